"""Out-of-memory error of a training step, with predicted and measured memory.

The error holds text and numbers only, no tensor, frame or other exception: these would
keep the memory of the failed step alive.
"""

import contextlib
import gc
import traceback
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from budgetfit.applying.allocator_settings import running_settings
from budgetfit.applying.out_of_memory.expected_batch import LargerTensor
from budgetfit.applying.out_of_memory.fallback_recipe import (
    FallbackRecipe,
    find_fallback_recipe,
)
from budgetfit.core.allocator.out_of_memory_message import (
    OutOfMemoryMessage,
    parse_out_of_memory,
)
from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Recipe
from budgetfit.errors import BudgetfitError
from budgetfit.utils.format_bytes import format_bytes

_NOTABLE_BYTES: Final = 128 * 2**20  # below this, differences explain nothing
_PREDICTION_ERROR: Final = 1.05  # tolerance of predictions against recordings


class TrainingOutOfMemoryError(BudgetfitError, torch.OutOfMemoryError):
    """A training step ran out of memory; the run is in its state before the step.

    Attributes:
        phase: ``forward``, ``backward`` or ``optimizer``.
        module: Path of the running module; ``""`` if unknown.
        dropped_micro_batches: Number of earlier ones of the same update; their
            gradients were dropped.
        weights_intact: False if the optimizer was stopped in the middle of an update.
        card: GPU memory at the failed allocation.
        recipe: Settings that should fit, for ``run.adopt``; None if none is known.
        original: The first line of the error that was caught.
    """

    phase: str
    module: str
    dropped_micro_batches: int
    weights_intact: bool
    card: OutOfMemoryMessage
    recipe: Recipe | None
    reasons: tuple[str, ...]
    original: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStep:
    """Where a training step failed; other attributes are those of the error.

    Attributes:
        micro_batch: Number of the micro-batch in the update, from 1.
        larger: Tensors of the batch that exceed the plan.
        growth: Largest ratio of a tensor's elements to the planned ones.
    """

    phase: str
    micro_batch: int
    recipe: Recipe
    larger: tuple[LargerTensor, ...] = ()
    growth: float = 1.0
    module: str = ""
    weights_intact: bool = True
    ranks: int = 1


def out_of_memory_error(
    error: BaseException, step: FailedStep, *, device: torch.device, plan: Plan | None
) -> TrainingOutOfMemoryError:
    """Return the detailed error, to be raised after ``error`` is freed."""
    card = read_gpu_memory(str(error), device)
    reasons = _reasons(step, card, plan)
    smaller = find_fallback_recipe(
        step.recipe,
        plan,
        usable_bytes=card.usable_bytes,
        growth=max(step.growth, _shortfall(card, plan)),
    )
    report = TrainingOutOfMemoryError(_text(step, card, plan, reasons, smaller))
    report.phase, report.module = step.phase, step.module
    report.dropped_micro_batches = step.micro_batch - 1
    report.weights_intact = step.weights_intact
    report.card, report.reasons = card, reasons
    report.recipe = None if smaller is None else smaller.recipe
    report.original = str(error).split("\n", 1)[0]
    return report


def read_gpu_memory(text: str, device: torch.device) -> OutOfMemoryMessage:
    """Read memory statistics from an error's text; missing ones from torch."""
    # The text is preferred: it is from the moment of the failure; much is freed since.
    unknown = OutOfMemoryMessage(kind="allocator", start=0)
    card = next(iter(parse_out_of_memory(text)), unknown)
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # the device may be unusable
            if card.reserved_bytes is None:
                allocated = torch.cuda.memory_allocated(device)
                idle = torch.cuda.memory_reserved(device) - allocated
                card = replace(card, allocated_bytes=allocated, idle_bytes=idle)
            if card.total_bytes is None or card.free_bytes is None:
                free, total = torch.cuda.mem_get_info(device)
                card = replace(card, free_bytes=free, total_bytes=total)
    return card


def free_memory(device: torch.device) -> None:
    """Free the memory of earlier steps, after their frames are gone."""
    # The allocator's cache and cuBLAS workspaces: one lives as long as its thread, and
    # pins its segment.
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _shortfall(card: OutOfMemoryMessage, plan: Plan | None) -> float:
    """Return the ratio of needed to predicted bytes; 1 if about equal."""
    if plan is None or card.allocated_bytes is None:
        return 1.0
    needed = card.allocated_bytes + (card.requested_bytes or 0)
    factor = needed / max(1, plan.estimate.allocated_bytes)
    return factor if factor > _PREDICTION_ERROR else 1.0


def _reasons(
    step: FailedStep, card: OutOfMemoryMessage, plan: Plan | None
) -> tuple[str, ...]:
    """Return likely causes, the strongest evidence first."""
    found = []
    if step.larger:
        found.append(
            f"the batch is larger than planned: {'; '.join(map(str, step.larger))}"
        )
    if plan is not None:
        found += _gpu_reasons(card, plan)
    idle = card.idle_bytes or 0
    if card.requested_bytes is not None and idle >= max(card.requested_bytes, 1):
        running = running_settings()
        advice = (
            ""
            if running is not None and running.expandable_segments
            else "; start with PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
        found.append(
            f"fragmentation: {format_bytes(idle)} are reserved and free, but not in "
            f"one piece{advice}"
        )
    if not found and _shortfall(card, plan) > 1:
        found.append(
            "this process holds more than the plan knows of: another model, outputs "
            "or losses that are kept, or a prediction that is too low"
        )
    return tuple(found)


def _gpu_reasons(card: OutOfMemoryMessage, plan: Plan) -> list[str]:
    found = []
    others = card.other_bytes(plan.budget.context_bytes) or 0
    if others > max(_NOTABLE_BYTES, plan.budget.headroom_bytes):
        found.append(
            f"other processes hold about {format_bytes(others)} of the card, which the "
            "plan counted on; nvidia-smi names them"
        )
    total = card.total_bytes
    if total is not None and total + _NOTABLE_BYTES < plan.budget.total_bytes:
        found.append(
            f"the card has {format_bytes(total)}, and the plan is for "
            f"{format_bytes(plan.budget.total_bytes)}"
        )
    return found


def _text(
    step: FailedStep,
    card: OutOfMemoryMessage,
    plan: Plan | None,
    reasons: tuple[str, ...],
    smaller: FallbackRecipe | None,
) -> str:
    lines = [_first_line(step, card), *_memory_lines(card, plan)]
    lines += [f"Likely: {reason}." for reason in reasons]
    lines.append(_recovery_text(step))
    if smaller is None:
        usable = card.usable_bytes
        size = "..." if usable is None else f"{usable / 2**30:.1f}GiB"
        lines += [
            "No smaller micro-batch is left. Plan again for what is free:",
            f'  plan = budgetfit.plan(model, vram="{size}")',
        ]
    elif step.ranks > 1:
        others = f"The other {step.ranks - 1} of {step.ranks} ranks wait for this one"
        lines += [
            f"Should fit: {smaller}.",
            f"{others}: start all anew from the last saved state, each with",
            f"  plan = budgetfit.plan(..., batch_size={smaller.recipe.batch_size})",
        ]
    else:
        lines += [
            f"Should fit: {smaller}. To go on with it:",
            "  run.adopt(error.recipe)",
            "  for part in run.parts(batch): run.step(part)",
        ]
    return "\n".join(lines)


def _first_line(step: FailedStep, card: OutOfMemoryMessage) -> str:
    place = f" of {step.module}" if step.module else ""
    tried = (
        ""
        if card.requested_bytes is None
        else f": tried to allocate {format_bytes(card.requested_bytes)}"
    )
    return (
        f"Out of memory in the {step.phase}{place}, micro-batch {step.micro_batch} of "
        f"{step.recipe.gradient_accumulation_steps}{tried}."
    )


def _memory_lines(card: OutOfMemoryMessage, plan: Plan | None) -> list[str]:
    lines = []
    if plan is not None:
        lines.append(
            f"  predicted  {format_bytes(plan.estimate.allocated_bytes)} allocated, "
            f"{format_bytes(plan.estimate.reserved_bytes)} reserved at most, "
            f"{format_bytes(plan.budget.usable_bytes)} usable"
        )
    if card.allocated_bytes is not None and card.reserved_bytes is not None:
        lines.append(
            f"  measured   {format_bytes(card.allocated_bytes)} allocated, "
            f"{format_bytes(card.reserved_bytes)} reserved"
        )
    if card.total_bytes is not None and card.free_bytes is not None:
        lines.append(
            f"  the card   {format_bytes(card.total_bytes)}, "
            f"{format_bytes(card.free_bytes)} of it free"
        )
    return lines


def _recovery_text(step: FailedStep) -> str:
    if not step.weights_intact:
        return (
            "The optimizer was stopped in the middle of an update: go on from the last "
            "state that was saved."
        )
    earlier = step.micro_batch - 1
    again = {
        0: "",
        1: " The one before it in this update went with it: hand it in again.",
    }.get(
        earlier,
        f" The {earlier} before it in this update went with it: hand them in again.",
    )
    return (
        "Weights, optimizer, scaler and random state are as before this update; this "
        f"micro-batch has not been trained on.{again}"
    )


def running_module(error: BaseException, model: nn.Module) -> str:
    """Return the path of the innermost running module in a traceback; "" if none."""
    names = {id(module): name for name, module in model.named_modules()}
    innermost = ""
    # Skip the frame that caught it: before Python 3.13, ``f_locals`` keeps the locals
    # alive, the error among them.
    inner = error.__traceback__ and error.__traceback__.tb_next
    for frame, _ in traceback.walk_tb(inner):
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module):
            innermost = names.get(id(running), innermost)
    return innermost
