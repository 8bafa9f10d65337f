"""What of the evaluation measurement can be held without a device."""

from dataclasses import replace

import pytest

from tests.accuracy.evaluation import (
    LOOPS,
    Outcome,
    in_files,
    keywords,
    larger,
    loops_of,
    next_power,
    settings,
    table,
)
from tests.accuracy.evaluation_cases import CASES
from tests.accuracy.evaluation_loops import BATCHES, evaluation_samples
from tests.accuracy.report import of_other_commands
from tests.integrations.tiny_training import plan_for, tiny_model
from tests.processes import python

PLANNED = 6
OUTCOME = Outcome(
    case="one",
    loop="trainer",
    samples=6,
    fits=True,
    allocated_bytes=80 << 20,
    reserved_bytes=90 << 20,
    usable_bytes=100 << 20,
    retries=0,
    largest=9,
    next_power_fits=True,
    trained=True,
)


def test_the_measured_program_does_without_budgetfit() -> None:
    program = (
        "import sys, tests.accuracy.evaluation_loops\n"
        "sys.exit(any(name.startswith('budgetfit') for name in sys.modules))"
    )
    assert python("-c", program).returncode == 0


def test_what_every_export_says_is_what_is_measured() -> None:
    plan = plan_for(tiny_model("gpt2"), (), precision="bf16-mixed", batch_size=4)
    plan = replace(plan, estimate=replace(plan.estimate, eval_batch_size=PLANNED))
    name = "per_device_eval_batch_size"
    assert settings(plan, "trainer")[name] == PLANNED
    assert settings(plan, "trainer")["bf16"] is True
    assert settings(plan, "sft")[name] == PLANNED
    assert settings(plan, "dpo")[name] == PLANNED / 2  # pairs
    assert settings(plan, "accelerate") == {"mixed_precision": "bf16"}
    assert settings(plan, "lightning")["precision"] == "bf16-mixed"
    assert settings(plan, "torch") == {}
    assert in_files(plan) == {PLANNED}


def test_a_program_that_needs_budgetfit_is_not_measured() -> None:
    with pytest.raises(ValueError, match="needs budgetfit"):
        keywords("import budgetfit\nTrainingArguments(a=1)", "TrainingArguments")


def test_larger_batches_begin_right_above_the_planned_one() -> None:
    assert larger(1) == [2]
    assert larger(16) == [17, 18, 20, 24, 32]
    assert [next_power(each) for each in (3, 4, 5)] == [4, 8, 8]
    assert evaluation_samples(5) == BATCHES * 5 + 2


def test_every_case_has_loops_that_are_known() -> None:
    asked = {name for case in CASES.values() for name in loops_of(case)}
    assert asked == set(LOOPS)


def test_the_accuracy_page_keeps_its_section_when_it_is_made_again() -> None:
    section = "\n## Evaluation between training steps\n\nThe figures."
    assert of_other_commands(f"# Accuracy\n\nrows\n{section}\n") == section
    assert of_other_commands("# Accuracy\n") == ""


def test_the_table_begins_with_the_worst_and_counts() -> None:
    over = replace(OUTCOME, case="over", fits=False, reserved_bytes=120 << 20)
    tight = replace(OUTCOME, case="tight", allocated_bytes=99 << 20, largest=6)
    lines = table([OUTCOME, tight, over]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == [
        "| over",
        "| tight",
        "| one",
    ]
    assert "| 120.0% | NO |" in lines[2]
    assert "within budget 2 of 3" in lines[-1]
