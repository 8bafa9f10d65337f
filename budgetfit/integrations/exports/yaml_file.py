"""YAML for programs that train from one file, and what such a file cannot say.

Such a program has settings for checkpointing, but none for single blocks. Where a
plan's own recipe cannot be said, the nearest one that was judged is written instead.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError
from budgetfit.integrations.source_code.common import about, plain_line
from budgetfit.reporting.phrases import blocks_text, rate_text, sample_text
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from budgetfit.core.plan import Estimate

Settings = dict[str, Any]
_BARE_EXPONENT: Final = re.compile(r"-?\d+e-?\d+")


@dataclass(frozen=True, slots=True)
class Written:
    """What a file says of a plan.

    Attributes:
        plan: The plan, with the recipe and the estimate that the file has.
        checkpointing: The program's settings for its blocks.
        remarks: What it cannot say, and what that means for memory.
    """

    plan: Plan
    checkpointing: Settings
    remarks: tuple[str, ...] = ()


def nearest(
    plan: Plan, say: Callable[[Recipe, tuple[str, ...]], Settings | None]
) -> Written:
    """Return what a program can be told of a plan: it, or the best judged beside it.

    Args:
        plan: Its alternatives are looked at only where it cannot be said itself.
        say: Returns the settings of a recipe's checkpointing, given the blocks' names;
            None where there are none. It must know every block recomputed.
    """
    blocks = plan.model.blocks
    settings = _said(plan.recipe, blocks, say)
    if settings is not None:
        return Written(plan, settings)
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
        return Written(other, settings, (cannot, found))
    tried = [
        f"{row.label} needs {format_bytes(row.estimate.reserved_bytes)} and "
        f"{format_bytes(plan.budget.usable_bytes)} are usable"
        for row, *_ in rows
    ]
    known = "; ".join(tried) or "no setting that it has was judged for this plan"
    said = f"Below is the nearest, every block recomputed. It may not fit: {known}."
    full = say(replace(plan.recipe, segments=_each(blocks), loss_chunks=1), blocks)
    return Written(plan, full or {}, (cannot, said))


def _value(value: object) -> str:
    """Return a value as JSON, which YAML reads too; 5e-05 would be a text there."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("e", ".0e", 1) if _BARE_EXPONENT.fullmatch(text) else text


def every_block_alike(recipe: Recipe, blocks: tuple[str, ...]) -> Segment | None:
    """Return how each block is treated, if all are treated alike and one by one."""
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


def refuse_what_is_no_text(plan: Plan, program: str) -> None:
    """Refuse a plan for a program that trains models of language.

    Raises:
        InputError: If a sample has no tokens, or the optimizer is no name of
            transformers'.
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
    """Return a file: remarks as comments, then a section for each group of settings."""
    comments = [*about(plan, what), *map(plain_line, remarks)]
    lines = [f"# {line}".rstrip() for line in comments]
    for title, settings in sections.items():
        lines += ["", f"# {title}"]
        lines += [
            f"{name}: {_value(value)}"
            for name, value in settings.items()
            if value is not None
        ]
    return "\n".join(lines) + "\n"
