"""Sizes of stock models that their fields' names do not tell (``stock.py``)."""

from __future__ import annotations

from typing import Any, Final

LAYERS: Final = 2

# Positions as the sum of two axes' embeddings.
_REFORMER = {
    "axial_pos_embds_dim": [16, 16],
    "axial_pos_shape": [4, 4],
    "attn_layers": ["lsh", "local"],
    "lsh_attn_chunk_length": 8,
    "local_attn_chunk_length": 8,
    "num_buckets": 2,
}

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_SHARED_ATTENTION = {
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "num_hidden_layers": 4,
}
_MAMBA_HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16}

SIZES: Final[dict[str, dict[str, Any]]] = {
    "BailingHybridConfig": {"layer_group_size": LAYERS},
    "BambaConfig": {"attn_layer_indices": [1], **_MAMBA_HEADS},
    "BrosConfig": {"hidden_size": 64},  # sines of eight coordinates share it
    "CohereCompassTextConfig": {
        "layer_types": ["full_attention"] * LAYERS,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
            }
        },
    },
    "DbrxConfig": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "Dots1Config": {"n_shared_experts": 1},
    "FalconH1Config": {"mamba_d_ssm": 64, **_MAMBA_HEADS},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"], **_MAMBA_HEADS},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearConfig": _HYBRID,
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Lfm3Config": {"layer_types": ["conv", "full_attention"]},
    "LiltConfig": {"hidden_size": 48},  # six coordinates share it
    "MT5Config": {"decoder_start_token_id": 0},
    "Mamba2Config": {"num_heads": 4, "head_dim": 16},
    "NemotronConfig": {"num_key_value_heads": 2},
    "PerceiverConfig": {
        "d_latents": 32,
        "num_latents": 8,
        "num_self_attends_per_block": 2,
    },
    "Qwen3NextConfig": _HYBRID,
    "Qwen3_5TextConfig": _HYBRID,
    "Qwen3_5MoeTextConfig": _HYBRID,
    "Qwen4ExpTextConfig": {
        **_HYBRID,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": _REFORMER,
    "ReformerModelWithLMHead": {"is_decoder": True},
    "T5Config": {"decoder_start_token_id": 0},  # as every checkpoint has it
    "UMT5Config": {"decoder_start_token_id": 0},
    "XmodConfig": {"default_language": "en_XX"},
    "xLSTMConfig": {
        "hidden_size": 128,
        "num_heads": 2,
        "chunk_size": 16,
        "mode": "train",
    },
    "ZambaConfig": _SHARED_ATTENTION,
    "Zamba2Config": _SHARED_ATTENTION,
}

# What is planned otherwise than by default, by how a model's name begins.
_SHORT = {"max_length": 16}  # no limit in the config: it would get 1024 tokens
PLANS: Final[dict[str, dict[str, Any]]] = {
    "Bloom": _SHORT,
    "CpmAnt": _SHORT,
    "FalconMamba": _SHORT,
    "LongT5": _SHORT,
    "MT5": _SHORT,
    "Mamba": _SHORT,
    "RecurrentGemma": _SHORT,
    "Rwkv": _SHORT,
    "SwitchTransformers": _SHORT,
    "T5": _SHORT,
    "UMT5": _SHORT,
    "XLNet": _SHORT,
    "xLSTM": _SHORT,
}
