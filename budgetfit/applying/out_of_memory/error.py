"""Out of memory while training: what was predicted, what was there, what would fit.

The error is made of text and numbers alone. It must hold no tensor, no frame and no
other exception: whoever catches it needs the memory that the failed step held.
"""

from __future__ import annotations

import gc
import os
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from budgetfit.applying.out_of_memory.cuda_memory_stats import CardMemory, card_memory
from budgetfit.applying.out_of_memory.expected_batch import LargerTensor
from budgetfit.applying.out_of_memory.fallback_recipe import (
    SmallerRecipe,
    smaller_recipe,
)
from budgetfit.core.recipe import Recipe
from budgetfit.errors import BudgetfitError
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from budgetfit.core.plan import Plan

# torch.OutOfMemoryError is the caching allocator's; libraries and the host have others.
_TEXTS: Final = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_NOTABLE_BYTES: Final = 128 * 2**20  # below this, differences explain nothing
_PREDICTION_ERROR: Final = 1.05  # what the recordings are held to


class TrainingOutOfMemoryError(BudgetfitError, torch.OutOfMemoryError):
    """A training step ran out of memory; the run is as it was before the step.

    Attributes:
        phase: ``forward``, ``backward`` or ``optimizer``.
        module: Path of the module that ran, as far as Python knows; ``""`` if not.
        dropped_micro_batches: Earlier ones of the same update, whose gradients are
            gone.
        weights_intact: False if the optimizer was stopped in the middle of an update.
        card: What the card held when it was full.
        recipe: Settings that should fit, for ``run.adopt``; None if none is known.
        reasons: What is likely to have gone wrong, in plain words.
        original: The first line of the error that was caught.
    """

    phase: str
    module: str
    dropped_micro_batches: int
    weights_intact: bool
    card: CardMemory
    recipe: Recipe | None
    reasons: tuple[str, ...]
    original: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStep:
    """Where a step stopped.

    Attributes:
        phase: As in the error.
        micro_batch: Which of the update's, from 1.
        recipe: What it trained by.
        larger: Tensors of the batch that exceed the plan.
        growth: How many times the planned elements the most grown one has.
        module: As in the error.
        weights_intact: As in the error.
    """

    phase: str
    micro_batch: int
    recipe: Recipe
    larger: tuple[LargerTensor, ...] = ()
    growth: float = 1.0
    module: str = ""
    weights_intact: bool = True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had too little memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
    )


def out_of_memory_error(
    error: BaseException,
    step: FailedStep,
    *,
    device: torch.device,
    plan: Plan | None,
) -> TrainingOutOfMemoryError:
    """Return the report on ``error``, to be raised when ``error`` itself is gone."""
    card = card_memory(str(error), device)
    reasons = _reasons(step, card, plan)
    smaller = smaller_recipe(
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


def free_memory(device: torch.device) -> None:
    """Give back what a failed step held; call it when its frames are gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _shortfall(card: CardMemory, plan: Plan | None) -> float:
    """Return how many times the predicted bytes were needed; 1 if about as many."""
    if plan is None or card.allocated_bytes is None:
        return 1.0
    needed = card.allocated_bytes + (card.requested_bytes or 0)
    factor = needed / max(1, plan.estimate.allocated_bytes)
    return factor if factor > _PREDICTION_ERROR else 1.0


def _reasons(step: FailedStep, card: CardMemory, plan: Plan | None) -> tuple[str, ...]:
    """Return what there is evidence for, the most telling first."""
    found = []
    if step.larger:
        found.append(
            f"the batch is larger than planned: {'; '.join(map(str, step.larger))}"
        )
    if plan is not None:
        found += _reasons_of_the_card(card, plan)
    idle = card.idle_bytes
    if card.requested_bytes is not None and idle >= max(card.requested_bytes, 1):
        advice = (
            ""
            if _segments_expand()
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


def _reasons_of_the_card(card: CardMemory, plan: Plan) -> list[str]:
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
    card: CardMemory,
    plan: Plan | None,
    reasons: tuple[str, ...],
    smaller: SmallerRecipe | None,
) -> str:
    lines = [_first_line(step, card), *_numbers(card, plan)]
    lines += [f"Likely: {reason}." for reason in reasons]
    lines.append(_what_is_left(step))
    if smaller is None:
        size = "..." if card.usable_bytes is None else _gib(card.usable_bytes)
        lines += [
            "No smaller micro-batch is left. Plan again for what is free:",
            f'  plan = budgetfit.plan(model, vram="{size}")',
        ]
    else:
        lines += [
            f"Should fit: {smaller}. To go on with it:",
            "  run.adopt(error.recipe)",
            "  for part in run.parts(batch): run.step(part)",
        ]
    return "\n".join(lines)


def _first_line(step: FailedStep, card: CardMemory) -> str:
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


def _numbers(card: CardMemory, plan: Plan | None) -> list[str]:
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


def _what_is_left(step: FailedStep) -> str:
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


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}GiB"


def _segments_expand() -> bool:
    """Whether the environment asks for expandable segments already."""
    return any(
        "expandable_segments:True" in os.environ.get(name, "")
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    )


def running_module(error: BaseException, model: nn.Module) -> str:
    """Return the path of the innermost module that ran, from the error's frames.

    ``""`` if it was the model itself, or a backward, where Python sees no module.
    """
    names = {id(module): name for name, module in model.named_modules()}
    innermost = ""
    # Not the frame that caught it: asked for its locals, it would keep them, the error
    # among them (before Python 3.13).
    inner = error.__traceback__ and error.__traceback__.tb_next
    for frame, _ in traceback.walk_tb(inner):
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module):
            innermost = names.get(id(running), innermost)
    return innermost
