"""Decoders that predict the next token."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from tests.zoo.entry import Entry

ENTRIES = [
    Entry(
        "LlamaForCausalLM",
        "causal LM",
        lambda: AutoModelForCausalLM.from_config(
            LlamaConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                vocab_size=99,
                max_position_embeddings=16,
            )
        ),
    ),
    Entry(
        "GPT2LMHeadModel",
        "causal LM",
        lambda: AutoModelForCausalLM.from_config(
            GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=16)
        ),
    ),
]
