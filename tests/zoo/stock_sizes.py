"""Sizes of stock models that their fields' names do not tell (``shrink.py``)."""

from typing import Any, Final

LAYERS: Final = 2

# Positions as the sum of two axes' embeddings.
_REFORMER = {
    "axial_pos_embds_dim": [32, 32],
    "axial_pos_shape": [4, 4],
    "attn_layers": ["lsh", "local"],
    "lsh_attn_chunk_length": 8,
    "local_attn_chunk_length": 8,
    "num_buckets": 2,
}

_FEW: dict[str, Any] = {"num_hidden_layers": LAYERS}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"], **_FEW}
_CONVOLVED = {"layer_types": ["conv", "full_attention"], **_FEW}
_SHARED_ATTENTION = {
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "num_hidden_layers": 4,
}
_INPUT_PER_LAYER = {
    "vocab_size_per_layer_input": 1024,
    "hidden_size_per_layer_input": 16,
}
_MAMBA_HEADS = {"mamba_n_heads": 16, "mamba_d_head": 16}

SIZES: Final[dict[str, dict[str, Any]]] = {
    "BailingHybridConfig": {"layer_group_size": LAYERS},
    "BambaConfig": {"attn_layer_indices": [1], **_MAMBA_HEADS},
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
    "CodeGenConfig": {"n_embd": 64, "n_head": 4, "rotary_dim": 8},
    "DbrxConfig": {"/": 16, "attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "DeepseekV2Config": {
        "/": 16,
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 2,
    },
    "DiffLlamaConfig": {"/": 16},
    "Dots1Config": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "FalconConfig": {
        "/": 64,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_kv_heads": 4,
        "ffn_hidden_size": 128,
    },
    "FalconH1Config": {"mamba_d_ssm": 256, **_MAMBA_HEADS},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nTextConfig": {
        "activation_sparsity_pattern": None,
        "intermediate_size": 64,
        "layer_types": None,
        "num_kv_shared_layers": 0,
        **_FEW,
        **_INPUT_PER_LAYER,
    },
    "Gemma4TextConfig": _INPUT_PER_LAYER,
    "GptOssConfig": {"/": 16},  # rows of whole 16 bytes
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"], **_MAMBA_HEADS},
    "HrmTextConfig": {"num_layers_per_stack": None},
    "HunYuanDenseV1Config": {"head_dim": 16},
    "HunYuanMoEV1Config": {"head_dim": 16},
    "Jais2Config": {"/": 13},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearConfig": {"mlp_layer_types": ["dense", "sparse"], **_HYBRID},
    "Lfm2MoeConfig": _CONVOLVED,
    "Lfm3Config": _CONVOLVED,
    "Llama4TextConfig": {"/": 40},
    "MT5Config": {"decoder_start_token_id": 0},
    "Mamba2Config": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "MiniMaxM3VLTextConfig": {"/": 32},
    "MiMoV2FlashConfig": {"/": 32},
    "MinistralConfig": {"head_dim": 16},
    "MllamaTextConfig": _FEW,
    "NemotronConfig": {"head_dim": None, "num_key_value_heads": 1},
    "NemotronHConfig": {"moe_intermediate_size": 960},
    "NystromformerConfig": {"/": 3},  # with one head its convolution crashed
    "OlmoHybridConfig": {"/": 15},
    "Qwen3NextConfig": _HYBRID,
    "Qwen3_5TextConfig": _HYBRID,
    "Qwen3_5MoeTextConfig": _HYBRID,
    "Qwen4ExpTextConfig": {
        **_HYBRID,
        "head_dim": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "RecurrentGemmaConfig": {"/": 5, "num_hidden_layers": 3},
    "ReformerConfig": _REFORMER,
    "ReformerModelWithLMHead": {"is_decoder": True},
    "T5Config": {"decoder_start_token_id": 0},  # as every checkpoint has it
    "UMT5Config": {"decoder_start_token_id": 0},
    "XmodConfig": {"default_language": "en_XX"},
    "xLSTMConfig": {
        "hidden_size": 128,
        "embedding_dim": 128,
        "num_heads": 2,
        "chunk_size": 16,
        "mode": "train",
    },
    "ZambaConfig": {"/": 16, **_SHARED_ATTENTION},
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
