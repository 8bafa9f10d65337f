"""Run docs/keras.md: ``KERAS_BACKEND=torch python -m tests.docs.keras_page FOLDER``.

Keras chooses its backend when it is imported, so the page has a process of its own.
"""

import sys
from pathlib import Path

import pytest

from tests.docs import stand_ins
from tests.docs.page_setups import SETUPS
from tests.docs.run_page import run_page

PAGE = "docs/keras.md"

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        stand_ins.put_in_place(patch, Path(sys.argv[1]))
        run_page(PAGE, SETUPS[PAGE]())
