"""Installed code is told from a user's own, wherever it is installed."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import budgetfit
from budgetfit.traces.cache.value_hash import ValueHash
from budgetfit.utils import user_code
from budgetfit.utils.user_code import is_installed

ROOT = Path(budgetfit.__file__).parents[1]
PACKAGES = Path(sysconfig.get_paths()["purelib"])
ASKS = """
import packaging.requirements, platformdirs
from budgetfit.utils.user_code import is_library
print(is_library("packaging.requirements"), is_library("platformdirs"))
"""


@pytest.mark.skipif(os.name == "nt", reason="links to folders need rights there")
@pytest.mark.parametrize("place", ["the user's", "another"])
def test_packages_outside_of_the_environment_are_libraries(
    tmp_path: Path, place: str
) -> None:
    """An interpreter that has none of its own finds them in ``PLACE``."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = tmp_path / "lib" / version / "site-packages"
    folder = own if place == "the user's" else tmp_path / "modules"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(PACKAGES)
    paths = [str(ROOT), *([] if folder == own else [str(folder)])]
    base = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run(
        [base, "-c", ASKS],
        env={
            "PYTHONUSERBASE": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": os.environ["PATH"],
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that modules are found in, with an installed one and a user's own."""
    (tmp_path / "tool-1.0.dist-info").mkdir()
    (tmp_path / "tool-1.0.dist-info" / "RECORD").write_text(
        "tool/__init__.py,sha256=x,3\nsingle.py,sha256=y,3\n"
    )
    for name in ("tool/__init__.py", "tool/part/file.py", "single.py", "mine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for cached in (is_installed, user_code._recorded):
        cached.cache_clear()
    return tmp_path


def test_only_what_the_installer_recorded_is_installed(folder: Path) -> None:
    installed = ("tool/__init__.py", "tool/part/file.py", "single.py")
    assert all(is_installed(str(folder / name)) for name in installed)
    assert not is_installed(str(folder / "mine.py"))


def test_a_folder_is_no_other_whose_name_begins_with_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        user_code, "_package_folders", lambda: frozenset({tmp_path / "packages"})
    )
    is_installed.cache_clear()
    assert is_installed(str(tmp_path / "packages" / "numpy" / "x.py"))
    assert not is_installed(str(tmp_path / "packages-of-mine" / "x.py"))


def test_names_of_types_have_keys() -> None:
    digests = []
    for value in (list[int], list[str], dict[str, int], int | str, int | None):
        found = ValueHash()
        found.add(value)
        digests.append(found.hexdigest())
    assert len(set(digests)) == len(digests)
