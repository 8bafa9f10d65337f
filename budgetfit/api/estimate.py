"""Estimates of settings given by name, and the layer table, for the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from budgetfit.core.loop import PLAIN, RUN, Loop, as_loop
from budgetfit.core.plan import Estimate, Layer, ModelSummary
from budgetfit.core.precision import runs_on
from budgetfit.core.recipe import Recipe
from budgetfit.core.validation import check_batch
from budgetfit.errors import InputError
from budgetfit.inputs.arguments import Arguments
from budgetfit.inputs.several_gpus import AUTO
from budgetfit.planning.planner import make_estimate, make_layers, policy_recipe
from budgetfit.planning.profiling.block_chain import TrainingSettings
from budgetfit.planning.profiling.first_trace import with_precision_fallback
from budgetfit.traces.loops.library import check_installed
from budgetfit.tracing.isolation.torch_state import neutral_torch_state
from budgetfit.workload.workload import Workload

if TYPE_CHECKING:
    from budgetfit.inputs.arguments import Model, ParsedArguments

LAYER_PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16")


def estimate_recipe(
    asked: ParsedArguments,
    recipe: Recipe,
    *,
    keep_own_checkpointing: bool = False,
    loop: Loop = RUN,
) -> Estimate:
    """Predict the memory of a recipe, with the dtypes that it does not cast.

    Raises:
        InputError: The loop's library is not installed, or it cannot train so.
        TraceError: The model cannot run on fake tensors.
    """
    check_installed(loop)
    if recipe.parallelism is not None:
        asked.given.check_for_several([recipe.parallelism])
    if recipe.parallelism is not None and loop != RUN:
        settings = (each for each in fields(Loop) if each.name != "kind")
        changed = (x.name for x in settings if getattr(loop, x.name) != x.default)
        named = next(changed, "loop")
        raise InputError(
            f"{named}= is not planned for several GPUs: there budgetfit.Run is around "
            f"the steps. Leave {named}= out."
        )
    made = make_estimate(
        asked.workload,
        recipe,
        asked.budget,
        context_bytes=asked.target.context_bytes,
        keep_own_checkpointing=keep_own_checkpointing,
        progress=asked.given.progress,
        loop=loop,
    )
    return (
        replace(made, as_is=asked.workload.dtypes())
        if recipe.precision == "as-is"
        else made
    )


@neutral_torch_state()
def estimate_settings(
    model: Model,
    *,
    precision: str = "as-is",
    checkpointing: str | Sequence[str] = "as-is",
    loop: Loop | str = PLAIN,
    **given: Any,
) -> tuple[Estimate, ModelSummary]:
    """Predict the memory of settings given by name, as on the command line.

    Args:
        model: As for ``plan``.
        precision: One dtype policy.
        checkpointing: A policy other than ``auto``, or block names.
        loop: As for ``estimate``.
        given: Further arguments of ``plan``.

    Raises:
        InputError: An argument is invalid.
        TraceError: The model cannot run on fake tensors.
    """
    asked = Arguments(
        model=model, precision=precision, checkpointing=checkpointing, **given
    ).parsed()
    share = asked.samples_per_rank
    ranks = asked.parallelisms[0].gpus if asked.parallelisms else 1
    size = asked.given.batch_size or asked.source.batch_size
    if asked.given.batch_size is None and asked.given.batch is None and share:
        size = next(each for each in range(size, 0, -1) if share % each == 0)
    check_batch(size, share, ranks)
    policy = asked.checkpointing
    (chosen,) = asked.precisions
    engine = asked.given.engine
    if len(asked.parallelisms) > 1 and engine in {AUTO, "deepspeed"}:
        one = "fsdp2" if engine == AUTO else "zero2"
        raise InputError(
            f"engine={engine!r} leaves a choice, and an estimate is of one engine. Use "
            f"plan, which chooses, or name one, for example engine={one!r}."
        )
    settings = TrainingSettings(
        precision=chosen,
        optimizer=asked.optimizer,
        effective_batch_size=share,
        # The default of PyTorch, accelerate and the Trainer is not sync_each_batch.
        parallelism=next(
            (each for each in asked.parallelisms if not each.sync_each_batch), None
        ),
    )

    def estimated(workload: Workload, settings: TrainingSettings) -> Estimate:
        recipe = policy_recipe(workload, policy, settings, size)
        return estimate_recipe(
            replace(asked, workload=workload),
            recipe,
            keep_own_checkpointing=policy == "as-is",
            loop=as_loop(loop),
        )

    if asked.parallelisms and as_loop(loop) == PLAIN:
        loop = RUN
    found = with_precision_fallback(
        estimated, asked.workload, settings, asked.fallback_precision
    )
    return found, asked.workload.summary()


@neutral_torch_state()
def layers(model: Model, *, gpu: str = "rtx-4090", **given: Any) -> tuple[Layer, ...]:
    """Return the memory of each layer under each dtype policy.

    Args:
        model: As for ``plan``.
        gpu: Attention and scratch memory are those of this GPU.
        given: Further arguments of ``plan``.

    Raises:
        InputError: An argument is invalid.
        TraceError: The model cannot run on fake tensors.
    """
    asked = Arguments(model=model, gpu=gpu, **given).parsed()
    wanted = [name for name in LAYER_PRECISIONS if runs_on(name, asked.target.gpu)]
    return make_layers(asked.workload, wanted, progress=asked.given.progress)
