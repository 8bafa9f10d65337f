"""``compare``: the best settings on several GPUs, by several training methods."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from budgetfit.core.adapter import FULL, METHODS
from budgetfit.core.plan import GpuComparison
from budgetfit.core.precision import requested_precisions
from budgetfit.core.validation import check_batch, check_objective
from budgetfit.errors import InputError, TraceError
from budgetfit.inputs.adapter import find_adapter
from budgetfit.inputs.settings import (
    TargetGpu,
    find_target_gpu,
    make_workload,
    optimizer_name,
    parse_lengths,
    parse_request,
)
from budgetfit.planning.alternatives.compare_gpus import GpuWithBudget, compare_gpus
from budgetfit.tracing.isolation.torch_state import neutral_torch_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch import nn
    from transformers import PretrainedConfig

    from budgetfit.core.adapter import Adapter
    from budgetfit.core.plan import ModelSummary
    from budgetfit.core.sample_dims import BatchDims
    from budgetfit.core.validation import ImageSize


@neutral_torch_state()
def compare(  # noqa: PLR0913 - the arguments of plan
    model: nn.Module | PretrainedConfig | str,
    gpus: Sequence[str],
    *,
    batch: Any = None,  # noqa: ANN401 - any nesting of tensors
    batch_dims: BatchDims = None,
    max_length: int | None = None,
    image_size: ImageSize = None,
    text_only: bool = False,
    lengths: Iterable[int] | Mapping[int, int] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | str | None = None,
    precision: str | Sequence[str] = "auto",
    optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw_torch_fused",
    batch_size: int | None = None,
    effective_batch_size: int | None = None,
    checkpointing: str | Sequence[str] = "auto",
    objective: str = "throughput",
    headroom: int | str | None = None,
    host_ram: int | str | None = None,
    method: str | None = None,
    methods: Sequence[str] | None = None,
    lora_r: int = 16,
    lora_alpha: int = 32,
    lora_dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    quantization: str | None = None,
    double_quantization: bool = True,
    prepare_for_kbit: bool = True,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[tuple[GpuComparison, ...], ModelSummary]:
    """Find the best training settings on each of several GPUs, by each method.

    The arguments are those of ``budgetfit.plan``, with several GPUs instead of one,
    and ``methods``: several of ``full``, ``lora`` and ``qlora``. Settings of adapters
    are for those that have some; how the base is stored is ``qlora``'s, where asked
    for.

    Returns:
        A row for each GPU and method, GPUs in their order, and the model summary.

    Raises:
        InputError: An argument is invalid; nothing was traced.
        TraceError: The model cannot run on fake tensors.
    """
    check_objective(objective)
    if objective == "length":
        raise InputError(
            'objective="length" is a question to one card at a time. Use plan: '
            "budgetfit plan MODEL --gpu NAME --objective length."
        )
    check_batch(batch_size, effective_batch_size)
    if isinstance(gpus, str) or not gpus:
        raise InputError(
            'Name the cards to compare, for example ["t4", "rtx-4090"] '
            "(--gpus t4,rtx-4090)."
        )
    targets = [find_target_gpu(None, name) for name in gpus]
    wanted = _methods(method, methods)
    settings = {
        "lora_r": lora_r,
        "lora_alpha": lora_alpha,
        "lora_dropout": lora_dropout,
        "target_modules": target_modules,
        "quantization": quantization,
        "double_quantization": double_quantization,
        "prepare_for_kbit": prepare_for_kbit,
    }
    workload_with = partial(
        make_workload,
        model,
        batch=batch,
        batch_dims=batch_dims,
        max_length=max_length,
        image_size=image_size,
        text_only=text_only,
        lengths=parse_lengths(lengths, max_length),
        loss=loss,
        optimizer=optimizer,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    summaries: list[ModelSummary] = []

    def comparison_rows(name: str) -> list[GpuComparison]:
        parse = partial(find_adapter, name, **_settings_of(name, wanted, settings))
        rows: dict[int, GpuComparison] = {}
        for adapter, group in _by_adapter(targets, precision, parse).items():
            workload, _ = workload_with(target=targets[group[0]], adapter=adapter)
            summaries.append(workload.summary())
            made = compare_gpus(
                workload,
                [
                    GpuWithBudget(targets[i].gpu, targets[i].budget(headroom, host_ram))
                    for i in group
                ],
                parse_request(checkpointing, objective, batch_size, workload),
                precision=precision,
                optimizer=optimizer_name(optimizer),
                effective_batch_size=effective_batch_size,
                progress=progress,
            )
            rows |= zip(group, made, strict=True)
        return [replace(rows[i], method=name) for i in range(len(targets))]

    tables, errors = [], []
    for name in wanted:
        try:
            tables.append(comparison_rows(name))
        except (InputError, TraceError) as error:
            if progress is not None:
                progress(f"{name} is left out")
            errors.append(error)
            tables.append(
                [
                    GpuComparison(
                        gpu=target.gpu,
                        budget=target.budget(headroom, host_ram),
                        estimate=None,
                        problem=f"{name}: {error}",
                        method=name,
                    )
                    for target in targets
                ]
            )
    if len(errors) == len(wanted):
        raise errors[0]
    return tuple(row for rows in zip(*tables, strict=True) for row in rows), summaries[
        0
    ]


def _methods(method: str | None, methods: Sequence[str] | None) -> list[str]:
    """Return the methods to compare, without duplicates; full fine-tuning by default.

    Raises:
        InputError: If both arguments are given, or a method is unknown.
    """
    known = (FULL, *METHODS)
    if methods is None:
        methods = [method or FULL]
    elif method is not None:
        raise InputError("Say either method= or methods=, which takes several.")
    if isinstance(methods, str) or not methods or not set(methods) <= set(known):
        raise InputError(
            f"methods must be some of {', '.join(known)}, for example "
            f'["full", "lora"] (--methods full,lora); got {methods!r:.80}.'
        )
    return list(dict.fromkeys(methods))


def _settings_of(
    name: str, wanted: Sequence[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the adapter settings that apply to one of several methods."""
    if len(wanted) == 1:
        return settings
    if name == FULL:
        return {}
    if name == "lora" and "qlora" in wanted:
        return {**settings, "quantization": None}
    return settings


def _by_adapter(
    targets: Sequence[TargetGpu],
    precision: str | Sequence[str],
    parse: Callable[..., Adapter | None],
) -> dict[Adapter | None, list[int]]:
    """Group GPUs by adapter: its compute dtype depends on the GPU."""
    groups: dict[Adapter | None, list[int]] = {}
    for number, target in enumerate(targets):
        try:
            names = requested_precisions(precision, target.gpu)
        except InputError:  # reported in the GPU's row
            names = ("fp32",)
        groups.setdefault(parse(target.gpu, names), []).append(number)
    return groups
