"""Whole answers on disk: the same question again is answered without torch.

An answer is what the api returned, as JSON in the folder of the trace cache, with the
files that computing it imported. It is used while those are unchanged, and everything
in its key (``answer_key``).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
import zlib
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from budgetfit.cli.answer_key import answer_key, file_version, imported_files
from budgetfit.core.plan import (
    Alternative,
    Estimate,
    GpuComparison,
    Layer,
    LazyAlternatives,
    ModelSummary,
    Plan,
)
from budgetfit.core.recipe import Recipe
from budgetfit.errors import DoesNotFitError, Suggestion
from budgetfit.traces.cache.code_hash import NotCacheableError
from budgetfit.traces.cache.folder import CACHE_VARIABLE, CacheFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pydantic import TypeAdapter

_T = TypeVar("_T")

FORMAT: Final = "budgetfit answer 1"
_KINDS: Final[Mapping[str, Any]] = {
    "plan": Plan,
    "estimate": tuple[Estimate, ModelSummary],
    "compare": tuple[tuple[GpuComparison, ...], ModelSummary],
    "layers": tuple[Layer, ...],
}
_FAST: Final = 1  # compression level
_GZIP: Final = 31  # window bits of zlib that mean gzip, with its checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suggestion(Suggestion):
    """A suggestion whose recipe has a type that can be read again."""

    recipe: Recipe | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """The fields of a ``DoesNotFitError``."""

    needed_bytes: int
    usable_bytes: int
    largest: tuple[str, int]
    suggestions: tuple[_Suggestion, ...]
    floor_bytes: int
    notes: tuple[str, ...]
    batch_bytes: int = 0
    host_bytes: int = 0
    host_ram_bytes: int | None = None


class _Answer(NamedTuple):
    """What is stored.

    Attributes:
        value: What the api returned; for ``DoesNotFitError`` a ``_Refusal``.
        complete: False for a plan of which only ``judged_alternatives`` are known.
    """

    value: Any
    complete: bool = True


class AnswerCache(CacheFolder):
    """The answers in the cache's folder."""

    suffix = ".json.gz"

    def load(self, key: str | None, command: str) -> _Answer | None:
        """Return the answer stored under ``key``; None if there is none."""
        return self.read(key, lambda path, key: _read(path, key, command))

    def store(self, key: str | None, command: str, answer: _Answer) -> None:
        """Store ``answer`` under ``key``, if possible."""
        self.write(key, lambda file, key: _write(file, key, command, answer))


def ask(
    command: str, asked: Mapping[str, object], compute: Callable[[], Any]
) -> object:
    """Return what ``compute`` returns, from disk where nothing changed.

    ``command``: ``plan``, ``estimate``, ``compare`` or ``layers``; ``asked``: the
    arguments that decide its answer.
    """
    key = answer_key(command, asked)
    if key is None:
        return compute()

    def keep(answer: _Answer) -> None:
        if answer_key(command, asked) == key and not _reads_card(asked):
            cache.store(key, command, answer)

    cache = AnswerCache()
    stored = cache.load(key, command)
    if stored is None:
        return _computed(compute, keep)
    value = stored.value
    if isinstance(value, _Refusal):
        given = {field.name: getattr(value, field.name) for field in fields(_Refusal)}
        raise DoesNotFitError(**given)
    if stored.complete:
        return value
    return _with_alternatives(value, lambda: compute().alternatives, keep)


def _computed(compute: Callable[[], Any], keep: Callable[[_Answer], None]) -> object:
    try:
        found = compute()
    except DoesNotFitError as error:
        with contextlib.suppress(Exception):  # it is the answer, kept or not
            keep(_Answer(_refusal(error)))
        raise
    lazy = found.lazy_alternatives if isinstance(found, Plan) else None
    with contextlib.suppress(Exception):
        keep(_Answer(_plain(found), complete=lazy is None))
    return found if lazy is None else _with_alternatives(found, lazy.evaluate, keep)


def _with_alternatives(
    plan: Plan,
    evaluate: Callable[[], tuple[Alternative, ...]],
    keep: Callable[[_Answer], None],
) -> Plan:
    """Return a plan that is kept again when all its alternatives are evaluated."""
    known = plan.judged_alternatives

    def evaluated() -> tuple[Alternative, ...]:
        rows = evaluate()
        whole = replace(_plain(plan), alternatives=rows)
        with contextlib.suppress(Exception):
            keep(_Answer(whole))
        return rows

    lazy = LazyAlternatives(known=known, evaluate=evaluated)
    return replace(plan, alternatives=(), lazy_alternatives=lazy)


def _plain(found: _T) -> _T:
    """Return an answer without what cannot be written."""
    if not isinstance(found, Plan):
        return found
    return replace(
        found,
        source=None,
        alternatives=found.judged_alternatives,
        lazy_alternatives=None,
        lazy_curves=None,
    )


def _refusal(error: DoesNotFitError) -> _Refusal:
    given = {
        field.name: getattr(error, field.name)
        for field in fields(_Refusal)
        if field.name != "suggestions"
    }
    suggestions = tuple(
        _Suggestion(**{each.name: getattr(item, each.name) for each in fields(item)})
        for item in error.suggestions
    )
    return _Refusal(suggestions=suggestions, **given)


def _reads_card(asked: Mapping[str, object]) -> bool:
    """Whether the answer depends on the card of this machine, and what it has free."""
    # Called after the computation, which has imported torch.
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    from budgetfit.inputs.several_gpus import find_counted_gpu
    from budgetfit.inputs.target_gpu import current_gpu

    several = asked.get("gpus")  # of compare: cards
    named = several if isinstance(several, (list, tuple)) else ()
    named = named or [asked.get("gpu") or current_gpu().name]
    return current_gpu().name in {find_counted_gpu(name).gpu.name for name in named}


def _read(path: Path, key: str, command: str) -> _Answer | None:
    # Not gzip.open, whose errors are those of a disk.
    text = zlib.decompress(path.read_bytes(), wbits=_GZIP)
    head, _, content = text.partition(b"\n")
    known = json.loads(head)
    if (known["format"], known["key"]) != (FORMAT, key):
        raise ValueError(known["key"])
    if any(
        file_version(file) != tuple(then) for file, then in known["imported"].items()
    ):
        return None
    adapter = _adapter(command, refused=known["refused"])
    return _Answer(
        adapter.validate_json(content, strict=True), complete=known["complete"]
    )


def _write(file: IO[bytes], key: str, command: str, answer: _Answer) -> None:
    """Write an answer.

    Raises:
        NotCacheableError: It could not be read again as it is, or not relied on.
    """
    refused = isinstance(answer.value, _Refusal)
    adapter = _adapter(command, refused=refused)
    content = json.dumps(adapter.dump_python(answer.value, mode="json"))
    again = adapter.validate_json(content, strict=True)
    # Numbers that are equal may be printed differently: 8 and 8.0. A warning that the
    # cache of traces is in trouble names the variable; tomorrow it need not be.
    if _printed(again) != _printed(answer.value) or CACHE_VARIABLE in content:
        raise NotCacheableError(command)
    head = {
        "format": FORMAT,
        "key": key,
        "imported": imported_files(),
        "refused": refused,
        "complete": answer.complete,
    }
    text = f"{json.dumps(head)}\n{content}"
    file.write(gzip.compress(text.encode(), compresslevel=_FAST))


def _printed(value: object) -> str:
    """Return all fields of an answer as text."""
    if isinstance(value, (list, tuple)):
        return str([_printed(each) for each in value])
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    return repr(value)


def _adapter(command: str, *, refused: bool) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(_Refusal if refused else _KINDS[command])
