"""What was made of fakes before is made again, and is what torch makes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe
from budgetfit.tracing import call_cache
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake import result_cache
from budgetfit.tracing.fake.model_copy import fake_mode
from budgetfit.tracing.fake.result_cache import FakeResultCache, OutputSpec, ResultSpec
from budgetfit.tracing.fake.tensor_factory import FakeTensorFactory
from budgetfit.tracing.recording import storage_log
from budgetfit.tracing.recording.step_tracer import trace_step
from budgetfit.tracing.recording.storage_log import StorageLog
from tests.traced import raw_trace

ADA = CudaTarget(compute_capability=(8, 9), torch_version=(2, 13))
aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    result_cache._SEEN.clear()
    yield
    result_cache._SEEN.clear()


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


CALLS: dict[str, Callable[[], Call]] = {
    "add": lambda: (aten.add.Tensor, (floats(3, 4), floats(4)), {"alpha": 2}),
    "add in place": lambda: (aten.add_.Tensor, (floats(3, 4), floats(4)), {}),
    "product": lambda: (aten.mm.default, (floats(3, 4), floats(5, 4).t()), {}),
    "view": lambda: (aten.view.default, (floats(3, 4), [12]), {}),
    "unsafe view": lambda: (aten._unsafe_view.default, (floats(3, 4), [12]), {}),
    "slice of a slice": lambda: (aten.slice.Tensor, (floats(9, 4)[2:], 0, 1, 3), {}),
    "detach": lambda: (aten.detach.default, (floats(3, 4).t(),), {}),
    "split": lambda: (aten.split.Tensor, (floats(6, 4), 2), {}),
    "expand": lambda: (aten.expand.default, (floats(3, 1), [3, 7]), {}),
    "cat": lambda: (aten.cat.default, ([floats(3, 4), floats(2, 4)],), {}),
    "layer norm": lambda: (
        aten.native_layer_norm.default,
        (floats(3, 4), [4], floats(4), None, 1e-5),
        {},
    ),
    "attention": lambda: (
        aten._scaled_dot_product_flash_attention.default,
        (*[floats(2, 3, 16, 8, dtype=torch.bfloat16) for _ in range(3)], 0.0),
        {"is_causal": True},
    ),
    "zeros": lambda: (aten.zeros.default, ([3, 4],), {"dtype": torch.float16}),
    "no output": lambda: (
        aten._foreach_add_.List,
        ([floats(3), floats(4)], [floats(3), floats(4)]),
        {},
    ),
    "outputs of a list": lambda: (
        aten._foreach_add.List,
        ([floats(3), floats(4)], [floats(3), floats(4)]),
        {},
    ),
}


def relations(call: Call, out: object) -> list[Any]:
    """Say all of outputs that a trace can notice, storages by what has them first."""
    func, args, kwargs = call
    outputs = out if isinstance(out, (tuple, list)) else [out]
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    storages: dict[int, int] = {}
    found: list[Any] = [func, type(out), sorted(kwargs)]
    for x in [*tensors, *outputs]:
        if not isinstance(x, torch.Tensor):
            found.append(x)
            continue
        storage = x.untyped_storage()
        number = storages.setdefault(storage._cdata, len(storages))
        place = x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x._version
        same = [n for n, value in enumerate(tensors) if value is x]
        found += [place, number, storage.nbytes(), x.requires_grad, same]
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_call_seen_before_is_answered_as_torch_answers_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    dispatch = FakeTensorMode.dispatch

    def counted(self: FakeTensorMode, func: Any, *rest: Any) -> Any:
        asked.append(func)
        return dispatch(self, func, *rest)

    with fake_mode() as mode:
        first, *calls = (CALLS[name]() for _ in range(4))
        torchs = relations(first, first[0](*first[1], **first[2]))
        with StorageLog(None, FakeResultCache(mode).run):  # runs it below autograd
            for number, (func, args, kwargs) in enumerate(calls):
                if number == 1:
                    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
                assert relations(calls[number], func(*args, **kwargs)) == torchs
    assert asked == []


def test_a_number_of_another_type_is_another_call() -> None:
    with fake_mode() as mode:
        run = FakeResultCache(mode).run
        whole = torch.empty(3, dtype=torch.int64)
        for _ in range(3):
            assert run(aten.add.Scalar, (whole, 1), {}).dtype == torch.int64
            assert run(aten.add.Scalar, (whole, 1.0), {}).dtype == torch.float32
            assert run(aten.add.Scalar, (whole, True), {}).dtype == torch.int64


def test_what_shape_an_argument_takes_is_left_to_torch() -> None:
    with fake_mode() as mode:
        run = FakeResultCache(mode).run
        for _ in range(3):
            x = floats(3, 4)
            assert run(aten.unsqueeze_.default, (x, 0), {}) is x
            assert x.shape == (1, 3, 4)
            x = floats(3, 4)
            run(aten.resize_.default, (x, [7, 5]), {})
            assert x.shape == (7, 5)


def test_the_key_of_a_call_is_given_once_and_to_that_call_alone() -> None:
    with fake_mode() as mode:
        results = FakeResultCache(mode)
        args = (floats(3),)
        for _ in range(2):  # torch's result, then the cached one
            results.run(aten.neg.default, args, {})
            assert results.take_key(aten.neg.default, args) is not None
            assert results.take_key(aten.neg.default, args) is None
        results.run(aten.neg.default, args, {})
        assert results.take_key(aten.abs.default, args) is None
        results.run(aten.neg.default, args, {})
        assert results.take_key(aten.neg.default, (args[0],)) is None
        args = (floats(3), [7, 5])
        results.run(aten.resize_.default, args, {})  # torch's alone
        assert results.take_key(aten.resize_.default, args) is None


def test_constants_are_left_to_torch() -> None:
    with fake_mode() as mode:
        run = FakeResultCache(mode).run
        for number in (5, 6):
            constant = torch.tensor(number)
            doubled = run(aten.mul.Tensor, (constant, constant), {})
            assert run(aten._local_scalar_dense.default, (doubled,), {}) == number**2


def test_a_view_of_which_one_is_not_guessed() -> None:
    with fake_mode():
        x = floats(12)
        args = (x, x.view(3, 4))
        assert result_cache._result_of(args, {}, x.view(4, 3)) is None
        assert result_cache._result_of((x,), {}, x.view(4, 3)) is not None


def test_outputs_that_share_or_pad_their_storage_are_left_to_torch() -> None:
    with fake_mode() as mode:
        pair = floats(2, 6).unbind()
        assert result_cache._result_of((), {}, pair) is None
        padded = floats(9)[:6]
        made = ResultSpec(None, (OutputSpec(-1, padded.shape, (1,)),))
        assert not FakeResultCache(mode)._recreates(made, (), padded)
        assert FakeResultCache(mode)._recreates(made, (), floats(6))


def test_no_more_is_remembered_than_memory_is_worth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_cache, "MAX_CACHED_CALLS", 4)
    with fake_mode() as mode:
        run = FakeResultCache(mode).run
        for size in range(1, 20):
            assert run(aten.neg.default, (floats(size),), {}).shape == (size,)
            assert len(result_cache._SEEN) <= 4


def test_another_torch_that_makes_fakes_in_another_way_makes_them_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*_: object) -> None:
        raise AttributeError("_set_throw_on_mutable_data_ptr")

    monkeypatch.setattr(FakeTensorFactory, "_fake", gone)
    with fake_mode() as mode:
        run = FakeResultCache(mode).run
        for _ in range(3):
            assert run(aten.neg.default, (floats(3),), {}).shape == (3,)
        assert not result_cache._SEEN
        parameter = FakeTensorFactory(mode).parameter(floats(3))
        assert isinstance(parameter, torch.nn.Parameter)


def test_in_inference_mode_torch_makes_all_results() -> None:
    with fake_mode() as mode, torch.inference_mode():
        out = FakeResultCache(mode).run(aten.neg.default, (floats(3),), {})
    assert out.is_inference()
    assert not result_cache._SEEN


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "convolutions"])
def test_a_trace_is_the_same_where_torch_makes_all_results(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(batch_size=2, precision="bf16-mixed", optimizer="adamw_torch")

    def trace() -> list[object]:
        log = raw_trace(name, recipe, target=ADA, blocks=()).log
        names = "sizes", "events", "ops", "categories", "layers", "scratch"
        return [getattr(log, attribute) for attribute in names]

    at_once = [trace(), trace()]  # the first sees calls, the second knows them all
    monkeypatch.setattr(FakeTensorFactory, "_equals_torch", lambda _: False)
    monkeypatch.setattr(storage_log, "call_key", lambda *_: None)
    by_torch = trace()
    assert at_once == [by_torch, by_torch]


def test_a_compiled_model_is_traced_as_it_is() -> None:
    def trace(*, compiled: bool) -> list[int]:
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        if compiled:
            model = torch.compile(model, backend="eager")
        raw = trace_step(
            model,
            lambda copied, on_phase: Run(
                copied,
                Recipe(batch_size=2, optimizer="sgd"),
                loss=lambda output, _: output.sum(),
                on_phase=on_phase,
            ),
            torch.zeros(2, 8),
            batch_size=2,
            blocks=(),
            target=ADA,
        )
        return [*raw.log.events, *raw.log.sizes]

    assert trace(compiled=True) == trace(compiled=False)
