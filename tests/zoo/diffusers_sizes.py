"""Models of diffusers, made small from the defaults of their own constructors.

One rule for all: few layers and heads, narrow texts, small latents; the width of a head
stays, as rotary embeddings are divided over it. What is special about a class is in
``SIZES``.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import diffusers
from torch import nn

LAYERS, HEADS, WIDTH, GROUPS, PIXELS, TOKENS = 3, 2, 32, 8, 16, 8
# One more than a multiple of what a latent frame stands for.
FRAMES = {"LTX": 9, "Mochi": 7}
OTHER_FRAMES = 5
_LAYERS = re.compile(r"(num_|n_)?\w*layers|depth|num_\w*blocks|num_blocks")
_HEADS = re.compile(r"(num|n)_\w*heads")
_TEXTS = re.compile(
    r"(joint_attention|text\w*|cap_feat|pooled_projection|cond_embed|caption|in_text"
    r"|crossattn_proj_in|image)_(dim|dim2|channels|hidden_dim)"
    r"|(joint_attention|pooled_projection|ffn|intermediate|llm_features|adaln)_dim"
    r"|cross_attention_dim(_t5)?|encoder_hidden_(size|states_channels)|cap_feat_dim"
    r"|pooled_projection_dim|intermediate_size|text_intermediate_size|caption_channels"
    r"|encoder_hid_dim|time_embed_dim|time_embedding_dim|ff_dim|text_emb_dim"
)
# Pixels of an image, where a latent stands for more or fewer than 8.
IMAGE: dict[str, int] = {"AutoencoderRAE": PIXELS}
_TWO_LEVELS = {
    "block_out_channels": (WIDTH, 2 * WIDTH),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
# Arguments of constructors that the rule gets wrong, or leaves large.
SIZES: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": _TWO_LEVELS,
    "AutoencoderRAE": {
        "encoder_hidden_size": 64,  # heads are 64 wide
        "encoder_num_hidden_layers": LAYERS,
        "encoder_input_size": 28,
        "patch_size": PIXELS // 2,
        "decoder_hidden_size": WIDTH,
        "decoder_num_hidden_layers": LAYERS,
        "decoder_num_attention_heads": HEADS,
        "decoder_intermediate_size": WIDTH,
        "image_size": PIXELS,
    },
    "CosmosTransformer3DModel": {"concat_padding_mask": False},  # needs torchvision
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2,
        "caption_channels": (WIDTH, WIDTH),
        "llama_layers": (0, 1, 2, 3, 4, 5),
        "axes_dims_rope": (64, 32, 32),
        "in_channels": 16,
        "num_single_layers": LAYERS,
    },
    "HunyuanImageTransformer2DModel": {"text_embed_2_dim": None},
    "Kandinsky3UNet": {"attention_head_dim": GROUPS},
    "UNetSpatioTemporalConditionModel": {"num_attention_heads": (2, 2, 2, 2)},
    "UNet3DConditionModel": {"attention_head_dim": GROUPS},
    "Krea2Transformer2DModel": {
        "text_hidden_dim": WIDTH,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "num_text_layers": 4,
    },
}


def small_config(name: str) -> dict[str, Any]:
    """Return arguments of a class that make a small model of it."""
    kind = getattr(diffusers, name)
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(kind.__init__).parameters.items()
        if parameter.default is not parameter.empty
    }
    own = SIZES.get(name, {})
    heads = defaults.get("num_attention_heads", defaults.get("n_heads"))
    inner = defaults.get("hidden_size", defaults.get("dim"))
    width = defaults.get("attention_head_dim")
    if isinstance(heads, int) and isinstance(width, int):
        inner = heads * width
    divisor = heads // HEADS if isinstance(heads, int) and heads > HEADS else 1
    small = {
        key: _smaller(key, value, inner, divisor)
        for key, value in defaults.items()
        if key not in own
    }
    return {key: small[key] for key in small if small[key] != defaults[key]} | own


def plan_arguments(name: str) -> dict[str, Any]:
    """Return what is said to plan a small model: few tokens of text, few pixels."""
    fields = inspect.signature(getattr(diffusers, name).__init__).parameters
    takes = inspect.signature(getattr(diffusers, name).forward).parameters
    arguments: dict[str, Any] = {}
    has_texts = any(
        word in argument for argument in takes for word in ("encoder_", "cap_")
    )
    if has_texts and "num_embeddings" not in fields:  # which is their length
        arguments["max_length"] = TOKENS
    if any(word in name for word in ("3D", "Motion", "Temporal")):
        arguments["frames"] = next(
            (FRAMES[kind] for kind in FRAMES if name.startswith(kind)), OTHER_FRAMES
        )
    if not fields.keys() & {"sample_size", "sample_height"}:
        arguments["image_size"] = IMAGE.get(name, 8 * PIXELS)
    return arguments


def builder(name: str) -> Callable[[], nn.Module]:
    """Return a function that builds a small model in training mode."""

    def build() -> nn.Module:
        model: nn.Module = getattr(diffusers, name)(**small_config(name))
        return model.train()

    return build


def _smaller(key: str, value: Any, inner: int | None, divisor: int) -> Any:  # noqa: C901, PLR0911 - a rule each
    if isinstance(value, bool) or (value is None and key != "sample_size"):
        return value
    if key.endswith("block_out_channels") or key == "channels":
        if isinstance(value, int):
            return WIDTH
        return tuple(WIDTH if size == value[0] else 2 * WIDTH for size in value)
    if key in ("norm_num_groups", "groups"):
        return GROUPS
    if key.startswith("sample_"):
        return OTHER_FRAMES if key == "sample_frames" else PIXELS
    if key == "max_text_seq_length":
        return TOKENS
    if not isinstance(value, int):
        return value
    if _LAYERS.fullmatch(key):
        return min(value, LAYERS)
    if _HEADS.fullmatch(key):
        return min(value, HEADS)
    if value == inner:
        return value // divisor
    return min(value, WIDTH) if _TEXTS.fullmatch(key) else value
