"""Levers that are only suggested, with what each would give.

They change what is trained, or take away what a training loop may want.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from budgetfit.applying.optimizers.cpu_offload import NAME as OFFLOADED
from budgetfit.core.plan import Alternative
from budgetfit.core.precision import PRECISIONS, find_precision
from budgetfit.errors import InputError, TraceError
from budgetfit.planning.alternatives.lora_estimate import RANK, lora_twin
from budgetfit.planning.profiling.block_chain import Chains
from budgetfit.planning.search.baselines import best, best_of_policy
from budgetfit.planning.search.loss_chunking import search_with_loss_parts
from budgetfit.planning.search.search import judged, search
from budgetfit.traces.session import Traces
from budgetfit.workload.model_check import trainable_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.core.recipe import Recipe
    from budgetfit.planning.profiling.block_chain import Setting
    from budgetfit.planning.profiling.option_probes import Lever as Option
    from budgetfit.planning.search.search import Request

EIGHT_BIT = "adamw_bnb_8bit"
HALF = "bf16"
ADAMW = ("adamw_torch", "adamw_torch_fused")
LEVER_ROUNDS: Final = 3  # recipes that are judged for each
WORTH_A_ROW = 0.01  # of the plan's speed or memory
FEW_SAMPLES: Final = 8  # with fewer, one more is more than 12 % of the batch


class Lever(NamedTuple):
    """A change that only the user can decide on: ``arguments`` of ``plan``.

    ``chains`` makes the chains with it, and returns None where the model has no place
    for it.
    """

    label: str
    arguments: dict[str, object]
    chains: Callable[[], Chains | None]
    note: str
    changes_training: bool = True


def lever_rows(
    chains: Chains, request: Request, budget: Budget, plan: Estimate
) -> tuple[Alternative, ...]:
    """Return what each lever would give, at its own best batch and checkpointing.

    A lever that is no faster there is shown at the plan's batch size, for the memory
    that it saves. Left out: levers that make the plan neither faster nor smaller by
    1 %, with which nothing fits, or with which the model cannot run.
    """
    rows = []
    for lever in levers(chains):
        try:
            found = _best(lever, request, budget, plan)
        except (InputError, TraceError) as error:
            chains.traces.log.append(f"{lever.label} is not shown: {error}")
            continue
        if found is not None:
            rows.append(
                Alternative(
                    label=lever.label,
                    estimate=found,
                    fits=bool(found.fits),
                    changes_training=lever.changes_training,
                    note=lever.note,
                )
            )
    return tuple(rows)


def levers(chains: Chains) -> Iterator[Lever]:
    """Yield the levers that are not pulled yet and that the card has hardware for."""
    setting = replace(chains.setting, loss_chunks=1)
    subject = chains.traces.subject
    if _can_step_in_backward(setting):
        yield Lever(
            "optimizer in backward",
            {"optimizer_in_backward": True},
            lambda: Chains(chains.traces, _stepping(setting)),
            "the same updates, each weight's as soon as its gradient is complete: "
            "optimizer_in_backward=True; no accumulation, no clipping, no GradScaler",
            changes_training=False,
        )
    if setting.optimizer in ADAMW:
        eight_bit = replace(setting, optimizer=EIGHT_BIT)
        yield Lever(
            "with 8-bit optimizer",
            {"optimizer": EIGHT_BIT},
            lambda: Chains(chains.traces, eight_bit),
            f'optimizer="{EIGHT_BIT}"',
        )
    if has_half(chains) and setting.precision != "as-is":
        pure = replace(setting, precision=HALF)
        yield Lever(
            "with pure bf16",
            {"precision": HALF},
            lambda: Chains(chains.traces, pure),
            f'precision="{HALF}"',
        )
    if _is_mostly_trained(subject.model):
        yield Lever(
            f"with LoRA r={RANK}",
            {"method": "lora"},
            lambda: _with_lora(chains),
            'method="lora" (needs peft): frozen base, adapters on every linear layer '
            "of the blocks",
        )


def _is_mostly_trained(model: nn.Module) -> bool:
    """Whether a model is no adapter's: some keep a table of positions fixed."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return trainable_count(model) > total / 2


def has_half(chains: Chains) -> bool:
    """Whether the card computes in bf16, and the weights are not planned in it yet."""
    capability = chains.traces.subject.gpu.compute_capability
    able = capability >= PRECISIONS[HALF].needs_capability
    return able and chains.setting.precision != HALF


def _stepping(setting: Setting) -> Setting:
    """Return the setting with the optimizer's step in the backward pass."""
    return replace(setting, optimizer_in_backward=True, accumulation=None)


def _can_step_in_backward(setting: Setting) -> bool:
    """Whether nothing that was asked for needs the gradients of all weights at once."""
    return (
        not setting.optimizer_in_backward
        and setting.effective_batch_size is None
        and setting.optimizer != OFFLOADED
        and not find_precision(setting.precision).grad_scaler
    )


def _with_lora(chains: Chains) -> Chains | None:
    """Return chains of the model with adapters, its base in 16 bits unless in fp32.

    Frozen weights need no fp32 copy, so a base under autocast is loaded in 16 bits.
    """
    subject = chains.traces.subject
    policy = find_precision(chains.setting.precision)
    half = policy.autocast is not None or policy.weights == HALF
    base = None
    if half:
        capable = subject.gpu.compute_capability >= PRECISIONS[HALF].needs_capability
        base = torch.bfloat16 if capable else torch.float16
    twin = lora_twin(subject, base)
    if twin is None:
        return None
    traces = Traces(twin, chains.traces.progress)
    traces.log = chains.traces.log
    return Chains(traces, replace(chains.setting, loss_chunks=1))


def options_of(recipe: Recipe) -> frozenset[Option]:
    """Return which further options of blocks a recipe uses."""
    used: set[Option] = set()
    for segment in recipe.segments:
        if segment.mode == "selective":
            used.add("selective")
        elif segment.mode == "offload" or segment.input_on_host:
            used.add("offload")
    return frozenset(used)


def _best(
    lever: Lever, request: Request, budget: Budget, plan: Estimate
) -> Estimate | None:
    """Return the lever at its best batch, solved for on its own chain."""
    changed = lever.chains()
    if changed is None:
        return None
    fastest = best(_solved(changed, request, budget, plan.recipe), request)
    if fastest is None:
        return None
    if fastest.samples_per_s > plan.samples_per_s * (1 + WORTH_A_ROW):
        return fastest
    setting = replace(changed.setting, loss_chunks=fastest.recipe.loss_chunks)
    size = plan.recipe.batch_size
    same = judged(changed, setting.recipe(size, fastest.recipe.segments), budget)
    smaller = same.reserved_bytes < plan.reserved_bytes * (1 - WORTH_A_ROW)
    return same if same.fits and smaller else None


def _solved(
    chains: Chains, request: Request, budget: Budget, plan: Recipe
) -> list[Estimate]:
    """Return what may be fastest; each option that the plan has no use for is left out.

    A plan that keeps every block does so with more room as well, but for what is left
    over where one more sample is much.
    """
    if request.checkpointing != "auto":
        return [best_of_policy(chains, request.checkpointing, request, budget)]
    tried = []
    if not plan.segments and plan.loss_chunks == 1:
        tried = [best_of_policy(chains, "none", request, budget)]
        if tried[0].fits and tried[0].recipe.batch_size >= FEW_SAMPLES:
            return tried
    chains = Chains(chains.traces, chains.setting, options_of(plan))
    if plan.loss_chunks > 1:
        _, found = search_with_loss_parts(chains, request, budget, LEVER_ROUNDS)
    else:
        found = search(chains, request, budget, most_rounds=LEVER_ROUNDS)
    if found.estimate is not None:
        tried.append(found.estimate)
    if plan.segments and chains.traces.subject.blocks:
        tried.append(best_of_policy(chains, "full", request, budget))
    return tried
