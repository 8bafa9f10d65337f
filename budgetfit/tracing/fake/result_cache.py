"""What ops made of fakes before, made again without torch's dispatch (tracing T9).

A trace runs the same few hundred calls over and over, and torch takes 60 microseconds
and more for a fake result even where it remembers it. Here the first sight of a call is
torch's; what it made is written down as how each output relates to the arguments, made
again at once and compared with the truth. Only a call whose outputs come out the same
in every respect is answered from then on. All others stay torch's.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from budgetfit.tracing.fake.tensor_factory import FakeTensors
from budgetfit.tracing.op_signature import STRIDED, Calls, call_key, describe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensorMode

    from budgetfit.tracing.op_signature import Key

TORCH_DECIDES = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
LIFTS = frozenset(
    {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
)


class Output(NamedTuple):
    """One output: an argument itself, a view of one, or a tensor of its own.

    ``argument`` is its position among the op's, -1 for none; ``shape`` is None where
    the output is that argument.
    """

    argument: int
    shape: torch.Size | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32


class Result(NamedTuple):
    """What a call returns: outputs in a container, or one alone.

    What is no tensor, as None or a length, is the same each time.
    """

    container: type | None
    outputs: tuple[Output | int | None, ...]


_SEEN: Calls[Result | None] = Calls()  # None: torch decides


class FakeResults:
    """Runs ops on the fakes of one mode; the results are remembered in the process."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._fakes = FakeTensors(mode)

    def run(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - whatever the op returns
        """Run an op, as ``func(*args, **kwargs)`` does under the fake mode."""
        if not _may_repeat(func) or not self._answers():
            return func(*args, **kwargs)
        key = call_key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        try:
            result = _SEEN[key]
        except KeyError:
            return self._first(key, func, args, kwargs)
        if result is None:
            return func(*args, **kwargs)
        return self._make(result, args)

    def _answers(self) -> bool:
        return self._fakes.at_once and not torch.is_inference_mode_enabled()

    # -- the first sight of a call ----------------------------------------------------

    def _first(
        self, key: Key, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        out = func(*args, **kwargs)
        result = None
        if call_key(func, args, kwargs) == key:  # else it changed its arguments
            result = _result_of(args, kwargs, out)
        if result is not None and not self._makes(result, args, out):
            result = None
        _SEEN.keep(key, result)
        return out

    def _makes(self, result: Result, args: tuple[Any, ...], out: Any) -> bool:  # noqa: ANN401
        """Whether a result made again is like what torch made."""
        again = self._make(result, args)
        if result.container is None:
            again, out = (again,), (out,)
        return all(map(self._alike, again, out, result.outputs))

    def _alike(self, again: Any, out: Any, made: Output | int | None) -> bool:  # noqa: ANN401
        if not isinstance(made, Output) or made.shape is None:
            return again is out
        one: list[Any] = []
        other: list[Any] = []
        keys = torch._C._dispatch_key_set
        return (
            describe((again,), one)
            and describe((out,), other)
            and one == other
            and again.untyped_storage().nbytes() == out.untyped_storage().nbytes()
            and again._version == out._version
            and keys(again) == keys(out)
            and vars(again) == vars(out)
        )

    # -- making results ---------------------------------------------------------------

    def _make(self, result: Result, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        container, outputs = result
        if container is None:
            return self._output(outputs[0], args)
        return container(self._output(output, args) for output in outputs)

    def _output(self, output: Output | int | None, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        if not isinstance(output, Output):
            return output
        argument, shape, stride, offset, dtype = output
        if shape is None:
            return args[argument]
        if argument < 0:
            return self._fakes.empty(shape, stride, dtype)
        return self._fakes.view(args[argument], shape, stride, offset, dtype)


@functools.cache
def _may_repeat(func: OpOverload) -> bool:
    """Whether a result may depend on nothing but the arguments' metadata."""
    return (
        func.namespace in {"aten", "budgetfit"}
        and func not in LIFTS
        and not any(tag in func.tags for tag in TORCH_DECIDES)
    )


def _result_of(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,  # noqa: ANN401 - whatever an op returned
) -> Result | None:
    """Return how outputs relate to arguments; None where that cannot be told."""
    container = type(out) if type(out) in {list, tuple} else None
    first = [_storage(x) if isinstance(x, torch.Tensor) else 0 for x in args]
    inputs = _storages((*args, *kwargs.values()))
    made: list[Output | int | None] = []
    for x in (out,) if container is None else out:
        if x is None or type(x) is int:
            made.append(x)
            continue
        if type(x) is not FakeTensor or x.layout is not STRIDED:
            return None
        same = [n for n, value in enumerate(args) if value is x]
        if same:
            made.append(Output(same[0]))
            continue
        argument, storage = -1, _storage(x)
        if storage in inputs:
            if inputs.count(storage) > 1 or storage not in first:
                return None  # a view of which one?
            argument = first.index(storage)
        place = x.shape, x.stride(), int(x.storage_offset())
        made.append(Output(argument, *place, x.dtype))
    own = [
        _storage(x)
        for x, output in zip((out,) if container is None else out, made, strict=True)
        if isinstance(output, Output) and output.argument < 0
    ]
    return Result(container, tuple(made)) if len(set(own)) == len(own) else None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(values: Iterable[Any]) -> list[int]:
    """Return the storages of tensors in arguments, also of those in lists."""
    found: list[int] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(_storage(value))
        elif isinstance(value, (tuple, list)):
            found += _storages(value)
    return found
