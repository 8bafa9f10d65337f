"""What holds for every test: nobody's own files are read or written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from budgetfit.verifying.calibration_file import FOLDER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def no_calibration_of_this_machine(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Point at an empty folder, for subprocesses and plans made once per session, too.

    Tests of the file itself choose a folder of their own.
    """
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(tmp_path_factory.mktemp("calibration"))
    yield
    if before is None:
        del os.environ[FOLDER_VARIABLE]
    else:
        os.environ[FOLDER_VARIABLE] = before
