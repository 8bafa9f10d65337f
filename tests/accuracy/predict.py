"""What budgetfit predicts for a recorded case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from budgetfit.core.gpus import find_gpu
from budgetfit.core.recipe import Recipe
from budgetfit.memory.chain_peak import chain_peak_bytes
from budgetfit.memory.profile import chain_profile
from budgetfit.memory.replay import ENDLESS_BYTES, kernel_card, replay
from budgetfit.planning.chains import every_block
from budgetfit.planning.subject import Subject
from budgetfit.planning.traces import Traces
from tests.accuracy.case import Case, Input
from tests.accuracy.training import build_model

if TYPE_CHECKING:
    from budgetfit.core.memory_timeline import MemoryTimeline
    from budgetfit.core.step_trace import StepTrace


@dataclass(frozen=True)
class Comparison:
    """One case: predicted against recorded peaks over all steps, in bytes.

    ``formula_allocated`` is what the solver's chain formula says (rule C).
    """

    case: Case
    predicted_allocated: int
    recorded_allocated: int
    predicted_reserved: int
    recorded_reserved: int
    formula_allocated: int

    @property
    def allocated_error(self) -> float:
        """Signed: above zero means predicted too much."""
        return self.predicted_allocated / self.recorded_allocated - 1

    @property
    def reserved_error(self) -> float:
        """Signed: above zero means predicted too much."""
        return self.predicted_reserved / self.recorded_reserved - 1

    @property
    def formula_error(self) -> float:
        """The chain formula against the judge, signed."""
        return self.formula_allocated / self.predicted_allocated - 1


def subject_of(case: Case, *, cudnn: bool) -> Subject:
    """The case's model on meta, with a batch of shapes and small integers."""
    batch = {
        wanted.name: torch.zeros((2, *wanted.shape), dtype=_dtype(case, wanted))
        for wanted in case.model.inputs
    }
    subject = Subject(
        model=build_model(case.model, "meta"),
        batch=batch,
        gpu=find_gpu(case.gpu),
        cudnn=cudnn,
    ).with_found_blocks()
    if not case.model.blocks:
        return subject
    blocks = [
        f"{path}.{name}"
        for path in case.model.blocks
        for name, _ in subject.model.get_submodule(path).named_children()
    ]
    return replace(subject, blocks=tuple(blocks))


def _dtype(case: Case, wanted: Input) -> torch.dtype:
    """What the recorded batch had: pure bf16 got its images in bf16."""
    if case.precision == "bf16" and wanted.dtype != "int64":
        return torch.bfloat16
    return getattr(torch, wanted.dtype)


def recipe_of(case: Case, subject: Subject, *, recompute: bool) -> Recipe:
    """The case's settings as a recipe."""
    return Recipe(
        batch_size=case.batch_size,
        gradient_accumulation_steps=case.gradient_accumulation_steps,
        precision=case.precision,
        optimizer=case.optimizer,
        segments=every_block(subject.blocks) if recompute else (),
    )


def judge(case: Case, subject: Subject, trace: StepTrace) -> MemoryTimeline:
    """Replay a trace of the case on its card, without a limit."""
    return replay(
        trace,
        case.batch_size,
        subject.gpu,
        limit_bytes=ENDLESS_BYTES,
        expandable_segments=is_expandable(case),
    )


def is_expandable(case: Case) -> bool:
    """Whether the case ran with expandable segments."""
    return "expandable_segments:True" in case.allocator


def compare(case: Case, recording: dict[str, Any]) -> Comparison:
    """Predict a recorded case by tracing it at its own batch size."""
    recompute = case.checkpointing == "recompute"
    subject = subject_of(case, cudnn=recording["software"]["cudnn_enabled"])
    traces = Traces(subject)
    kept = traces.once(recipe_of(case, subject, recompute=False))
    recipe = recipe_of(case, subject, recompute=recompute)
    trace = traces.once(recipe) if recompute else kept
    chain = chain_profile(
        kept,
        trace if recompute else None,
        case.batch_size,
        kernel_card(subject.gpu),
        expandable_segments=is_expandable(case),
    )
    steps = [
        point for point in judge(case, subject, trace).points if point.phase != "setup"
    ]
    phases = [phase for step in recording["steps"] for phase in step]
    return Comparison(
        case=case,
        predicted_allocated=max(point.allocated_bytes for point in steps),
        recorded_allocated=max(phase["peak_allocated_bytes"] for phase in phases),
        predicted_reserved=max(point.reserved_bytes for point in steps),
        recorded_reserved=max(phase["peak_reserved_bytes"] for phase in phases),
        formula_allocated=chain_peak_bytes(chain, recipe.segments),
    )
