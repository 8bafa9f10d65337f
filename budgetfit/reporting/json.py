"""JSON reports for ``--json``, one document each.

Keys are field names; bytes are whole numbers.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from budgetfit.core.block_report import BlockRow
from budgetfit.core.plan import Estimate, GpuComparison, Layer, Plan
from budgetfit.core.verification import Verification
from budgetfit.doctor.facts import Finding
from budgetfit.errors import BudgetfitError, DoesNotFitError, Suggestion
from budgetfit.explain.explanation import Explanation
from budgetfit.gpus.interconnect import find_link
from budgetfit.gpus.kernel_shares import find_shares
from budgetfit.gpus.table import Gpu


def plan_json(plan: Plan, samples: int | None = None) -> str:
    """The document that ``--save`` writes; with ``hours`` for ``samples``, if given."""
    if samples is None:
        return plan.to_json()
    return _document({**json.loads(plan.to_json()), **_hours(plan, samples)})


def estimate_json(estimate: Estimate, samples: int | None = None) -> str:
    """The estimate's fields, its rates, and ``hours`` for ``samples``.

    Where lengths vary ``samples_per_s`` is the rate of the longest, and
    ``samples_per_s_of_data`` that over all.
    """
    fields = dataclasses.asdict(estimate)
    return _document({**fields, **_rates(estimate), **_hours(estimate, samples)})


def compare_json(rows: Sequence[GpuComparison], samples: int | None = None) -> str:
    """``{"cards": [...]}``: each row's fields, ``fits``, and rates as an estimate's.

    ``samples_per_money`` too, null without a price or where it does not fit, and with
    ``hours`` and ``cost`` for ``samples`` samples, where given.
    """
    found = [
        {
            **dataclasses.asdict(row),
            "fits": row.fits,
            **_rates(row.estimate),
            "samples_per_money": row.samples_per_money,
            **_hours(row.estimate, samples),
            **({} if samples is None else {"cost": row.cost(samples)}),
        }
        for row in rows
    ]
    return _document({"cards": found})


def _rates(estimate: Estimate | None) -> dict[str, Any]:
    names = ("samples_per_s", "samples_per_s_of_data")
    return {name: getattr(estimate, name, None) for name in names}


def _hours(rated: Plan | Estimate | None, samples: int | None) -> dict[str, Any]:
    if samples is None:
        return {}
    hours = rated.hours(samples) if rated is not None else None
    return {"samples": samples, "hours": hours}


def why_json(row: BlockRow) -> str:
    """The block's row; ``headroom_bytes`` is free at its own peak."""
    return _document({**dataclasses.asdict(row), "headroom_bytes": row.headroom_bytes})


def verification_json(check: Verification) -> str:
    """The verification's fields, ``passed`` and ``allocated_error``."""
    return _document(
        {
            "passed": check.passed,
            "allocated_error": check.allocated_error,
            **dataclasses.asdict(check),
        }
    )


def layers_json(layers: Sequence[Layer]) -> str:
    """``{"layers": [...]}``, every layer, equal ones not merged."""
    return _document({"layers": [dataclasses.asdict(layer) for layer in layers]})


def gpus_json(gpus: Iterable[Gpu]) -> str:
    """``{"gpus": [...]}``, each with the shares of its rates; unknown is null.

    ``interconnect`` is what usually connects several in one machine.
    """
    rows = [
        dataclasses.asdict(gpu)
        | {
            "interconnect": find_link(gpu, across_nodes=False).name,
            "shares": find_shares(gpu)._asdict(),
        }
        for gpu in gpus
    ]
    return _document({"gpus": rows})


def export_json(to: str, text: str) -> str:
    """``{"to": ..., "text": ...}``."""
    return _document({"to": to, "text": text})


def explanation_json(found: Explanation) -> str:
    """The explanation's fields; unknown bytes are null."""
    return _document(dataclasses.asdict(found))


def findings_json(findings: Sequence[Finding]) -> str:
    """``{"problems": ..., "findings": [...]}``."""
    problems = sum(finding.verdict == "problem" for finding in findings)
    rows = [dataclasses.asdict(finding) for finding in findings]
    return _document({"problems": problems, "findings": rows})


def error_json(error: Exception) -> str:
    """``{"error": {"type", "message", ...}}`` with the error's own fields."""
    fields: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, DoesNotFitError):
        fields |= {
            "needed_bytes": error.needed_bytes,
            "floor_bytes": error.floor_bytes,
            "batch_bytes": error.batch_bytes,
            "proven": error.proven,
            "notes": list(error.notes),
            "usable_bytes": error.usable_bytes,
            "host_bytes": error.host_bytes,
            "host_ram_bytes": error.host_ram_bytes,
            "largest": {"name": error.largest[0], "bytes": error.largest[1]},
            "suggestions": [_suggestion(item) for item in error.suggestions],
        }
    elif isinstance(error, BudgetfitError):
        fields |= error.__dict__
    return _document({"error": fields})


def _suggestion(item: Suggestion) -> dict[str, Any]:
    recipe: Any = item.recipe
    return {
        "text": item.text,
        "options": item.options,
        "arguments": item.arguments,
        "peak_bytes": item.peak_bytes,
        "host_bytes": item.host_bytes,
        "samples_per_s": item.samples_per_s,
        "changes_training": item.changes_training,
        "recipe": dataclasses.asdict(recipe) if recipe is not None else None,
    }


def _document(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1)
