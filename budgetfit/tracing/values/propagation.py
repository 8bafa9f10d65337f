"""Constant propagation: concrete values of fake tensors, computed op by op.

By default for constants and integer tensors, which are small and decide most branches;
with ``all_values`` for weights and activations as well.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from budgetfit.tracing.call_cache import Args, Kwargs
from budgetfit.tracing.values.assumptions import DIFFERENCES, FULL_MASK, NEGATIONS
from budgetfit.tracing.values.concrete_execution import run_on_cpu
from budgetfit.tracing.values.op_traits import LIKE, QUANTIFIERS, OpTraits, traits_of
from budgetfit.tracing.values.value_checks import ValueChecks

MAX_INTEGERS = 1 << 20  # elements; larger masks would take too long
MAX_FLOATS = 1 << 18  # elements: samples times length, not times width


class _LazyConstant(NamedTuple):
    """A constant that is computed when it is read: most are an optimizer's zeros."""

    make: Callable[[], torch.Tensor]


class PropagatedValues:
    """Concrete values of fake tensors, propagated through ops.

    ``all_values``: all values are tracked, whatever their size; outputs of ops that do
    not run on a CPU stay unknown.

    Attributes:
        overflowed: Whether an integer tensor was too large to be tracked.
    """

    def __init__(self, checks: ValueChecks, *, all_values: bool = False) -> None:
        self.all_values = all_values
        self._checks = checks
        self.overflowed = False
        self._real: Any = WeakIdKeyDictionary()
        self._why: Any = WeakIdKeyDictionary()
        self._large = False  # whether a value with many elements is known

    def record(
        self, fake: torch.Tensor, real: torch.Tensor, why: Iterable[str] = ()
    ) -> None:
        """Record the values of ``fake``, if tracked, and ``why`` they were assumed."""
        if fake.shape != real.shape:
            return
        if self.is_tracked(real):
            self._large |= real.numel() > MAX_FLOATS
            self._real[fake] = real
            if why:
                self._why[fake] = frozenset(why)
            elif len(self._why):
                self._why.pop(fake, None)
        elif not real.is_floating_point():
            self.overflowed = True

    def is_tracked(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values are tracked: integers, and small floats.

        What is repeated along a dimension (stride 0) counts once.
        """
        if self.all_values:
            return True
        if tensor.is_floating_point():
            return _stored(tensor) <= MAX_FLOATS
        return not tensor.is_complex() and _stored(tensor) <= MAX_INTEGERS

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor; None if they are unknown."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        found: torch.Tensor | _LazyConstant | None = self._real.get(tensor)
        if isinstance(found, _LazyConstant):
            found = self._real[tensor] = found.make()
        if self.all_values and found is not None and found.dtype != tensor.dtype:
            with _disable_current_modes():  # a dtype policy changed the weight's data
                found = self._real[tensor] = found.to(tensor.dtype)
        return found

    def reasons(self, *values: object) -> frozenset[str]:
        """Return the notes on what was assumed for any of these values."""
        if not len(self._why):
            return frozenset()
        inputs = leaves_of(values)
        found = (self._why.get(x) for x in inputs if isinstance(x, FakeTensor))
        return frozenset().union(*filter(None, found))

    def inputs_known(self, traits: OpTraits, args: Args, kwargs: Kwargs) -> bool:
        """Return whether all tensors among an op's arguments have known values."""
        if traits.like:
            return True
        all_values = self.all_values
        if not all_values:
            # Nearly every op has an activation or a weight among its own arguments.
            for x in args:
                if (
                    type(x) is FakeTensor
                    and x.numel() > MAX_FLOATS
                    and x.dtype.is_floating_point
                    and not (self._large and x in self._real)
                ):
                    return False
        inputs = 0
        for x in leaves_of((*args, *kwargs.values()) if kwargs else args):
            if isinstance(x, torch.Tensor):
                inputs += 1
                if isinstance(x, FakeTensor) and x not in self._real:
                    return False
        return inputs > 0 or traits.constant or all_values

    def worth_computing(self, traits: OpTraits, args: Args, out: object) -> bool:
        """Return whether to compute an op whose inputs are known."""
        if traits.view or traits.mutates:
            return True
        tracked = any(map(self.is_tracked, tensors_of(out)))
        if traits.pointwise:
            return tracked or self._is_tracked_collapsed(args)
        large = (
            x.numel() > MAX_FLOATS for x in tensors_of(args) if x.is_floating_point()
        )
        return tracked and (self.all_values or not any(large))

    def _is_tracked_collapsed(self, args: Args) -> bool:
        """Return whether most elements of a pointwise op's large output are equal."""
        known = (self.value(x) for x in tensors_of(args))
        with _disable_current_modes():
            shapes = [_collapsed(x).shape for x in known if x is not None]
            return torch.broadcast_shapes(*shapes).numel() <= MAX_FLOATS

    def propagate(self, func: OpOverload, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Compute and record the outputs of an op whose inputs are known."""
        if func in LIKE:
            if self.is_tracked(out):
                self._real[out] = _LazyConstant(_like(func, args, kwargs))
            return
        why = self.reasons(args, tuple(kwargs.values()))
        if (known := self._without_computing(func, args, out, why)) is not None:
            self.record(out, known, why)
            return
        real = None
        if not traits_of(func).mutates or self._make_writable(func, args):
            real = self.compute(func, args, kwargs)
        if real is None:
            self.invalidate(func, args)
            return
        if FULL_MASK in why and func in DIFFERENCES:
            real = _full_if_empty(real)
        pairs = zip(tensors_of(out), tensors_of(real), strict=not self.all_values)
        for fake, value in pairs:
            if self.all_values and not (func.is_view or func._schema.is_mutable):
                value = _laid_out_like(fake, value)  # noqa: PLW2901 - the same values
            self.record(fake, value, why)

    def _without_computing(
        self, func: OpOverload, args: Args, out: Any, why: frozenset[str]
    ) -> torch.Tensor | None:
        negated = FULL_MASK in why and func in NEGATIONS and out.numel() > 1
        if negated and self._checks.opposites != "empty":
            self._checks.opposites = "were full"
            return self.value(args[0])  # the negation may be as full
        real = self.value(args[0]) if func in QUANTIFIERS else None
        if real is None or _stored(real) != 1:
            return None
        with _disable_current_modes():  # one element stands for all
            one = real.as_strided((), ()).ne(0)
            return one.to(out.dtype).expand(out.shape)

    def compute(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an op on the concrete values of its arguments; None: it has none."""
        leaves, spec = tree_flatten((args, kwargs))
        values = [self.value(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        with _disable_current_modes():
            traits, tensors = traits_of(func), list(tensors_of(values))
            if traits.pointwise and not (traits.mutates or self.all_values):
                shape = torch.broadcast_shapes(*(x.shape for x in tensors))
                if shape.numel() > MAX_FLOATS:
                    values = [
                        _collapsed(x) if isinstance(x, torch.Tensor) else x
                        for x in values
                    ]
                    args, kwargs = tree_unflatten(values, spec)
                    return func(*args, **kwargs).expand(shape)
            real_args, real_kwargs = tree_unflatten(values, spec)
            if self.all_values:
                return run_on_cpu(func, real_args, real_kwargs)
            if not (traits.view and any(map(_repeats, tensors))):
                return func(*real_args, **real_kwargs)
            if func is torch.ops.aten.as_strided.default:  # other memory
                return None
            try:
                return func(*real_args, **real_kwargs)
            except RuntimeError:  # a view for which elements must not repeat memory
                return None

    def _make_writable(self, func: OpOverload, args: Args) -> bool:
        """Give written values that repeat memory for each element; whether that fits.

        Values of views of them, which shared their memory, are forgotten.
        """
        written = list(_written(func, args))
        if not self._large and not any(_repeats(self._real.get(x)) for x in written):
            return True
        # Known values are looked through once: an op on a list writes to hundreds.
        storages = {x.untyped_storage()._cdata for x in written}
        aliases = defaultdict[int, list[torch.Tensor]](list)
        for other in self._aliases(storages):
            aliases[other.untyped_storage()._cdata].append(other)
        for fake in written:
            real = self._real.get(fake)
            repeats = _repeats(real)
            if repeats and real.numel() > MAX_INTEGERS:
                return False
            for other in aliases[fake.untyped_storage()._cdata]:
                value = self._real.get(other)
                known = other is not fake and value is not None
                if known and (repeats or _repeats(value)):
                    del self._real[other]
            if repeats:
                with _disable_current_modes():
                    self._real[fake] = real.clone(memory_format=torch.contiguous_format)
        return True

    def invalidate(self, func: OpOverload, args: Args) -> None:
        """Forget the values of mutated tensors and their aliases."""
        written = {x.untyped_storage()._cdata for x in _written(func, args)}
        for fake in self._aliases(written):
            del self._real[fake]

    def _aliases(self, storages: set[int]) -> list[torch.Tensor]:
        """Return the fakes with known values that are in one of the storages."""
        if not storages or not len(self._real):
            return []
        fakes = list(self._real.keys())
        return [x for x in fakes if x.untyped_storage()._cdata in storages]


def _written(func: OpOverload, args: Args) -> Iterator[torch.Tensor]:
    """Yield the tensors that an op writes to."""
    for value, argument in zip(args, func._schema.arguments, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_of(value)


def leaves_of(values: Iterable[object]) -> Iterator[object]:
    """Yield the leaves of nested arguments."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from leaves_of(value)
        else:
            yield value


def _laid_out_like(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return values with a fake's strides, so that views of it are valid for them."""
    if real.stride() == fake.stride() or real.shape != fake.shape:
        return real
    with _disable_current_modes():
        result = torch.empty_strided(fake.shape, fake.stride(), dtype=real.dtype)
        return result.copy_(real)


def _full_if_empty(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask; one of several questions that are all answered with no is full."""
    with _disable_current_modes():
        if not mask.dim() or mask.any():
            return mask
        return torch.ones((), dtype=mask.dtype).expand_as(mask)


def _like(func: OpOverload, args: Args, kwargs: Kwargs) -> Callable[[], torch.Tensor]:
    """Return a function that makes a ``*_like`` constant; it keeps no input alive."""
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


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return one element along each dimension that repeats its elements (stride 0)."""
    return tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]


def _collapsed(tensor: torch.Tensor) -> torch.Tensor:
    """Return one element along each dimension along which all are equal."""
    # Those of a repeated dimension (stride 0) first: they need no comparison.
    for dim in sorted(range(tensor.dim()), key=tensor.stride):
        if tensor.shape[dim] > 1:
            first, last = (tensor.narrow(dim, n, 1) for n in (0, tensor.shape[dim] - 1))
            # Where they differ, as in a causal mask, the others need not be compared.
            if not tensor.stride(dim) or (
                torch.equal(first, last) and bool((tensor == first).all())
            ):
                tensor = first
    return tensor


def _stored(tensor: torch.Tensor) -> int:
    """Return the number of elements, those of a repeated dimension (stride 0) once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size if stride else min(size, 1) for size, stride in pairs)


def count_nonzero(tensor: torch.Tensor) -> int:
    """Count elements that are not zero, those of a repeated dimension together."""
    stored = without_repeats(tensor)
    return int(stored.count_nonzero()) * (tensor.numel() // max(stored.numel(), 1))


def _repeats(value: object) -> bool:
    return isinstance(value, torch.Tensor) and _stored(value) < value.numel()


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in any nesting."""
    return (x for x in tree_leaves(value) if isinstance(x, torch.Tensor))
