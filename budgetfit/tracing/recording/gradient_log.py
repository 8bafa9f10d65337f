"""GradientLog: when each parameter's gradient is accumulated, and in which storage."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.records import OpRecord, op_name

_ADD = torch.ops.aten.add_.Tensor


class GradientRecord(NamedTuple):
    """A gradient that was accumulated.

    Attributes:
        incoming: The storage that backward computed it in.
        accumulated: The storage of ``parameter.grad`` afterwards.
        event: Number of events before it was accumulated; ``ops`` the same of ops.
        add_op: The op that would add it to an existing gradient.
        released: Number of events before it would be freed then.
    """

    incoming: int
    accumulated: int
    event: int
    ops: int
    add_op: OpRecord
    released: int


@dataclass(slots=True)
class GradientLog:
    """Records gradient accumulation with hooks on the parameters.

    FSDP2 calls them for its shards, whose gradients are views of what it reduced.

    Attributes:
        rows: In the order of accumulation.
        complete: Whether no row is missing: no gradient was sparse, and no parameter
            has other hooks (an optimizer in backward, a hook that keeps gradients).
    """

    log: StorageLog
    rows: list[GradientRecord] = field(default_factory=list)
    complete: bool = True
    _incoming: dict[int, int] = field(default_factory=dict)
    _reduced: int = 0  # rows of ended reductions

    @property
    def suffice(self) -> bool:
        """Whether a second micro-batch can be derived; older FSDP2 calls no hooks."""
        return self.complete and bool(self.rows)

    def register_hooks(self, model: nn.Module) -> None:
        """Register hooks on the trainable parameters."""
        self.log.on_reduced = self._end_reduction
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                self.complete = False  # an optimizer in backward
                continue
            if parameter._backward_hooks:
                self.complete = False
            parameter.register_hook(self._note_incoming(id(parameter)))
            parameter.register_post_accumulate_grad_hook(self._log_accumulated)

    def _note_incoming(self, parameter: int) -> Callable[[torch.Tensor | None], None]:
        def note(gradient: torch.Tensor | None) -> None:
            if gradient is not None:  # compiled code has none for what it does not use
                self._incoming[parameter] = self.log.index_of(gradient)

        return note

    def _log_accumulated(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        accumulated = -1 if gradient is None else self.log.index_of(gradient)
        shard = getattr(gradient, "_local_tensor", None)
        of_shard = -1 if shard is None else accumulated
        incoming = self._incoming.pop(id(parameter), of_shard)
        if gradient is None or accumulated < 0 or incoming < 0:
            self.complete = False
            return
        gradient = gradient if shard is None else shard
        cost = self.log.cost(_ADD, (gradient, gradient), gradient)
        event = len(self.log.events)
        layer = self.log.current_layer()
        op = OpRecord(op_name(_ADD), event, layer, cost)
        self.rows.append(
            GradientRecord(incoming, accumulated, event, len(self.log.ops), op, event)
        )

    def _end_reduction(self) -> None:
        """Note that FSDP2 has reduced gradients: what it holds meanwhile is freed."""
        # Until then it holds the last gradient; the others share its storage, or are
        # copies in host memory.
        event = len(self.log.events)
        for number in range(self._reduced, len(self.rows)):
            row = self.rows[number]
            if row.incoming == self.rows[-1].incoming:
                self.rows[number] = row._replace(released=event)
        self._reduced = len(self.rows)
