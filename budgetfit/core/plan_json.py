"""Strict (de)serialization of plans as JSON: a saved plan is untrusted data.

pydantic checks the types of fields. This module checks what JSON lets through
(duplicate keys, NaN, unbounded numbers and nesting) and consistency between fields.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import TypeAdapter, ValidationError

from budgetfit.core.plan import Estimate, Plan
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe, SegmentMode
from budgetfit.errors import InputError

FORMAT: Final = 1  # raised when a field changes its meaning
MAX_FILE_BYTES: Final = 64 * 2**20  # a plan of a thousand blocks has 2 MB
_LARGEST_NUMBER: Final = 2**63
_DEEPEST: Final = 24  # a plan has 7
# step -1 is the setup; another option may cost less time than the plan's.
_MAY_BE_NEGATIVE: Final = frozenset({"step", "extra_ms"})
_MODEL_SETTINGS: Final = ("model", "settings")
_NOT_SAVED: Final = {"source", "lazy_alternatives", "lazy_curves"}
_RATE: Final = "samples_per_s"
_TIMES: Final = ("samples", "hours")  # of `--json --samples N`
_MODES: Final = ("keep", *get_args(SegmentMode))
_ASKED: Final[dict[str, tuple[type, ...]]] = {
    "model": (str,),
    "vram": (int, str),
    "gpu": (str,),
    "max_length": (int,),
    "image_size": (str,),
    "frames": (int,),
    "text_only": (bool,),
    "lengths": (dict,),
    "image_sizes": (dict,),
    "loss": (str,),
    "loss_of_factory": (bool,),
    "batch": (str,),
    "trust_remote_code": (bool,),
    "gpus": (int, str),
    "checkpointing": (str,),
}


# Sizes of samples, and how many there are of each.
_SIZES: Final = {
    "lengths": re.compile(r"[1-9]\d{0,8}"),
    "image_sizes": re.compile(r"[1-9]\d{0,8}x[1-9]\d{0,8}"),
}
_LONGEST_NAME: Final = 200  # a field of ours has 60 characters at most
_ANEW: Final = "Save it again: budgetfit plan MODEL --vram 24GB --save plan.json"


def damaged_plan_error(where: str, why: str) -> InputError:
    """Return an InputError that names a field and what is wrong with it."""
    if len(where) > _LONGEST_NAME:
        where = f"{where[:100]}...{where[-40:]}"
    return InputError(
        f"The saved plan is damaged at {where!r}: {why.rstrip('.')}. {_ANEW}"
    )


def read_plan_text(path: str | Path) -> str:
    """Read a plan file, unless it is too large for a plan."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, TypeError, ValueError) as error:  # no path, or a zero in it
        raise InputError(
            f"Cannot read the plan {str(path)!r}: {error}. {_ANEW}"
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise InputError(f"{str(path)!r} is too large for a plan. {_ANEW}")
    return text


def _parse_document(text: str) -> dict[str, Any]:
    """Parse JSON; refuse duplicate keys and numbers that are not finite.

    Raises:
        InputError: Names the field.
    """
    try:
        data = json.loads(text, object_pairs_hook=_each_once)
    except RecursionError:
        raise InputError(
            f"This is not a saved plan: it is nested too deep. {_ANEW}"
        ) from None
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(
            f"This is not a saved plan: line {error.lineno} is not JSON. {_ANEW}"
        ) from None
    except (TypeError, ValueError) as error:  # no text at all, or a number too long
        raise InputError(f"This is not a saved plan: {error}. {_ANEW}") from None
    found = data.pop("format", None) if isinstance(data, dict) else None
    if not isinstance(data, dict) or type(found) is not int or found != FORMAT:
        raise InputError(f"This is not a plan of this version. {_ANEW}")
    for where, value in _values(data):
        if why := _why_not(where, value):
            raise damaged_plan_error(".".join(where), why)
    return data


def to_json(plan: Plan) -> str:
    """Return ``plan`` as one JSON document."""
    plain = TypeAdapter(Plan).dump_python(
        replace(plan, source=None, lazy_curves=None), mode="json", exclude=_NOT_SAVED
    )
    # Derived fields, for other readers of the document.
    plain["estimate"][_RATE] = plan.estimate.samples_per_s
    for row, known in zip(plain["alternatives"], plan.alternatives, strict=True):
        row["estimate"][_RATE] = known.estimate.samples_per_s
    return json.dumps({"format": FORMAT, **plain}, indent=1)


def from_json(text: str) -> Plan:
    """Read what ``to_json`` wrote.

    Raises:
        InputError: If the text is not a plan of this format; names the field.
    """
    data = _parse_document(text)
    _drop_rates(data)
    try:
        # In JSON mode pydantic accepts lists for tuples and coerces nothing else.
        plan = TypeAdapter(Plan).validate_json(
            json.dumps(data), strict=True, extra="forbid"
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise damaged_plan_error(
            where, first["msg"].removeprefix("Value error, ")
        ) from None
    for where, why in _faults(plan):
        raise damaged_plan_error(where, why)
    return plan


def _drop_rates(document: dict[str, Any]) -> None:
    """Drop derived fields: ``samples_per_s`` and hours."""
    for name in _TIMES:
        document.pop(name, None)
    rows = document.get("alternatives")
    for holder in (document, *(rows if isinstance(rows, list) else ())):
        estimate = holder.get("estimate") if isinstance(holder, dict) else None
        if isinstance(estimate, dict):
            estimate.pop(_RATE, None)
            if estimate.get("layers") == []:  # in plans of earlier versions
                del estimate["layers"]


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    for name in found:
        if not _is_text(name):
            raise damaged_plan_error(ascii(name)[1:-1], "the name is no valid Unicode")
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise damaged_plan_error(twice, "the field stands twice")
    return found


def _values(data: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each leaf value with its path."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), data)]
    while waiting:
        where, value = waiting.pop()
        if not isinstance(value, (dict, list)):
            yield where, value
            continue
        if len(where) > _DEEPEST:
            raise damaged_plan_error(".".join(where), "it is nested too deep")
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        waiting += [((*where, str(name)), inner) for name, inner in pairs]


def _why_not(where: tuple[str, ...], value: object) -> str:
    """Return why a value is valid nowhere in a plan; empty if it is."""
    if isinstance(value, str):
        return "" if _is_text(value) else "the text is no valid Unicode"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    if where[:2] == _MODEL_SETTINGS:  # values of a model's config: any number
        return ""
    if not abs(value) < _LARGEST_NUMBER:  # nor is NaN
        return "the number is out of range"
    if value < 0 and where[-1] not in _MAY_BE_NEGATIVE:
        return f"{value} is below zero"
    return ""


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _faults(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield fields that are not consistent with others, each with the reason."""
    blocks = plan.model.blocks
    yield from _recipe_faults("recipe", plan.recipe, blocks)
    yield from _estimate_faults("estimate", plan.estimate)
    for number, row in enumerate(plan.alternatives):
        where = f"alternatives.{number}.estimate"
        yield from _recipe_faults(f"{where}.recipe", row.estimate.recipe, blocks)
        yield from _estimate_faults(where, row.estimate)
    for number, block in enumerate(plan.block_table):
        where, count = f"block_table.{number}", len(block.choices)
        if block.chosen >= count:
            yield f"{where}.chosen", f"there are {count} choices, counted from 0"
        for choice, each in enumerate(block.choices):
            if each.mode not in _MODES:
                why = f"{each.mode!r:.60} is none of {', '.join(_MODES)}"
                yield f"{where}.choices.{choice}.mode", why
    if plan.model.batch_dims is not None:
        try:
            plan.model.batch_dims.check_names(plan.model.batch)
        except InputError as error:
            yield "model.batch_dims.named", str(error)
    yield from _provenance_faults(plan.provenance)
    # All numbers belong to the original recipe.
    for name in plan.recipe.__dataclass_fields__:
        known = getattr(plan.estimate.recipe, name)
        if getattr(plan.recipe, name) != known:
            why = f"all numbers of the plan are those of {known!r:.80}, so it cannot be"
            yield (
                f"recipe.{name}",
                f"{why} edited by hand: plan again with what you want",
            )


def _recipe_faults(
    where: str, recipe: Recipe, blocks: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    try:
        find_precision(recipe.precision)
    except InputError as error:
        yield f"{where}.precision", str(error)
    for name in recipe.wrapped_blocks:
        if name not in blocks:
            yield f"{where}.segments", f"the planned model has no block {name!r}"


def _estimate_faults(where: str, estimate: Estimate) -> Iterator[tuple[str, str]]:
    for name in ("step_ms", "time_factor"):
        if getattr(estimate, name) <= 0:
            yield f"{where}.{name}", "it must be above zero"
    if not 0 <= estimate.optimizer_ms <= estimate.step_ms:
        yield f"{where}.optimizer_ms", "it must be a part of step_ms"
    low_ms, high_ms = estimate.step_range_ms or (estimate.step_ms, estimate.step_ms)
    if not 0 < low_ms <= estimate.step_ms <= high_ms:
        yield f"{where}.step_range_ms", "step_ms must be inside it"
    count = len(estimate.timeline.points)
    if count and estimate.timeline.peak >= count:
        yield f"{where}.timeline.peak", f"there are {count} points, counted from 0"


def _are_counts(value: dict[Any, Any], size: re.Pattern[str]) -> bool:
    """Whether keys are sizes, and values numbers of samples; at least one."""
    return bool(value) and all(
        size.fullmatch(key) and type(count) is int and count > 0
        for key, count in value.items()
    )


def _provenance_faults(provenance: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Check what reports show, and the arguments that ``verify`` uses again."""
    asked = provenance.get("asked")
    if asked is None:
        asked = {}
    elif not isinstance(asked, dict):
        yield "provenance.asked", "an object is expected"
    for name, kinds in _ASKED.items():
        value = asked.get(name)
        if value is not None and type(value) not in kinds:  # True is not a number here
            yield f"provenance.asked.{name}", f"{value!r:.60} was not asked"
    for name, size in _SIZES.items():
        value = asked.get(name)
        if isinstance(value, dict) and not _are_counts(value, size):
            yield f"provenance.asked.{name}", "a number of samples by size is expected"
    length = provenance.get("longest_length")
    if length is not None and (type(length) is not int or length < 1):
        yield "provenance.longest_length", "a whole number is expected"
    for name in ("solver", "certificate"):
        if not isinstance(provenance.get(name, ""), str):
            yield f"provenance.{name}", "a text is expected"
