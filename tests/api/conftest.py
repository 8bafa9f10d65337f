"""What several files of tests of the front door share."""

from pathlib import Path

import pytest

from tests.api.planned import write_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The folder of a small Llama's config."""
    return write_config(tmp_path)
