"""Each config builds, on meta, the model that was published: as many parameters."""

from pathlib import Path

import pytest

from budgetfit.integrations.model_sources.model_source import resolve_model

CONFIGS = Path(__file__).parent / "configs"

# As the published weights have, tied embeddings counted once; transformers ties the
# head of every T5, so flan-t5-xl's 2,849,757,184 lack it.
PARAMETERS = {
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.3-70B": 70_553_706_496,
    "Mistral-7B-v0.3": 7_248_023_552,
    "ModernBERT-base": 149_655_232,
    "Phi-4-mini": 3_836_021_760,
    "Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "convnext-base-224": 88_591_464,
    "deberta-v3-base": 184_423_682,
    "dinov2-base": 86_580_480,
    "flan-t5-xl": 2_849_757_184 - 32_128 * 2048,
    "gemma-3-1b-it": 999_885_952,
    "gemma-3-4b-it": 4_300_079_472,
    "gpt-oss-20b": 20_914_757_184,
    "mamba2-1.3b": 1_343_757_312,
    "segformer-b2-ade-512": 27_461_974,
    "whisper-large-v3": 1_543_490_560,
    "whisper-small": 241_734_912,
}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.filterwarnings("ignore")
def test_a_config_has_the_published_number_of_parameters(name: str) -> None:
    model = resolve_model(CONFIGS / name).model
    assert sum(each.numel() for each in model.parameters()) == PARAMETERS[name]
    assert all(each.is_meta for each in model.parameters())


def test_every_config_is_checked() -> None:
    folders = {file.parent.name for file in CONFIGS.glob("*/config.json")}
    assert folders == set(PARAMETERS)
