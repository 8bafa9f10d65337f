"""YAML configs for axolotl and LLaMA-Factory: common parts.

These programs have no settings for checkpointing single blocks. Where a plan's recipe
cannot be expressed, the nearest judged alternative is written instead.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from budgetfit.applying.optimizers.factory import transformers_names
from budgetfit.core.parallelism import Engine
from budgetfit.core.plan import Estimate, Plan
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError
from budgetfit.integrations.exports.language_models import refuse_unless_language_model
from budgetfit.integrations.exports.ranks import copied_gradients, refuse_several_gpus
from budgetfit.integrations.source_code.python_source import (
    escape_line,
    plan_summary_lines,
    refuse_compile,
    refuse_optimizer_in_backward,
)
from budgetfit.reporting.formatting import blocks_text
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text

Settings = dict[str, Any]
# Returns the checkpointing settings of a recipe, given the blocks' names; None where
# there are none. A program must support checkpointing every block.
Checkpointing = Callable[[Recipe, tuple[str, ...]], Settings | None]
_BARE_EXPONENT: Final = re.compile(r"-?\d+e-?\d+")


def config_text(  # noqa: PLR0913, PLR0917 - a plan, and what a program can say
    plan: Plan,
    program: str,
    say: Checkpointing,
    sections: Callable[[Plan, Recipe, Settings], dict[str, Settings]],
    remarks: Callable[[Plan], Iterable[str]],
    engines: tuple[Engine, ...] = ("ddp",),
) -> str:
    """Return the YAML text of a plan: remarks as comments, then groups of settings.

    ``sections`` returns the settings by title, of a plan, the recipe that is written
    and its checkpointing settings, which ``say`` returns; those that are None are left
    out. ``remarks``: what else the program cannot express. ``engines``: those that it
    can be told to use on several GPUs.

    Raises:
        InputError: If the program cannot train this model or this optimizer.
    """
    refuse_unless_language_model(plan, program)
    _refuse_other_optimizers(plan, program)
    refuse_optimizer_in_backward(plan, program)
    refuse_several_gpus(plan, program, but=engines)
    refuse_compile(plan, program)
    written, checkpointing, said = _nearest_expressible(plan, say)
    comments = plan_summary_lines(written, f"A run of {program}")
    further = [*remarks(plan), *copied_gradients(written)]
    comments += map(escape_line, [*said, *further])
    lines = [f"# {line}".rstrip() for line in comments]
    for title, settings in sections(plan, written.recipe, checkpointing).items():
        lines += ["", f"# {title}"]
        lines += [
            f"{name}: {_value(value)}"
            for name, value in settings.items()
            if value is not None
        ]
    return "\n".join(lines) + "\n"


def _nearest_expressible(
    plan: Plan, say: Checkpointing
) -> tuple[Plan, Settings, list[str]]:
    """Return the plan, or the best alternative that a program's settings can express.

    With the program's checkpointing settings, and remarks on what they cannot express.
    """
    blocks = plan.model.blocks
    settings = _said(plan.recipe, blocks, say)
    if settings is not None:
        return plan, settings, []
    samples = plan.recipe.effective_batch_size
    rows = [
        (row, estimate, settings)
        for row in plan.alternatives
        if not row.is_suggestion
        and row.estimate.recipe.parallelism == plan.recipe.parallelism
        and (estimate := row.estimate.with_samples(samples)) is not None
        and (settings := _said(estimate.recipe, blocks, say)) is not None
    ]
    judged = [each for each in rows if each[0].fits]
    fitting = [each for each in judged if _fits_with_copies(plan, each[1])]
    cannot = f"It cannot be told this: {_treatment(plan)}."
    if judged:
        # Where gradients that DDP copies fit with none, the caller refuses it.
        candidates = fitting or judged
        best = max(candidates, key=lambda each: each[1].samples_per_s)
        row, estimate, settings = best
        found = (
            f"Below is the nearest that was judged to fit: {row.label}, "
            f"{_numbers(estimate)}; the plan: {_numbers(plan.estimate)}."
        )
        return _with_estimate(plan, estimate), settings, [cannot, found]
    tried = [
        f"{row.label} needs {format_bytes(row.estimate.reserved_bytes)} and "
        f"{format_bytes(plan.budget.usable_bytes)} are usable"
        for row, *_ in rows
    ]
    known = "; ".join(tried) or "no setting that it has was judged for this plan"
    said = f"Below is the nearest, every block recomputed. It may not fit: {known}."
    each = tuple(Segment((name,)) for name in blocks)
    full = say(replace(plan.recipe, segments=each, loss_chunks=1), blocks)
    return plan, full or {}, [cannot, said]


def _with_estimate(plan: Plan, estimate: Estimate) -> Plan:
    return plan.changed(recipe=estimate.recipe, estimate=estimate)


def _fits_with_copies(plan: Plan, estimate: Estimate) -> bool:
    """Whether an alternative fits with gradients that are no views of DDP's buckets."""
    try:
        copied_gradients(_with_estimate(plan, estimate))
    except InputError:
        return False
    return True


def _value(value: object) -> str:
    """Format a value as JSON, valid in YAML too, where 5e-05 would be a string."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("e", ".0e", 1) if _BARE_EXPONENT.fullmatch(text) else text


def uniform_treatment(recipe: Recipe, blocks: tuple[str, ...]) -> Segment | None:
    """Return the common segment settings of all blocks, if they are the same."""
    first = recipe.segments[0] if recipe.segments else None
    if first is None or len(recipe.segments) != len(blocks):
        return None
    alike = tuple(replace(first, blocks=(name,)) for name in blocks)
    return first if recipe.segments == alike else None


def _said(
    recipe: Recipe, blocks: tuple[str, ...], say: Checkpointing
) -> Settings | None:
    return say(recipe, blocks) if recipe.loss_chunks == 1 else None


def _treatment(plan: Plan) -> str:
    recipe = plan.recipe
    text = blocks_text(recipe, plan.model.blocks) if recipe.segments else ""
    parts = f"output head and loss in {recipe.loss_chunks} parts"
    return "; ".join([text] * bool(text) + [parts] * (recipe.loss_chunks > 1))


def _numbers(estimate: Estimate) -> str:
    memory = format_bytes(estimate.reserved_bytes)
    return f"{memory} reserved and {rate_text(estimate.samples_per_s)} samples/s"


def _refuse_other_optimizers(plan: Plan, program: str) -> None:
    """Refuse optimizers without a transformers name."""
    name = plan.recipe.optimizer
    if name not in transformers_names():
        kind = "the function " if "." in name else ""
        raise InputError(
            f"{program} takes transformers' optimizer names, and the plan was made "
            f"with {kind}{name}. Plan with one of those names, for example "
            "--optimizer adamw_torch_fused."
        )
