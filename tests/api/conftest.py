"""What several files of tests of the front door share."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.models import LLAMA


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The folder of a small Llama's config."""
    LlamaConfig(
        **LLAMA, architectures=["LlamaForCausalLM"], model_type="llama"
    ).save_pretrained(tmp_path)
    return tmp_path
