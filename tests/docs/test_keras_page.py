"""docs/keras.md runs, in a process whose Keras is on torch."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from tests.processes import python


@pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed")
def test_what_the_page_on_keras_says_is_so(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = ("-W", "ignore", "-m", "tests.docs.keras_page", str(tmp_path))
    done = python(*words, KERAS_BACKEND="torch", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-4000:]
