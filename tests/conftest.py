"""What holds for every test: nobody's own files are read or written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from budgetfit.calibration.file import FOLDER_VARIABLE
from budgetfit.traces.cache.cache import CACHE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator


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
