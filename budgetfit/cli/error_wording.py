"""Rewrite messages for the command line: options instead of Python arguments."""

from __future__ import annotations

import functools
import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from typer.models import OptionInfo

from budgetfit.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.core.plan import Alternative, Estimate, GpuComparison, Plan

_STRING = r"""(?:"[^"]*"|'[^']*')"""
# Arguments inside a call are Python and stay.
_CALL = r"[\w.]+\([^()]*(?:\([^()]*\)[^()]*)*\)"
_VALUE = rf"{_STRING}|\[{_STRING}(?:, {_STRING})*\]|True|False|\d[\w.]*|\.\.\."
_ARGUMENT: Final = re.compile(rf"{_CALL}|(?<![\w.-])(\w+)=({_VALUE}|(?=[\s,.;:)]|$))")


def with_option_names(text: str) -> str:
    """Replace ``max_length=512`` by ``--max-length 512`` in a message."""
    # Arguments without an option stay, and those whose option the same line names, too.
    return "\n".join(map(_with_options, text.split("\n")))


def _with_options(line: str) -> str:
    def option(found: re.Match[str]) -> str:
        on, off = _options().get(found[1] or "", ("", ""))
        if any(each and re.search(rf"{each}(?![\w-])", line) for each in (on, off)):
            return found[0]
        value = found[2]
        if value in ("True", "False"):
            return (on if value == "True" else off) or found[0]
        words = ",".join(each[1:-1] for each in re.findall(_STRING, value or ""))
        if words:
            value = shlex.quote(words)
        return f"{on} {value}".rstrip() if on else found[0]

    return _ARGUMENT.sub(option, line)


def plan_with_option_names(plan: Plan) -> Plan:
    """Return a plan to print, whose warnings and alternatives name options."""
    warnings = tuple(map(with_option_names, plan.warnings))
    estimate = estimate_with_option_names(plan.estimate)
    shown = plan.changed(warnings=warnings, estimate=estimate)
    lazy = plan.lazy_alternatives
    if lazy is None:
        return shown.changed(alternatives=_alternatives(plan.alternatives))
    lazy = replace(
        lazy,
        known=_alternatives(lazy.known),
        evaluate=lambda: _alternatives(plan.alternatives),
    )
    return shown.changed(lazy_alternatives=lazy)


def _alternatives(rows: Sequence[Alternative]) -> tuple[Alternative, ...]:
    return tuple(replace(row, note=with_option_names(row.note)) for row in rows)


def estimate_with_option_names(estimate: Estimate) -> Estimate:
    """Return an estimate to print, whose notes name options."""
    return replace(estimate, notes=tuple(map(with_option_names, estimate.notes)))


def rows_with_option_names(rows: Sequence[GpuComparison]) -> tuple[GpuComparison, ...]:
    """Return a comparison to print, whose warnings name options."""
    return tuple(
        replace(
            row,
            problem=with_option_names(row.problem),
            warnings=tuple(map(with_option_names, row.warnings)),
        )
        for row in rows
    )


@functools.cache
def _options() -> dict[str, tuple[str, str]]:
    """Map each argument to its option and its ``--no-`` option."""
    groups = [each for each in vars(options).values() if isinstance(each, dict)]
    return {
        name: each.words(name)
        for group in groups
        for name, each in group.items()
        if isinstance(each, options.Declared) and isinstance(each.info, OptionInfo)
    }
