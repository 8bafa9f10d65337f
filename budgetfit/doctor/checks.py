"""The whole check-up: gather the facts, judge each."""

from collections.abc import Iterator

from budgetfit.doctor.check_allocator import judge_allocator
from budgetfit.doctor.check_gpu import judge_card
from budgetfit.doctor.check_libraries import judge_libraries
from budgetfit.doctor.check_torch import judge_torch
from budgetfit.doctor.facts import Machine
from budgetfit.doctor.finding import Finding, note, ok, problem
from budgetfit.doctor.gather import gather, with_card


def check_up(gpu: str | None = None) -> tuple[Finding, ...]:
    """Look at this installation; works without a GPU and with libraries that break.

    Args:
        gpu: Judge as if this card were in the machine.

    Raises:
        InputError: No such card; names the nearest.
    """
    machine = gather()
    return tuple(judge(machine if gpu is None else with_card(machine, gpu)))


def judge(machine: Machine) -> Iterator[Finding]:
    """Yield every finding about a machine, from its facts alone."""
    yield from judge_torch(machine)
    yield from judge_card(machine)
    yield from judge_allocator(machine)
    yield from judge_libraries(machine)
    yield _cache(machine)


def _cache(machine: Machine) -> Finding:
    if machine.cache_error:
        return problem(
            "cache",
            f"Traces cannot be kept in {machine.cache_folder} "
            f"({machine.cache_error}): every plan traces anew.",
            "export BUDGETFIT_CACHE=/a/folder/of/yours",
        )
    if not machine.cache_folder:
        return note(
            "cache",
            "Traces are not kept (BUDGETFIT_CACHE, or no home folder): every "
            "plan traces anew.",
            "export BUDGETFIT_CACHE=/a/folder/of/yours",
        )
    if machine.cache_no_key:
        return note(
            "cache",
            "Traces cannot be kept, and every plan traces anew: nothing says what "
            f"they depend on in {machine.cache_no_key}.",
            "python -m venv .venv && .venv/bin/pip install budgetfit",
        )
    return ok("cache", f"Traces are kept in {machine.cache_folder}.")
