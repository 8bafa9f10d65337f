"""Find the step in which an optimizer last does something new.

Steps are traced until memory repeats, which takes an optimizer of torch one step. A
user's may add a parameter group in its second step, or average its weights in every
fifth (Lookahead). Its further steps are run alone, unrecorded, and their ops compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from budgetfit.tracing.call_cache import Args, Kwargs

if TYPE_CHECKING:
    from budgetfit.tracing.recording.raw_trace import RawTrace
    from budgetfit.tracing.records import RunOp

MOST_STEPS: Final = 12  # further ones, of ops that together are no more than
MOST_OPS: Final = 30_000
_SCALAR_BYTES: Final = 512
# Of these libraries every step does what the first did.
_STEADY: Final = ("torch", "budgetfit", "transformers")


class _Ops(TorchDispatchMode):
    """Notes which ops run, and the shapes of what they return."""

    def __init__(self, run: RunOp) -> None:
        super().__init__()
        self._run = run
        self.seen: list[object] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run the op and note it."""
        out = self._run(func, args, kwargs or {})
        if func.namespace != "prim":
            made = [x.shape for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.seen.append((func, *made))
        return out


def look_at_later_steps(
    raw: RawTrace, model: nn.Module, optimizer: torch.optim.Optimizer, run: RunOp
) -> None:
    """Set ``last_new_step`` and ``adds_parameters`` of a trace.

    Args:
        raw: Of one or more steps.
        model: Of fake tensors; its gradients are replaced.
        optimizer: Runs up to ``MOST_STEPS`` more steps.
        run: Runs an op.
    """
    optimizer = _own(optimizer)
    if not _may_change(optimizer):
        return
    before = _parameters(optimizer)
    steps = raw.phases[-1].step + 1
    if steps > 1 and _leaves_tensors(raw):
        raw.last_new_step = steps
    seen: set[tuple[object, ...]] = set()
    count = 0
    for number in range(steps + 1, steps + MOST_STEPS + 1):
        for each in before.union(_parameters(optimizer), model.parameters()):
            each.grad = torch.empty_like(each) if each.requires_grad else None
        with contextlib.suppress(Exception), _Ops(run) as ops:  # then nothing is known
            optimizer.step()
        if seen and tuple(ops.seen) not in seen:
            raw.last_new_step = number
        seen.add(tuple(ops.seen))
        count += len(ops.seen)
        if count > MOST_OPS:
            break
    raw.adds_parameters = not _parameters(optimizer) <= before


def _leaves_tensors(raw: RawTrace) -> bool:
    """Whether the last update made states."""
    phase, log = raw.phases[-1], raw.log
    events = log.events[phase.start : phase.end]
    freed = {-event for event in events}
    return any(
        event > 0 and event not in freed and log.sizes[event - 1] > _SCALAR_BYTES
        for event in events
    )


def _own(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return what a library has wrapped."""
    inner: Callable[..., Any] | Any = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _may_change(optimizer: torch.optim.Optimizer) -> bool:
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    kind = type(optimizer).__module__.partition(".")[0]
    return any(hooks) or kind not in _STEADY


def _parameters(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    return {each for group in optimizer.param_groups for each in group["params"]}
