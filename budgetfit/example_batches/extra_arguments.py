"""What models read beside their main input, told by the names of their arguments."""

from typing import Any

import torch
from torch import Tensor

from budgetfit.example_batches import images as made_batch_images
from budgetfit.example_batches import token_ids as made_batch_text
from budgetfit.example_batches.request import BatchRequest, forward_arguments
from budgetfit.example_batches.token_ids import first_field

Arguments = dict[str, Any]

_REGIONS = 36  # objects that a detector has found, LXMERT's and VisualBERT's number
_PAGE = 1000  # LayoutLM's coordinates


def add_companions(request: BatchRequest, batch: Arguments) -> None:
    """Add what the model takes besides: boxes of words, images, regions, masks."""
    takes, needs = forward_arguments(request.model)
    missing = takes - batch.keys()
    ids = batch.get("input_ids")
    if isinstance(ids, Tensor):
        _beside_text(request, batch, ids, missing)
    sound = batch.get("input_features")
    if isinstance(sound, Tensor) and "attention_mask" in missing and ids is None:
        # Feature extractors pad, so that they always say what is sound.
        shape = (request.batch_size, max(sound.shape[1:]))
        batch["attention_mask"] = torch.ones(shape, dtype=torch.int64, device="cpu")
    if "qformer_input_ids" in needs and isinstance(ids, Tensor):
        batch["qformer_input_ids"] = made_batch_text.token_ids(request, 32)


def _beside_text(
    request: BatchRequest, batch: Arguments, ids: Tensor, missing: frozenset[str]
) -> None:
    config: Any = request.model.config
    if "bbox" in missing:
        batch["bbox"] = _word_boxes(request, ids)
    if "visual_feats" in missing:
        batch["visual_feats"] = _regions(request, config.visual_feat_dim)
        batch["visual_pos"] = _regions(request, config.visual_pos_dim)
    if "visual_embeds" in missing:
        embeds = _regions(request, config.visual_embedding_dim)
        batch["visual_embeds"] = embeds
        ones = torch.ones(embeds.shape[:2], dtype=torch.int64, device="cpu")
        batch["visual_attention_mask"] = ones
        batch["visual_token_type_ids"] = ones.clone()
    kinds = getattr(config, "type_vocab_sizes", None)
    if kinds and "token_type_ids" in missing:  # TAPAS: column, row, rank, ...
        shape = (*ids.shape, len(kinds))
        batch["token_type_ids"] = torch.zeros(shape, dtype=torch.int64, device="cpu")
    wanted = "pixel_values" in missing and not request.text_only
    if wanted and _looks_at_images(config):
        batch["pixel_values"] = made_batch_images.images(request, config)


def _looks_at_images(config: object) -> bool:
    """Whether images are read beside text that has no placeholders for them."""
    token = first_field(config, "image_token_id", "image_token_index")
    described = first_field(config, "image_size", "input_size", "vision_config")
    others = first_field(config, "audio_config", "vq_config")
    return token is None and described is not None and others is None


def _regions(request: BatchRequest, width: int) -> Tensor:
    return request.floats((request.batch_size, _REGIONS, width))


def _word_boxes(request: BatchRequest, ids: Tensor) -> Tensor:
    """Return ``[batch, tokens, 4]``: left, top, right and bottom of each word."""
    config: Any = request.model.config
    limit = first_field(config, "max_2d_position_embeddings")
    largest = _PAGE if limit is None else min(_PAGE, limit)
    corners = request.integers((*ids.shape, 2), 0, largest // 2)
    sizes = request.integers((*ids.shape, 2), 1, largest // 2)
    boxes = torch.cat([corners, corners + sizes], dim=-1)
    if limit is None:  # BROS has no table of them: it reads shares of the page
        return (boxes / _PAGE).to(request.float_dtype)
    return boxes
