"""Values of small tensors made from known ones, beside their fakes (tracing T8).

Models ask tensors questions: are all mask entries one, are the position ids packed,
which tokens are images? A fake tensor has no values, so whole numbers that come from
the batch, and whatever is made from them or from constants, are computed for real
beside the trace. What depends on weights or on random numbers stays unknown, and a
question about it is a ``TraceError``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from budgetfit.tracing.log_rows import run_plainly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from budgetfit.tracing.log_rows import RunOp

LARGEST_ELEMENTS = 1 << 20  # a mask of length^2 is not worth its time
MOST_FLOATS = 1 << 18  # samples times length, and not times width
# What a lone random number is taken for. Models compare it with the probability of
# leaving a layer out (layerdrop); with this one all layers run, which takes the most.
LARGEST_CHANCE = 1 - 2**-24
aten = torch.ops.aten

# Made from nothing but their arguments.
CONSTANTS = frozenset(
    {
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.full.default,
        aten.zeros.default,
        aten.ones.default,
        aten.scalar_tensor.default,
        aten.eye.default,
        aten.tril_indices.default,
        aten.triu_indices.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
# Their result is a number, or has a shape that depends on values.
ASKS_FOR_VALUES = frozenset(
    {
        aten._local_scalar_dense.default,
        aten.is_nonzero.default,
        aten.equal.default,
        aten.nonzero.default,
        aten.masked_select.default,
        aten._unique2.default,
        aten.unique_consecutive.default,
        aten.repeat_interleave.Tensor,
        aten.bincount.default,
    }
)
# A mask among their indices stands for the positions where it is true.
TAKES_MASKS = frozenset({aten.index.Tensor, aten._unsafe_index.Tensor})
LIKE = frozenset(op for op in CONSTANTS if "like" in str(op) or "new_" in str(op))


def _whole(tensor: torch.Tensor) -> bool:
    """Whole numbers, and a few others: masks of ones, an optimizer's step count."""
    if tensor.is_floating_point():
        return tensor.numel() <= MOST_FLOATS
    return not tensor.is_complex() and tensor.numel() <= LARGEST_ELEMENTS


class Nature(NamedTuple):
    """What is to know about an op, looked up once."""

    writes: bool
    random: bool
    constant: bool
    like: bool
    takes_masks: bool
    asks: bool


@functools.cache
def _nature(func: torch._ops.OpOverload) -> Nature:
    return Nature(
        writes=func._schema.is_mutable,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        constant=func in CONSTANTS,
        like=func in LIKE,
        takes_masks=func in TAKES_MASKS,
        asks=func in ASKS_FOR_VALUES,
    )


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        else:
            yield value


class _Later(NamedTuple):
    """A constant that nobody has looked at yet: most are an optimizer's zeros."""

    make: Callable[[], torch.Tensor]


class KnownValues:
    """Remembers real values for fake tensors and computes those of ops on them.

    ``run`` makes the fakes.
    """

    def __init__(self, run: RunOp = run_plainly) -> None:
        self._run = run
        self._real: Any = WeakIdKeyDictionary()

    def remember(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Note that ``fake`` stands for ``real``, if that is worth following."""
        if _whole(real) and fake.shape == real.shape:
            self._real[fake] = real

    def run(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run an op on fakes; where all its inputs are known, know its output too.

        Raises:
            DataDependentOutputException: If the op needs a value that is not known.
        """
        nature = _nature(func)
        if nature.takes_masks:
            args = (args[0], list(self._positions(args[1])), *args[2:])
        known = self._inputs_known(nature, args, kwargs)
        if nature.asks:
            return self._answer(func, args, kwargs, known=known)
        out = self._run(func, args, kwargs)
        if func is aten.rand.default and out.numel() == 1:
            with _disable_current_modes():
                self.remember(out, torch.full(out.shape, LARGEST_CHANCE))
        if not known:
            if nature.writes:
                self._forget(func, args)
        elif not nature.random and (nature.writes or any(map(_whole, _tensors(out)))):
            self._follow(func, args, kwargs, out)
        elif nature.writes:
            self._forget(func, args)
        return out

    def _inputs_known(
        self, nature: Nature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        if nature.like:
            return True
        inputs = 0
        # Nearly every op has an activation or a weight among its first arguments, so
        # the first unknown one ends the search.
        for x in _leaves((*args, *kwargs.values()) if kwargs else args):
            if isinstance(x, torch.Tensor):
                inputs += 1
                if isinstance(x, FakeTensor) and (
                    (x.dtype.is_floating_point and x.numel() > MOST_FLOATS)
                    or x not in self._real
                ):
                    return False
        return inputs > 0 or nature.constant

    def _answer(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        known: bool,
    ) -> Any:  # noqa: ANN401
        if not known:
            return func(*args, **kwargs)  # raises, unless a fake can answer
        real = self._compute(func, args, kwargs)
        if not any(True for _ in _tensors(real)):
            return real
        leaves, spec = tree_flatten(real)
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
            if isinstance(x, torch.Tensor)
            else x
            for x in leaves
        ]
        for fake, value in zip(fakes, leaves, strict=True):
            if isinstance(value, torch.Tensor):
                self.remember(fake, value)
        return tree_unflatten(fakes, spec)

    def _positions(
        self, indices: list[torch.Tensor | None]
    ) -> Iterator[torch.Tensor | None]:
        """Turn known masks into positions; a fake cannot say how many those are."""
        for index in indices:
            if index is not None and index.dtype == torch.bool and index in self._real:
                found = self._answer(aten.nonzero.default, (index,), {}, known=True)
                yield from self.run(aten.unbind.int, (found, 1), {})
            else:
                yield index

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the real values of a fake; what is none is its own."""
        found = self._real.get(tensor, tensor)
        if isinstance(found, _Later):
            found = self._real[tensor] = found.make()
        return found

    def _follow(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,  # noqa: ANN401
    ) -> None:
        if func in LIKE:
            if _whole(out):
                self._real[out] = _Later(_like(func, args, kwargs))
            return
        real = self._compute(func, args, kwargs)
        for fake, value in zip(_tensors(out), _tensors(real), strict=True):
            self.remember(fake, value)

    def _compute(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        leaves, spec = tree_flatten((args, kwargs))
        values = [self._value(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        with _disable_current_modes():
            real_args, real_kwargs = tree_unflatten(values, spec)
            return func(*real_args, **real_kwargs)

    def _forget(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
        """Unlearn what was written to: these tensors and their aliases."""
        written = {
            tensor.untyped_storage()._cdata
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value)
        }
        if not written or not len(self._real):
            return
        for fake in list(self._real.keys()):
            if fake.untyped_storage()._cdata in written:
                del self._real[fake]


def _like(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], torch.Tensor]:
    """Return what makes a constant, and holds only the shape that it is made like."""
    with _disable_current_modes():
        args = tuple(
            torch.empty(x.shape, dtype=x.dtype, device="meta")
            if isinstance(x, torch.Tensor)
            else x
            for x in args
        )

    def make() -> torch.Tensor:
        with _disable_current_modes():
            return func(*args, **{**kwargs, "device": "cpu"})

    return make


def _tensors(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401
    return (x for x in tree_leaves(value) if isinstance(x, torch.Tensor))


__all__ = ["DataDependentOutputException", "KnownValues"]
