"""The quick questions; ``python -m tests.situations.run`` asks all."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.situations.all_cases import all_cases
from tests.situations.answer import GIB, Answer, model_path
from tests.situations.case import Case
from tests.situations.expectation import Fits, OneLine, Refused, Rows

QUICK = ("llama-1b-as-loaded", "own-argument", "own-missing", "dit-no-batch")
CASES = {case.name: case for case in all_cases()}


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_question_is_answered_right(name: str) -> None:
    assert not list(CASES[name].expects.wrong(CASES[name].answer()))


def test_names_are_unique() -> None:
    assert Counter(case.name for case in all_cases()).most_common(1)[0][1] == 1


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_a_question_is_about_a_model_that_is_here(case: Case) -> None:
    model = case.question.split()[-1 if case.question.startswith("python ") else 1]
    path = model_path(model).partition(":")[0]
    assert Path(path).exists() or case.question.startswith("python ")


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_bounds_by_hand_agree_with_each_other(case: Case) -> None:
    expects = case.expects
    if isinstance(expects, Refused):
        assert expects.floor_gib < expects.known_gib
    if isinstance(expects, Fits):
        least, most = expects.reserved_gib
        assert expects.parameters_gib + (expects.states_gib or 0.0) < most
        assert least < most


ESTIMATE: dict[str, Any] = {
    "fits": True,
    "reserved_bytes": 10 * GIB,
    "host_bytes": 0,
    "step_ms": 1000.0,
    "at_peak_bytes": {"parameters": 4 * GIB, "optimizer_state": 2 * GIB},
    "recipe": {"batch_size": 2, "gradient_accumulation_steps": 4},
}
FITS = Fits(4.0, 2.0, (8, 12), effective=8)
BUDGET = {"total_bytes": 11 * GIB, "context_bytes": 0, "headroom_bytes": 0}


def _fitting(**changes: object) -> Answer:
    document = {"estimate": {**ESTIMATE, **changes}, "budget": BUDGET}
    return Answer(0, document, "", 0.0, 0.0)


def test_a_right_answer_has_nothing_wrong() -> None:
    assert not list(FITS.wrong(_fitting()))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"reserved_bytes": 13 * GIB}, "reserved 13.00 GiB"),
        ({"reserved_bytes": 11 * GIB + 1}, "usable bytes"),
        ({"host_bytes": 17 * GIB}, "17.00 GiB pinned"),
        ({"fits": False}, "fits is False"),
        (
            {"at_peak_bytes": {"parameters": 5 * GIB, "optimizer_state": 2 * GIB}},
            "parameters 5.000 GiB",
        ),
        (
            {"recipe": {"batch_size": 2, "gradient_accumulation_steps": 1}},
            "effective batch 2",
        ),
    ],
)
def test_a_wrong_fit_is_found(changes: dict[str, object], problem: str) -> None:
    assert any(problem in text for text in FITS.wrong(_fitting(**changes)))


def test_a_fit_that_is_refused_is_wrong() -> None:
    refused = Answer(3, {"error": {"message": "Does not fit"}}, "", 0.0, 0.0)
    assert list(FITS.wrong(refused)) == ["exit 3: Does not fit"]
    assert list(replace(FITS, says=("bf16",)).wrong(_fitting())) == [
        "does not say 'bf16'"
    ]


def _refused(needed: float, *suggestions: tuple[str, float]) -> Answer:
    error = {
        "needed_bytes": int(needed * GIB),
        "usable_bytes": 20 * GIB,
        "suggestions": [
            {"text": text, "peak_bytes": int(peak * GIB)} for text, peak in suggestions
        ],
    }
    return Answer(3, {"error": error}, "", 0.0, 0.0)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (_refused(31.0, ("LoRA", 9.0)), "30.00 is known to do"),
        (_refused(21.0, ("LoRA", 9.0)), "below 25.00 by hand"),
        (_refused(28.0, ("LoRA", 21.0)), "which does not fit"),
        (_refused(28.0, ("another", 9.0)), "'lora' is not suggested"),
        (_refused(28.0), "nothing is"),
        (_fitting(), "not refused"),
    ],
)
def test_a_wrong_refusal_is_found(answer: Answer, problem: str) -> None:
    expects = Refused(floor_gib=25.0, known_gib=30.0, suggests=("lora",))
    assert not list(expects.wrong(_refused(28.0, ("LoRA", 9.0))))
    assert any(problem in text for text in expects.wrong(answer))


def test_wrong_rows_and_lines_are_found() -> None:
    card = {"gpu": {"name": "t4"}, "fits": True}
    answer = Answer(0, {"cards": [card]}, "", 0.0, 0.0)
    assert not list(Rows(fits={"t4 full": True}).wrong(answer))
    assert list(Rows(fits={"t4 full": False, "l4 full": True}).wrong(answer)) == [
        "t4 full: fits is True, not False",
        "l4 full: fits is None, not True",
    ]
    mistake = Answer(2, {}, "Error: no such card.", 0.0, 0.0)
    assert not list(OneLine(says=("no such card",)).wrong(mistake))
    assert list(OneLine(says=("AMD",), code=1).wrong(mistake)) == [
        "exit 2: Error: no such card.",
        "does not say 'AMD'",
    ]
