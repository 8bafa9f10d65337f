"""A short part of the fuzzing, with fixed seeds; the long one is started by hand.

``python -m tests.fuzz.command_lines`` and ``python -m tests.fuzz.plan_files`` run 2,000
cases each, with a limit of 60 s for each.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import budgetfit
from budgetfit.cli.parsing import one_or_list, policy_or_blocks, split_names
from budgetfit.core.units import parse_bytes
from budgetfit.traces.cache.folder import CACHE_VARIABLE
from tests.fuzz import words
from tests.fuzz.command_lines import run_line
from tests.fuzz.lines import Line, commands, make_lines
from tests.fuzz.place import write_place, write_plans
from tests.fuzz.plan_files import make_cases, quiet, run_case
from tests.fuzz.surroundings import VARIABLES

SEED = 20
LINES, PLANS = 15, 30


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A folder to work in, and the plans in it."""
    folder = write_place(tmp_path_factory.mktemp("place"))
    with quiet():
        plans = write_plans(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("traces")))
        yield folder, plans


def test_random_command_lines_end_as_documented(place: tuple[Path, Any]) -> None:
    assert place
    outcomes = [run_line(line) for line in make_lines(LINES, SEED)]
    faults = [(each.fault, each.case, each.text) for each in outcomes if each.fault]
    assert faults == []
    assert {"0", "2"} <= {each.ended for each in outcomes}


def test_every_command_is_drawn_with_words_for_each_of_its_values() -> None:
    """A new option without words of its own would meet nothing but nonsense."""
    known = commands()
    lines = make_lines(4000, SEED)
    assert {each.words[: len(name)] for name in known for each in lines} >= set(known)
    values = {
        parameter.name
        for command in known.values()
        for parameter in command.params
        if not getattr(parameter, "is_flag", False)
    }
    assert values == set(words.WRONG)
    assert values == {*words.RIGHT, *words.OPEN}
    # What doctor and explain are handed is not on their command lines.
    assert {each.given is None for each in lines} == {True, False}
    assert {name for each in lines for name, _ in each.variables} > set(VARIABLES)


def test_damaged_plans_are_refused_or_used(place: tuple[Path, Any]) -> None:
    folder, plans = place
    outcomes = [run_case(case, folder) for case in make_cases(PLANS, SEED, plans)]
    faults = [(each.fault, each.case, each.text) for each in outcomes if each.fault]
    assert faults == []
    assert {each.ended for each in outcomes} == {"refused", "used"}


@pytest.mark.parametrize(
    ("words", "codes", "fault"),
    [
        (("gpus",), {0}, ""),
        (("gpus",), {2}, "exit code 0, where it must be [2]"),
        (("export", "full.json"), {2}, ""),
        (("verify", "full.json", "--device=cpu", "--model=missing.py:x"), {2}, ""),
    ],
)
def test_the_fuzzer_sees_a_wrong_exit_code(
    place: tuple[Path, Any], words: tuple[str, ...], codes: set[int], fault: str
) -> None:
    assert place
    assert run_line(Line(words, frozenset(codes))).fault == fault


Edit = tuple[tuple[str | int, ...], Any, str]


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("recipe", "batch_size"), 3, "recipe.batch_size': all numbers of the plan"),
        (("recipe", "batch_size"), "2", "recipe.batch_size': Input should be a valid"),
        (("recipe", "loss_chunks"), True, "recipe.loss_chunks'"),
        (("recipe", "segments", 0, "mode"), "x", "recipe.segments.0.mode'"),
        (("estimate", "step_ms"), 0, "estimate.step_ms': it must be above zero"),
        (("estimate", "optimizer_ms"), 1e9, "optimizer_ms': it must be a part of"),
        (("estimate", "step_range_ms"), [0.0, 1.0], "step_ms must be inside it"),
        (("estimate", "step_ms"), float("nan"), "estimate.step_ms': the number is out"),
        (("estimate", "allocated_bytes"), -1, "allocated_bytes': -1 is below zero"),
        (
            ("estimate", "allocated_bytes"),
            10**30,
            "allocated_bytes': the number is out",
        ),
        (("estimate", "timeline", "peak"), 999, "estimate.timeline.peak': there are"),
        (("block_table", 1, "chosen"), 99, "block_table.1.chosen': there are"),
        (("block_table", 1, "choices", 0, "mode"), "x", "choices.0.mode': 'x' is none"),
        (("budget", "total_bytes"), 1, "budget': 1 B leave nothing"),
        (("provenance", "asked", "model"), ["x"], "provenance.asked.model'"),
        (("provenance", "solver"), {}, "provenance.solver': a text is expected"),
        (("model", "name"), "\ud800", "model.name': the text is no valid Unicode"),
        (("provenance", "more"), [[[[[[]]]]]] * 2, ""),
    ],
)
def test_an_edited_field_is_named(
    place: tuple[Path, Any], where: tuple[str | int, ...], value: object, message: str
) -> None:
    document = json.loads(json.dumps(place[1]["full"]))
    home = document
    for part in where[:-1]:
        home = home[part]
    home[where[-1]] = value
    text = json.dumps(document)
    if not message:
        assert budgetfit.Plan.from_json(text).fits
        return
    with pytest.raises(budgetfit.InputError) as caught:
        budgetfit.Plan.from_json(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 1, "recipe": 1, "recipe": 2}', "'recipe': the field stands twice"),
        ("[" * 100_000, "not a saved plan: it is nested too deep"),
        ('{"format": 1, "a": ' + "[" * 40 + "]" * 40 + "}", "is nested too deep"),
        ('{"format": true}', "not a plan of this version"),
        ('{"format": 1, "recipe": 1e999}', "'recipe': the number is out of range"),
        ('{"format": 1, "recipe": ' + "9" * 5000 + "}", "not a saved plan: Exceeds"),
    ],
)
def test_what_json_lets_through_is_refused(text: str, message: str) -> None:
    with pytest.raises(budgetfit.InputError) as caught:
        budgetfit.Plan.from_json(text)
    assert message in str(caught.value)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
)
SIZES = st.one_of(
    st.text(max_size=12),
    st.builds(
        "{}{}".format, st.floats(), st.sampled_from(["GB", "GiB", " MB", "B", ""])
    ),
    st.builds("{}{}".format, st.integers(), st.sampled_from(["GB", "kib", "TB"])),
)


@given(size=SIZES | ANYTHING)
def test_a_size_is_bytes_or_refused(size: Any) -> None:
    with contextlib.suppress(budgetfit.InputError):
        assert parse_bytes(size) > 0


@given(text=st.text(max_size=40))
def test_any_word_of_the_command_line_is_read(text: str) -> None:
    assert one_or_list(text) or not text
    assert isinstance(policy_or_blocks(text), (str, list))
    assert all(split_names(text))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    fields=st.fixed_dictionaries(
        {"batch_size": st.integers(-1, 9) | ANYTHING},
        optional={
            "gradient_accumulation_steps": st.integers(0, 3) | ANYTHING,
            "precision": st.sampled_from(["fp32", "bf16", "x"]) | ANYTHING,
            "optimizer": st.sampled_from(["sgd", "adamw_torch"]) | ANYTHING,
            "segments": st.lists(
                st.builds(dict, blocks=st.lists(st.text(max_size=3), max_size=2))
            )
            | ANYTHING,
            "loss_chunks": st.integers(0, 3) | ANYTHING,
            "optimizer_in_backward": st.booleans() | ANYTHING,
            "compile": st.sampled_from(["none", "blocks"]) | ANYTHING,
        },
    )
)
def test_any_recipe_is_one_or_refused(fields: dict[str, Any]) -> None:
    """Also inside a saved plan, where the field is named."""
    with contextlib.suppress(budgetfit.InputError):
        recipe = budgetfit.Recipe(**fields)
        assert recipe.effective_batch_size >= recipe.batch_size >= 1
