"""Stock transformers models, built small from their own config classes.

One rule for all: a field is shrunk by what its name says. Where sizes must fit together
in a way that names do not say, the table that lists the model adds its own.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any

import transformers
from transformers import PretrainedConfig

from tests.zoo.entry import Entry
from tests.zoo.stock_sizes import LAYERS, PLANS, SIZES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

VOCABULARY = 99
WIDTH, INNER, HEADS, HEAD_SIZE, POSITIONS = 32, 64, 4, 8, 16
EXPERTS, EXPERTS_PER_TOKEN = 4, 2

# Fields that only a checkpoint's config sets.
_UNSET = {"head_dim": HEAD_SIZE, "num_experts_per_tok": 2, "n_routed_experts": EXPERTS}

# The first pattern that is found in a field's name decides.
_SIZES: tuple[tuple[str, int], ...] = (
    ("vocab(ulary)?_size", VOCABULARY),
    ("max_position|n_positions|max_seq|^seq_length$|^n_ctx$", POSITIONS),
    ("max_(source|target)", POSITIONS),
    ("(experts_per_tok|moe_topk|moe_k|expert_top_k|^top_k)", EXPERTS_PER_TOKEN),
    ("^(n|num)_(local_|routed_)?experts$|^moe_num_experts$", EXPERTS),
    ("shared_experts?$|shared_expert_num", 1),
    ("^(n|num)_(expert_)?groups?$|topk_group", 1),
    ("num_(dense|sparse)_layers|first_k_dense", 1),
    (r"(^|_)(n|num)_?(\w+_)?layers?$|^(encoder|decoder)_layers$|^num_blocks$", LAYERS),
    ("(key_value|kv|n_head)_(heads|groups|kv)$", HEADS // 2),
    ("heads?$", HEADS),
    ("^(attention_)?head_(dim|size)$|_head_dim$|rotary_dim", HEAD_SIZE),
    ("lora_rank|_rank$|_d_state$|^state_size$|^input_embed_size$", 16),
    ("intermediate|ffn_(dim|hidden|size)|^d_ff$|^dff$|inner", INNER),
    ("hidden_(size|dim)|^d_model$|^n_embd$|embedding_(size|dim)|lru_width", WIDTH),
    ("^dim$|embed_dim|^emb_dim$", WIDTH),
    ("sliding_window|window_size|chunk_size", 8),
)


def small_config(kind: type[PretrainedConfig], **own: Any) -> PretrainedConfig:  # noqa: ANN401
    """Return a config of this class with every size shrunk by its name.

    ``own`` are fields that this model needs otherwise; nested configs are shrunk too.
    """
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = _shrunk(kind, field)
        if value is not None:
            fields[field.name] = value
    parts = {
        name: small_config(part, **own.pop(name, {}))
        for name, part in kind.sub_configs.items()
        if name not in fields and part is not transformers.AutoConfig
    }
    return kind(**{**fields, **parts, **own})


def _shrunk(kind: type[PretrainedConfig], field: dataclasses.Field[Any]) -> Any:  # noqa: ANN401
    """Return a small value for a field; None leaves the default."""
    default = field.default
    if default is None and field.name in _UNSET:
        return _UNSET[field.name]
    if field.name.endswith(("_token_id", "_token_index")):
        return _small_token(field.name, default)
    if not isinstance(default, int) or isinstance(default, bool):
        return None
    if _is_as_many(kind, field):
        return HEADS
    for pattern, size in _SIZES:
        if re.search(pattern, field.name):
            return min(size, default) if default > 0 else None
    return None


def _is_as_many(kind: type[PretrainedConfig], field: dataclasses.Field[Any]) -> bool:
    """Whether a model has as many keys as queries: some attentions need that."""
    heads = getattr(kind, "num_attention_heads", None)
    return field.name == "num_key_value_heads" and field.default == heads


def _small_token(name: str, default: Any) -> Any:  # noqa: ANN401
    if name == "pad_token_id":
        return 0 if default is None or default >= VOCABULARY else default
    if isinstance(default, int) and default >= VOCABULARY:
        return VOCABULARY - 1 - default % 10
    if isinstance(default, list):
        return [item % VOCABULARY for item in default]
    return None


def stock_entries(
    task: str,
    names: Iterable[str],
    sizes: Mapping[str, Mapping[str, Any]] = SIZES,
    **for_all: Any,  # noqa: ANN401
) -> Iterator[Entry]:
    """Yield an entry for each of these classes of transformers.

    Args:
        task: The family of the entries.
        names: Class names, for example the values of one of the auto tables.
        sizes: Name of a config's or a model's class -> fields of the config that the
            general rule gets wrong.
        for_all: Fields of every config.
    """
    for name in dict.fromkeys(names):
        begins = (plan for start, plan in PLANS.items() if name.startswith(start))
        plan = next(begins, {})
        build = functools.partial(_build, name, sizes, for_all)
        yield Entry(name, task, build, plan)


def _build(
    name: str, sizes: Mapping[str, Mapping[str, Any]], for_all: Mapping[str, Any]
) -> nn.Module:
    model_class = getattr(transformers, name)  # imported when it is its turn
    kind = model_class.config_class
    own = {**for_all, **sizes.get(kind.__name__, {}), **sizes.get(name, {})}
    model: nn.Module = model_class(small_config(kind, **own))
    return model
