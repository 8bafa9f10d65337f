"""One checkpoint over several consecutive blocks, without changing their parent.

The parent calls the blocks one by one, perhaps with different arguments. Autograd gets
empty holders for their saved tensors, and the first holder that backward unpacks
recomputes all calls in order, each with its recorded arguments and the previous one's
recomputed output (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

Torch's ``checkpoint`` wraps one function call. Here the saved-tensor hooks are active
only while a block runs: an exception between two blocks leaves no hooks behind, and
what the parent computes there is saved as usual. The graph owns the recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from budgetfit.applying.checkpointing.activation_offload import offload_checkpoint_input
from budgetfit.applying.checkpointing.autocast_and_rng import (
    ForwardContext,
    RngState,
    SavedByAutograd,
    preserved_rng,
)
from budgetfit.applying.pytree import tensors_in


class SegmentCheckpoint:
    """Checkpoint over the blocks of one segment.

    ``check``: whether to compare shapes, dtypes and devices of recomputed tensors.
    ``run_to_end``: no early stop of a recomputation, for ops that write to tensors that
    autograd has saved already.
    """

    def __init__(
        self,
        *,
        check: bool = True,
        input_on_host: bool = False,
        run_to_end: bool = False,
    ) -> None:
        self.check = check
        self.input_on_host = input_on_host
        self.run_to_end = run_to_end
        self._newest: weakref.ref[_SegmentForward] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the current forward: copies and pickles of a model have none."""
        return {**vars(self), "_newest": None}

    def call(
        self,
        position: int,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, Any],
        *,
        random: bool,
    ) -> Any:
        """Run the segment's block ``position`` without saving its activations."""
        # If the input is the previous block's output, the call continues that forward.
        # Otherwise it starts a new one, which is always correct and saves less memory.
        x = next(tensors_in((args, kwargs)), None)
        if x is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        current = self._newest() if self._newest is not None else None
        if current is not None and current.continues(position, x):
            return current.run(position, forward, args, kwargs, random=random)
        with offload_checkpoint_input(x) if self.input_on_host else nullcontext():
            current = _SegmentForward(x, check=self.check, run_to_end=self.run_to_end)
            self._newest = weakref.ref(current)
            return current.run(position, forward, args, kwargs, random=random)


class _OutputRef(NamedTuple):
    """Names a tensor that the recomputation produces: output ``leaf`` of ``call``.

    A reference would keep the activation between two blocks and its graph alive.
    """

    call: int
    leaf: int


_INPUT = _OutputRef(-1, 0)


class _Call(NamedTuple):
    """One block's recorded forward; ``context`` where it is not the segment's first."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng_state: RngState | None
    context: ForwardContext | None

    def resolved_arguments(
        self, outputs: dict[_OutputRef, torch.Tensor]
    ) -> tuple[list[object], dict[str, object]]:
        """Return the arguments with recomputed tensors substituted."""

        def get(value: object) -> object:
            return outputs[value] if isinstance(value, _OutputRef) else value

        args = [get(value) for value in self.args]
        return args, {name: get(value) for name, value in self.kwargs.items()}


class _TensorVersion:
    """Weak reference to a tensor, with its version counter."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        # Torch's notes on autograd, "In-place correctness checks".
        self._version = tensor._version

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether this is the same tensor, unmodified since."""
        return self._tensor() is tensor and tensor._version == self._version


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Holder:
    """Placeholder that autograd keeps for a saved tensor."""

    owner: _SegmentForward
    value: torch.Tensor | None = None


class _SegmentForward:
    """One forward through the segment's blocks, and its recomputation."""

    def __init__(self, x: torch.Tensor, *, check: bool, run_to_end: bool) -> None:
        self._input = SavedByAutograd(x)
        self._device_type = x.device.type
        self._check = check
        self._run_to_end = run_to_end
        self._context = ForwardContext(self._device_type)
        self._calls: list[_Call] = []
        self._produced: dict[_OutputRef, _TensorVersion] = {_INPUT: _TensorVersion(x)}
        self._position = -1
        self._holders: list[weakref.ref[_Holder]] = []
        self._kinds: list[object] = []
        self._refilled = 0

    def continues(self, position: int, x: torch.Tensor) -> bool:
        """Whether ``x`` is the last block's unmodified output, of a later position."""
        last = self._produced.get(_OutputRef(len(self._calls) - 1, 0))
        return position > self._position and last is not None and last.is_still(x)

    def run(
        self,
        position: int,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, Any],
        *,
        random: bool,
    ) -> Any:
        """Run one block and record the call."""
        context = ForwardContext(self._device_type)
        call = _Call(
            forward,
            tuple(self._recorded(value) for value in args),
            {name: self._recorded(value) for name, value in kwargs.items()},
            RngState(tensors_in((args, kwargs))) if random else None,
            context if context.state != self._context.state else None,
        )
        with saved_tensors_hooks(self._hold, _unpack):
            output = forward(*args, **kwargs)
        number = len(self._calls)
        self._calls.append(call)
        self._position = position
        for leaf, tensor in enumerate(tensors_in(output)):
            self._produced[_OutputRef(number, leaf)] = _TensorVersion(tensor)
        return output

    def recompute(self) -> None:
        """Recompute all blocks and fill the holders that are still alive."""
        x = self._input.get()
        states = [call.rng_state for call in self._calls if call.rng_state]
        self._refilled = 0
        with (
            preserved_rng(states, self._device_type),
            self._context.reentered(),
            torch.enable_grad(),
            saved_tensors_hooks(self._refill, lambda tensor: tensor),
        ):
            try:
                self._replay(x)
            except _StopRecomputationError:
                return
        if self._refilled == len(self._holders):
            return
        raise CheckpointError(
            f"The recomputation saved {self._refilled} tensors, the forward "
            f"{len(self._holders)}. A block must do the same when it runs again."
        )

    def _recorded(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            for name, seen in self._produced.items():
                if seen.is_still(value):
                    return name
        return value

    def _hold(self, tensor: torch.Tensor) -> _Holder:
        holder = _Holder(self)
        self._holders.append(weakref.ref(holder))
        self._kinds.append(_metadata(tensor))
        return holder

    def _replay(self, x: torch.Tensor) -> None:
        last_use = {
            value: number
            for number, call in enumerate(self._calls)
            for value in (*call.args, *call.kwargs.values())
            if isinstance(value, _OutputRef)
        }
        outputs = {_INPUT: x}
        for number, call in enumerate(self._calls):
            if call.rng_state is not None:
                call.rng_state.restore()
            args, kwargs = call.resolved_arguments(outputs)
            for name in [name for name in outputs if last_use.get(name) == number]:
                del outputs[name]  # so that the block can free it, as in the forward
            with call.context.reentered() if call.context else nullcontext():
                output = call.forward(*args, **kwargs)
            outputs |= {
                _OutputRef(number, leaf): tensor
                for leaf, tensor in enumerate(tensors_in(output))
                if _OutputRef(number, leaf) in last_use
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
        if holder is not None:  # else its node was freed
            if self._check and self._kinds[index] != _metadata(tensor):
                raise CheckpointError(
                    f"The recomputation saved {_metadata(tensor)}, the forward "
                    f"{self._kinds[index]}. A block must do the same when run again."
                )
            holder.value = plain
        if self._refilled == len(self._holders) and not self._run_to_end:
            raise _StopRecomputationError  # early stop
        return plain


class _StopRecomputationError(Exception):
    """Early stop of a recomputation, as torch's error of this name."""


def _unpack(holder: _Holder) -> torch.Tensor:
    """Return the saved tensor of ``holder``, recomputed if necessary."""
    if holder.value is None:
        holder.owner.recompute()
    tensor, holder.value = holder.value, None  # used once
    if tensor is None:
        raise CheckpointError("A saved tensor was not made again by its recomputation.")
    return tensor


def _metadata(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
