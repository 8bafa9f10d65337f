"""Changes of training to suggest: 8-bit Adam, pure bf16, LoRA, optimizer in backward.

They change the results of training, or restrict the training loop.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import nn

from budgetfit.applying.optimizers.cpu_offload import NAME as OFFLOADED
from budgetfit.applying.quantized_layers.nf4_linear import Nf4Linear
from budgetfit.core.plan import Alternative, Estimate
from budgetfit.core.precision import PRECISIONS, find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError, TraceError
from budgetfit.planning.alternatives.lora_estimate import LORA_RANK, lora_workload
from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
from budgetfit.planning.profiling.option_recipes import OptionKind
from budgetfit.planning.search.baselines import best_with_policy
from budgetfit.planning.search.loss_chunking import search_with_loss_chunks
from budgetfit.planning.search.search import search
from budgetfit.planning.session import PlanningSession
from budgetfit.traces.session import TraceSession
from budgetfit.workload.model_check import trainable_count

ADAMW_8BIT = "adamw_bnb_8bit"
PURE_BF16 = "bf16"
ADAMW = ("adamw_torch", "adamw_torch_fused")
MAX_ROUNDS_PER_CHANGE: Final = 3  # recipes judged for each
MIN_GAIN = 0.01  # of the plan's speed or memory
FEW_SAMPLES: Final = 8  # with fewer, one more is more than 12 % of the batch


class TrainingChange(NamedTuple):
    """A change of training that the user decides on: ``arguments`` of ``plan``.

    ``session`` makes the session with it, and returns None where it does not apply to
    the model.
    """

    label: str
    arguments: dict[str, object]
    session: Callable[[], PlanningSession | None]
    note: str
    changes_training: bool = True


def training_change_rows(
    session: PlanningSession, plan: Estimate
) -> tuple[Alternative, ...]:
    """Return each training change at its own best batch size and checkpointing."""
    # Searched for more briefly than a plan with the change, which may be a few per cent
    # faster. One that is no faster is shown at the plan's batch size, for the memory
    # that it saves. Left out: changes that make the plan neither faster nor smaller by
    # 1 %, with which nothing fits, or with which the model cannot run.
    rows = []
    for change in training_changes(session):
        try:
            found = _best(change, plan)
        except (InputError, TraceError) as error:
            session.traces.log.append(f"{change.label} is not shown: {error}")
            continue
        if found is not None:
            rows.append(
                Alternative(
                    label=change.label,
                    estimate=found,
                    fits=bool(found.fits),
                    changes_training=change.changes_training,
                    note=change.note,
                )
            )
    return tuple(rows)


def training_changes(session: PlanningSession) -> Iterator[TrainingChange]:
    """Yield training changes that are not in use yet and that the GPU supports."""
    unchunked = partial(session.changed, loss_chunks=1)
    if _can_step_in_backward(session.settings):
        yield TrainingChange(
            "optimizer in backward",
            {"optimizer_in_backward": True},
            partial(unchunked, optimizer_in_backward=True, accumulation=None),
            "the same updates, each weight's as soon as its gradient is complete: "
            "optimizer_in_backward=True; no accumulation, no clipping, no GradScaler",
            changes_training=False,
        )
    if session.settings.optimizer in ADAMW:
        yield TrainingChange(
            "with 8-bit optimizer",
            {"optimizer": ADAMW_8BIT},
            partial(unchunked, optimizer=ADAMW_8BIT),
            f'optimizer="{ADAMW_8BIT}"',
        )
    if can_use_pure_bf16(session) and session.settings.precision != "as-is":
        yield TrainingChange(
            "with pure bf16",
            {"precision": PURE_BF16},
            partial(unchunked, precision=PURE_BF16),
            f'precision="{PURE_BF16}"',
        )
    if _is_mostly_trained(session.workload.model):
        yield TrainingChange(
            f"with LoRA r={LORA_RANK}",
            {"method": "lora"},
            partial(_with_lora, session),
            'method="lora" (needs peft): frozen base, adapters on every linear layer '
            "but the output's",
        )


def _is_mostly_trained(model: nn.Module) -> bool:
    """Whether most parameters train, which is not so with adapters."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return trainable_count(model) > total / 2


def can_use_pure_bf16(session: PlanningSession) -> bool:
    """Whether the GPU supports bf16 and the weights are not in bf16 yet."""
    # A base that is quantised for fp32 is another one where a plan in bf16 is asked
    # for: its layers then compute in bf16.
    return (
        session.settings.precision != PURE_BF16
        and _supports_bf16(session)
        and not any(
            isinstance(layer, Nf4Linear) and layer.packing.compute == torch.float32
            for layer in session.workload.model.modules()
        )
    )


def _supports_bf16(session: PlanningSession) -> bool:
    needed = PRECISIONS[PURE_BF16].needs_capability
    return session.workload.gpu.compute_capability >= needed


def _can_step_in_backward(settings: TrainingSettings) -> bool:
    """Whether nothing requested needs all gradients at once (accumulation, scaler)."""
    return (
        not settings.optimizer_in_backward
        and settings.effective_batch_size is None
        and settings.optimizer != OFFLOADED
        and not find_precision(settings.precision).grad_scaler
    )


def _with_lora(session: PlanningSession) -> PlanningSession | None:
    """Return the session with LoRA adapters, on the base that ``method="lora"`` has."""
    policy = find_precision(session.settings.precision)
    in_16_bits = policy.autocast is not None or policy.weights == PURE_BF16
    base = None  # as loaded
    if session.workload.frozen_in_compute_dtype and in_16_bits:
        base = torch.bfloat16 if _supports_bf16(session) else torch.float16
    adapted = lora_workload(session.workload, base)
    if adapted is None:
        return None
    traces = TraceSession(adapted, session.traces.tracer.progress)
    traces.tracer.log = session.traces.log
    chain = BlockChain(traces, replace(session.settings, loss_chunks=1))
    return replace(session, block_chain=chain)


def option_kinds_of(recipe: Recipe) -> frozenset[OptionKind]:
    """Return the kinds of block options that a recipe uses."""
    used: set[OptionKind] = set()
    for segment in recipe.segments:
        if segment.mode == "selective":
            used.add("selective")
        elif segment.mode == "offload" or segment.input_on_host:
            used.add("offload")
    return frozenset(used)


def _best(change: TrainingChange, plan: Estimate) -> Estimate | None:
    """Return a training change at its best batch size, solved on its own chain."""
    session = change.session()
    if session is None:
        return None
    fastest = session.best_fitting(_solved(session, plan.recipe))
    if fastest is None:
        return None
    if fastest.samples_per_s > plan.samples_per_s * (1 + MIN_GAIN):
        return fastest
    settings = replace(session.settings, loss_chunks=fastest.recipe.loss_chunks)
    size = plan.recipe.batch_size
    same = session.judge(settings.recipe(size, fastest.recipe.segments))
    smaller = same.reserved_bytes < plan.reserved_bytes * (1 - MIN_GAIN)
    return same if same.fits and smaller else None


def _solved(session: PlanningSession, plan: Recipe) -> list[Estimate]:
    """Return candidates for the fastest, with the option kinds that the plan uses."""
    # A plan that keeps every block also does so with more memory, except where one more
    # sample is a large share of the batch.
    if session.request.checkpointing != "auto":
        return [best_with_policy(session, session.request.checkpointing)]
    tried = []
    if not plan.segments and plan.loss_chunks == 1:
        tried = [best_with_policy(session, "none")]
        if tried[0].fits and tried[0].recipe.batch_size >= FEW_SAMPLES:
            return tried
    chain = BlockChain(session.traces, session.settings, option_kinds_of(plan))
    session = replace(session, block_chain=chain)
    solve = search_with_loss_chunks if plan.loss_chunks > 1 else search
    found = solve(session, max_rounds=MAX_ROUNDS_PER_CHANGE).estimate
    if found is not None:
        tried.append(found)
    if plan.segments and session.workload.blocks:
        tried.append(best_with_policy(session, "full"))
    return tried
