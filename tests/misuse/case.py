"""A wrong use of budgetfit: what is done, and what is the right answer to it."""

import contextlib
import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from budgetfit import BudgetfitError
from tests.zoo.state import assert_same, model_state, model_values, switches

SUBJECTS = (
    "order_and_twice",
    "other_models",
    "saved_states",
    "modes",
    "precision",
    "batch_structure",
    "gradients",
    "parameters",
    "losses",
    "copies_and_wrappers",
    "other_libraries",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One wrong use.

    Attributes:
        subject: The file that it is in.
        name: Unique in that file.
        did: What was done, in words.
        kind: The class of the error or warning that is right; None for a right result,
            which ``do`` checks itself.
        words: A pattern that its text holds.
        do: Does it.
    """

    subject: str
    name: str
    did: str
    kind: type[BaseException] | None
    words: str
    do: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened in a case; ``is_right`` says whether it should have."""

    is_right: bool
    happened: str


class HalfChangedError(AssertionError):
    """An error left a model or the process in another state than before."""


_CASES: list[Case] = []
_Case = Callable[[], object]


def refused(
    words: str, kind: type[Exception] = BudgetfitError
) -> Callable[[_Case], _Case]:
    """Declare that an error is right, of class ``kind``, its text with ``words``."""
    return _declare(kind, words)


def warned(words: str) -> Callable[[_Case], _Case]:
    """Declare that a warning with ``words`` is right, and no error."""
    return _declare(UserWarning, words)


def right() -> Callable[[_Case], _Case]:
    """Declare that a right result is right: the function asserts what it is."""
    return _declare(None, "")


def all_cases() -> tuple[Case, ...]:
    """Return every case, subject by subject."""
    for subject in SUBJECTS:
        importlib.import_module(f"tests.misuse.{subject}")
    return tuple(sorted(_CASES, key=lambda case: SUBJECTS.index(case.subject)))


def judge(case: Case) -> Outcome:
    """Do what a case does, and compare what happens with what is right."""
    is_warning = case.kind is not None and issubclass(case.kind, Warning)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            case.do()
        except Exception as error:  # noqa: BLE001 - any of them is an outcome
            text = f"{type(error).__name__}: {error}"
            expected = case.kind is not None and not is_warning
            return Outcome(
                expected
                and isinstance(error, case.kind or ())
                and re.search(case.words, text, re.DOTALL) is not None,
                text,
            )
    texts = [
        str(item.message) for item in said if issubclass(item.category, UserWarning)
    ]
    if is_warning:
        found = [text for text in texts if re.search(case.words, text, re.DOTALL)]
        return Outcome(
            bool(found), "UserWarning: " + found[0] if found else "no such warning"
        )
    if case.kind is not None:
        return Outcome(is_right=False, happened=f"no error, not {case.kind.__name__}")
    return Outcome(is_right=True, happened="right result")


@contextlib.contextmanager
def unharmed(model: nn.Module) -> Iterator[None]:
    """Where the body ends in an error, see that it left model and process alone.

    Raises:
        HalfChangedError: If it did not.
    """

    def state() -> dict[str, object]:
        return switches() | model_state(model) | model_values(model)

    before = state()
    try:
        yield
    except Exception as error:
        try:
            assert_same(before, state())
        except AssertionError as changed:
            raise HalfChangedError(f"{changed}, after {error}") from error
        raise


def _declare(kind: type[BaseException] | None, words: str) -> Callable[[_Case], _Case]:
    def declare(do: _Case) -> _Case:
        _CASES.append(
            Case(
                subject=do.__module__.rpartition(".")[2],
                name=do.__name__,
                did=" ".join((do.__doc__ or "").split()).rstrip("."),
                kind=kind,
                words=words,
                do=do,
            )
        )
        return do

    return declare
