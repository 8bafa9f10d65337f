"""The environment of a command that sees an imitated card."""

from pathlib import Path

import pytest

from tests.accuracy.nulldriver.cards import find_card
from tests.accuracy.nulldriver.install import (
    constraints_without_torch,
    pip_arguments,
    wanted_versions,
)
from tests.accuracy.nulldriver.run import (
    DEFAULT,
    default_environment,
    environment_folder,
    pinned_version,
    variables,
)

ENVIRONMENT = Path("/environments/torch-2.13.0")
LIBRARIES = ENVIRONMENT / "nulldriver"


def test_a_command_loads_the_null_driver_first_and_finds_the_environments_python() -> (
    None
):
    after = variables(find_card("t4"), ENVIRONMENT, LIBRARIES, {"PATH": "/bin"})
    assert after["LD_PRELOAD"] == f"{LIBRARIES}/libnullcuda.so"
    assert after["LD_LIBRARY_PATH"] == str(LIBRARIES)
    assert after["PATH"] == f"{ENVIRONMENT}/bin:/bin"
    assert after["NULLCUDA_CC"] == "75"


def test_a_null_driver_that_is_started_by_another_takes_its_place() -> None:
    card, other = find_card("t4"), Path("/other")
    before = variables(find_card("b200"), other, other / "nulldriver", {})
    after = variables(card, ENVIRONMENT, LIBRARIES, before)
    assert after["NULLCUDA_GPU"] == "t4"
    assert after["LD_PRELOAD"] == f"{LIBRARIES}/libnullcuda.so"
    assert after["LD_LIBRARY_PATH"].split(":")[0] == str(LIBRARIES)


def test_a_memory_size_is_passed_on_and_an_argument_replaces_it() -> None:
    card, before = find_card("t4"), {"NULLCUDA_GB": "40"}
    assert (
        variables(card, ENVIRONMENT, LIBRARIES, before)["NULLCUDA_GB"],
        variables(card, ENVIRONMENT, LIBRARIES, before, 1.5)["NULLCUDA_GB"],
    ) == ("40", "1.5")
    assert "NULLCUDA_GB" not in variables(card, ENVIRONMENT, LIBRARIES, {})


def test_the_environment_is_the_one_of_the_pinned_torch_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(DEFAULT, raising=False)
    assert default_environment() == environment_folder(pinned_version("torch"))
    monkeypatch.setenv(DEFAULT, "/somewhere")
    assert default_environment() == Path("/somewhere")


def test_a_package_without_a_pinned_version_is_an_error(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==1.2.3\ntorchvision==4\n", encoding="utf-8")
    assert pinned_version("torch", constraints) == "1.2.3"
    with pytest.raises(ValueError, match="names no version of numpy"):
        pinned_version("numpy", constraints)


def test_another_torch_keeps_the_pinned_versions_of_everything_else() -> None:
    wanted = wanted_versions("9.9.9")
    assert wanted["torch"] == "9.9.9"
    assert wanted["transformers"] == pinned_version("transformers")
    text = "numpy==1\ntorch==2.13.0\ntorch-metrics==3\n"
    assert constraints_without_torch(text) == "numpy==1\ntorch-metrics==3\n"


def test_pip_is_asked_for_the_plain_torch_and_not_for_a_build_without_cuda() -> None:
    arguments = pip_arguments({"torch": "2.13.0", "numpy": "1"}, Path("pinned.txt"))
    assert arguments[-2:] == ["torch===2.13.0", "numpy==1"]
    assert arguments[arguments.index("--constraint") + 1] == "pinned.txt"
