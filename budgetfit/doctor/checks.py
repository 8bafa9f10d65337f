"""Run all checks of ``budgetfit doctor``."""

from collections.abc import Iterator

from budgetfit.doctor.check_allocator import check_allocator
from budgetfit.doctor.check_gpu import check_gpus
from budgetfit.doctor.check_libraries import check_libraries
from budgetfit.doctor.check_torch import check_torch
from budgetfit.doctor.facts import Finding, Machine, note, ok, problem
from budgetfit.doctor.gather import gather, with_gpu


def check_installation(gpu: str | None = None) -> tuple[Finding, ...]:
    """Check this installation; works without a GPU and with broken libraries.

    ``gpu``: check as if it were in the machine.

    Raises:
        InputError: No such GPU; names the nearest.
    """
    machine = gather()
    return tuple(run_checks(machine if gpu is None else with_gpu(machine, gpu)))


def run_checks(machine: Machine) -> Iterator[Finding]:
    """Yield all findings about a machine, given its facts."""
    yield from check_torch(machine)
    yield from check_gpus(machine)
    yield from check_allocator(machine)
    yield from check_libraries(machine)
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
