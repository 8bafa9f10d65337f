"""The arguments that a saved plan was made with, parsed again."""

from dataclasses import replace
from typing import Any

from budgetfit.core.plan import Plan
from budgetfit.core.samples.sample_dims import SampleDims
from budgetfit.inputs.arguments import Arguments, ParsedArguments
from budgetfit.inputs.plan_source import (
    check_batch_shapes,
    has_sizes,
    loss_and_optimizer,
)
from budgetfit.inputs.target_gpu import parse_limit
from budgetfit.workload.model_check import check_same_model
from budgetfit.workload.workload import Workload


def parse_again(  # noqa: PLR0913 - what a saved plan may be checked with
    plan: Plan,
    asked: dict[str, Any],
    *,
    gpu: str | None = None,
    vram: int | str | None = None,
    headroom: int | str | None = None,
    host_ram: int | str | None = None,
    **further: Any,
) -> ParsedArguments:
    """Parse what a plan was made for: its model with adapters, its batch and loss.

    With the lengths or sizes of its samples, where it says them. ``asked``: its
    ``planned_arguments``; ``gpu``: instead of the planned card; ``vram`` alone: a limit
    on it, or another card where it has less;
    ``host_ram``: instead of what was planned; ``further``: other arguments of ``plan``.

    Raises:
        InputError: The model, batch or loss is not known, or not the planned one.
    """
    card = None
    budget = plan.budget
    planned_card = gpu is None and (
        vram is None or parse_limit(vram) <= plan.gpu.total_bytes
    )
    if host_ram is None and (planned_card or budget.host_ram_source == "given"):
        host_ram = _planned_host_ram(plan)
    if planned_card:
        card = plan.gpu
    if planned_card and vram is None:
        vram = budget.total_bytes
        headroom = budget.headroom_bytes if headroom is None else headroom
    several = plan.recipe.parallelism
    parsed = Arguments(
        **asked,
        batch_dims=_batch_dims(plan.model.batch_dims),
        gpu=gpu,
        vram=vram,
        headroom=headroom,
        host_ram=host_ram,
        allocator=plan.budget.allocator.text or None,
        link=plan.gpu.interconnect or None,
        **further,
    ).parsed([plan.recipe.precision], 0 if several is None else several.nodes, card)
    workload = parsed.workload
    if asked["loss"] is None:  # a factory may return it
        loss_and_optimizer(plan, workload.loss, workload.optimizer, ("check",))
    check_same_model(plan, workload.model)
    check_batch_shapes(plan, workload.batch, workload.batch_dims, "check")
    return replace(parsed, workload=_with_planned_sizes(plan, workload))


def _planned_host_ram(plan: Plan) -> int | None:
    """Return the planned limit on pinned host memory of one machine, in bytes."""
    of_rank, several = plan.budget.host_ram_bytes, plan.recipe.parallelism
    if of_rank is None or several is None:
        return of_rank
    return of_rank * (several.gpus // several.nodes)


def _with_planned_sizes(plan: Plan, workload: Workload) -> Workload:
    """Pad batches as planned; forget sizes that the plan does not say."""
    lengths, over = workload.lengths, plan.varying_lengths
    if lengths is None:
        return workload
    if not has_sizes(plan):  # two of them, only for the shapes of the batch
        known = set(lengths.notes())
        notes = tuple(note for note in workload.notes if note not in known)
        return replace(workload, lengths=None, notes=notes)
    padded_to = None if over is None else over.pad_to_multiple_of
    return replace(workload, lengths=replace(lengths, padded_to=padded_to or 1))


def _batch_dims(dims: SampleDims | None) -> int | dict[str, int | None] | None:
    """Return the argument that says so; None: nothing was named."""
    if dims is None or not dims.named:
        return None
    return dims.default if "" in dims.named else dims.named
