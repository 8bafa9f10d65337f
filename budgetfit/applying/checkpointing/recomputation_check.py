"""Determinism check of recomputation: compare values of saved tensors.

A recomputation replaces the tensors that autograd saved in the forward. Gradients are
right if and only if these are the same again: the rest of the graph is the original. So
a few values of each are sampled when it is saved, and compared when it is recomputed,
before the weights are updated. This detects any hidden state: a private generator, a
counter, a hook.

Integers are judged where a gradient is about to use them: only then autograd's node
says what they are, and some are memory that nothing has written. oneDNN's LSTM saves
its workspace, ``at::empty`` bytes (PyTorch, ``aten/src/ATen/native/mkldnn/RNN.cpp``);
attention without dropout the seed and offset of a dropout, ``at::empty`` as well
(``aten/src/ATen/native/transformers/cuda/attention.cu``; flash-attn's ``rng_state``).
All that such an op takes and returns is saved and compared beside them.
"""

from __future__ import annotations

import itertools
import math
import re
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from budgetfit.applying.pytree import tensors_in
from budgetfit.errors import RecomputationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

# Per tensor, spread over all its dimensions.
MAX_SAMPLED_VALUES: Final = 1024
# Relative tolerance. CPU kernels are deterministic, some GPU kernels use atomic adds.
_CPU, _ELSEWHERE = 1e-5, 1e-3
_NODE_OF_WORKSPACE: Final = "MkldnnRnnLayerBackward"
_NODE_OF_ATTENTION: Final = re.compile(r"Attention|FlashAttn|fMHA", re.IGNORECASE)
_SEED_AND_OFFSET: Final = 2  # values, in one tensor or two


class SavedTensorCheck:
    """Sampled values of the tensors that one forward saved, in host memory.

    Args:
        block: The block's name, for the error.
        after_forward: Sample after the forward, for ops that write to tensors that
            autograd has saved already. Keeps all of them alive until then.

    Attributes:
        suspects: Attributes that the forward has changed and that a recomputation does
            not find as they were, for the error.
    """

    def __init__(self, block: str, *, after_forward: bool) -> None:
        self._block = block
        self._after_forward = after_forward
        self._first: list[_Sample] = []
        self._returned: list[_Sample] = []
        self.suspects: tuple[str, ...] = ()
        self._differing_integers: dict[int, float] = {}  # by index: relative difference

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Sample what autograd saves in a forward."""
        with self._observed(
            lambda tensor: self._first.append(_Sample(tensor)), self._check_integers
        ):
            yield

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Compare what a recomputation saves with the forward's samples.

        Raises:
            RecomputationError: At the last saved tensor, where checkpoints stop early.
        """
        differences: list[float] = []

        def compare(tensor: torch.Tensor) -> None:
            if len(differences) == len(self._first):
                self._refuse("it saves more tensors", math.inf)
            difference = self._first[len(differences)].difference(_Sample(tensor))
            differences.append(difference)
            if math.isinf(difference):  # checkpoint would raise, less clearly
                self._refuse("it saves tensors of other shapes or dtypes", difference)
            if len(differences) == len(self._first):
                self._check_differences(differences)

        with self._observed(compare):
            yield
        if len(differences) < len(self._first):
            self._refuse("it saves fewer tensors", math.inf)

    @contextmanager
    def _observed(
        self,
        look: Callable[[torch.Tensor], None],
        on_use: Callable[[int], None] | None = None,
    ) -> Iterator[None]:
        """Pass saved tensors to ``look``, at once or after the forward."""
        waiting: list[torch.Tensor] = []
        with _observed_saved_tensors(
            (lambda tensor: waiting.append(tensor.detach()))
            if self._after_forward
            else look,
            on_use,
        ):
            yield
        for tensor in waiting:
            look(tensor)

    def record_output(self, output: object) -> None:
        """Sample what a block returns to the next one of its segment."""
        self._returned = [_Sample(tensor) for tensor in tensors_in(output)]

    def compare_output(self, output: object) -> None:
        """Compare what a recomputed block returns (not the last one of a segment).

        Raises:
            RecomputationError: If it differs; the next block would be blamed otherwise.
        """
        for first, tensor in zip(self._returned, tensors_in(output), strict=False):
            difference = first.difference(_Sample(tensor))
            if difference > first.tolerance:
                what = f"what it returns differs by {difference:.2g} of its norm"
                self._refuse(what, difference)

    def _check_differences(self, differences: list[float]) -> None:
        wrong = {
            index: difference
            for index, difference in enumerate(differences)
            if difference > self._first[index].tolerance
        }
        self._differing_integers = {
            index: difference
            for index, difference in wrong.items()
            if self._first[index].is_integer
        }
        if len(wrong) > len(self._differing_integers):
            self._refuse_values(wrong.values())

    def _check_integers(self, index: int) -> None:
        """Refuse integers that differ, now that a gradient is about to use them."""
        if index not in self._differing_integers:
            return
        node = torch._C._current_autograd_node()
        name = node.name() if node is not None else ""
        if name.startswith(_NODE_OF_WORKSPACE):
            return
        few = self._first[index].size <= _SEED_AND_OFFSET
        if not (few and _NODE_OF_ATTENTION.search(name)):
            self._refuse_values(self._differing_integers.values())

    def _refuse_values(self, wrong: Collection[float]) -> None:
        share = f"{len(wrong)} of the {len(self._first)} tensors that it saves"
        what = f"{share} differ, by up to {max(wrong):.2g} of their norm"
        self._refuse(what, max(wrong))

    def refuse_iterator(self, found: tuple[str, str] | None) -> None:
        """Refuse a block with an iterator, whose position cannot be put back.

        Args:
            found: The attribute and the iterator's class; None if there is none.

        Raises:
            RecomputationError: If there is one.
        """
        if found is None:
            return
        name, kind = found
        raise RecomputationError(
            f"Block {self._block!r} cannot run again in backward: its attribute "
            f"{name!r} leads to an iterator ({kind}), which would move on twice and "
            "cannot be put back. Leave the block out: checkpointing=[...] with the "
            "names of the other blocks. Or use a number in place of the iterator.",
            block=self._block,
            difference=math.inf,
        )

    def _refuse(self, what: str, difference: float) -> None:
        names = " and ".join(map(repr, self.suspects))
        look_for = (
            f"its forward changes {names}, which holds tensors of the graph or objects "
            "that cannot be copied."
            if names
            else "look for a counter, a cache, a hook, a hidden generator, or other "
            "parameters than the model's (torch.func.functional_call)."
        )
        raise RecomputationError(
            f"Block {self._block!r} did something else when it ran again in backward: "
            f"{what}, so gradients would be wrong. Leave it out: checkpointing=[...] "
            "with the names of the other blocks. Or let its forward depend on its "
            f"inputs, buffers and the global random generators alone: {look_for}",
            block=self._block,
            difference=difference,
        )


class _Sample:
    """Metadata and sampled values of a tensor; of wrapper subclasses, metadata only."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._metadata = tensor.shape, tensor.dtype, tensor.device
        self.is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        self.size = tensor.numel()
        self.tolerance = _tolerance(tensor)
        self._values: torch.Tensor | None = None
        if (
            tensor.layout is torch.strided
            and not tensor.is_quantized
            and not is_traceable_wrapper_subclass(tensor)
        ):
            # Active modes would count these ops (selective checkpointing) or log them.
            with torch.no_grad(), _disable_current_modes():
                few = tensor.detach()[_sampling_slices(tensor.shape)]
                self._values = few.resolve_conj().resolve_neg().to("cpu", copy=True)

    def difference(self, other: _Sample) -> float:
        """Return the relative norm of the difference.

        For integers the share that differs; infinite if the metadata differ.
        """
        if self._metadata != other._metadata:
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
    # At most 1; a NaN on one side only counts as 1.
    return min(1.0, difference / norm) if norm > 0 and difference < math.inf else 1.0


def _tolerance(tensor: torch.Tensor) -> float:
    """Return the relative tolerance: at least two rounding steps of the dtype."""
    least = _CPU if tensor.device.type == "cpu" else _ELSEWHERE
    if not tensor.is_floating_point() and not tensor.is_complex():
        return least
    return max(least, 2 * torch.finfo(tensor.dtype).eps)


def _sampling_slices(shape: torch.Size) -> tuple[slice, ...]:
    """Return strided slices that select at most ``MAX_SAMPLED_VALUES`` elements."""
    steps = [1] * len(shape)
    left = MAX_SAMPLED_VALUES
    by_size = sorted(range(len(shape)), key=shape.__getitem__)
    for done, dimension in enumerate(by_size):
        size = shape[dimension]
        kept = max(1, min(size, int(left ** (1 / (len(shape) - done)) + 1e-9)))
        steps[dimension] = -(-size // kept) or 1
        left //= max(1, -(-size // steps[dimension]))
    return tuple(slice(None, None, step) for step in steps)


@contextmanager
def _observed_saved_tensors(
    look: Callable[[torch.Tensor], None], on_use: Callable[[int], None] | None
) -> Iterator[None]:
    """Pass saved tensors to ``look``, before the active saved-tensor hooks.

    ``on_use`` gets the index of one that backward has unpacked (after recomputation).
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:  # no active checkpoint: nothing will be recomputed
        yield
        return
    pack, unpack = hooks
    with saved_tensors_hooks(
        partial(_look_and_pack, look, itertools.count(), pack),
        partial(_unpack_and_tell, unpack, on_use),
    ):
        yield


# Where a part of a block is compiled, dynamo would compile these too. Not closures: a
# disabled function and its wrapper refer to each other, and would keep what it closes
# over until the next garbage collection.
@_disable_dynamo
def _look_and_pack(
    look: Callable[[torch.Tensor], None],
    indices: Iterator[int],
    pack: Callable[[torch.Tensor], object],
    tensor: torch.Tensor,
) -> tuple[int, object]:
    look(tensor)
    return next(indices), pack(tensor)


@_disable_dynamo
def _unpack_and_tell(
    unpack: Callable[[object], torch.Tensor],
    on_use: Callable[[int], None] | None,
    packed: tuple[int, object],
) -> torch.Tensor:
    index, inner = packed
    tensor = unpack(inner)
    if on_use is not None:
        on_use(index)
    return tensor
