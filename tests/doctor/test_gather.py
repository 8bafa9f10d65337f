import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from budgetfit.doctor import gather, gather_gpu, import_library, subprocesses
from budgetfit.doctor.facts import GpuFacts
from budgetfit.errors import InputError
from tests.doctor.machines import GOOD, MIB
from tests.processes import python

ROOT = Path(__file__).parents[2]
SMI = """#!{python}
import sys
words = " ".join(sys.argv[1:])
if "compute-apps" in words:
    print("42, /usr/bin/python3, 5120, GPU-1")
    print("43, C:\\\\a,b.exe, [N/A], GPU-1")
elif "compute_cap" in words and {old}:
    print('Field "compute_cap" is not a valid field to query.')
    sys.exit(2)
elif "query-gpu" in words:
    end = "" if {old} else ", Enabled, [N/A], 7.5"
    print("Tesla T4, 550.54.14, 15360, 100, 14992, GPU-1" + end)
else:
    print("| NVIDIA-SMI 550.54.14   Driver Version: 550.54.14   CUDA Version: 12.4 |")
"""


def fake_smi(folder: Path, *, old: bool) -> Path:
    path = folder / "nvidia-smi"
    path.write_text(SMI.format(python=sys.executable, old=old))
    path.chmod(0o755)
    return path


@pytest.mark.skipif(
    os.name == "nt", reason="the stand-in is a script with a first line"
)
@pytest.mark.parametrize("old", [False, True])
def test_cards_driver_and_processes_are_read_from_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, old: bool
) -> None:
    fake_smi(tmp_path, old=old)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    driver, cards, processes = gather_gpu.gather_gpus()
    assert (driver.version, driver.cuda) == ("550.54.14", (12, 4))
    assert cards == (
        GpuFacts(
            name="Tesla T4",
            capability=(7, 5),  # an old driver does not tell: from the card table
            total_bytes=15360 * MIB,
            used_bytes=100 * MIB,
            reserved_bytes=268 * MIB,
            sold_as_gb=16,
            ecc=not old,
            uuid="GPU-1",
        ),
    )
    assert [(p.pid, p.name, p.used_bytes) for p in processes] == [
        (42, "/usr/bin/python3", 5120 * MIB),
        (43, "C:\\a,b.exe", None),
    ]


@pytest.mark.skipif(
    os.name == "nt", reason="the stand-in is a script with a first line"
)
def test_a_failing_nvidia_smi_is_a_fact_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "nvidia-smi"
    path.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = gather_gpu.gather_gpus()
    assert found.driver.error == "Failed to initialize NVML"
    assert found.gpus == ()


def test_without_nvidia_smi_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_gpu.shutil, "which", lambda *_, **__: None)
    assert gather_gpu.gather_gpus().driver.version == ""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os._exit(7)", "ended with code 7"),
        ("import os; os.abort()", "ended with code -6"),
        ("print('x' * 10)", ""),
    ],
)
def test_a_library_that_breaks_in_any_way_is_a_fact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    (tmp_path / "torchvision.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    error = subprocesses.import_in_subprocess("torchvision")["error"]
    assert words in error
    assert bool(words) is bool(error)


def test_a_library_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchaudio.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(subprocesses, "IMPORT_LIMIT_S", 0.3)
    answer = subprocesses.import_in_subprocess("torchaudio")
    assert answer == {"import_timeout": "no answer within 0 s"}
    assert gather._library("torchaudio", "2.11", answer).import_timeout
    assert gather._torch("2.11", answer).import_timeout


def test_bitsandbytes_tells_why_its_own_library_was_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('slow')")
    (package / "cextension.py").write_text(
        "class ErrorHandlerMock:\n    error_msg = 'No compatible\\nCUDA binary'\n"
        "lib = ErrorHandlerMock()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = subprocesses.import_in_subprocess("bitsandbytes")
    assert answer == {"error": "No compatible CUDA binary"}
    (package / "cextension.py").write_text("lib = object()\n")
    assert subprocesses.import_in_subprocess("bitsandbytes") == {"error": ""}


def test_torch_tells_what_it_was_built_for() -> None:
    found = import_library.torch_facts()
    assert json.loads(json.dumps(found)) == found
    assert {"version", "cuda", "hip", "available", "tf32"} <= found.keys()


def test_the_probe_starts_without_budgetfit() -> None:
    code = (
        f"import runpy, sys; runpy.run_path({import_library.__file__!r}); "
        "print([name for name in sys.modules if name.split('.')[0] in "
        "('budgetfit', 'torch', 'numpy')])"
    )
    done = python("-P", "-c", code, check=True)
    assert done.stdout.strip() == "[]"


def test_a_named_card_is_the_tables_or_this_machines() -> None:
    assumed = gather.with_gpu(GOOD, "h100-80gb")
    assert assumed.assumed
    assert assumed.gpus[0].capability == (9, 0)
    assert assumed.driver.version == ""
    real = gather.with_gpu(GOOD, "rtx4090")
    assert not real.assumed
    assert real.gpus == GOOD.gpus
    with pytest.raises(InputError, match=r"not in the card table\. Nearest"):
        gather.with_gpu(GOOD, "rtx-9999")


def test_requirements_are_those_of_the_package() -> None:
    needs, _ = gather._requirements("budgetfit_is_no_package")
    assert needs == ()


def test_a_cache_below_a_file_is_an_error_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BUDGETFIT_CACHE", str(tmp_path / "file" / "traces"))
    assert "is no folder" in gather._cache()[1]
    monkeypatch.setenv("BUDGETFIT_CACHE", str(tmp_path / "new" / "traces"))
    assert gather._cache() == (str(tmp_path / "new" / "traces"), "")
    monkeypatch.setenv("BUDGETFIT_CACHE", "off")
    assert gather._cache() == ("", "")


def test_it_is_told_what_keeps_traces_from_having_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gather._no_key() == ""
    # A copy of ours that is edited while it runs; what runs must not be trusted.
    shutil.copytree(ROOT / "budgetfit", tmp_path / "budgetfit")
    late = time.time() + 3600
    os.utime(tmp_path / "budgetfit" / "errors.py", (late, late))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert "just changed" in gather._no_key()


@pytest.mark.skipif(os.name == "nt", reason="Windows has other limits")
def test_a_cache_that_may_not_be_looked_at_is_an_error_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUDGETFIT_CACHE", str(tmp_path / ("x" * 300)))
    assert "xxx: File name too long" in gather._cache()[1]
