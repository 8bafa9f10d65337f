import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit.errors import InputError
from budgetfit.integrations.exports import accelerate, deepspeed, lightning, trainer
from budgetfit.integrations.model_sources.python_factory import load_factory
from budgetfit.utils.function_name import is_factory_text
from tests.models import alone

MODEL = """
import sys
import torch
from torch import nn

print("made of print")
calls = []

def build():
    print("building")
    calls.append(str(torch.get_default_device()))
    return nn.Linear(4, 2)

def build_from_values():
    calls.append(str(torch.get_default_device()))
    width = int(torch.tensor([4.0, 3.0]).max().item())
    return nn.Linear(width, 2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    @classmethod
    def small(cls):
        return cls()

ready = nn.Linear(3, 3)
number = 3

def needs(width):
    return nn.Linear(width, 2)

def fails():
    raise RuntimeError("no\\nsuch   weights")

def leaves():
    sys.exit("usage: train.py")

def pair():
    return nn.Linear(1, 1), "tokenizer"

if __name__ == "__main__":
    raise AssertionError("trained")
"""


@pytest.fixture(autouse=True)
def _same_interpreter_after() -> Iterator[None]:
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name not in modules]:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write_file(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write_file


@pytest.fixture
def file(write: Callable[[str, str], Path]) -> Path:
    return write("my_model.py", MODEL)


def test_a_function_in_a_file_builds_its_model_on_meta(file: Path) -> None:
    resolved = load_factory(f"{file}:build")
    assert resolved.model.weight.shape == (2, 4)
    assert resolved.model.weight.is_meta
    assert resolved.name == "Linear"
    assert resolved.source == f"from {file}:build, no weights allocated"
    assert resolved.notes == ()


@pytest.mark.parametrize("name", ["Net", "Net.small"])
def test_a_class_and_its_classmethod_are_factories_too(file: Path, name: str) -> None:
    assert type(load_factory(f"{file}:{name}").model).__name__ == "Net"


def test_a_ready_module_is_taken_as_it_is(file: Path) -> None:
    resolved = load_factory(f"{file}:ready")
    assert not resolved.model.weight.is_meta
    assert resolved.materialize is None
    assert resolved.name == "ready"


def test_a_factory_that_needs_values_is_called_again_on_the_cpu(file: Path) -> None:
    resolved = load_factory(f"{file}:build_from_values")
    assert resolved.model.weight.shape == (2, 4)
    assert not resolved.model.weight.is_meta
    assert "was called on the CPU: on meta it raises" in resolved.notes[0]
    assert resolved.source.endswith("built on the CPU")
    calls = sys.modules[f"budgetfit_factory_{file.stem}"].calls
    assert calls == ["meta", "cpu"]


def test_a_factory_builds_real_weights_on_request(file: Path) -> None:
    materialize = load_factory(f"{file}:build").materialize
    assert materialize is not None
    assert materialize("cpu").weight.isfinite().all()
    assert materialize("cpu", torch.bfloat16).weight.dtype is torch.bfloat16


def test_planning_a_factory_leaves_the_random_state(file: Path) -> None:
    state = torch.random.get_rng_state()
    load_factory(f"{file}:build_from_values")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_the_code_prints_does_not_mix_into_the_answer(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_factory(f"{file}:build").materialize()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "made of print" in printed.err
    assert "building" in printed.err


def test_a_file_imports_its_neighbours_as_when_python_runs_it(
    write: Callable[[str, str], Path],
) -> None:
    write("neighbour_of_model.py", "WIDTH = 7\n")
    text = "from torch import nn\n\ndef build():\n    import neighbour_of_model as n\n"
    file = write("model.py", text + "    return nn.Linear(n.WIDTH, 1)\n")
    assert load_factory(f"{file}:build").model.in_features == 7


def test_a_module_of_the_working_folder_is_found(
    write: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("package_of_mine/__init__.py", "")
    write("package_of_mine/models.py", MODEL)
    monkeypatch.chdir(tmp_path)
    resolved = load_factory("package_of_mine.models:build")
    assert isinstance(resolved.model, nn.Linear)


def test_a_file_named_like_a_library_does_not_replace_it(
    write: Callable[[str, str], Path],
) -> None:
    import random  # noqa: PLC0415, the module itself is what the test is about

    load_factory(f"{write('random.py', MODEL)}:build")
    assert sys.modules["random"] is random


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("biuld", r"has no biuld. It defines Net, build, build_from_values"),
        ("Net.missing", "has no Net.missing"),
        ("number", "is a int and no function"),
        ("fails", r"without arguments and raised RuntimeError: no such weights"),
        ("needs", "raised TypeError: .*missing 1 required positional argument"),
        ("leaves", "raised SystemExit: usage: train.py"),
        ("pair", "pair gave no batch. The batch, a str, holds no"),
    ],
)
def test_a_factory_that_gives_no_model_is_refused_in_one_line(
    file: Path, name: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_factory(f"{file}:{name}")
    assert "\n" not in str(error.value)


def test_a_missing_file_or_module_is_refused_with_the_right_form() -> None:
    with pytest.raises(InputError, match=r"no file no_such.py.*package.module:build"):
        load_factory("no_such.py:build")
    with pytest.raises(InputError, match=r"no module no_such_package"):
        load_factory("no_such_package.models:build")
    with pytest.raises(InputError, match=r"is no module and no .py file"):
        load_factory("some/folder:build")


def test_code_that_cannot_be_imported_is_refused_with_its_own_words(
    write: Callable[[str, str], Path],
) -> None:
    broken = write("broken.py", "import no_such_library\n")
    with pytest.raises(
        InputError, match=r"Running .*No module named 'no_such_library'"
    ):
        load_factory(f"{broken}:build")
    wrong = write("wrong.py", "def build(:\n")
    with pytest.raises(InputError, match="SyntaxError: invalid syntax"):
        load_factory(f"{wrong}:build")


def test_a_failure_leaves_nothing_behind(
    write: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("left_over.py", "X = 1\n")
    file = write("failing.py", "import left_over\nimport colorsys\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    for text in (f"{file}:build", "failing:build"):
        with pytest.raises(InputError, match="ZeroDivisionError"):
            load_factory(text)
        assert sys.path == path
        names = {"left_over", "failing", "budgetfit_factory_failing"}
        assert not names & sys.modules.keys()
        # The user's own modules go; what Python provides stays.
        assert "colorsys" in sys.modules


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("package.module:build", True),
        ("path/model.py:build", True),
        ("C:\\models\\model.py:Net.small", True),
        ("C:\\models\\config.json", False),
        ("C:/models", False),
        ("model.py:", False),
        (":build", False),
        ("org/name", False),
    ],
)
def test_a_factory_is_told_from_a_path(text: str, answer: bool) -> None:
    assert is_factory_text(text) is answer


WITH_LOSS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return {"logits": x}

def loss(outputs, batch):
    return (outputs["logits"] - batch["y"]).square().mean()

def make():
    torch.manual_seed(0)
    return Net(), {"x": torch.ones(4, 4), "y": torch.ones(4, 4)}, loss
"""


@pytest.fixture(scope="module")
def planned_with_loss(tmp_path_factory: pytest.TempPathFactory) -> budgetfit.Plan:
    file = tmp_path_factory.mktemp("code") / "net.py"
    file.write_text(WITH_LOSS)
    path = file.with_name("plan.json")
    made = budgetfit.plan(
        f"{file}:make",
        gpu="t4",
        batch_size=4,
        precision="fp32",
        checkpointing=["layers.0", "layers.2"],
    )
    alone(made).save(path)
    return budgetfit.Plan.load(path)


def test_scripts_have_a_factorys_model_and_loss(
    planned_with_loss: budgetfit.Plan,
) -> None:
    names: dict[str, Any] = {"__name__": "train"}
    exec(planned_with_loss.to_torch_script(), names)
    model, batch = names["build_model"](), names["factory"]()[1]
    loss = names["loss_of"](model, batch)
    expected = (model(batch["x"])["logits"] - 1).square().mean()
    assert torch.equal(loss, expected)
    assert len(names["main"](["--steps", "2", "--device", "cpu"])) == 2
    for library in (trainer, accelerate, lightning, deepspeed):
        text = library.export_text(planned_with_loss, "plan.json")
        assert "planned with the loss of " in text
        assert "net.py:make" in text


def test_next_leaves_a_factorys_loss_to_the_factory(
    planned_with_loss: budgetfit.Plan,
) -> None:
    asked = planned_with_loss.provenance["asked"]
    assert asked["loss_of_factory"]
    assert "--loss" not in "".join(str(planned_with_loss).split("NEXT")[1:])


def test_check_takes_a_factorys_loss(
    planned_with_loss: budgetfit.Plan, tmp_path: Path
) -> None:
    planned_with_loss.save(tmp_path / "plan.json")
    loaded = budgetfit.Plan.load(tmp_path / "plan.json")
    file = tmp_path / "net.py"
    file.write_text(WITH_LOSS)
    found = budgetfit.check(loaded, f"{file}:make")
    assert found.reserved_bytes == planned_with_loss.estimate.reserved_bytes
    without = tmp_path / "without.py"
    without.write_text(WITH_LOSS.replace("}, loss\n", "}\n"))
    with pytest.raises(InputError, match=r"loss=.*file\.py:function"):
        budgetfit.check(loaded, f"{without}:make")
