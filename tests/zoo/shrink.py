"""Stock transformers models, made small from their own default configs.

One rule for all: widths and head counts of a config and of the configs inside it are
divided by one number, so that ratios between them and the size of a head stay. Layers,
tokens and pixels are few. What the names of fields do not tell is in
``stock_sizes.py``, or in the table that lists the model.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig

from tests.zoo.entry import Entry
from tests.zoo.stock_sizes import LAYERS, PLANS, SIZES

VOCABULARY, EXPERTS, PIXELS = 1024, 8, 64
POSITIONS, TEXT_POSITIONS = 128, 16  # images and sound have tokens among the text's
_DIVISORS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
_NARROWEST = 16  # narrower ones are no widths but counts
# Lengths, at most these: shorter audio, fewer frames and fewer queries.
_SPANS = {
    "num_frames": 4,
    "frames_per_clip": 4,
    "max_source_positions": 50,
    "mm_tokens_per_image": 4,
    "num_queries": 10,
    "num_image_tokens": 4,
    "context_length": 64,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    **dict.fromkeys(("num_experts", "moe_num_experts", "num_local_experts"), EXPERTS),
    "n_routed_experts": EXPERTS,
}
_POSITIONS = re.compile(
    r"max_(position_embeddings|target_positions|seq_len|sequence_length)|n_positions"
    r"|n_ctx|seq_length"
)
_DEPTHS = re.compile(
    r"(num_|n_)?((encoder|decoder|hidden|text|transformer|attention)_)*"
    r"(num_)?(hidden_)?(layers?|depth|blocks)|num_(encoder|decoder)_layers"
    r"|resampler_depth|max_window_layers|num_sparse_(en|de)coder_layers"
)
_HEADS = re.compile(r"(\w+_)?(num|n)_(\w+_)?heads?|(\w+_)?(attention|key_value)_heads")
_WIDTHS = re.compile(
    r"(\w+_)?(hidden_sizes?|intermediate_size|d_model|d_ff|n_embd|d_inner|channels"
    r"|embedding_size|feature_size|dim_feedforward|proj_size|output_size|linear_units"
    r"|(\w+_)?dim)"
)
_NOT_WIDTHS = re.compile(
    r"(\w+_)?head_dim|\w*kernel\w*|query_dim|num_channels|num_input_channels"
    r"|in_channels|in_chans|mel_dim|input_dim|patch_dim|\w*rope\w*|audio_channels"
    r"|mask_input_channels|keypoint_decoder_dim|codebook_dim"
)
_LAYER_NUMBERS = re.compile(
    r"\w*(indices|indexes|cross_attention_layers)|vision_feature_layer"
)
_TOKENS = re.compile(r"\w*_token_(id|index|ids)|\w+_index")
_STAGES = (
    "depths",
    "depth",
    "hidden_sizes",
    "num_heads",
    "num_attention_heads",
    "embed_dim",
    "stage_channels",
)


def shrink(config: PreTrainedConfig, changes: Mapping[str, Any] | None = None) -> Any:
    """Return a small config of the same class; ``changes`` are taken as they are.

    A dot in the name of a change leads into a part, as in
    ``{"text_config.head_dim": 32}``; ``"/"`` is the number to divide by, where the
    largest that divides all widths and head counts is wrong.
    """
    changes = dict(changes or {})
    divisor = changes.pop("/", None) or _divisor(config)
    return _Shrinking(config, divisor).rebuild(config, changes)


def small_entries(
    family: str, models: Mapping[str, Mapping[str, Any]] | Iterable[str]
) -> Iterator[Entry]:
    """Yield an entry for each model class: its name, with changes to its config."""
    if not isinstance(models, Mapping):
        models = {name: {} for name in models}
    for name, changes in models.items():
        plans = (plan for start, plan in PLANS.items() if name.startswith(start))
        yield Entry(name, family, _builder(name, changes), next(plans, {}))


def _builder(name: str, changes: Mapping[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model_class = getattr(transformers, name)  # imported when it is its turn
        kind = model_class.config_class
        own = {**SIZES.get(kind.__name__, {}), **SIZES.get(name, {}), **changes}
        model: nn.Module = model_class(shrink(kind(), own))
        return model.train()

    return build


class _Shrinking:
    """One config with its parts: what they share is a divisor and token numbers."""

    def __init__(self, whole: PreTrainedConfig, divisor: int) -> None:
        sizes = [
            value
            for name, value in _fields(whole)
            if name.endswith("vocab_size") and isinstance(value, int) and value > PIXELS
        ]
        self.divisor = divisor
        self.has_parts = bool(_parts(whole))
        self.vocabulary = min([VOCABULARY, *sizes])
        self.tokens: dict[int, int] = {}

    def rebuild(self, config: PreTrainedConfig, changes: Mapping[str, Any]) -> Any:
        """Return the config, made again of smaller values."""
        values: dict[str, Any] = {}
        depth = _new_depth(config)
        for field in dataclasses.fields(config):
            name, old = field.name, _get(config, field.name)
            if name in changes:
                continue
            if isinstance(old, PreTrainedConfig):
                values[name] = self.rebuild(old, _inside(name, changes))
            elif (new := self._value(name, old, config, depth)) != field.default:
                values[name] = new
        for name in ("transformers_version", "id2label", "label2id"):
            values.pop(name, None)
        if values.pop("_out_indices", None) or values.pop("_out_features", None):
            values.pop("_out_features", None)
            values["out_indices"] = list(config.out_indices)
        own = {name: value for name, value in changes.items() if "." not in name}
        return type(config)(**values | own)

    def _value(self, name: str, old: object, config: object, depth: int) -> Any:  # noqa: PLR0911 - a rule each
        if name == "pad_token_id" and old is None and not self.has_parts:
            return 0  # without it decoders do not classify
        if isinstance(old, (list, tuple)):
            return self._values(name, old, config, depth)
        if not isinstance(old, int) or isinstance(old, bool):
            return old
        if name in ("image_size", "img_size", "crop_size", "pretrain_image_size"):
            return min(old, _pixels(config))
        if name.endswith("vocab_size"):
            return min(old, self.vocabulary) if old > PIXELS else old
        if (longest := self._longest(name)) is not None:
            return min(old, longest)
        if _DEPTHS.fullmatch(name):
            return min(old, depth or old)
        if _TOKENS.fullmatch(name):
            return self._token(old)
        if _HEADS.fullmatch(name) or (_is_width(name) and old >= _NARROWEST):
            return max(1, old // self.divisor)
        return old

    def _longest(self, name: str) -> int | None:
        if _POSITIONS.fullmatch(name):
            return POSITIONS if self.has_parts else TEXT_POSITIONS
        return _SPANS.get(name)

    def _values(self, name: str, old: Any, config: Any, depth: int) -> Any:
        kind = type(old)
        if old and all(isinstance(v, int) and not isinstance(v, bool) for v in old):
            if _TOKENS.fullmatch(name):
                return kind(self._token(value) for value in old)
            if name in ("depths", "depth", "num_blocks", "layers_per_stage"):
                return kind(min(value, LAYERS) for value in old)
            wide = _is_width(name) and min(old) >= _NARROWEST
            if wide or _HEADS.fullmatch(name):
                return kind(max(1, value // self.divisor) for value in old)
            if name == "image_size" and min(old) > PIXELS:
                return kind([_pixels(config)] * len(old))
        is_for_layers = len(old) == getattr(config, "num_hidden_layers", 0) > depth
        return old[:depth] if depth and is_for_layers else old

    def _token(self, old: int) -> int:
        """Return a token of the small vocabulary, another one for each."""
        if old < self.vocabulary:
            return old
        return self.tokens.setdefault(old, self.vocabulary - 1 - len(self.tokens))


def _inside(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    start = f"{name}."
    return {k.removeprefix(start): v for k, v in changes.items() if k.startswith(start)}


def _pixels(config: object) -> int:
    """Return a small image that whole patches fill."""
    patch = getattr(config, "patch_size", None) or 16
    patch = patch if isinstance(patch, int) else max(patch)
    return int(patch * max(2, PIXELS // patch))


def _is_width(name: str) -> bool:
    return bool(_WIDTHS.fullmatch(name)) and not _NOT_WIDTHS.fullmatch(name)


def _new_depth(config: PreTrainedConfig) -> int:
    """Return how many layers are enough; 0 where the config numbers or groups them."""
    for field in dataclasses.fields(config):
        value = _get(config, field.name)
        if not isinstance(value, (list, tuple)):
            continue
        numbers = _LAYER_NUMBERS.fullmatch(field.name)
        if numbers and any(isinstance(v, int) and v > 1 for v in value):
            return 0
        if field.name in _STAGES:
            return 0
    kinds = list(getattr(config, "layer_types", None) or ())
    return max([LAYERS, *(1 + kinds.index(kind) for kind in set(kinds))])


def _fields(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = _get(config, field.name)
        if isinstance(value, PreTrainedConfig):
            yield from _fields(value)
        else:
            yield field.name, value


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    values = [_get(config, field.name) for field in dataclasses.fields(config)]
    return [value for value in values if isinstance(value, PreTrainedConfig)]


def _get(config: PreTrainedConfig, name: str) -> Any:
    """Return a field; one that differs between layers has only this for all."""
    return vars(config)[name] if name in vars(config) else getattr(config, name)


def _divisor(config: PreTrainedConfig) -> int:
    """Return the largest number that divides all widths and head counts."""
    heads: list[int] = []
    widths: list[int] = []
    for name, value in _fields(config):
        values = value if isinstance(value, (list, tuple)) else [value]
        sizes = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
        if _HEADS.fullmatch(name):
            few = "key_value" in name and sizes and sizes[0] <= EXPERTS
            heads += [] if few else sizes
        elif _is_width(name):
            widths += [size for size in sizes if size >= _NARROWEST]
    if not widths:
        return 1
    common = math.gcd(*heads, *widths)
    return next(
        (
            divisor
            for divisor in _DIVISORS
            if common % divisor == 0
            and min(widths) // divisor >= LAYERS * 4
            and max(widths) // divisor >= PIXELS // 2
        ),
        1,
    )
