"""What a chunked loss takes: predicted, and measured in a real step on a CPU."""

from typing import Any

import pytest
from transformers import LlamaConfig

import budgetfit
from budgetfit.core.recipe import Recipe
from budgetfit.tracing.recording.steady_state import append_steady_step
from tests.planning.profiling.test_real_cpu_step import BATCH, predicted, real
from tests.traced import raw_trace

WORDS, WIDTH, LENGTH, SAMPLES = 128_000, 256, 512, 4


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(batch_size=BATCH, loss_chunks=5),
        Recipe(batch_size=BATCH, loss_chunks=5, gradient_accumulation_steps=2),
        Recipe(
            batch_size=BATCH, loss_chunks=5, precision="bf16-mixed", optimizer="sgd"
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_live_bytes_with_a_chunked_loss_are_those_of_a_real_step(
    name: str, recipe: Recipe
) -> None:
    raw = raw_trace(name, recipe, target=None)
    append_steady_step(raw)
    assert predicted(raw) == real(name, recipe)


def test_the_peak_falls_by_seven_eighths_of_what_the_vocabulary_takes() -> None:
    # Bytes a logit. Forward: bf16 and fp32 logits, log-softmax, 2 + 4 + 4. Backward:
    # the log-softmax, its gradient and its input's, 4 + 4 + 4. What is added up part by
    # part, the gradient of the head's weight, is small here.
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": WIDTH}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=WORDS, **sizes, **layers)
    whole, parts = (
        budgetfit.estimate(
            config,
            Recipe(batch_size=SAMPLES, precision="bf16-mixed", loss_chunks=chunks),
            gpu="h100-80gb",
            max_length=LENGTH,
        )
        for chunks in (1, 8)
    )
    logits, weight_bytes = SAMPLES * LENGTH * WORDS, WORDS * WIDTH * 2
    for phase, bytes_per_logit in (("forward", 10), ("backward", 12)):
        saved = whole.phase_peaks_bytes[phase] - parts.phase_peaks_bytes[phase]
        expected = logits * bytes_per_logit * 7 // 8
        assert expected - 2 * weight_bytes <= saved <= expected, phase
