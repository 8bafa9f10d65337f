"""Estimates of settings given by name, and the layer table, for the command line."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from budgetfit.core.precision import requested_precisions, runs_on
from budgetfit.core.validation import check_batch
from budgetfit.inputs.adapter import find_adapter
from budgetfit.inputs.settings import (
    find_target_gpu,
    make_workload,
    parse_checkpointing,
    parse_lengths,
)
from budgetfit.planning.planner import make_estimate, make_layers, policy_recipe
from budgetfit.planning.profiling.block_chain import TrainingSettings
from budgetfit.planning.profiling.precision_fallback import (
    fallback_for,
    with_precision_fallback,
)
from budgetfit.tracing.isolation.torch_state import neutral_torch_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch import nn
    from transformers import PretrainedConfig

    from budgetfit.core.plan import Estimate, Layer, ModelSummary
    from budgetfit.core.sample_dims import BatchDims
    from budgetfit.core.validation import ImageSize
    from budgetfit.workload.workload import Workload

    Model = nn.Module | PretrainedConfig | str
    Loss = Callable[[Any, Any], torch.Tensor]
    Progress = Callable[[str], None]
    Lengths = Iterable[int] | Mapping[int, int]

LAYER_PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16")


@neutral_torch_state()
def estimate_settings(  # noqa: PLR0913 - the options of the command line
    model: Model,
    *,
    vram: int | str | None = None,
    gpu: str | None = None,
    headroom: int | str | None = None,
    host_ram: int | str | None = None,
    batch: Any = None,  # noqa: ANN401
    batch_dims: BatchDims = None,
    max_length: int | None = None,
    image_size: ImageSize = None,
    text_only: bool = False,
    loss: Loss | str | None = None,
    lengths: Lengths | None = None,
    batch_size: int | None = None,
    effective_batch_size: int | None = None,
    precision: str = "as-is",
    optimizer: str = "adamw_torch_fused",
    checkpointing: str | Sequence[str] = "as-is",
    method: str | None = None,
    lora_r: int = 16,
    lora_alpha: int = 32,
    lora_dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    quantization: str | None = None,
    double_quantization: bool = True,
    prepare_for_kbit: bool = True,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> tuple[Estimate, ModelSummary]:
    """Predict the memory of settings given by name, as on the command line.

    Raises:
        InputError: An argument is invalid.
        TraceError: The model cannot run on fake tensors.
    """
    check_batch(batch_size, effective_batch_size)
    target = find_target_gpu(vram, gpu)
    (chosen,) = requested_precisions(precision, target.gpu)
    adapter = find_adapter(
        method,
        target.gpu,
        [chosen],
        lora_r=lora_r,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        target_modules=target_modules,
        quantization=quantization,
        double_quantization=double_quantization,
        prepare_for_kbit=prepare_for_kbit,
    )
    workload, source = make_workload(
        model,
        target,
        batch=batch,
        batch_dims=batch_dims,
        max_length=max_length,
        image_size=image_size,
        text_only=text_only,
        loss=loss,
        lengths=parse_lengths(lengths, max_length),
        optimizer=optimizer,
        adapter=adapter,
        keeps_dtypes=chosen == "as-is",
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    size = batch_size or source.batch_size
    check_batch(size, effective_batch_size)
    policy = parse_checkpointing(checkpointing, workload)
    setting = TrainingSettings(
        precision=chosen,
        optimizer=optimizer,
        effective_batch_size=effective_batch_size,
    )
    found = with_precision_fallback(
        lambda workload, setting: make_estimate(
            workload,
            policy_recipe(workload, policy, setting, size),
            target.budget(headroom, host_ram),
            context_bytes=target.context_bytes,
            keep_own_checkpointing=policy == "as-is",
            progress=progress,
        ),
        workload,
        setting,
        fallback_for(precision) if adapter is None else None,
    )
    return with_dtypes(found, workload), workload.summary()


def with_dtypes(estimate: Estimate, workload: Workload) -> Estimate:
    """Record in an estimate the dtypes that a recipe does not cast."""
    if estimate.recipe.precision != "as-is":
        return estimate
    return replace(estimate, as_is=workload.dtypes())


@neutral_torch_state()
def layers(  # noqa: PLR0913 - the options of the command line
    model: Model,
    *,
    gpu: str | None = None,
    batch: Any = None,  # noqa: ANN401
    batch_dims: BatchDims = None,
    max_length: int | None = None,
    image_size: ImageSize = None,
    text_only: bool = False,
    loss: Loss | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> tuple[Layer, ...]:
    """Return the memory of each layer under each dtype policy.

    Without ``gpu``, attention and scratch memory are those of an RTX 4090.

    Raises:
        InputError: An argument is invalid.
        TraceError: The model cannot run on fake tensors.
    """
    target = find_target_gpu(None, gpu or "rtx-4090")
    workload, _ = make_workload(
        model,
        target,
        batch=batch,
        batch_dims=batch_dims,
        max_length=max_length,
        image_size=image_size,
        text_only=text_only,
        loss=loss,
        optimizer="adamw_torch_fused",
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    wanted = [name for name in LAYER_PRECISIONS if runs_on(name, target.gpu)]
    return make_layers(workload, wanted, progress=progress)
