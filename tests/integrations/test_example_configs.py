from pathlib import Path

import pytest

from budgetfit.example_batches.make_batch import make_batch
from budgetfit.integrations.model_sources.model_source import resolve_model

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"

# Published counts; tied embeddings are counted once.
PARAMETERS = {
    "SmolLM2-1.7B": 1_711_376_384,
    "Llama-3.1-8B": 8_030_261_248,
    "Mixtral-8x7B": 46_702_792_704,
    "gpt2": 124_439_808,
    "bert-base-uncased": 109_514_298,
    "t5-small": 60_506_624,
    "vit-base-patch16-224": 86_567_656,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_example_config_has_the_published_number_of_parameters(name: str) -> None:
    resolved = resolve_model(CONFIGS / name)
    assert sum(p.numel() for p in resolved.model.parameters()) == PARAMETERS[name]
    assert all(parameter.is_meta for parameter in resolved.model.parameters())
    assert resolved.name == name
    assert resolved.source == "from config.json, no weights loaded"
    assert resolved.notes == ()
    assert "labels" in make_batch(resolved.model).batch


def test_every_example_config_is_checked() -> None:
    assert {file.parent.name for file in CONFIGS.glob("*/config.json")} == set(
        PARAMETERS
    )


def test_llama_31_keeps_its_scaled_rotary_positions() -> None:
    config = resolve_model(CONFIGS / "Llama-3.1-8B").model.config
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["factor"] == 8.0
    assert config.rope_parameters["rope_theta"] == 500_000.0
