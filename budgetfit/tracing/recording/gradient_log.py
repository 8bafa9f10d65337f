"""Where each parameter's gradient comes from in a backward, and where it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from budgetfit.tracing.op_costs import cost_of
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.records import OpRow, op_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_ADD = torch.ops.aten.add_.Tensor


class Accumulated(NamedTuple):
    """A gradient that was accumulated.

    Attributes:
        storage: Where it came from backward.
        kept: Where the parameter has it.
        event: Events before it was there; ``ops`` the same of ops.
        op: What adding it to one that is there already takes.
    """

    storage: int
    kept: int
    event: int
    ops: int
    op: OpRow


@dataclass(slots=True)
class GradientLog:
    """Watches gradients arrive.

    Attributes:
        rows: In the order of arrival.
        complete: Whether all that matters is in ``rows``: no gradient was sparse, and
            nothing else acts when one arrives.
    """

    log: StorageLog
    rows: list[Accumulated] = field(default_factory=list)
    complete: bool = True
    _incoming: dict[int, int] = field(default_factory=dict)

    def watch(self, model: nn.Module) -> None:
        """Put hooks on the parameters that are trained."""
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                self.complete = False  # an optimizer of its own kind
                continue
            parameter.register_hook(self._comes_to(id(parameter)))
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _comes_to(self, parameter: int) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            self._incoming[parameter] = self.log.index_of(gradient)

        return note

    def _arrived(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        incoming = self._incoming.pop(id(parameter), -1)
        kept = -1 if gradient is None else self.log.index_of(gradient)
        if gradient is None or kept < 0 or incoming < 0:
            self.complete = False
            return
        rate, flops, moved = cost_of(_ADD, (gradient, gradient), {}, gradient)
        event = len(self.log.events)
        layer = self.log.current_layer()
        op = OpRow(op_name(_ADD), event, layer, rate, flops, moved)
        self.rows.append(Accumulated(incoming, kept, event, len(self.log.ops), op))
