"""YAML configs for axolotl and LLaMA-Factory: common parts.

These programs have no settings for checkpointing single blocks. Where a plan's recipe
cannot be expressed, the nearest judged alternative is written instead.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError
from budgetfit.integrations.source_code.python_source import (
    escape_line,
    plan_summary_lines,
)
from budgetfit.reporting.formatting import blocks_text, rate_text, sample_text
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from budgetfit.core.plan import Estimate

Settings = dict[str, Any]
_BARE_EXPONENT: Final = re.compile(r"-?\d+e-?\d+")


@dataclass(frozen=True, slots=True)
class ExportedPlan:
    """The part of a plan that a config file expresses.

    Attributes:
        plan: The plan, with the recipe and estimate that the file has.
        checkpointing: The program's checkpointing settings.
        remarks: What it cannot express, with the effect on memory.
    """

    plan: Plan
    checkpointing: Settings
    remarks: tuple[str, ...] = ()


def nearest_expressible(
    plan: Plan, say: Callable[[Recipe, tuple[str, ...]], Settings | None]
) -> ExportedPlan:
    """Return the plan, or the best alternative that a program's settings can express.

    Args:
        plan: Its alternatives are used only where it cannot be expressed itself.
        say: Returns the checkpointing settings of a recipe, given the blocks' names;
            None where it has none. It must support checkpointing every block.
    """
    blocks = plan.model.blocks
    settings = _said(plan.recipe, blocks, say)
    if settings is not None:
        return ExportedPlan(plan, settings)
    samples = plan.recipe.effective_batch_size
    rows = [
        (row, estimate, settings)
        for row in plan.alternatives
        if not row.is_suggestion
        and (estimate := row.estimate.with_samples(samples)) is not None
        and (settings := _said(estimate.recipe, blocks, say)) is not None
    ]
    fitting = [each for each in rows if each[0].fits]
    cannot = f"It cannot be told this: {_treatment(plan)}."
    if fitting:
        row, estimate, settings = max(fitting, key=lambda each: each[1].samples_per_s)
        found = (
            f"Below is the nearest that was judged to fit: {row.label}, "
            f"{_numbers(estimate)}; the plan: {_numbers(plan.comparable)}."
        )
        other = plan.changed(recipe=estimate.recipe, estimate=estimate)
        return ExportedPlan(other, settings, (cannot, found))
    tried = [
        f"{row.label} needs {format_bytes(row.estimate.reserved_bytes)} and "
        f"{format_bytes(plan.budget.usable_bytes)} are usable"
        for row, *_ in rows
    ]
    known = "; ".join(tried) or "no setting that it has was judged for this plan"
    said = f"Below is the nearest, every block recomputed. It may not fit: {known}."
    full = say(replace(plan.recipe, segments=_each(blocks), loss_chunks=1), blocks)
    return ExportedPlan(plan, full or {}, (cannot, said))


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


def _each(blocks: tuple[str, ...]) -> tuple[Segment, ...]:
    return tuple(Segment((name,)) for name in blocks)


def _said(
    recipe: Recipe,
    blocks: tuple[str, ...],
    say: Callable[[Recipe, tuple[str, ...]], Settings | None],
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


def refuse_non_text_plan(plan: Plan, program: str) -> None:
    """Refuse plans that a program for language models cannot train.

    Raises:
        InputError: If samples have no tokens, or the optimizer is not a transformers
            name.
    """
    if "input_ids" not in plan.model.batch:
        raise InputError(
            f"{program} trains models of language, and a sample of this plan is "
            f"{sample_text(plan.model.batch)}. Use --to trainer or --to torch instead."
        )
    if "." in plan.recipe.optimizer:
        raise InputError(
            f"{program} takes transformers' optimizer names, and the plan was made "
            f"with the function {plan.recipe.optimizer}. Plan with one of those names, "
            "for example --optimizer adamw_torch_fused."
        )


def yaml_text(
    plan: Plan, what: str, remarks: Iterable[str], sections: dict[str, Settings]
) -> str:
    """Return the YAML text: remarks as comments, then groups of settings."""
    comments = [*plan_summary_lines(plan, what), *map(escape_line, remarks)]
    lines = [f"# {line}".rstrip() for line in comments]
    for title, settings in sections.items():
        lines += ["", f"# {title}"]
        lines += [
            f"{name}: {_value(value)}"
            for name, value in settings.items()
            if value is not None
        ]
    return "\n".join(lines) + "\n"
