"""What holds for every test: nobody's own files are read or written.

``--within SECONDS`` runs as many of the cheapest tests as take that long.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from budgetfit.calibration.file import FOLDER_VARIABLE
from budgetfit.traces.cache.folder import CACHE_VARIABLE
from tests import durations

# No test asserts a time: a busy machine is no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def no_files_of_this_machine(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """No calibration but an empty folder, and no cache of traces.

    For subprocesses and plans made once per session, too; tests of the files themselves
    choose folders of their own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("calibration")))
        patch.setenv(CACHE_VARIABLE, "off")
        yield


@pytest.fixture(scope="module")
def kept_traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for the tests of one file, which plan one model again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("traces")))
        yield


@pytest.fixture(scope="module", autouse=True)
def measures_in_its_own_folder() -> Iterator[None]:
    """What a file of tests measures must not change the plans of the next."""
    yield
    found = [path.name for path in Path(os.environ[FOLDER_VARIABLE]).iterdir()]
    assert not found, f"tests wrote the session's calibration folder: {found}"


def pytest_collection_finish() -> None:
    """Exclude all tests' code and data from garbage collections: half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def garbage_is_of_one_file() -> Iterator[None]:
    """Exclude what earlier files keep, cached plans for example, as well."""
    yield
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within", type=float, help="processor seconds; tests.durations")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    within_s: float | None = config.getoption("--within")
    if within_s is None:
        return
    functions = durations.chosen([item.nodeid for item in items], within_s)
    runs, left_out = [], []
    for item in items:
        is_chosen = durations.function_of(item.nodeid) in functions
        (runs if is_chosen else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = runs
