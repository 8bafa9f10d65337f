"""Plans made by hand, every size a whole number of MiB: no torch, no tracing."""

import dataclasses
from typing import Any

from budgetfit.core.block_report import BlockChoice, BlockRow
from budgetfit.core.budget import Budget
from budgetfit.core.memory_timeline import MemoryTimeline, TimelinePoint
from budgetfit.core.plan import (
    Alternative,
    Estimate,
    GpuComparison,
    Layer,
    LayerMemory,
    ModelSummary,
    Plan,
)
from budgetfit.core.plan_curves import BatchSizePoint, CheckpointingPoint, PlanCurves
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.varying_lengths import VaryingLengths
from budgetfit.core.verification import PhaseCheck, Verification
from budgetfit.gpus.table import Gpu, find_gpu

MIB = 2**20
GIB = 2**30
BLOCKS = tuple(f"model.layers.{index}" for index in range(24))


def segments(*groups: range) -> tuple[Segment, ...]:
    """One segment per range of block numbers."""
    return tuple(Segment(tuple(BLOCKS[index] for index in group)) for group in groups)


def singles(numbers: range) -> tuple[Segment, ...]:
    """Ordinary checkpointing of these blocks."""
    return tuple(Segment((BLOCKS[number],)) for number in numbers)


def sample_recipe(**changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "batch_size": 6,
        "gradient_accumulation_steps": 11,
        "precision": "bf16-mixed",
        "optimizer": "adamw_torch_fused",
        "segments": singles(range(16)),
    }
    return Recipe(**settings | changes)


def sample_timeline(allocated_bytes: int, reserved_bytes: int) -> MemoryTimeline:
    """A backward peak; parts are 1/2 parameters, 1/4 activations, 1/4 optimizer."""
    points = tuple(
        TimelinePoint(
            step=0,
            micro_step=0,
            phase=phase,
            block=block,
            allocated_bytes=allocated,
            reserved_bytes=reserved_bytes,
        )
        for phase, block, allocated in (
            ("setup", "", allocated_bytes // 4),
            ("forward", "model.layers.23", allocated_bytes // 2),
            ("backward", "model.layers.15", allocated_bytes),
            ("optimizer", "", allocated_bytes // 2),
        )
    )
    return MemoryTimeline(
        points=points,
        allocated_bytes=allocated_bytes,
        reserved_bytes=reserved_bytes,
        at_peak_bytes={
            "parameters": allocated_bytes // 2,
            "gradients": 0,
            "activations": allocated_bytes // 4,
            "optimizer_state": allocated_bytes // 4,
        },
        at_peak_layers=(("lm_head", 2 * GIB), ("model.layers.15.mlp", 512 * MIB)),
        peak=2,
    )


def sample_estimate(
    recipe: Recipe | None = None,
    *,
    allocated_bytes: int = 20 * GIB,
    reserved_bytes: int = 22 * GIB,
    step_ms: float = 6600.0,
    **changes: Any,
) -> Estimate:
    timeline = sample_timeline(allocated_bytes, reserved_bytes)
    values: dict[str, Any] = {
        "recipe": recipe or sample_recipe(),
        "allocated_bytes": allocated_bytes,
        "reserved_bytes": reserved_bytes,
        "process_bytes": reserved_bytes + 512 * MIB,
        "phase_peaks_bytes": timeline.phase_peaks_bytes,
        "at_peak_bytes": timeline.at_peak_bytes,
        "step_ms": step_ms,
        "timeline": timeline,
        "notes": ("cuDNN is not modelled.",),
        "fits": True,
    }
    return Estimate(**values | changes)


def sample_model(**changes: Any) -> ModelSummary:
    values: dict[str, Any] = {
        "name": "SmolLM2-1.7B",
        "parameter_count": 1_711_376_384,
        "trainable_count": 1_711_376_384,
        "blocks": BLOCKS,
        "block_type": "LlamaDecoderLayer",
        "source": "from config.json, no weights loaded",
        "batch": {"input_ids": ((2, 2048), "int64"), "labels": ((2, 2048), "int64")},
    }
    return ModelSummary(**values | changes)


def sample_gpu(**changes: Any) -> Gpu:
    return dataclasses.replace(find_gpu("rtx-4090"), total_bytes=24 * GIB, **changes)


def sample_plan(**changes: Any) -> Plan:
    """24 GiB = 23 usable + 512 MiB context + 512 MiB headroom; 66 samples in 6.6 s."""
    estimate = changes.pop("estimate", None) or sample_estimate()
    full = sample_recipe(segments=singles(range(24)))
    keep = sample_recipe(batch_size=2, gradient_accumulation_steps=33, segments=())
    values: dict[str, Any] = {
        "recipe": estimate.recipe,
        "estimate": estimate,
        "budget": Budget(24 * GIB, 512 * MIB, 512 * MIB),
        "gpu": sample_gpu(),
        "model": sample_model(),
        "alternatives": (
            Alternative(
                label="every block checkpointed",
                estimate=sample_estimate(full, reserved_bytes=12 * GIB, step_ms=8250.0),
                fits=True,
            ),
            Alternative(
                label="everything kept, batch 2",
                estimate=sample_estimate(
                    keep, reserved_bytes=30 * GIB, step_ms=5280.0, fits=False
                ),
                fits=False,
            ),
        ),
        "warnings": ("Labels are made up; pass batch= for your own.",),
        "provenance": {
            "budgetfit": "0.1.0",
            "torch": "2.13.0",
            "transformers": "5.23.0",
            "solver": "No plan is faster.",
            "asked": {"model": None},
        },
    }
    return Plan(**values | changes)


def sample_lengths(**changes: Any) -> VaryingLengths:
    """Return what a plan does for batches of several lengths."""
    settings: dict[str, Any] = {
        "span": "samples of 64 to 2048 tokens",
        "shortest": 64,
        "longest": 2048,
        "measure": "longest first",
        "reserved_bytes": 1,
        "updates": 1,
        "samples_per_s": 100.0,
        "plain_samples_per_s": 100.0,
        "grouped_samples_per_s": 120.0,
        "fits": True,
    }
    return VaryingLengths(**{**settings, **changes})


def sample_curves(plan: Plan) -> PlanCurves:
    """Categories that add up to the timeline, and three choices on the front."""

    def point(
        label: str, gib: int, samples_per_s: float, wrapped: int
    ) -> CheckpointingPoint:
        return CheckpointingPoint(
            label=label,
            peak_bytes=gib * GIB,
            samples_per_s=samples_per_s,
            segments=singles(range(wrapped)),
        )

    return PlanCurves(
        category_bytes=tuple(
            {
                "parameters": each.allocated_bytes // 2,
                "activations": each.allocated_bytes - each.allocated_bytes // 2,
            }
            for each in plan.estimate.timeline.points
        ),
        limit_bytes=21 * GIB,
        plan=point("", 20, 10.0, 16),
        front=(point("", 28, 12.5, 0), point("", 20, 10.0, 16), point("", 11, 8.0, 24)),
        practices=(
            point("no checkpointing", 28, 12.5, 0),
            point("every block recomputed", 11, 8.0, 24),
        ),
        batch_sizes=tuple(
            BatchSizePoint(
                batch_size=size,
                gradient_accumulation_steps=11,
                peak_bytes=(4 + 3 * size) * GIB,
                samples_per_s=10 * size / (size + 1),
                segments=singles(range(2 * size)),
            )
            for size in (1, 2, 4, 6)
        ),
    )


def sample_cards() -> tuple[GpuComparison, ...]:
    """A card that is too small, one at 8 and one at 10 samples per second, one that
    cannot.
    """

    def row(name: str, usable: int, **changes: Any) -> GpuComparison:
        budget = Budget((usable + 1) * GIB, 512 * MIB, 512 * MIB)
        values: dict[str, Any] = {"estimate": None, "blocks": 24} | changes
        return GpuComparison(gpu=find_gpu(name), budget=budget, **values)

    return (
        row("t4", 14, estimate=sample_estimate(fits=False)),
        row("l4", 23, estimate=sample_estimate(step_ms=8250.0)),
        row("rtx-4090", 23, estimate=sample_estimate()),
        row("v100-16gb", 14, problem="precision='bf16' needs compute capability 8.0"),
    )


def sample_row() -> BlockRow:
    """A block that is recomputed, because keeping it is 100 MiB too much."""
    keep = BlockChoice(
        mode="keep",
        saved_bytes=400 * MIB,
        backward_bytes=200 * MIB,
        extra_ms=0.0,
        plan_peak_bytes=1100 * MIB,
        plan_ms=90.0,
    )
    recompute = dataclasses.replace(
        keep, mode="recompute", saved_bytes=16 * MIB, extra_ms=3.0, plan_ms=93.0
    )
    return BlockRow(
        name=BLOCKS[3],
        segment=BLOCKS[3:4],
        choices=(keep, recompute),
        chosen=1,
        prefix_bytes=500 * MIB,
        peak_bytes=900 * MIB,
        limit_bytes=1000 * MIB,
    )


def sample_layers() -> tuple[Layer, ...]:
    """Two equal layers and a head; fp32 weights are 4 MiB for each million (2^20)."""

    def layer(name: str, kind: str, millions: int, saved_mib: int) -> Layer:
        full = LayerMemory(
            weight_bytes=millions * 4 * MIB,
            saved_bytes=0,
            saved_bytes_per_sample=saved_mib * MIB,
        )
        half_saved = dataclasses.replace(
            full, saved_bytes_per_sample=saved_mib * MIB // 2
        )
        return Layer(
            name=name,
            type=kind,
            parameter_count=millions * MIB,
            recompute_flops_per_sample=2e9,
            by_precision={
                "fp32": full,
                "tf32": full,
                "fp16-mixed": half_saved,
                "bf16-mixed": half_saved,
            },
        )

    return (
        layer("model.layers.0.mlp", "LlamaMLP", 16, 8),
        layer("model.layers.1.mlp", "LlamaMLP", 16, 8),
        layer("lm_head", "Linear", 96, 64),
    )


def sample_verification(**changes: Any) -> Verification:
    values: dict[str, Any] = {
        "device": "cuda",
        "device_name": "NVIDIA GeForce RTX 4090",
        "steps": 3,
        "phases": tuple(
            PhaseCheck(
                step=step,
                phase=phase,
                predicted_allocated_bytes=predicted * GIB,
                measured_allocated_bytes=16 * GIB,
                predicted_reserved_bytes=22 * GIB,
                measured_reserved_bytes=22 * GIB,
            )
            for step in range(3)
            for phase, predicted in (("forward", 14), ("backward", 20))
        ),
        "predicted_process_bytes": 23 * GIB,
        "measured_process_bytes": 23 * GIB,
        "step_ms": 500.0,
        "predicted_step_ms": 400.0,
        "gradients_match": True,
        "max_gradient_error": 3e-7,
        "recomputed_blocks": 16,
        "expected_recomputed_blocks": 16,
    }
    return Verification(**values | changes)
