"""The command line as its own process: what it imports, and how it ends."""

import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from budgetfit.cli.app import main
from budgetfit.cli.output import api, ignore_odd_width
from budgetfit.cli.quiet_libraries import quiet_libraries
from tests.processes import ROOT, python
from tests.reporting.sample_plans import sample_plan

HEAVY = ("torch", "transformers", "scipy")


@pytest.mark.parametrize(
    "words",
    [["--help"], ["plan", "--help"], ["gpus"], ["gpus", "--json"], ["cache", "info"]],
)
def test_what_needs_no_torch_does_not_import_it(words: list[str]) -> None:
    result = python(
        "-c",
        f"""
import sys
sys.argv = ["budgetfit", *{words!r}]
try:
    import budgetfit.__main__
    budgetfit.__main__.main()
finally:
    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
""",
    )
    assert result.returncode == 0
    assert result.stdout
    assert result.stderr.strip() == "[]"


def test_nothing_is_left_to_collect_when_the_process_ends() -> None:
    result = python(
        "-c",
        """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count() > 0, file=sys.stderr))
sys.argv = ["budgetfit", "gpus"]
import budgetfit.__main__
budgetfit.__main__.main()
""",
    )
    assert result.returncode == 0
    assert result.stderr.strip() == "True"


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "org/name", "--gpu", "rtx4091"],
        ["plan", "org/name", "--gpu", "mi300x"],
        ["plan", "org/name", "--vram", "24"],
        ["plan", "org/name", "--gpu", "t4", "--headroom", "lots"],
        ["plan", "org/name", "--gpu", "t4", "--precision", "bf17"],
        ["plan", "org/name", "--gpu", "t4", "--precision", "bf16"],
        ["plan", "org/name", "--vram", "24GB", "--precision", "fp32,bf17"],
        ["plan", "org/name", "--gpu", "t4", "--objective", "luck"],
        ["plan", "org/name", "--gpu", "t4", "--batch-size", "0"],
        ["plan", "no/such/config.json", "--gpu", "t4"],
        ["plan", "no_such.py:build", "--gpu", "t4"],
        ["plan", "org/name", "--fsdp"],
        ["estimate", "org/name", "--gpu", "rtx4091"],
        ["estimate", "org/name", "--gpu", "t4", "--precision", "fp32,bf16"],
        ["compare", "org/name", "--gpus", "t4,rtx4091"],
        ["compare", "org/name", "--gpus", "t4", "--objective", "luck"],
        ["compare", "org/name", "--gpus", "t4", "--price", "l4=0.80"],
        ["layers", "no/such/config.json"],
        ["verify", "no_such.json"],
        ["export", "no_such.json", "--to", "torch"],
    ],
)
def test_what_was_mistyped_is_told_before_torch_is_imported(words: list[str]) -> None:
    result = python(
        "-c",
        f"""
import sys
sys.argv = ["budgetfit", *{words!r}]
import budgetfit.__main__
try:
    budgetfit.__main__.main()
except SystemExit as ended:
    print(ended.code, [name for name in {HEAVY!r} if name in sys.modules])
""",
    )
    assert result.stdout == "2 []\n", result
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("columns", ["0", "1", "-5", "", "9" * 5000, "\u00b2"])
def test_a_width_of_no_use_hides_no_mistake_of_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "argv", ["budgetfit", "explain"])
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "Missing argument 'OOM.txt'" in capsys.readouterr().err


def test_a_width_that_can_be_read_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    ignore_odd_width()
    assert os.environ["COLUMNS"] == "100"


def test_loading_and_printing_a_plan_does_not_import_torch(tmp_path: Path) -> None:
    sample_plan().save(tmp_path / "plan.json")
    result = python(
        "-c",
        f"""
import random, sys
import budgetfit
budgetfit.Plan, budgetfit.Recipe, budgetfit.InputError
state = random.getstate()
plan = budgetfit.Plan.load({str(tmp_path / "plan.json")!r})
print(plan, plan.estimate)
assert "torch" not in sys.modules
assert random.getstate() == state
""",
    )

    assert result.returncode == 0, result.stderr
    assert "RECOMMENDED" in result.stdout
    assert "Plan(" not in result.stdout
    assert "Estimate(" not in result.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes")
def test_a_reader_that_leaves_early_sees_no_traceback() -> None:
    command = f"{sys.executable} -m budgetfit gpus | head -1"
    result = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "sold as" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["gpus"], ["gpus", "--json"]])
def test_a_full_disk_is_told_in_a_line(words: list[str]) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "budgetfit", *words],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_commands_name_files_as_they_are_without_a_locale(tmp_path: Path) -> None:
    path = tmp_path / "plän.json"
    sample_plan().save(path)
    result = subprocess.run(
        [sys.executable, "-m", "budgetfit", "show", path],
        cwd=ROOT,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=True,
    )
    assert f"budgetfit verify '{path}'" in result.stdout.decode()


def test_an_ascii_terminal_can_show_every_table() -> None:
    result = python(
        "-c",
        "import sys; sys.argv = ['budgetfit', 'gpus']\n"
        "from budgetfit.cli.app import main; main()",
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()


SWALLOWS = """
        if name == "torch":
            try:  # as numpy's and torch's modules in C do
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass
            raise ImportError("cannot load module more than once per process")
"""
PASSES_ON = """
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("module", "imports"),
    [("budgetfit.cli.app", SWALLOWS), ("budgetfit.__main__", PASSES_ON)],
)
def test_an_interruption_of_an_import_ends_the_program(
    module: str, imports: str
) -> None:
    result = python(
        "-c",
        f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupts:
    def find_spec(self, name, path=None, target=None):{imports}
sys.meta_path.insert(0, Interrupts())
sys.argv = ["budgetfit", "plan", "gpt2", "--gpu", "t4"]
from {module} import main
main()
""",
    )

    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interruptions_are_python_s_again_once_torch_is_loaded() -> None:
    before = signal.getsignal(signal.SIGINT)
    api()
    assert signal.getsignal(signal.SIGINT) is before


REMARKS = """
import logging, warnings
import platformdirs
import budgetfit.cli.app as cli

def remark(where, category=UserWarning):
    warnings.warn_explicit(f"{{category.__name__}} in {{where}}", category, where, 1)

def speak(*_):
    logging.getLogger("a.library").warning("a kernel was not loaded")
    logging.getLogger("a.library").error("a real error")
    remark(platformdirs.__file__)
    remark("<frozen importlib>")
    remark(logging.__file__)
    remark(cli.__file__, DeprecationWarning)
    remark(cli.__file__)
    remark({mine!r})

cli.app = speak
cli.main()
"""


def test_remarks_of_libraries_are_not_for_those_who_call_budgetfit(
    tmp_path: Path,
) -> None:
    mine = str(tmp_path / "mine.py")
    result = python("-c", REMARKS.format(mine=mine), PYTHONWARNINGS="")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line[:1] != " "]
    told = [line.rpartition("/")[2] for line in lines]
    assert told == ["a real error", "app.py", "mine.py"]


def test_who_asks_for_warnings_gets_them_all(tmp_path: Path) -> None:
    result = python("-c", REMARKS.format(mine=str(tmp_path)), PYTHONWARNINGS="default")
    assert result.stderr.count("Warning in ") == 6


def test_an_own_process_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    before = (warnings.showwarning, logging.root.manager.disable)
    with quiet_libraries():
        assert (warnings.showwarning, logging.root.manager.disable) != before
    assert (warnings.showwarning, logging.root.manager.disable) == before
