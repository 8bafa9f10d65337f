"""What budgetfit predicts for a recorded case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from budgetfit.core.gpus import Gpu, find_gpu
from budgetfit.core.memory_timeline import MemoryTimeline
from budgetfit.core.recipe import Recipe
from budgetfit.memory.replay import replay
from budgetfit.planning.chains import every_block
from budgetfit.planning.judge import NO_LIMIT_BYTES
from budgetfit.planning.subject import Subject
from budgetfit.planning.traces import Traces
from tests.accuracy.case import Case
from tests.accuracy.training import build_model


@dataclass(frozen=True)
class Comparison:
    """One case: predicted against recorded peaks over all steps, in bytes."""

    case: Case
    predicted_allocated: int
    recorded_allocated: int
    predicted_reserved: int
    recorded_reserved: int

    @property
    def allocated_error(self) -> float:
        """Signed: above zero means predicted too much."""
        return self.predicted_allocated / self.recorded_allocated - 1

    @property
    def reserved_error(self) -> float:
        """Signed: above zero means predicted too much."""
        return self.predicted_reserved / self.recorded_reserved - 1


def subject_of(case: Case, *, cudnn: bool) -> Subject:
    """The case's model on meta, with a batch that has only shapes and small integers."""
    model = build_model(case.model, "meta")
    batch = {
        wanted.name: torch.zeros((2, *wanted.shape), dtype=getattr(torch, wanted.dtype))
        for wanted in case.model.inputs
    }
    subject = Subject(
        model=model, batch=batch, gpu=find_gpu(case.gpu), cudnn=cudnn
    ).with_found_blocks()
    return subject


def recipe_of(case: Case, subject: Subject) -> Recipe:
    """The case's settings as a recipe."""
    recompute = case.checkpointing == "recompute"
    return Recipe(
        batch_size=case.batch_size,
        gradient_accumulation_steps=case.gradient_accumulation_steps,
        precision=case.precision,
        optimizer=case.optimizer,
        segments=every_block(subject.blocks) if recompute else (),
    )


def predict(case: Case, *, cudnn: bool = False) -> MemoryTimeline:
    """Trace the case at its batch size and replay it on its card."""
    subject = subject_of(case, cudnn=cudnn)
    recipe = recipe_of(case, subject)
    trace = Traces(subject).once(recipe)
    return replay(
        trace,
        case.batch_size,
        subject.gpu,
        limit_bytes=NO_LIMIT_BYTES,
        expandable_segments="expandable_segments:True" in case.allocator,
    )


def compare(case: Case, recording: dict[str, Any]) -> Comparison:
    """Predict a recorded case."""
    timeline = predict(case, cudnn=recording["software"]["cudnn_enabled"])
    phases = [phase for step in recording["steps"] for phase in step]
    steps = [point for point in timeline.points if point.phase != "setup"]
    return Comparison(
        case=case,
        predicted_allocated=max(point.allocated_bytes for point in steps),
        recorded_allocated=max(phase["peak_allocated_bytes"] for phase in phases),
        predicted_reserved=max(point.reserved_bytes for point in steps),
        recorded_reserved=max(phase["peak_reserved_bytes"] for phase in phases),
    )


__all__ = ["Comparison", "Gpu", "compare", "predict"]
