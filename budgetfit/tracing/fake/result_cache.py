"""FakeResultCache: cached results of ops on fake tensors, without torch's dispatch.

A trace repeats the same few hundred calls, and torch takes 60 us and more for a fake
result even from its own cache. Here torch runs the first call; how each output relates
to the arguments is recorded, the outputs are recreated from that and compared with
torch's. Only a call whose outputs are equal in every respect is cached.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from budgetfit.tracing.call_cache import (
    STRIDED,
    Args,
    CallCache,
    CallKey,
    Kwargs,
    add_metadata,
    call_key,
)
from budgetfit.tracing.fake.tensor_factory import FakeTensorFactory

UNCACHEABLE_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
LIFT_OPS = frozenset(
    {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
)


class OutputSpec(NamedTuple):
    """One output of a cached call: an argument itself, a view of one, or a new tensor.

    ``argument`` is the argument's position, -1 for none; ``shape`` is None if the
    output is that argument.
    """

    argument: int
    shape: torch.Size | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32


class ResultSpec(NamedTuple):
    """The result of a cached call: outputs in a container, or one alone.

    Outputs that are no tensors (None, a length) are constant.
    """

    container: type | None
    outputs: tuple[OutputSpec | int | None, ...]


_SEEN: CallCache[ResultSpec | None] = CallCache()  # None: torch runs the op


class FakeResultCache:
    """Runs ops on the fakes of one mode, with a process-wide cache of the results."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._fakes = FakeTensorFactory(mode)
        self._last: tuple[CallKey, tuple[Any, ...]] | None = None

    def take_key(self, func: OpOverload, args: Args) -> CallKey | None:
        """Return the key of the last call once, if it was this one and decided it.

        ``args``: the tuple itself that ``run`` was given.
        """
        last, self._last = self._last, None
        if last is None or last[1] is not args or last[0][0] is not func._op:
            return None
        return last[0]

    def run(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an op, as ``func(*args, **kwargs)`` does under the fake mode."""
        enabled = self._fakes.fast_path and not torch.is_inference_mode_enabled()
        if not (enabled and _is_cacheable(func)):
            return func(*args, **kwargs)
        key = call_key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        try:
            result = _SEEN[key]
        except KeyError:
            return self._run_and_cache(key, func, args, kwargs)
        if result is None:
            return func(*args, **kwargs)
        self._last = key, args
        return self._recreate(result, args)

    # -- the first run of a call ------------------------------------------------------

    def _run_and_cache(
        self, key: CallKey, func: OpOverload, args: Args, kwargs: Kwargs
    ) -> object:
        with self._uncached():
            out = func(*args, **kwargs)
        result = None
        if call_key(func, args, kwargs) == key:  # else it changed its arguments
            result = _result_of(args, kwargs, out)
        if result is not None and not self._recreates(result, args, out):
            result = None
        _SEEN.store(key, result)
        if result is not None:
            self._last = key, args
        return out

    @contextlib.contextmanager
    def _uncached(self) -> Iterator[None]:
        """Run an op without torch's own cache: filling it takes a third of the time."""
        before, self._mode.cache_enabled = self._mode.cache_enabled, False
        try:
            yield
        finally:
            self._mode.cache_enabled = before

    def _recreates(self, result: ResultSpec, args: Args, out: Any) -> bool:
        """Whether a recreated result equals torch's."""
        again = self._recreate(result, args)
        if result.container is None:
            again, out = (again,), (out,)
        return all(map(self._equal, again, out, result.outputs))

    def _equal(self, again: Any, out: Any, made: OutputSpec | int | None) -> bool:
        if not isinstance(made, OutputSpec) or made.shape is None:
            return again is out
        one: list[Any] = []
        other: list[Any] = []
        keys = torch._C._dispatch_key_set
        return (
            add_metadata((again,), one)
            and add_metadata((out,), other)
            and one == other
            and again.untyped_storage().nbytes() == out.untyped_storage().nbytes()
            and again._version == out._version
            and keys(again) == keys(out)
            and vars(again) == vars(out)
        )

    # -- recreating results -----------------------------------------------------------

    def _recreate(self, result: ResultSpec, args: Args) -> Any:
        container, outputs = result
        if container is None:
            return self._output(outputs[0], args)
        return container(self._output(output, args) for output in outputs)

    def _output(self, output: OutputSpec | int | None, args: Args) -> object:
        if not isinstance(output, OutputSpec):
            return output
        argument, shape, stride, offset, dtype = output
        if shape is None:
            return args[argument]
        if argument < 0:
            return self._fakes.empty(shape, stride, dtype)
        return self._fakes.view(args[argument], shape, stride, offset, dtype)


@functools.cache
def _is_cacheable(func: OpOverload) -> bool:
    """Whether an op's result can depend on the metadata of its arguments alone."""
    return (
        func.namespace in {"aten", "budgetfit", "fsdp"}
        and func not in LIFT_OPS
        and not any(tag in func.tags for tag in UNCACHEABLE_TAGS)
    )


def _result_of(args: Args, kwargs: Kwargs, out: Any) -> ResultSpec | None:
    """Return how outputs relate to arguments; None if that is ambiguous."""
    container = type(out) if type(out) in {list, tuple} else None
    first = [_storage(x) if isinstance(x, torch.Tensor) else 0 for x in args]
    inputs = _storages((*args, *kwargs.values()))
    made: list[OutputSpec | int | None] = []
    for x in (out,) if container is None else out:
        if x is None or type(x) is int:
            made.append(x)
            continue
        if type(x) is not FakeTensor or x.layout is not STRIDED:
            return None
        same = [n for n, value in enumerate(args) if value is x]
        if same:
            made.append(OutputSpec(same[0]))
            continue
        argument, storage = -1, _storage(x)
        if storage in inputs:
            if inputs.count(storage) > 1 or storage not in first:
                return None  # a view of which one?
            argument = first.index(storage)
        place = x.shape, x.stride(), int(x.storage_offset())
        made.append(OutputSpec(argument, *place, x.dtype))
    own = [
        _storage(x)
        for x, output in zip((out,) if container is None else out, made, strict=True)
        if isinstance(output, OutputSpec) and output.argument < 0
    ]
    return ResultSpec(container, tuple(made)) if len(set(own)) == len(own) else None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(values: Iterable[object]) -> list[int]:
    """Return the storages of tensors in (nested) arguments."""
    found: list[int] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(_storage(value))
        elif isinstance(value, (tuple, list)):
            found += _storages(value)
    return found
