"""Levers that are only suggested, with what each would give.

They change what is trained, or take away what a training loop may want.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from budgetfit.applying.offloaded_optimizer import NAME as OFFLOADED
from budgetfit.core.errors import InputError, TraceError
from budgetfit.core.plan import Alternative
from budgetfit.core.precision import PRECISIONS, find_precision
from budgetfit.planning.chains import Chains
from budgetfit.planning.fastest import bounds_of_fastest, fastest
from budgetfit.planning.lora_twin import RANK, lora_twin
from budgetfit.planning.practices import best, best_batch, best_of_policy
from budgetfit.planning.search import judged, solver_for
from budgetfit.planning.traces import Traces
from budgetfit.solvers.batch_size import choose_batch_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.core.recipe import Segment
    from budgetfit.planning.chains import Setting
    from budgetfit.planning.search import Request

EIGHT_BIT = "adamw_bnb_8bit"
ADAMW = ("adamw_torch", "adamw_torch_fused")
WEIGHT_LIKE = ("parameters", "gradients", "optimizer_state")
ROOM_SHARES: Final = (1.0, 0.8, 0.6, 0.4)  # of what a lever frees, until its plan fits
BATCH_SHARES: Final = (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4)  # of the plan's batch
WORTH_A_ROW = 0.01  # of the plan's speed or memory


class Lever(NamedTuple):
    """A change that only the user can decide on.

    ``chains`` makes the chains with it, and returns None where the model has no place
    for it. ``freed`` is, roughly, which share of each category it saves.
    """

    label: str
    chains: Callable[[], Chains | None]
    note: str
    freed: dict[str, float]
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
            found = _best(lever, chains, request, budget, plan)
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
    setting = chains.setting
    subject = chains.traces.subject
    if _can_step_in_backward(setting):
        stepping = replace(setting, optimizer_in_backward=True)
        yield Lever(
            "optimizer in backward",
            lambda: Chains(chains.traces, stepping, frozenset()),
            "the same updates, each weight's as soon as its gradient is complete: "
            "Recipe(optimizer_in_backward=True); no accumulation, no clipping, no "
            "GradScaler",
            {"gradients": 1.0},
            changes_training=False,
        )
    if setting.optimizer in ADAMW:
        eight_bit = replace(setting, optimizer=EIGHT_BIT)
        yield Lever(
            "with 8-bit optimizer",
            lambda: Chains(chains.traces, eight_bit, frozenset()),
            f'optimizer="{EIGHT_BIT}"',
            {"optimizer_state": 3 / 4},
        )
    half = PRECISIONS["bf16"]
    has_bf16 = subject.gpu.compute_capability >= half.needs_capability
    if has_bf16 and setting.precision not in (half.name, "as-is"):
        pure = replace(setting, precision=half.name)
        yield Lever(
            "with pure bf16",
            lambda: Chains(chains.traces, pure, frozenset()),
            f'precision="{half.name}"',
            dict.fromkeys(WEIGHT_LIKE, 1 / 2),
        )
    if all(parameter.requires_grad for parameter in subject.model.parameters()):
        yield Lever(
            f"with LoRA r={RANK}",
            lambda: _with_lora(chains),
            'method="lora" (needs peft): frozen base, adapters on every linear layer '
            "of the blocks",
            {"parameters": 1 / 2, "gradients": 1.0, "optimizer_state": 1.0},
        )


def _can_step_in_backward(setting: Setting) -> bool:
    """Whether nothing needs the gradients of all weights at once."""
    return (
        not setting.optimizer_in_backward
        and setting.effective_batch_size is None
        and setting.accumulation in (None, 1)
        and setting.optimizer != OFFLOADED
        and not find_precision(setting.precision).grad_scaler
    )


def _with_lora(chains: Chains) -> Chains | None:
    """Return chains of the model with adapters, its base in 16 bits unless in fp32.

    Frozen weights need no fp32 copy, so a base under autocast is loaded in 16 bits.
    """
    subject = chains.traces.subject
    policy = find_precision(chains.setting.precision)
    half = policy.autocast is not None or policy.weights == "bf16"
    base = None
    if half:
        capable = subject.gpu.compute_capability >= PRECISIONS["bf16"].needs_capability
        base = torch.bfloat16 if capable else torch.float16
    twin = lora_twin(subject, base)
    if twin is None:
        return None
    traces = Traces(twin, chains.traces.progress)
    traces.log = chains.traces.log
    return Chains(traces, chains.setting, frozenset())


def _batch_sizes(chains: Chains, request: Request, plan: Estimate) -> list[int] | None:
    """Return the batch sizes that segments are looked for at; None for all.

    The lever's own batch is chosen afterwards, by the judge; what suits the room that
    it frees hardly depends on a few samples more or less.
    """
    if request.batch_size is not None:
        return [request.batch_size]
    if chains.setting.effective_batch_size is not None:
        return None  # its divisors are few
    size = plan.recipe.batch_size
    return sorted({max(1, round(size * share)) for share in BATCH_SHARES})


def _segments(
    chains: Chains, request: Request, plan: Estimate, live_bytes: int, freed_bytes: int
) -> tuple[Segment, ...]:
    """Return what the plan's own chain would do with so much more room."""
    solve = solver_for(request, chains.traces.subject.blocks)
    chosen = choose_batch_size(
        chains.within(live_bytes, tails=False),
        solve,
        budget_bytes=live_bytes + freed_bytes,
        objective=request.objective,
        effective_batch_size=chains.setting.effective_batch_size,
        batch_sizes=_batch_sizes(chains, request, plan),
        bounds=bounds_of_fastest if solve is fastest else None,
    ).best
    if chosen is None or chosen.solution.segments is None:
        return plan.recipe.segments
    return chosen.solution.segments


def _best(
    lever: Lever, chains: Chains, request: Request, budget: Budget, plan: Estimate
) -> Estimate | None:
    """Return the lever at its best batch, with segments that suit what it frees.

    The segments are solved for on the plan's own chain with so much more room: one
    program is traced, and not those that a chain of the lever's own would need.
    """
    changed = lever.chains()
    if changed is None:
        return None
    freed = sum(
        int(share * plan.at_peak_bytes.get(name, 0))
        for name, share in lever.freed.items()
    )
    live = budget.usable_bytes - (plan.reserved_bytes - plan.allocated_bytes)
    found: list[Estimate] = []
    tried: set[tuple[Segment, ...]] = set()
    for share in ROOM_SHARES:
        segments = _segments(chains, request, plan, live, round(share * freed))
        if segments not in tried:
            tried.add(segments)
            found = [best_batch(changed, segments, request, budget)]
        if found[0].fits or request.checkpointing != "auto":
            break
    if not found[0].fits and request.checkpointing == "auto":
        found.append(best_of_policy(changed, "full", request, budget))
    fastest = best(found, request)
    if fastest is None:
        return None
    if fastest.samples_per_s > plan.samples_per_s * (1 + WORTH_A_ROW):
        return fastest
    size = plan.recipe.batch_size
    same = judged(
        changed, changed.setting.recipe(size, fastest.recipe.segments), budget
    )
    smaller = same.reserved_bytes < plan.reserved_bytes * (1 - WORTH_A_ROW)
    return same if same.fits and smaller else None
