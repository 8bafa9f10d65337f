"""Real values beside fake tensors, followed from op to op (tracing T8).

Constants and whole numbers are small and decide most; with ``everything`` all values
are followed, weights and activations as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from budgetfit.tracing.values.assumptions import FULL_MASK, OPPOSITES
from budgetfit.tracing.values.concrete_execution import compute_anything
from budgetfit.tracing.values.op_traits import LIKE, nature_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from budgetfit.tracing.values.op_traits import Nature

LARGEST_ELEMENTS = 1 << 20  # a mask of length^2 is not worth its time
MOST_FLOATS = 1 << 18  # samples times length, and not times width


class _Later(NamedTuple):
    """A constant that nobody has looked at yet: most are an optimizer's zeros."""

    make: Callable[[], torch.Tensor]


class FollowedValues:
    """Remembers real values for fake tensors and computes those of ops on them.

    ``everything``: all values are followed, whatever their number, and ops that do not
    run on a CPU leave theirs unknown.

    Attributes:
        too_many: Whether whole numbers were too many to be followed.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self.everything = everything
        self.too_many = False
        self._real: Any = WeakIdKeyDictionary()
        self._why: Any = WeakIdKeyDictionary()
        self._large = False  # whether anything is known that has many elements

    def remember(
        self, fake: torch.Tensor, real: torch.Tensor, why: Iterable[str] = ()
    ) -> None:
        """Note that ``fake`` stands for ``real``, if that is worth following.

        ``why`` says what was assumed on the way to these values.
        """
        if fake.shape != real.shape:
            return
        follows = self.follows(real)
        if follows or _is_uniform(real):
            self._large |= not follows
            self._real[fake] = real
            if why:
                self._why[fake] = frozenset(why)
            elif len(self._why):
                self._why.pop(fake, None)
        elif not real.is_floating_point():
            self.too_many = True

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whole numbers, and a few others: masks of ones, an optimizer's step count."""
        if self.everything:
            return True
        if tensor.is_floating_point():
            return tensor.numel() <= MOST_FLOATS
        return not tensor.is_complex() and tensor.numel() <= LARGEST_ELEMENTS

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor; None where they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        found: torch.Tensor | _Later | None = self._real.get(tensor)
        if isinstance(found, _Later):
            found = self._real[tensor] = found.make()
        if self.everything and found is not None and found.dtype != tensor.dtype:
            with _disable_current_modes():  # a dtype policy changed the weight's data
                found = self._real[tensor] = found.to(tensor.dtype)
        return found

    def reasons(self, *values: Any) -> frozenset[str]:  # noqa: ANN401 - op arguments
        """Return what was assumed for any of these values."""
        if not len(self._why):
            return frozenset()
        inputs = leaves_of(values)
        found = (self._why.get(x) for x in inputs if isinstance(x, FakeTensor))
        return frozenset().union(*filter(None, found))

    def inputs_known(
        self, nature: Nature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Say whether all tensors among an op's arguments have known values."""
        if nature.like:
            return True
        everything = self.everything
        inputs = 0
        # Nearly every op has an activation or a weight among its first arguments, so
        # the first unknown one ends the search.
        for x in leaves_of((*args, *kwargs.values()) if kwargs else args):
            if isinstance(x, torch.Tensor):
                inputs += 1
                if isinstance(x, FakeTensor) and (
                    x not in self._real
                    if everything
                    else (x.dtype.is_floating_point and x.numel() > MOST_FLOATS)
                    or x not in self._real
                ):
                    return False
        return inputs > 0 or nature.constant or everything

    def worth_computing(self, nature: Nature, args: tuple[Any, ...], out: Any) -> bool:  # noqa: ANN401
        """Say whether an op's values are to be followed, its inputs' being known."""
        if nature.writes or any(map(self.follows, tensors_of(out))):
            return True
        if not self._large or not nature.pointwise:
            return False
        inputs = map(self.value, tensors_of(args))
        return all(x is None or _is_uniform(x) for x in inputs)

    def follow(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,  # noqa: ANN401
    ) -> None:
        """Know the values of what an op made from known ones."""
        if func in LIKE:
            if self.follows(out):
                self._real[out] = _Later(_like(func, args, kwargs))
            return
        why = self.reasons(args, tuple(kwargs.values()))
        if FULL_MASK in why and func in OPPOSITES and out.numel() > 1:
            real = self.value(args[0])  # the opposite of any mask may be as full
            assert real is not None  # noqa: S101 - all inputs are known
            self.remember(out, real, why)
            return
        if nature_of(func).writes:
            self._make_writable(args)
        real = self.compute(func, args, kwargs)
        if real is None:
            self.forget(func, args)
            return
        pairs = zip(tensors_of(out), tensors_of(real), strict=not self.everything)
        for fake, value in pairs:
            if self.everything and not (func.is_view or func._schema.is_mutable):
                value = _laid_out_like(fake, value)  # noqa: PLW2901 - the same values
            self.remember(fake, value, why)

    def compute(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run an op on the values of its arguments."""
        leaves, spec = tree_flatten((args, kwargs))
        values = [self.value(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        with _disable_current_modes():
            if self._large and nature_of(func).pointwise:
                tensors = list(tensors_of(values))
                if all(map(_is_uniform, tensors)):
                    values = [_one_of(x) for x in values]
                    args, kwargs = tree_unflatten(values, spec)
                    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
                    return func(*args, **kwargs).expand(shape)
            real_args, real_kwargs = tree_unflatten(values, spec)
            if self.everything:
                return compute_anything(func, real_args, real_kwargs)
            return func(*real_args, **real_kwargs)

    def _make_writable(self, args: tuple[Any, ...]) -> None:
        """Give values that are said once for all elements a place for each."""
        for fake in tensors_of(args):
            real = self._real.get(fake)
            if (
                isinstance(real, torch.Tensor)
                and real.numel() > 1
                and _is_uniform(real)
            ):
                with _disable_current_modes():
                    self._real[fake] = real.clone(memory_format=torch.contiguous_format)

    def forget(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
        """Unlearn what was written to: these tensors and their aliases."""
        written = {
            tensor.untyped_storage()._cdata
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_of(value)
        }
        if not written or not len(self._real):
            return
        for fake in list(self._real.keys()):
            if fake.untyped_storage()._cdata in written:
                del self._real[fake]


def leaves_of(values: Iterable[Any]) -> Iterator[Any]:
    """Return what is in nested arguments."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from leaves_of(value)
        else:
            yield value


def _laid_out_like(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return values with a fake's strides, so that its views are views of them too."""
    if real.stride() == fake.stride() or real.shape != fake.shape:
        return real
    with _disable_current_modes():
        place = torch.empty_strided(fake.shape, fake.stride(), dtype=real.dtype)
        return place.copy_(real)


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


def _one_of(value: Any) -> Any:  # noqa: ANN401 - an op's argument
    """Return one element of what is the same everywhere."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.as_strided((), ()).clone()


def _is_uniform(tensor: torch.Tensor) -> bool:
    """Whether all elements are one and the same in memory."""
    return not any(tensor.stride()) and tensor.numel() > 0


def tensors_of(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401
    """Return the tensors in any nesting."""
    return (x for x in tree_leaves(value) if isinstance(x, torch.Tensor))
