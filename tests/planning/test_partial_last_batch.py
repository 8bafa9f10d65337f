"""A smaller batch on the way can make a plan that fits too large."""

from budgetfit.core.budget import Budget
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import StepTrace
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import replay
from budgetfit.planning.judge import last_batch_warnings
from tests.memory.made_traces import MIB, TraceMaker

ADA = find_gpu("rtx-4090")


def splitting() -> StepTrace:
    """Three samples reserve 180 + 100 MiB; one sample splits these blocks badly.

    It takes 60 of the 100, so that the 100 split the 180: after them, 80 and the 100
    are free, of which two times 90 find only one.
    """
    made = TraceMaker()
    for step in (0, 1):
        with made.phase("forward", step):
            made.born("x", per_sample=60 * MIB)
            made.born("weights", 100 * MIB)
            made.die("x")
            made.born("one", 90 * MIB)
            made.born("two", 90 * MIB)
            made.die("weights", "one", "two")
    return made.trace()


def within(limit_mib: int) -> Budget:
    return Budget(total_bytes=limit_mib * MIB, context_bytes=0, headroom_bytes=0)


def test_the_warning_says_what_would_be_reserved_and_what_to_do() -> None:
    trace, recipe = splitting(), Recipe(batch_size=3)
    assert replay(trace, 3, ADA).reserved_bytes == 280 * MIB
    (warning,) = last_batch_warnings(trace, recipe, ADA, within(300))
    assert "370 MiB" in warning
    assert "300 MiB" in warning
    assert "drop_last=True" in warning


def test_there_is_no_warning_where_it_still_fits() -> None:
    trace, recipe = splitting(), Recipe(batch_size=3)
    assert last_batch_warnings(trace, recipe, ADA, within(370)) == ()


def test_a_batch_of_one_has_no_smaller_one_and_without_a_trace_nothing_is_said() -> (
    None
):
    few = within(300)
    assert last_batch_warnings(splitting(), Recipe(batch_size=1), ADA, few) == ()
    assert last_batch_warnings(None, Recipe(batch_size=3), ADA, few) == ()
