"""ModuleTracker: which module and block runs, in forward, recomputation and backward.

Forward and recomputation are tracked with module hooks. No module runs in backward;
there the current autograd node decides: sequence numbers rise as the forward creates
nodes, so a node's number identifies the module and block that created it.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.tracing.recording.changed_containers import has_container

if TYPE_CHECKING:
    from budgetfit.tracing.recording.storage_log import StorageLog


@dataclass(slots=True)
class BlockForward:
    """One forward of a block: its first and last events and autograd sequence numbers.

    ``joined``: its input is the output of the previous run, the same tensor object.
    """

    block: int
    start: int
    sequence_start: int
    input_storage: int
    end: int = -1
    sequence_end: int = -1
    output_storage: int = -1
    output: weakref.ref[torch.Tensor] | None = None
    joined: bool = False


class ModuleTracker:
    """Tracks the current module and block of a fake model for its storage log.

    Attributes:
        layers: Module paths; the log stores indices into them.
        runs: The forward runs of blocks in this micro-batch, in execution order.
        backward: (run, event) at each change of the block whose backward runs.
        gives_containers: Whether a block was given a dict, list or object.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], log: StorageLog
    ) -> None:
        self.layers: list[str] = []
        self.runs: list[BlockForward] = []
        self.backward: list[tuple[int, int]] = []
        self.gives_containers = False
        self._log = log
        self._stack: list[int] = []
        self._forward = False
        self._sequences: list[int] = []
        self._sequence_layers: list[int] = []
        self._node_runs: list[int] = []
        self._index_of = {name: index for index, name in enumerate(blocks)}
        self._hooks: list[Any] = []
        self.layers += [name for name, _ in model.named_modules()]
        self._set_hooks(model, outermost=False)
        log.current_layer = self.current_layer

    def hook_wrapped(self, model: nn.Module) -> None:
        """Hook the modules again, once they are wrapped in place (``fully_shard``)."""
        # What FSDP2 does before and after a block then belongs to the block.
        self.remove_hooks()
        self._set_hooks(model, outermost=True)

    def _set_hooks(self, model: nn.Module, *, outermost: bool) -> None:
        modules = dict(model.named_modules())
        for layer, name in enumerate(self.layers):
            if name in modules:
                block = self._index_of.get(name)
                self._hooks += _hook(
                    self, modules[name], layer, block, outermost=outermost
                )

    # -- phases -----------------------------------------------------------------------

    def start_forward(self) -> None:
        """Start a micro-batch's forward; drop the records of the previous one."""
        self.runs, self.backward = [], []
        self._sequences, self._sequence_layers = [], []
        self._stack, self._forward = [], True

    def start_backward(self) -> None:
        """End the forward; from here on autograd nodes identify the module."""
        self._forward = False
        self._node_runs = [run.sequence_start for run in self.runs]

    def on_backward_op(self) -> None:
        """Record which block's backward the current op belongs to."""
        if self._forward:
            return
        node = torch._C._current_autograd_node()
        if node is None:
            return
        sequence = node._sequence_nr()
        if sequence >= _NO_SEQUENCE:
            return  # gradient accumulation: part of the block before
        run = self._run_of(sequence)
        if not self.backward or self.backward[-1][0] != run:
            self.backward.append((run, len(self._log.events)))

    def _run_of(self, sequence: int) -> int:
        """Return the run that created this node; ~k: created before run k started."""
        position = bisect.bisect_right(self._node_runs, sequence) - 1
        if position >= 0 and sequence < self.runs[position].sequence_end:
            return position
        return ~(position + 1)

    # -- layers -----------------------------------------------------------------------

    def current_layer(self) -> int:
        """Return the innermost module in forward or backward; -1: none."""
        if self._stack:
            return self._stack[-1]
        if self._forward:
            return -1
        node = torch._C._current_autograd_node()
        if node is None or not self._sequences:
            return -1
        position = bisect.bisect_right(self._sequences, node._sequence_nr()) - 1
        return self._sequence_layers[position] if position >= 0 else -1

    def current_path(self) -> str:
        """Return the current module's path; empty for none or the model itself."""
        layer = self.current_layer()
        return self.layers[layer] if layer >= 0 else ""

    def enter(self, layer: int) -> None:
        """Start a module's forward."""
        self._stack.append(layer)
        self._note_sequence()

    def leave(self) -> None:
        """End a module's forward, also after an exception."""
        if self._stack:
            self._stack.pop()
        self._note_sequence()

    def _note_sequence(self) -> None:
        if self._forward:
            self._sequences.append(torch._C._autograd._get_sequence_nr())
            self._sequence_layers.append(self._stack[-1] if self._stack else -1)

    def start_block(self, block: int, value: torch.Tensor | None) -> None:
        """Start a block's forward with ``value`` as its first tensor input."""
        if not self._forward or _in_transform():
            return
        before = self.runs[-1].output if self.runs else None
        self.runs.append(
            BlockForward(
                block=block,
                start=len(self._log.events),
                sequence_start=torch._C._autograd._get_sequence_nr(),
                input_storage=-1 if value is None else self._log.index_of(value),
                joined=before is not None and before() is value,
            )
        )

    def end_block(self, block: int, value: torch.Tensor | None) -> None:
        """End a block's forward with ``value`` as its first tensor output."""
        if not self._forward or not self.runs or _in_transform():
            return
        run = next((r for r in reversed(self.runs) if r.block == block), None)
        if run is not None and run.end < 0:
            run.end = len(self._log.events)
            run.sequence_end = torch._C._autograd._get_sequence_nr()
            run.output_storage = -1 if value is None else self._log.index_of(value)
            run.output = None if value is None else weakref.ref(value)

    def remove_hooks(self) -> None:
        """Remove all module hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _in_transform() -> bool:
    """Whether a transform of ``torch.func`` runs what is called."""
    # It hands on wrappers without a storage, and most of them cannot run under the
    # hooks that recompute a block (torch 2.13): such a run is none that a plan may
    # treat.
    return torch._C._functorch.peek_interpreter_stack() is not None


_NO_SEQUENCE = 2**63  # AccumulateGrad nodes have UINT64_MAX: run as soon as possible


def first_tensor(value: Any) -> torch.Tensor | None:
    """Return the first tensor in (nested) arguments or outputs."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return None
    return next((t for t in map(first_tensor, value) if t is not None), None)


def _hook(
    tracker: ModuleTracker,
    module: nn.Module,
    layer: int,
    block: int | None,
    *,
    outermost: bool,
) -> list[Any]:
    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        if block is not None:
            value = first_tensor(args)
            tracker.start_block(block, first_tensor(kwargs) if value is None else value)
            if not tracker.gives_containers:
                tracker.gives_containers = has_container(args, kwargs)
        tracker.enter(layer)

    def after(_: nn.Module, _args: Any, output: Any) -> None:
        tracker.leave()
        if block is not None:
            tracker.end_block(block, first_tensor(output))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=outermost),
        module.register_forward_hook(after, always_call=True),
    ]
