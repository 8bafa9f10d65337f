"""The report of a plan: one HTML page that loads nothing, or a part for notebooks."""

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from budgetfit.core.plan import GpuComparison, ModelSummary, Plan
from budgetfit.errors import InputError
from budgetfit.reporting.header import gpu_text, model_lines, origin_line
from budgetfit.reporting.html.colors import css_variables
from budgetfit.reporting.html.summary import answers

FIGURES: Final = (
    "step_memory",
    "gpu_memory",
    "peak_memory",
    "blocks",
    "throughput",
    "checkpointing",
    "batch_sizes",
)
_VERSIONS: Final = ("budgetfit", "torch", "transformers")
_HERE: Final = Path(__file__).parent


def plan_page(plan: Plan, *, comparison: Sequence[GpuComparison] = ()) -> str:
    """Return the report of a plan as a whole HTML page.

    Evaluates the plan's alternatives and curves. ``comparison``: rows of
    ``api.plan.compare``, to show GPUs side by side.

    Raises:
        InputError: If matplotlib or Jinja2 is missing.
    """
    check_libraries()
    return _rendered("page.html", **_of_plan(plan, comparison))


def notebook_html(plan: Plan) -> str | None:
    """Return the report for a notebook; None without matplotlib or Jinja2."""
    try:
        check_libraries()
    except InputError:
        return None
    return _rendered("report.html", **_of_plan(plan, ()))


def comparison_page(rows: Sequence[GpuComparison], model: ModelSummary) -> str:
    """Return what ``compare`` found as a whole HTML page.

    Raises:
        InputError: If matplotlib or Jinja2 is missing.
    """
    check_libraries()
    said = (text for row in rows for text in (row.problem, *row.warnings) if text)
    return _rendered(
        "page.html",
        title=f"{model.name}: budgetfit compare",
        kind="Comparison of GPUs",
        model=model,
        subtitle=_model_lines(model),
        answers=(),
        sections=[_figure("gpus").section(rows)],
        warnings=list(dict.fromkeys(said)),
        versions=(),
    )


def _of_plan(plan: Plan, comparison: Sequence[GpuComparison]) -> dict[str, Any]:
    sections = [_figure(name).section(plan) for name in FIGURES]
    sections.append(_figure("gpus").section(comparison))
    return {
        "title": f"{plan.model.name} on {plan.gpu.name}: budgetfit plan",
        "kind": "Training plan",
        "model": plan.model,
        "subtitle": [
            *_model_lines(plan.model),
            gpu_text(plan.gpu, plan.budget.total_bytes),
        ],
        "answers": answers(plan),
        "sections": [each for each in sections if each is not None],
        "warnings": list(dict.fromkeys((*plan.warnings, *plan.estimate.notes))),
        "versions": [
            f"{name} {plan.provenance[name]}"
            for name in _VERSIONS
            if name in plan.provenance
        ],
    }


def figure_file(plan: Plan, name: str) -> str:
    """Return one figure of ``FIGURES`` as an SVG file, light and dark by itself.

    Raises:
        InputError: If matplotlib or Jinja2 is missing.
    """
    check_libraries()
    svg = importlib.import_module("budgetfit.reporting.html.svg")
    return str(svg.standalone(_figure(name).section(plan).figure))


def check_libraries() -> None:
    """Check that what draws the report can be imported."""
    for name in ("jinja2", "matplotlib"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise InputError(
                f"A report with figures needs {name}, which is not installed: "
                "pip install 'budgetfit[report]'"
            ) from None


def _model_lines(model: ModelSummary) -> list[str]:
    """Return the lines of the model, whose name is the heading above them."""
    first, *others = model_lines(model)
    return [first.removeprefix(f"{model.name}: "), *others]


def _rendered(template: str, *, model: ModelSummary, **shown: object) -> str:
    text: str = (
        _environment()
        .get_template(template)
        .render(
            name=model.name,
            origin=origin_line(model),
            light=css_variables(dark=False),
            dark=css_variables(dark=True),
            **shown,
        )
    )
    return text


def _figure(name: str) -> ModuleType:
    return importlib.import_module(f"budgetfit.reporting.html.figures.{name}")


@functools.cache
def _environment() -> Any:  # noqa: ANN401 - a Jinja2 environment
    jinja2 = importlib.import_module("jinja2")
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
