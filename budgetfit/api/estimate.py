"""What the command line asks besides a plan: settings given by name, and the layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from budgetfit.core.requested_precision import check_batch, precisions, runs_on
from budgetfit.inputs.adapter import find_adapter
from budgetfit.inputs.settings import (
    find_card,
    make_subject,
    parse_checkpointing,
    parse_lengths,
)
from budgetfit.planning.planner import make_estimate, make_layers, policy_recipe
from budgetfit.planning.profiling.block_chain import Setting
from budgetfit.planning.profiling.precision_fallback import fallback, made_or_instead
from budgetfit.tracing.isolation.torch_state import undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch import nn
    from transformers import PretrainedConfig

    from budgetfit.core.plan import Estimate, Layer, ModelSummary
    from budgetfit.core.sample_dims import BatchDims
    from budgetfit.core.validation import ImageSize
    from budgetfit.workload.workload import Subject

    Model = nn.Module | PretrainedConfig | str
    Loss = Callable[[Any, Any], torch.Tensor]
    Progress = Callable[[str], None]
    Lengths = Iterable[int] | Mapping[int, int]

LAYER_PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16")


@undisturbed()
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
    """Predict settings given by name, as the command line has them.

    Raises:
        InputError: Something cannot be what was meant.
        TraceError: The model cannot run on fake tensors.
    """
    check_batch(batch_size, effective_batch_size)
    card = find_card(vram, gpu)
    (chosen,) = precisions(precision, card.gpu)
    adapter = find_adapter(
        method,
        card.gpu,
        [chosen],
        lora_r=lora_r,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        target_modules=target_modules,
        quantization=quantization,
        double_quantization=double_quantization,
        prepare_for_kbit=prepare_for_kbit,
    )
    subject, source = make_subject(
        model,
        card,
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
    policy = parse_checkpointing(checkpointing, subject)
    setting = Setting(
        precision=chosen,
        optimizer=optimizer,
        effective_batch_size=effective_batch_size,
    )
    found = made_or_instead(
        lambda subject, setting: make_estimate(
            subject,
            policy_recipe(subject, policy, setting, size),
            card.budget(headroom, host_ram),
            context_bytes=card.context_bytes,
            keep_own_checkpointing=policy == "as-is",
            progress=progress,
        ),
        subject,
        setting,
        fallback(precision) if adapter is None else None,
    )
    return with_dtypes(found, subject), subject.summary()


def with_dtypes(estimate: Estimate, subject: Subject) -> Estimate:
    """Let an estimate say which dtypes a recipe leaves as they are."""
    if estimate.recipe.precision != "as-is":
        return estimate
    return replace(estimate, as_is=subject.dtypes())


@undisturbed()
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
    """Return what each layer takes under each dtype policy.

    Without ``gpu`` attention and scratch memory are those of an RTX 4090.

    Raises:
        InputError: Something cannot be what was meant.
        TraceError: The model cannot run on fake tensors.
    """
    card = find_card(None, gpu or "rtx-4090")
    subject, _ = make_subject(
        model,
        card,
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
    wanted = [name for name in LAYER_PRECISIONS if runs_on(name, card.gpu)]
    return make_layers(subject, wanted, progress=progress)
