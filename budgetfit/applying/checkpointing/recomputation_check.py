"""Whether a recomputation makes what the forward has made, value by value.

What the recomputation of a block is for are the tensors that autograd saved in its
forward. A gradient is right if and only if these are the same again: everything else is
still the original graph's. So a few values of each are noted when it is saved, and
compared when it is saved again, before anybody trains with it. A private generator, a
counter or a hook shows here, whatever it is, and state that is kept does not.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from budgetfit.applying.pytree import tensors_in
from budgetfit.errors import RecomputationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Of each tensor, spread over all its dimensions.
MOST_VALUES: Final = 1024
# Relative. A CPU repeats its kernels, some of a card's add in any order.
_CPU, _ELSEWHERE = 1e-5, 1e-3


class SavedValues:
    """Some values of what a forward saved, in host memory.

    Args:
        block: The block's name, for the error.
        at_the_end: Look when the block has run: an op fills what autograd has saved
            before. All of it is then alive for as long.
    """

    def __init__(self, block: str, *, at_the_end: bool) -> None:
        self._block = block
        self._at_the_end = at_the_end
        self._first: list[_Sample] = []
        self._returned: list[_Sample] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what autograd saves in a forward."""
        waiting: list[torch.Tensor] = []

        def look(tensor: torch.Tensor) -> None:
            if self._at_the_end:
                waiting.append(tensor.detach())
            else:
                self._first.append(_Sample(tensor))

        with _looking_at_saved(look):
            yield
        self._first += [_Sample(tensor) for tensor in waiting]

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Compare what a recomputation saves with what the forward did.

        Raises:
            RecomputationError: With the last tensor, because checkpoints end there.
        """
        waiting: list[torch.Tensor] = []
        differences: list[float] = []

        def compare(tensor: torch.Tensor) -> None:
            if len(differences) == len(self._first):
                self._refuse("it saves more tensors", math.inf)
            difference = self._first[len(differences)].difference(_Sample(tensor))
            differences.append(difference)
            if math.isinf(difference):  # checkpoints refuse it, in other words
                self._refuse("it saves tensors of other shapes or dtypes", difference)
            if len(differences) == len(self._first):
                self._judge(differences)

        def look(tensor: torch.Tensor) -> None:
            if self._at_the_end:
                waiting.append(tensor.detach())
            else:
                compare(tensor)

        with _looking_at_saved(look):
            yield
        for tensor in waiting:
            compare(tensor)
        if len(differences) < len(self._first):
            self._refuse("it saves fewer tensors", math.inf)

    def note_output(self, output: object) -> None:
        """Note what a block returns to the next one of its segment."""
        self._returned = [_Sample(tensor) for tensor in tensors_in(output)]

    def compare_output(self, output: object) -> None:
        """Compare what a recomputation returns; a segment ends without its last one's.

        Raises:
            RecomputationError: Here and not where the next block saves it as its input.
        """
        for first, tensor in zip(self._returned, tensors_in(output), strict=False):
            difference = first.difference(_Sample(tensor))
            if difference > first.tolerance:
                what = f"what it returns differs by {difference:.2g} of its norm"
                self._refuse(what, difference)

    def _judge(self, differences: list[float]) -> None:
        wrong = [
            difference
            for difference, first in zip(differences, self._first, strict=True)
            if difference > first.tolerance
        ]
        if not wrong:
            return
        share = f"{len(wrong)} of the {len(differences)} tensors that it saves"
        what = f"{share} differ, by up to {max(wrong):.2g} of their norm"
        self._refuse(what, max(wrong))

    def _refuse(self, what: str, difference: float) -> None:
        raise RecomputationError(
            f"Block {self._block!r} did something else when it ran again in backward: "
            f"{what}, so gradients would be wrong. Leave it out: checkpointing=[...] "
            "with the names of the other blocks. Or let its forward depend on its "
            "inputs, buffers and the global random generators alone: look for a "
            "counter, a cache, a hook or a hidden generator.",
            block=self._block,
            difference=difference,
        )


class _Sample:
    """Kind and some values of a tensor; of a subclass that holds others, the kind."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._kind = tensor.shape, tensor.dtype, tensor.device
        self.tolerance = _tolerance(tensor)
        self._values: torch.Tensor | None = None
        if (
            tensor.layout is torch.strided
            and not tensor.is_quantized
            and not is_traceable_wrapper_subclass(tensor)
        ):
            # Modes count calls of ops (selective checkpointing), or log them.
            with torch.no_grad(), _disable_current_modes():
                few = tensor.detach()[_spread(tensor.shape)]
                self._values = few.resolve_conj().resolve_neg().to("cpu", copy=True)

    def difference(self, other: _Sample) -> float:
        """Return the norm of the difference, over the norm.

        Of whole numbers, the share that differs; infinite where the kind does.
        """
        if self._kind != other._kind:
            return math.inf
        mine, others = self._values, other._values
        if mine is None or others is None or mine.numel() == 0:
            return 0.0
        with torch.no_grad(), _disable_current_modes():
            return _difference(mine, others)


def _difference(mine: torch.Tensor, others: torch.Tensor) -> float:
    if not mine.is_floating_point() and not mine.is_complex():
        return (mine != others).double().mean().item()
    if mine.is_complex():
        mine, others = torch.view_as_real(mine), torch.view_as_real(others)
    mine, others = mine.double(), others.double()
    same = (mine == others) | (mine.isnan() & others.isnan())
    if same.all():
        return 0.0
    norm = torch.where(mine.isfinite(), mine, 0.0).norm().item()
    difference = torch.where(same, 0.0, mine - others).norm().item()
    # More than the whole norm is no worse; and a NaN on one side alone is all of it.
    return min(1.0, difference / norm) if norm > 0 and difference < math.inf else 1.0


def _tolerance(tensor: torch.Tensor) -> float:
    """Return what rounding may do: two steps of the dtype, where they are large."""
    least = _CPU if tensor.device.type == "cpu" else _ELSEWHERE
    if not tensor.is_floating_point():
        return least
    return max(least, 2 * torch.finfo(tensor.dtype).eps)


def _spread(shape: torch.Size) -> tuple[slice, ...]:
    """Return slices that leave at most ``MOST_VALUES`` elements of such a tensor."""
    steps = [1] * len(shape)
    left = MOST_VALUES
    by_size = sorted(range(len(shape)), key=shape.__getitem__)
    for done, dimension in enumerate(by_size):
        size = shape[dimension]
        kept = max(1, min(size, int(left ** (1 / (len(shape) - done)) + 1e-9)))
        steps[dimension] = -(-size // kept) or 1
        left //= max(1, -(-size // steps[dimension]))
    return tuple(slice(None, None, step) for step in steps)


@contextmanager
def _looking_at_saved(look: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Show what autograd saves to ``look``, before the hooks that are on get it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
    if hooks is None:  # no checkpoint around: nothing will be recomputed
        yield
        return
    pack, unpack = hooks

    def look_and_pack(tensor: torch.Tensor) -> object:
        look(tensor)
        return pack(tensor)

    with saved_tensors_hooks(look_and_pack, unpack):
        yield
