"""What a chunked loss takes: predicted, and measured in a real step on a CPU."""

import itertools
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import budgetfit
from budgetfit.core.recipe import Recipe
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
from budgetfit.planning.search import loss_chunking
from budgetfit.traces.session import TraceSession
from budgetfit.tracing.recording.steady_state import append_steady_step
from budgetfit.workload.workload import Workload
from tests.planning.profiling.test_real_cpu_step import BATCH, predicted, real
from tests.traced import raw_trace

WORDS, WIDTH, LENGTH, SAMPLES = 128_000, 256, 512, 4
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


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
    config = LlamaConfig(vocab_size=WORDS, **SIZES)
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


def test_more_parts_take_at_least_their_share_of_fewer_and_no_less_time() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **SIZES))
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    workload = Workload(model=model, batch=batch, gpu=find_gpu("h100-80gb"))
    settings = TrainingSettings(precision="bf16-mixed", optimizer="sgd")
    chain = BlockChain(TraceSession(workload.with_found_blocks()), settings)
    counts = loss_chunking.LOSS_CHUNKS[:3]
    profiles = {n: chain.with_loss_chunks(n).profile_at(SAMPLES) for n in counts}
    for fewer, more in itertools.pairwise(counts):
        bound = loss_chunking._with_head_bytes(fewer / more, profiles[fewer])
        own, head = bound.blocks[-1], profiles[more].blocks[-1]
        for name in ("saved_bytes", "forward_bytes", "backward_bytes"):
            assert getattr(own.keep, name) <= getattr(head.keep, name), name
        assert own.forward_ns <= head.forward_ns
        assert own.backward_ns <= head.backward_ns
        assert bound.blocks[:-1] == profiles[more].blocks[:-1]
