"""What exported settings say about their plan, and arguments as source text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from budgetfit.errors import InputError
from budgetfit.reporting.phrases import blocks_text
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from budgetfit.core.plan import Plan

_WIDTH: Final = 88  # of a line of source
_STANDARD: Final = frozenset({"importlib", "itertools", "runpy"})
LENGTH_NAMES = ("input_ids", "decoder_input_ids")


def about(plan: Plan, what: str) -> list[str]:
    """Return lines that say what was planned; nothing in them ends a docstring."""
    lines = [
        f"{what} for {plan.model.name}, as planned for {plan.gpu.title}.",
        "",
        f"Predicted for the process: {format_bytes(plan.estimate.process_bytes)}.",
        f"Blocks: {blocks_text(plan.recipe, plan.model.blocks)}.",
        f"Precision: {plan.recipe.precision}; optimizer: {_optimizer(plan)}.",
    ]
    if plan.adapter is not None:
        lines.append(f"Trained: {plan.adapter.describe()}.")
    if plan.recipe.loss_chunks > 1:
        lines.append(f"Output head and loss: in {plan.recipe.loss_chunks} parts.")
    length = planned_length(plan)
    if length is not None:
        lines.append(f"Samples: at most {length} tokens.")
    loss = (plan.provenance.get("asked") or {}).get("loss")
    if loss is not None:
        lines.append(f"Loss: planned with {loss}.")
    return [plain_line(line) for line in lines]


def plain_line(text: str) -> str:
    """Return a text that ends neither a docstring nor a comment: names are users'."""
    return " ".join(text.replace("\\", "/").replace('"', "'").splitlines())


def _optimizer(plan: Plan) -> str:
    inside = ", inside the backward pass" if plan.recipe.optimizer_in_backward else ""
    return plan.recipe.optimizer + inside


def refuse_optimizer_in_backward(plan: Plan, library: str) -> None:
    """Refuse a plan for a library that wants gradients behind the backward pass.

    Raises:
        InputError: If the plan's optimizer uses them up before.
    """
    if plan.recipe.optimizer_in_backward:
        raise InputError(
            f"{library} steps its optimizer after the backward pass, and the plan's "
            "steps inside it. Train with budgetfit.apply(plan, model), or plan with "
            "optimizer_in_backward=False."
        )


def planned_length(plan: Plan) -> int | None:
    """Return how many tokens a sample was planned with; None where it is no text."""
    for name in LENGTH_NAMES:
        shape, _ = plan.model.batch.get(name, ((), ""))
        if len(shape) == 2:  # noqa: PLR2004 - samples and tokens
            return shape[1]
    return None


def source(value: object) -> str:
    """Return a plain value as Python source, texts in double quotes."""
    # JSON's escapes are Python's, except for characters above 16 bits.
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def call(function: str, arguments: Sequence[str], indent: int, before: int = 0) -> str:
    """Return a call as source, one argument in each line where one line is too long.

    Args:
        function: What is called.
        arguments: As source; those of several lines are indented by ``indent + 4``.
        indent: Of the line that the call is in.
        before: Characters of that line before the call, indentation left out.
    """
    line = f"{function}({', '.join(arguments)})"
    if "\n" not in line and indent + before + len(line) <= _WIDTH:
        return line
    space = " " * indent
    inner = "".join(f"{space}    {argument},\n" for argument in arguments)
    return f"{function}(\n{inner}{space})"


def import_block(modules: Iterable[str], names: Iterable[tuple[str, str]]) -> str:
    """Return import lines: ``import`` of modules, names of modules, then budgetfit."""
    found = set(modules)
    by_module: dict[str, set[str]] = {}
    for module, name in names:
        by_module.setdefault(module, set()).add(name)
    groups = [
        [f"import {each}" for each in sorted(found & _STANDARD)],
        [
            *(f"import {each}" for each in sorted(found - _STANDARD - {"budgetfit"})),
            *(_import_names(*each) for each in sorted(by_module.items())),
        ],
        ["import budgetfit"] if "budgetfit" in found else [],
    ]
    return "\n\n".join("\n".join(group) for group in groups if group) + "\n"


def _import_names(module: str, names: Iterable[str]) -> str:
    ordered = sorted(names, key=lambda name: (not name.isupper(), name))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= _WIDTH:
        return line
    return call(f"from {module} import ", ordered, 0)


def keywords(arguments: Mapping[str, Any], indent: int) -> str:
    """Return ``name=value,`` lines."""
    space = " " * indent
    return "".join(
        f"{space}{name}={source(value)},\n" for name, value in arguments.items()
    )
