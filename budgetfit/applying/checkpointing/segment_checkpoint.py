"""One checkpoint over several neighbouring blocks; the parent's loop stays as it is.

The parent calls the blocks one by one, perhaps with arguments that differ. No call
saves anything of its own: autograd gets empty holders for its saved tensors, and the
first holder that backward opens runs all the calls again, in order, each with its own
recorded arguments, on the previous one's recomputed output (applying P2; Chen 2016).

Torch's ``checkpoint`` wraps one function call. Here the hooks are on only while a block
runs, so an exception between two blocks leaves nothing switched on, and what the parent
does there is saved as usual. The graph owns the recording: when it goes, all goes.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from budgetfit.applying.checkpointing.activation_offload import inputs_on_host
from budgetfit.applying.checkpointing.forward_context import (
    ForwardContexts,
    RandomState,
    SavedByAutograd,
    generators_kept,
)
from budgetfit.applying.pytree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable


class SegmentRegion:
    """The blocks of one segment, and the newest pass through them.

    Args:
        check: Whether recomputed tensors must have the shapes, dtypes and devices of
            the original ones.
        input_on_host: Whether the first block's input waits in pinned host memory.
        to_the_end: Whether a recomputation runs to its end, and not only to the last
            saved tensor: an op fills what autograd has saved.
    """

    def __init__(
        self,
        *,
        check: bool = True,
        input_on_host: bool = False,
        to_the_end: bool = False,
    ) -> None:
        self.check = check
        self.input_on_host = input_on_host
        self.to_the_end = to_the_end
        self._newest: weakref.ref[_Pass] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the pass that is on: copies and pickles of a model have none."""
        return {**vars(self), "_newest": None}

    def call(
        self,
        position: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        random: bool,
    ) -> Any:  # noqa: ANN401 - whatever the block returns
        """Run the segment's block number ``position``, saving nothing of it.

        A call whose input is the previous block's output itself joins that block's
        pass. Any other call starts a new one, which is always right and saves less.
        """
        x = next(tensors_in((args, kwargs)), None)
        if x is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        current = self._newest() if self._newest is not None else None
        if current is not None and current.continues(position, x):
            return current.run(position, forward, args, kwargs, random=random)
        with inputs_on_host(x) if self.input_on_host else nullcontext():
            current = _Pass(x, check=self.check, to_the_end=self.to_the_end)
            self._newest = weakref.ref(current)
            return current.run(position, forward, args, kwargs, random=random)


class _Made(NamedTuple):
    """Stands for a tensor that the replay makes itself: output ``leaf`` of ``call``.

    A reference to the tensor would keep an inner boundary alive, and a graph with it.
    """

    call: int
    leaf: int


_INPUT = _Made(-1, 0)


class _Call(NamedTuple):
    """One block's forward, ready to be run again."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: RandomState | None

    def given(
        self, made: dict[_Made, torch.Tensor]
    ) -> tuple[list[object], dict[str, object]]:
        """Return the arguments, with what the replay made put in its places."""

        def get(value: object) -> object:
            return made[value] if isinstance(value, _Made) else value

        args = [get(value) for value in self.args]
        return args, {name: get(value) for name, value in self.kwargs.items()}


class _Seen:
    """A tensor as it was at one moment, not kept alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        # Counts writes: torch's notes on autograd, "In-place correctness checks".
        self._version = tensor._version  # noqa: SLF001

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether this is the same object, not written to since."""
        return self._tensor() is tensor and tensor._version == self._version  # noqa: SLF001


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Holder:
    """What autograd keeps in place of a saved tensor."""

    owner: _Pass
    value: torch.Tensor | None = None


class _Pass:
    """One run through the segment's blocks, and its recomputation."""

    def __init__(self, x: torch.Tensor, *, check: bool, to_the_end: bool) -> None:
        self._input = SavedByAutograd(x)
        self._device_type = x.device.type
        self._check = check
        self._to_the_end = to_the_end
        self._contexts = ForwardContexts(x)
        self._calls: list[_Call] = []
        self._seen: dict[_Made, _Seen] = {_INPUT: _Seen(x)}
        self._position = -1
        self._holders: list[weakref.ref[_Holder]] = []
        self._kinds: list[object] = []
        self._refilled = 0

    def continues(self, position: int, x: torch.Tensor) -> bool:
        """Whether ``x`` is the last block's output itself and ``position`` is later."""
        last = self._seen.get(_Made(len(self._calls) - 1, 0))
        return position > self._position and last is not None and last.is_still(x)

    def run(
        self,
        position: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        random: bool,
    ) -> Any:  # noqa: ANN401 - whatever the block returns
        """Run one block and record how to run it again."""
        call = _Call(
            forward,
            tuple(self._recorded(value) for value in args),
            {name: self._recorded(value) for name, value in kwargs.items()},
            RandomState(tensors_in((args, kwargs))) if random else None,
        )
        with saved_tensors_hooks(self._hold, _open):
            output = forward(*args, **kwargs)
        number = len(self._calls)
        self._calls.append(call)
        self._position = position
        for leaf, tensor in enumerate(tensors_in(output)):
            self._seen[_Made(number, leaf)] = _Seen(tensor)
        return output

    def recompute(self) -> None:
        """Fill the holders that are still waited for."""
        x = self._input.get()
        states = [call.random_state for call in self._calls if call.random_state]
        self._refilled = 0
        with (
            generators_kept(states, self._device_type),
            self._contexts.again(),
            torch.enable_grad(),
            saved_tensors_hooks(self._refill, _same),
        ):
            try:
                self._replay(x)
            except _AllRefilledError:
                return
        if self._refilled == len(self._holders):
            return
        raise CheckpointError(
            f"The recomputation saved {self._refilled} tensors, the forward "
            f"{len(self._holders)}. A block must do the same when it runs again."
        )

    def _recorded(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            for name, seen in self._seen.items():
                if seen.is_still(value):
                    return name
        return value

    def _hold(self, tensor: torch.Tensor) -> _Holder:
        holder = _Holder(self)
        self._holders.append(weakref.ref(holder))
        self._kinds.append(_kind(tensor))
        return holder

    def _replay(self, x: torch.Tensor) -> None:
        last_use = {
            value: number
            for number, call in enumerate(self._calls)
            for value in (*call.args, *call.kwargs.values())
            if isinstance(value, _Made)
        }
        made = {_INPUT: x}
        for number, call in enumerate(self._calls):
            if call.random_state is not None:
                call.random_state.restore()
            args, kwargs = call.given(made)
            for name in [name for name in made if last_use.get(name) == number]:
                del made[name]  # the block may free it now, as in the forward
            output = call.forward(*args, **kwargs)
            made |= {
                _Made(number, leaf): tensor
                for leaf, tensor in enumerate(tensors_in(output))
                if _Made(number, leaf) in last_use
            }
            del args, kwargs, output

    def _refill(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self._refilled
        self._refilled += 1
        plain = tensor.detach()
        if index >= len(self._holders):
            raise CheckpointError(
                "The recomputation saves more tensors than the forward did. "
                "A block must do the same when it runs again."
            )
        holder = self._holders[index]()
        if holder is not None:  # else its part of the graph is gone
            if self._check and self._kinds[index] != _kind(tensor):
                raise CheckpointError(
                    f"The recomputation saved {_kind(tensor)}, the forward "
                    f"{self._kinds[index]}. A block must do the same when run again."
                )
            holder.value = plain
        if self._refilled == len(self._holders) and not self._to_the_end:
            raise _AllRefilledError  # nothing behind this is waited for
        return plain


class _AllRefilledError(Exception):
    """Ends a recomputation early."""


def _open(holder: _Holder) -> torch.Tensor:
    """Give autograd the tensor that ``holder`` stands for."""
    if holder.value is None:
        holder.owner.recompute()
    tensor, holder.value = holder.value, None  # used once: not kept any longer
    if tensor is None:
        raise CheckpointError("A saved tensor was not made again by its recomputation.")
    return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
