"""What users are given as files is there whole, or as it was before."""

import os
import pickle
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from budgetfit.cli.output import check_writable, write
from budgetfit.core.plan import Plan
from budgetfit.core.plan_curves import LazyCurves, PlanCurves
from budgetfit.errors import InputError
from budgetfit.utils.whole_file import whole_file, write_whole
from tests.reporting.sample_plans import sample_plan

OLD = "what was there"


@contextmanager
def disk_full(after_bytes: int) -> Iterator[None]:
    """Let no file grow beyond these bytes: a write fails in its middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def snapshot(_: Plan, path: Path) -> None:
    curves = LazyCurves(PlanCurves, snapshot=lambda: {"all": "x" * 9999})
    sample_plan(lazy_curves=curves).dump_snapshot(path)


def printed(_: Plan, path: Path) -> None:
    """As ``--save`` and ``export --save`` write; the trouble is returned."""
    trouble = write(path, "x" * 9999)
    if trouble:
        raise OSError(trouble)


WRITERS: dict[str, Callable[[Plan, Path], None]] = {
    "save": Plan.save,
    "report": Plan.report,
    "snapshot": snapshot,
    "command line": printed,
}


@pytest.mark.parametrize("name", WRITERS)
def test_after_a_failure_the_old_file_is_whole_and_alone(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text(OLD)
    plan = sample_plan()
    WRITERS[name](plan, tmp_path / "first")  # loads what it needs
    (tmp_path / "first").unlink()
    with disk_full(1000), pytest.raises(OSError, match="File too large"):
        WRITERS[name](plan, path)
    assert path.read_text() == OLD
    assert list(tmp_path.iterdir()) == [path]
    WRITERS[name](plan, path)
    assert path.stat().st_size > 1000


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    write_whole(tmp_path / "new", "text")
    (tmp_path / "other").touch()
    assert permissions(tmp_path / "new") == permissions(tmp_path / "other")
    write_whole(tmp_path / "private", "text", private=True)
    assert permissions(tmp_path / "private") == 0o600


@pytest.mark.parametrize("private", [False, True])
def test_an_old_file_keeps_its_permissions(tmp_path: Path, *, private: bool) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o640)
    write_whole(path, b"bytes", private=private)
    assert (path.read_bytes(), permissions(path)) == (b"bytes", 0o640)


def test_a_read_only_file_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text(OLD)
    opened = Path.open

    def refused(self: Path, mode: str = "r", *rest: Any) -> object:
        if self == path and mode != "r":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, mode, *rest)

    monkeypatch.setattr(Path, "open", refused)  # root may write everywhere
    with pytest.raises(PermissionError):
        write_whole(path, "new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_symbolic_link_stays_and_leads_to_the_new_content(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "target", tmp_path / "link"
    link.symlink_to(target)
    for content in ("new file", "another"):
        write_whole(link, content)
        assert link.is_symlink()
        assert target.read_text() == content
    assert list(target.parent.iterdir()) == [target]


def test_a_pipe_is_written_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "through")
    reader.join(10)
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_any_exception_of_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(OLD)

    def interrupted() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == OLD
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "no folder" / "plan.json"
    with pytest.raises(FileNotFoundError) as raised:
        write_whole(path, "text")
    assert raised.value.filename == str(path)
    assert str(raised.value).endswith(repr(str(path)))


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "command line"])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (".", "Is a directory"),
        ("", "Is a directory"),
        ("no folder/file", "No such file or directory"),
        ("/dev/null/file", "Not a directory"),
        ("zero\0", "embedded null byte"),
        (None, "expected str, bytes or os.PathLike object, not NoneType"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_in_one_line(
    name: str, path: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as raised:
        WRITERS[name](sample_plan(), path)
    assert str(raised.value) == (
        f"Cannot write {str(path)!r}: {reason}. Name a file in a folder that can be "
        "written to, such as plan.json; a file that was there is as it was."
    )
    assert isinstance(raised.value, OSError)
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [".", "", "missing", "zero\0", None, 7, b"bytes"])
def test_a_plan_that_cannot_be_read_is_told_in_one_line(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"Cannot read the plan .* Save it again"):
        Plan.load(path)


def test_a_name_as_long_as_file_systems_allow_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250 + ".json")
    write_whole(path, "text")
    assert path.read_text() == "text"


def test_a_folder_that_takes_no_new_file_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    check_writable(path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(InputError, match="its folder cannot be written to"):
        check_writable(path)
