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
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Final, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from budgetfit.applying.pytree import tensors_in
from budgetfit.errors import RecomputationError

# Per tensor, spread over all its dimensions.
MAX_SAMPLED_VALUES: Final = 1024
_BUFFER_BYTES: Final = 2**18
_ALIGNED_BYTES: Final = 16  # of the largest dtype
# Relative tolerance. CPU kernels are deterministic, some GPU kernels use atomic adds.
_CPU, _ELSEWHERE = 1e-5, 1e-3
_NODE_OF_WORKSPACE: Final = "MkldnnRnnLayerBackward"
_NODE_OF_ATTENTION: Final = re.compile(r"Attention|FlashAttn|fMHA", re.IGNORECASE)
_SEED_AND_OFFSET: Final = 2  # values, in one tensor or two


class SavedTensorCheck:
    """Sampled values of the tensors that one forward saved, in host memory.

    ``after_forward``: sample after the forward, for ops that write to tensors that
    autograd has saved already; keeps all of them alive until then. ``suspects``:
    attributes that the forward has changed and that a recomputation does not find as
    they were, for the error.
    """

    def __init__(self, block: str, *, after_forward: bool) -> None:
        self._block = block
        self._after_forward = after_forward
        self._first = _Samples()
        self._returned = _Samples()
        self.suspects: tuple[str, ...] = ()
        self._differing_integers: dict[int, float] = {}  # by index: relative difference

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Sample what autograd saves in a forward."""
        with self._observed(self._first.add, self._check_integers):
            yield
        self._first.arrive()

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Compare what a recomputation saves with the forward's samples."""
        # Raises at the last saved tensor, where checkpoints stop early.
        again = _Samples()

        def compare(tensor: torch.Tensor) -> None:
            if len(again) == len(self._first):
                self._refuse("it saves more tensors", math.inf)
            again.add(tensor)
            if not again.is_like(self._first, len(again) - 1):
                # checkpoint would raise, less clearly
                self._refuse("it saves tensors of other shapes or dtypes", math.inf)
            if len(again) == len(self._first):
                again.arrive()
                self._check_differences(self._first.differences(again))

        with self._observed(compare):
            yield
        if len(again) < len(self._first):
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
        self._returned = _Samples(tensors_in(output))

    def compare_output(self, output: object) -> None:
        """Compare what a recomputed block returns (not the last one of a segment).

        Raises:
            RecomputationError: If it differs; the next block would be blamed otherwise.
        """
        differences = self._returned.differences(_Samples(tensors_in(output)))
        for index, difference in enumerate(differences):
            if difference > self._returned.tolerance(index):
                what = f"what it returns differs by {difference:.2g} of its norm"
                self._refuse(what, difference)

    def _check_differences(self, differences: list[float]) -> None:
        wrong = {
            index: difference
            for index, difference in enumerate(differences)
            if difference > self._first.tolerance(index)
        }
        self._differing_integers = {
            index: difference
            for index, difference in wrong.items()
            if self._first.is_integer(index)
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
        few = self._first.size(index) <= _SEED_AND_OFFSET
        if not (few and _NODE_OF_ATTENTION.search(name)):
            self._refuse_values(self._differing_integers.values())

    def _refuse_values(self, wrong: Collection[float]) -> None:
        share = f"{len(wrong)} of the {len(self._first)} tensors that it saves"
        what = f"{share} differ, by up to {max(wrong):.2g} of their norm"
        self._refuse(what, max(wrong))

    def refuse_iterator(self, found: tuple[str, str] | None) -> None:
        """Refuse a block with an iterator, ``found`` in it, that cannot be put back."""
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
            else "look for a counter, a cache, a hook, a hidden generator, a "
            "parameter that it writes to (make it a buffer), other parameters than the "
            "model's (torch.func.functional_call), or requires_grad switched between "
            "forward and backward."
        )
        raise RecomputationError(
            f"Block {self._block!r} did something else when it ran again in backward: "
            f"{what}, so gradients would be wrong. Leave it out: checkpointing=[...] "
            "with the names of the other blocks. Or let its forward depend on its "
            f"inputs, buffers and the global random generators alone: {look_for}",
            block=self._block,
            difference=difference,
        )


class _Place(NamedTuple):
    """A tensor, and where the bytes of its sampled values are.

    Of wrapper subclasses there are none: buffer -1.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    buffer: int = -1
    offset: int = 0
    size: int = 0

    @property
    def metadata(self) -> tuple[object, ...]:
        return self.shape, self.dtype, self.device


class _Samples:
    """Sampled values of tensors, in order, in host memory.

    The host does not wait for each copy from a card: they go to page-locked memory, and
    ``arrive`` waits for all of them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._places: list[_Place] = []
        self._buffers: list[torch.Tensor] = []
        self._used = 0  # bytes of the last buffer
        self._streams: set[torch.cuda.Stream] = set()
        for tensor in tensors:
            self.add(tensor)
        self.arrive()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, tensor: torch.Tensor) -> None:
        """Sample one more tensor."""
        place = _Place(tensor.shape, tensor.dtype, tensor.device)
        if (
            tensor.layout is torch.strided
            and not tensor.is_quantized
            and not is_traceable_wrapper_subclass(tensor)
        ):
            with _without_modes():
                place = self._copied(tensor.detach(), place)
        self._places.append(place)

    def _copied(self, tensor: torch.Tensor, place: _Place) -> _Place:
        few = tensor[_sampling_slices(place.shape)].reshape(-1)
        few = few.resolve_conj().resolve_neg()
        on_card = place.device.type == "cuda"
        if on_card:
            self._streams.add(torch.cuda.current_stream(place.device))
        size = few.numel() * few.element_size()
        if not self._buffers or self._used + size > self._buffers[-1].numel():
            length = max(size, _BUFFER_BYTES)
            self._buffers.append(
                torch.zeros(length, dtype=torch.uint8, pin_memory=on_card)
            )
            self._used = 0
        at = self._used
        self._used += -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        place = place._replace(buffer=len(self._buffers) - 1, offset=at, size=size)
        self._view(place).copy_(few, non_blocking=on_card)
        return place

    def _view(self, place: _Place) -> torch.Tensor:
        end = place.offset + place.size
        return self._buffers[place.buffer][place.offset : end].view(place.dtype)

    def arrive(self) -> None:
        """Wait for the copies, and give the page-locked memory back."""
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()
        if self._buffers:
            with _without_modes():
                last = self._buffers.pop()[: self._used]
                self._buffers = [each.clone() for each in (*self._buffers, last)]

    def is_like(self, others: _Samples, index: int) -> bool:
        """Whether a tensor has the same shape, dtype and device."""
        return self._places[index].metadata == others._places[index].metadata

    def is_integer(self, index: int) -> bool:
        """Whether a tensor holds integers."""
        dtype = self._places[index].dtype
        return not (dtype.is_floating_point or dtype.is_complex)

    def size(self, index: int) -> int:
        """The number of a tensor's values, sampled or not."""
        return self._places[index].shape.numel()

    def tolerance(self, index: int) -> float:
        """The relative tolerance: at least two rounding steps of the dtype."""
        place = self._places[index]
        least = _CPU if place.device.type == "cpu" else _ELSEWHERE
        if self.is_integer(index):
            return least
        return max(least, 2 * torch.finfo(place.dtype).eps)

    def differences(self, others: _Samples) -> list[float]:
        """The relative norms of the differences, as far as both have tensors.

        For integers the share that differs; infinite if the metadata differ.
        """
        both = min(len(self), len(others))
        with _without_modes():
            if self._places == others._places and all(
                map(torch.equal, self._buffers, others._buffers)
            ):
                return [0.0] * both
            return [self._difference(others, index) for index in range(both)]

    def _difference(self, others: _Samples, index: int) -> float:
        mine, other = self._places[index], others._places[index]
        if mine.metadata != other.metadata:
            return math.inf
        if mine.buffer < 0 or other.buffer < 0 or not mine.size:
            return 0.0
        return _difference(self._view(mine), others._view(other))


def _without_modes() -> AbstractContextManager[object]:
    """Active modes would count these ops (selective checkpointing) or log them."""
    if torch._C._len_torch_dispatch_stack():
        return _disable_current_modes()
    return nullcontext()


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


@lru_cache(maxsize=1024)
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
