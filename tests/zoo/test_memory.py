"""Predicted memory of a few models of the zoo against their recordings."""

import pytest

from tests.zoo.entry import zoo
from tests.zoo.memory import compare, recordings

# Attention, a mixer, convolutions, group norm after attention, one head with a bias.
CHOSEN = (
    "AutoencoderKL",
    "BertForMaskedLM",
    "LlamaForCausalLM",
    "MambaForCausalLM",
    "ResNetForImageClassification",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_model_takes_what_was_recorded(name: str) -> None:
    if name not in zoo():
        pytest.skip("its library is not installed")
    found = compare(name, recordings()[name])
    assert found.predicted_allocated == found.recorded_allocated
    assert found.predicted_reserved == found.recorded_reserved


def test_the_whole_zoo_is_recorded() -> None:
    assert recordings().keys() >= zoo().keys()
