"""Planned in the middle of anything: the same plan, and everything as it was."""

import contextlib
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import pytest
import torch
import transformers
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

import budgetfit
from tests.cli.real_cli import CONFIG
from tests.counted_ops import CountedOps
from tests.models import alone
from tests.tracing.isolation.test_model_untouched import model_state, process_state


class CountsFunctions(TorchFunctionMode):
    """A user's own mode, which must not see what planning does."""

    counts = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


@contextlib.contextmanager
def hook_of_all_modules() -> Iterator[None]:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def nested_autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16):
        yield


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": nested_autocast,
    "default device meta": lambda: default_device("meta"),
    "a device's context": lambda: torch.device("meta"),
    "default dtype bf16": lambda: default_dtype(torch.bfloat16),
    "FLOP counter": lambda: FlopCounterMode(display=False),
    "dispatch mode": CountedOps,
    "function mode": CountsFunctions,
    "fake tensors": torch._subclasses.fake_tensor.FakeTensorMode,
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(same, same),
    "global hook": hook_of_all_modules,
}


# Of these a plan warns, because it does not predict what they take.
ABOUT_STATE = "use_deterministic_algorithms is on"


def config() -> transformers.GPT2Config:
    return transformers.GPT2Config(**CONFIG)


def numbers(plan: budgetfit.Plan) -> dict[str, Any]:
    """Return all of a plan but the seconds it took."""
    document: dict[str, Any] = json.loads(plan.to_json())
    document["provenance"].pop("seconds")
    return {name: without_notes(value) for name, value in document.items()}


def without_notes(value: object) -> Any:
    """Return a part of a plan without what it says about the state of torch."""
    if isinstance(value, dict):
        return {name: without_notes(part) for name, part in value.items()}
    if isinstance(value, list):
        return [
            without_notes(part)
            for part in value
            if not (isinstance(part, str) and ABOUT_STATE in part)
        ]
    return value


def make(model: Any) -> dict[str, Any]:
    plan = budgetfit.plan(model, gpu="t4", batch_size=2, checkpointing="full")
    return numbers(alone(plan))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return make(config())


@pytest.mark.parametrize("name", STATES)
def test_a_plan_is_the_same_in_any_state_and_leaves_it(
    name: str, plain: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about anomaly detection
        with STATES[name]() as state:
            before = process_state()
            counts = copy(getattr(state, "counts", None))
            found = make(config())
            assert getattr(state, "counts", None) == counts
            assert process_state() == before
    assert found == plain


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (deterministic, ABOUT_STATE),
        (torch.autograd.detect_anomaly, "detect_anomaly is on"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_checks_are_said_to_be_left_out_of_the_prediction(
    state: Callable[[], AbstractContextManager[Any]], said: str
) -> None:
    recipe = budgetfit.Recipe(batch_size=2)
    with state():
        plan = budgetfit.plan(config(), gpu="t4", batch_size=2)
        estimate = budgetfit.estimate(config(), recipe, gpu="t4")
    plain = budgetfit.estimate(config(), recipe, gpu="t4")
    for notes in (plan.warnings, estimate.notes):
        assert sum(said in note for note in notes) == 1
    assert not any(said in note for note in plain.notes)


def test_after_an_error_states_are_left_as_well() -> None:
    with torch.inference_mode(), nested_autocast(), default_device("meta"):
        before = process_state()
        with pytest.raises(budgetfit.InputError, match="not a memory size"):
            budgetfit.plan(config(), vram="much")
        with pytest.raises(budgetfit.DoesNotFitError):
            budgetfit.plan(
                config(),
                gpu="t4",
                vram="600MB",
                batch_size=100_000,
                checkpointing="full",
            )
        assert process_state() == before


def test_estimates_are_the_same_in_any_state() -> None:
    recipe = budgetfit.Recipe(batch_size=2, precision="fp16-mixed")
    model = transformers.GPT2LMHeadModel(config())
    before = model_state(model)
    expected = budgetfit.estimate(model, recipe, gpu="t4")
    for name in ("inference mode", "autocast", "default dtype bf16", "FLOP counter"):
        with STATES[name]():
            assert budgetfit.estimate(model, recipe, gpu="t4") == expected, name
    assert model_state(model) == before


def test_a_model_that_was_made_in_inference_mode_can_be_planned() -> None:
    with torch.inference_mode():
        model = transformers.GPT2LMHeadModel(config())
        inside = make(model)
    assert make(model) == inside
    assert all(parameter.is_inference() for parameter in model.parameters())


def test_plans_in_two_threads_are_equal(plain: dict[str, Any]) -> None:
    before = process_state()
    found: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: found.append(make(config()))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [plain, plain]
    assert process_state() == before


class Planned(Dataset[str]):
    """Plans where a sample is asked for."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> str:
        return json.dumps(make(config()))


@pytest.mark.skipif(
    not hasattr(__import__("os"), "fork"), reason="workers are forked here"
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_of_a_data_loader_can_plan(plain: dict[str, Any]) -> None:
    loader = DataLoader(
        Planned(), num_workers=1, batch_size=None, multiprocessing_context="fork"
    )
    (text,) = list(loader)
    assert json.loads(text) == plain
