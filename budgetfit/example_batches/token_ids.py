"""Random token ids for transformers models, and the default sequence length."""

import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from budgetfit.errors import InputError
from budgetfit.example_batches.request import Arguments, BatchRequest

# Fields of a config can have any type.
ConfigValue: TypeAlias = Any

# TRL's default SFTConfig.max_length.
_DEFAULT_LENGTH = 1024
_DEFAULT_VOCABULARY = 1024  # character and hash models: any id is valid
# T5's length, for encoder-decoders without a limit.
_DEFAULT_SEQ2SEQ_LENGTH = 512

_TEXT_PARTS = ("text_config", "encoder", "decoder")
_LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
    "max_target_positions",
    "max_text_positions",
)


def text_length(request: BatchRequest, config: object) -> int:
    """Return tokens per row: the requested length, else the model's default.

    Raises:
        InputError: It is below 1 or exceeds a learned position embedding.
    """
    limit, is_hard = _positions(request.model, config)
    if request.max_length is None:
        usual = _DEFAULT_LENGTH
        if limit is None and getattr(config, "is_encoder_decoder", False):
            usual = _DEFAULT_SEQ2SEQ_LENGTH
        length = usual if limit is None else min(usual, limit)
        why = "all that the model has positions for" if length == limit else "a default"
        request.notes.append(
            f"text rows of {length} tokens ({why}); max_length= changes it"
        )
        return length
    if request.max_length < 1:
        raise InputError(f"max_length must be at least 1, not {request.max_length}.")
    if limit is not None and request.max_length > limit:
        model_name = type(request.model).__name__
        if is_hard:
            raise InputError(
                f"max_length {request.max_length}, or the longest of lengths=, is too "
                f"long: {model_name} has {limit} positions. Use max_length={limit} or "
                "less; longer ones of lengths= are cut to it."
            )
        request.notes.append(
            f"max_length {request.max_length} is beyond the {limit} positions that "
            f"{model_name} was configured for"
        )
    return request.max_length


def max_positions(model: nn.Module) -> int | None:
    """Return the text positions of a transformers model; None if unlimited."""
    return _positions(model, text_config(model))[0]


def random_token_ids(request: BatchRequest, length: int, rows: int = 0) -> Tensor:
    """Return token ids, int64 ``[rows or batch_size, length]``."""
    # Without special tokens: padding would change attention masks, image tokens need
    # images.
    ordinary = _ordinary_tokens(request.model)
    shape = (rows or request.batch_size, length)
    return ordinary[request.integers(shape, 0, len(ordinary))]


def count_codebooks(model: nn.Module) -> int:
    """Return the number of codebooks of an audio language model; 0 for text models."""
    # Such models sum one embedding per codebook.
    for part in (model, getattr(model, "decoder", None)):
        if isinstance(part, nn.Module) and hasattr(part, "get_input_embeddings"):
            tables = _input_embedding(part)
            count = getattr(part.config, "num_codebooks", None)
            if isinstance(tables, nn.ModuleList) and len(tables) == count:
                return len(tables)
    return 0


def audio_codes(request: BatchRequest, length: int) -> Tensor:
    """Return audio codes, int64 ``[batch, length, codebooks]``."""
    count = count_codebooks(request.model)
    request.notes.append(f"audio codes of {count} codebooks")
    codes = random_token_ids(request, length * count)
    return codes.view(request.batch_size, length, count)


def source_ids(request: BatchRequest, length: int) -> Tensor:
    """Return random token ids; rows of encoder-decoders end with one EOS."""
    # BART's classification head uses the hidden state there and requires it.
    ids = random_token_ids(request, length)
    config = request.model.config
    end = getattr(config, "eos_token_id", None)
    if getattr(config, "is_encoder_decoder", False) and isinstance(end, int):
        ids[:, -1] = end
    return ids


def text_inputs(request: BatchRequest) -> Arguments:
    """Return ``input_ids`` of the requested or default length."""
    length = text_length(request, text_config(request.model))
    return {"input_ids": source_ids(request, length)}


def text_config(model: nn.Module) -> ConfigValue:
    """Return the text part of a model's config."""
    config: Any = model.config
    for name in (*_TEXT_PARTS, "encoder_config"):
        part = getattr(config, name, None)
        if getattr(part, "vocab_size", None) is not None:
            return part
    return config


def first_field(config: object, *names: str) -> ConfigValue:
    """Return the first config field that is not None, else None."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def _ordinary_tokens(model: nn.Module) -> Tensor:
    vocabulary = min(_vocabulary_sizes(model), default=_DEFAULT_VOCABULARY)
    special = {
        token for token in _special_tokens(model.config) if 0 <= token < vocabulary
    }
    tokens = torch.arange(vocabulary, device="cpu")
    if len(special) < vocabulary:
        keep = torch.ones(vocabulary, dtype=torch.bool, device="cpu")
        keep[torch.tensor(sorted(special), dtype=torch.int64, device="cpu")] = False
        tokens = tokens[keep]
    return tokens


def _vocabulary_sizes(model: nn.Module) -> Iterator[int]:
    """Yield all vocabulary sizes, of inputs and labels."""
    for part in _text_configs(model.config):
        for name in ("vocab_size", "src_vocab_size", "tgt_vocab_size"):
            size = getattr(part, name, None)
            if isinstance(size, int) and size > 0:
                yield size
    embedding = _input_embedding(model)
    if isinstance(embedding, nn.Embedding):
        yield embedding.num_embeddings


def _input_embedding(model: Any) -> object:
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError, TypeError):
        return None  # byte and hash models have none


def _special_tokens(config: object) -> Iterator[int]:
    for part in _text_configs(config):
        for name, value in vars(part).items():
            if name.endswith(("_token_id", "_token_index")):
                values = value if isinstance(value, list) else [value]
                yield from (item for item in values if isinstance(item, int))


def _text_configs(config: object) -> Iterator[object]:
    """Yield a config and the text configs inside it."""
    yield config
    for name in (*_TEXT_PARTS, "encoder_config", "decoder_config"):
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "model_type"):
            yield part


def _positions(model: nn.Module, config: object) -> tuple[int | None, bool]:
    """Return a text model's usable positions, and whether they are a hard limit."""
    # Rotary and relative positions can exceed the config, position embeddings cannot.
    limit = first_field(config, *_LENGTH_FIELDS)
    if not isinstance(limit, int) or limit < 1:
        return None, False
    if shorter := first_field(model.config, "max_text_len"):  # Grounding DINO
        return min(limit, shorter), True
    ahead = 1 if getattr(config, "ngram", None) else 0  # ProphetNet also uses the next
    for rows, padding in _position_tables(model):
        if not limit <= rows <= limit + 2:  # OPT and BART add two
            continue
        if rows == limit and padding is not None:
            # RoBERTa's positions start after the padding index.
            return limit - padding - 1 - ahead, True
        return limit, True
    return limit, False


def _position_tables(model: nn.Module) -> Iterator[tuple[int, int | None]]:
    """Yield rows and padding index of each position embedding."""
    # By attributes: I-BERT's quantised one is no ``nn.Embedding``.
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_named = re.search(r"pos|wpe", name.rpartition(".")[2])
        if is_named and isinstance(weight, Tensor) and hasattr(module, "padding_idx"):
            yield weight.shape[0], module.padding_idx
