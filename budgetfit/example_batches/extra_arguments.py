"""Extra forward arguments of transformers models, recognised by name."""

from typing import Any

import torch
from torch import Tensor

from budgetfit.example_batches import images, token_ids
from budgetfit.example_batches.request import Arguments, BatchRequest, forward_arguments
from budgetfit.example_batches.token_ids import first_field

_REGION_COUNT = 36  # detected objects per image, as in LXMERT and VisualBERT
_SOUND_MASKS = {"attention_mask", "feature_attention_mask", "input_features_mask"}
_TEXT_TOKENS = 77  # the default max_seq_length of OneFormer's processor, and CLIP's
_PAGE_SIZE = 1000  # LayoutLM's coordinates are 0 to 1000


def add_extra_arguments(request: BatchRequest, batch: Arguments) -> None:
    """Add further arguments to a batch: word boxes, images, region features, masks."""
    takes, needs = forward_arguments(request.model)
    missing = takes - batch.keys()
    ids = batch.get("input_ids")
    if isinstance(ids, Tensor):
        _add_text_extras(request, batch, ids, missing)
    sound = batch.get("input_features")
    if isinstance(sound, Tensor) and ids is None:
        # Feature extractors pad, so they always return a mask.
        mask = request.ones((request.batch_size, max(sound.shape[1:])))
        batch.update(dict.fromkeys(sorted(_SOUND_MASKS & missing), mask))
    fused = first_field(request.model.config, "audio_config") or request.model.config
    if "is_longer" in missing and first_field(fused, "enable_fusion"):
        # Of a fused CLAP: whether the sound is longer than what it hears at once.
        shape = (request.batch_size, 1)
        batch["is_longer"] = torch.zeros(shape, dtype=torch.bool, device="cpu")
    if "task_inputs" in needs:  # OneFormer: tokens of the task and of each object
        config: Any = request.model.config
        rows = (request.batch_size, config.num_queries - config.text_encoder_n_ctx)
        vocabulary = config.text_encoder_vocab_size
        shapes = {
            "task_inputs": (request.batch_size, config.task_seq_len),
            "text_inputs": (*rows, _TEXT_TOKENS),
        }
        for name, sizes in shapes.items():
            batch[name] = request.integers(sizes, 0, vocabulary)
    if "qformer_input_ids" in needs and isinstance(ids, Tensor):
        batch["qformer_input_ids"] = token_ids.random_token_ids(request, 32)


def _add_text_extras(
    request: BatchRequest, batch: Arguments, ids: Tensor, missing: frozenset[str]
) -> None:
    config: Any = request.model.config
    if "bbox" in missing:
        batch["bbox"] = _word_boxes(request, ids)
    if "visual_feats" in missing:
        batch["visual_feats"] = _region_features(request, config.visual_feat_dim)
        batch["visual_pos"] = _region_features(request, config.visual_pos_dim)
    if "visual_embeds" in missing:
        embeds = _region_features(request, config.visual_embedding_dim)
        batch["visual_embeds"] = embeds
        ones = request.ones(embeds.shape[:2])
        batch["attention_mask"] = request.ones(ids.shape)
        batch["visual_attention_mask"] = ones
        batch["visual_token_type_ids"] = ones.clone()
    if "image_embeds_position_mask" in missing:  # KOSMOS-2
        mask = torch.zeros_like(ids)
        mask[:, 1 : config.latent_query_num + 1] = 1
        batch["image_embeds_position_mask"] = mask
    kinds = getattr(config, "type_vocab_sizes", None)
    if kinds and "token_type_ids" in missing:  # TAPAS: column, row, rank, ...
        shape = (*ids.shape, len(kinds))
        batch["token_type_ids"] = torch.zeros(shape, dtype=torch.int64, device="cpu")
    wanted = "pixel_values" in missing and not request.text_only
    if wanted and _reads_images_without_placeholders(config):
        if images.reads_videos(config):
            batch["pixel_values"] = images.video_pixel_values(request, config)
        elif {"image_attention_mask", "perceiver_embeddings"} <= missing:
            # IDEFICS: several images a sample, and which tokens attend to which
            pixels = images.pixel_values(request, config, per_sample=(1,))
            batch["pixel_values"] = pixels
            batch["image_attention_mask"] = request.ones((*ids.shape, 1))
        else:
            batch["pixel_values"] = images.pixel_values(request, config)


def _reads_images_without_placeholders(config: object) -> bool:
    """Whether the model takes images and text without image placeholder tokens."""
    token = first_field(config, "image_token_id", "image_token_index")
    sizes = ("image_size", "input_size", "max_img_size")
    described = first_field(config, *sizes, "vision_config", "image_config")
    others = first_field(config, "audio_config", "vq_config")
    return token is None and described is not None and others is None


def _region_features(request: BatchRequest, width: int) -> Tensor:
    return request.floats((request.batch_size, _REGION_COUNT, width))


def _word_boxes(request: BatchRequest, ids: Tensor) -> Tensor:
    """Return word boxes ``[batch, tokens, 4]``: left, top, right, bottom."""
    config: Any = request.model.config
    limit = first_field(config, "max_2d_position_embeddings")
    largest = _PAGE_SIZE if limit is None else min(_PAGE_SIZE, limit)
    corners = request.integers((*ids.shape, 2), 0, largest // 2)
    sizes = request.integers((*ids.shape, 2), 1, largest // 2)
    boxes = torch.cat([corners, corners + sizes], dim=-1)
    if limit is None:  # BROS takes relative coordinates
        return (boxes / _PAGE_SIZE).to(request.float_dtype)
    return boxes
