"""Example labels for the loss of transformers models, by task."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from budgetfit.errors import InputError
from budgetfit.example_batches import audio, images, token_ids
from budgetfit.example_batches.multimodal_prompts import (
    IGNORE_INDEX,
    has_placeholders,
    mask_placeholders,
)
from budgetfit.example_batches.request import Arguments, BatchRequest, forward_arguments
from budgetfit.utils.lazy_import import lazy_import

CHOICE_COUNT = 4  # answers per question in SWAG
_OBJECTS_PER_IMAGE = 7  # COCO's mean for each image, 860 001 objects in 117 266 images
_MAX_BOX_PERCENT = 40  # so that centred boxes lie inside the image


def _language_modeling(request: BatchRequest, batch: Arguments) -> Arguments | None:
    """Language modelling: the labels are the input ids; the model shifts them."""
    if not batch and token_ids.count_codebooks(request.model):
        return _target_tokens(request, batch)
    ids = batch.get("input_ids")
    return None if ids is None else {"labels": _token_labels(request, ids)}


def _token_labels(request: BatchRequest, ids: Tensor) -> Tensor:
    return mask_placeholders(ids.clone(), request.model)


def _target_tokens(request: BatchRequest, batch: Arguments) -> Arguments:
    ids = batch.get("input_ids")
    config = token_ids.text_config(request.model)
    if ids is None:
        length = token_ids.text_length(request, config)
    else:
        length = ids.shape[1]
        request.notes.append(f"targets of {length} tokens, as long as the sources")
    if delays := getattr(request.model.config, "delay_pattern", None):
        return _delayed_codes(request, len(delays))
    if token_ids.count_codebooks(request.model):
        codes = token_ids.audio_codes(request, length)
        decoder = getattr(request.model.config, "decoder", None)
        takes, _ = forward_arguments(request.model)
        start = getattr(decoder, "decoder_start_token_id", None)
        if start is None and "decoder_input_ids" in takes:
            shifted = codes.roll(1, dims=1).transpose(1, 2).contiguous()
            return {"labels": codes, "decoder_input_ids": shifted}
        return {"labels": codes}
    labels = token_ids.random_token_ids(request, length)
    return _with_decoder_input(request, labels)


def _delayed_codes(request: BatchRequest, codebooks: int) -> Arguments:
    """Audio codes of a decoder with a delay for each codebook (Dia)."""
    config: Any = request.model.config
    length = token_ids.text_length(request, config.decoder_config)
    shape = (request.batch_size, length, codebooks)
    codes = token_ids.random_token_ids(request, length * codebooks).view(shape)
    request.notes.append(f"audio codes of {codebooks} codebooks")
    labels = codes.roll(-1, 1).transpose(1, 2).contiguous()
    return {"decoder_input_ids": codes, "labels": labels}


def _captions(request: BatchRequest, batch: Arguments) -> Arguments:
    """Captions: the input ids, or the targets of a decoder."""
    if "input_ids" not in batch:
        return _target_tokens(request, batch)
    labels = _token_labels(request, batch["input_ids"])
    config = request.model.config
    if getattr(config, "is_encoder_decoder", False) and not has_placeholders(config):
        return _with_decoder_input(request, labels)
    return {"labels": labels}


def _transcripts(request: BatchRequest, batch: Arguments) -> Arguments | None:
    if "input_ids" in batch and getattr(
        request.model.config, "is_encoder_decoder", False
    ):
        return _target_tokens(request, batch)  # sound from text
    if "input_ids" in batch:  # speech models with audio tokens
        return _language_modeling(request, batch)
    labels = audio.transcripts(request, request.model.config)
    return _with_decoder_input(request, labels)


def _with_decoder_input(request: BatchRequest, labels: Tensor) -> Arguments:
    """Add shifted labels as decoder input if there is no ``decoder_start_token_id``."""
    takes, _ = forward_arguments(request.model)
    start = getattr(request.model.config, "decoder_start_token_id", None)
    if start is None and "decoder_input_ids" in takes:
        return {"labels": labels, "decoder_input_ids": labels.roll(1, dims=1)}
    return {"labels": labels}


def _transducer(request: BatchRequest, batch: Arguments) -> Arguments:
    labels, read = audio.transducer_targets(request, _first(batch))
    return {"labels": labels, "decoder_input_ids": read}


def _classes(request: BatchRequest, _: Arguments) -> Arguments:
    """One class per sample; floats for regression and for several labels at once."""
    config: Any = request.model.config
    _refuse_missing_padding(request)
    count = _class_count(request)
    kind = getattr(config, "problem_type", None)
    if kind == "multi_label_classification":
        labels = request.integers((request.batch_size, count), 0, 2)
        return {"labels": labels.to(torch.float32)}
    if kind == "regression" or (kind is None and count == 1):
        shape = (request.batch_size,) if count == 1 else (request.batch_size, count)
        return {"labels": request.floats(shape)}
    return {"labels": _class_ids(request, request.batch_size)}


def _image_classes(request: BatchRequest, batch: Arguments) -> Arguments | None:
    if "input_ids" in batch and has_placeholders(request.model.config):
        return None  # ShieldGemma 2 answers with a word, and returns no loss
    return _classes(request, batch)


def _class_count(request: BatchRequest) -> int:
    config: Any = request.model.config
    return int(config.num_labels)


def _class_ids(request: BatchRequest, *shape: int) -> Tensor:
    return request.integers(shape, 0, _class_count(request))


def _refuse_missing_padding(request: BatchRequest) -> None:
    """Decoders classify at the last non-padding token: they need ``pad_token_id``."""
    modeling_auto = lazy_import("transformers.models.auto.modeling_auto")

    config = token_ids.text_config(request.model)
    is_decoder = (
        config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and config.model_type not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )
    has_padding = getattr(config, "pad_token_id", None) is not None
    if is_decoder and not has_padding and request.batch_size > 1:
        raise InputError(
            f"{type(request.model).__name__} trains with more than one sample only "
            "when it knows its padding token: set pad_token_id in the model's config, "
            "for example model.config.pad_token_id = model.config.eos_token_id."
        )


def _spans(request: BatchRequest, batch: Arguments) -> Arguments:
    length = batch["input_ids"].shape[1]
    start = request.integers((request.batch_size,), 0, length)
    end = request.integers((request.batch_size,), 0, length)
    return {
        "start_positions": torch.minimum(start, end),
        "end_positions": torch.maximum(start, end),
    }


def _visual_answers(request: BatchRequest, batch: Arguments) -> Arguments:
    """A score for each answer, or the answer's tokens for a decoder."""
    if "decoder_input_ids" in forward_arguments(request.model)[0]:
        return {"labels": _token_labels(request, batch["input_ids"])}
    shape = (request.batch_size, _class_count(request))
    return {"labels": request.floats(shape).abs()}


def _objects(request: BatchRequest, batch: Arguments) -> Arguments | None:
    """Return DETR's labels: one mapping per image with boxes and classes.

    None without Pillow, which transformers' box losses need, and where a text has the
    classes.
    """
    from transformers.utils.import_utils import is_vision_available  # noqa: PLC0415, slow

    if "input_ids" in batch:  # its words, between full stops, are the classes
        request.notes.append("no labels: their classes are words of the text")
        return None
    if not is_vision_available():
        request.notes.append("the loss of boxes needs Pillow: pip install pillow")
        return None
    pixels: Tensor = batch["pixel_values"]
    with_masks = "Segmentation" in type(request.model).__name__
    request.notes.append(f"{_OBJECTS_PER_IMAGE} objects in each image")
    labels = []
    for _ in range(request.batch_size):
        middles = request.integers((_OBJECTS_PER_IMAGE, 2), 30, 70) / 100
        sizes = request.integers((_OBJECTS_PER_IMAGE, 2), 10, _MAX_BOX_PERCENT) / 100
        target = {
            "class_labels": _class_ids(request, _OBJECTS_PER_IMAGE),
            "boxes": torch.cat([middles, sizes], dim=1).to(request.float_dtype),
        }
        if with_masks:
            target["masks"] = _masks(request, (_OBJECTS_PER_IMAGE, *pixels.shape[-2:]))
        labels.append(target)
    return {"labels": labels}


def _object_masks(request: BatchRequest, batch: Arguments) -> Arguments | None:
    """Return a mask ``[batch, objects, height, width]`` and class per object."""
    if "pixel_values" not in batch:
        return None  # of videos
    # All images have equally many: models take lists, and a tensor iterates like one.
    pixels: Tensor = batch["pixel_values"]
    rows = (request.batch_size, _OBJECTS_PER_IMAGE)
    request.notes.append(f"{_OBJECTS_PER_IMAGE} objects in each image")
    return {
        "mask_labels": _masks(request, (*rows, *pixels.shape[-2:])),
        "class_labels": _class_ids(request, *rows),
    }


def _masks(request: BatchRequest, shape: tuple[int, ...]) -> Tensor:
    return request.integers(shape, 0, 2).to(torch.float32)


def _moments(request: BatchRequest) -> tuple[Tensor, Tensor, Tensor]:
    """Return duration, start and end in seconds of what a text describes (TVP)."""
    start, end = request.floats((2, request.batch_size)).abs()
    return start + end + 1, start, start + end


def _pretraining(request: BatchRequest, batch: Arguments) -> Arguments | None:
    """Masked tokens and, with the second head, sentence order."""
    ids = batch.get("input_ids")
    if ids is None:
        takes, _ = forward_arguments(request.model)
        if {"mask_time_indices", "sampled_negative_indices"} <= takes:
            return audio.contrastive_targets(request, _first(batch))
        # ViTMAE and the like mask patches themselves.
        return {} if "pixel_values" in batch else None
    if "Electra" in type(request.model).__name__:
        # Replaced token detection.
        return {"labels": request.integers(tuple(ids.shape), 0, 2)}
    takes, _ = forward_arguments(request.model)
    if "question_positions" in takes:  # Splinter
        return {"question_positions": ids.new_zeros(len(ids), 1)} | {
            name: spans[:, None] for name, spans in _spans(request, batch).items()
        }
    labels: Arguments = {"labels": ids.clone()}
    if "visual_attention_mask" in batch:  # VisualBERT predicts at image regions, too
        regions = torch.full_like(batch["visual_attention_mask"], IGNORE_INDEX)
        labels["labels"] = torch.cat([ids, regions], dim=1)
    names = ("next_sentence_label", "sentence_order_label", "sentence_image_labels")
    for name in names:
        if name in takes:
            labels[name] = request.integers((request.batch_size,), 0, 2)
    return labels


def _first(batch: Arguments) -> Tensor:
    return next(iter(batch.values()))


_Make = Callable[[BatchRequest, Arguments], Any]
# Tasks that need labels alone.
_LABELS_ONLY: dict[str, _Make] = {
    "CTC": lambda request, batch: audio.ctc_labels(request, _first(batch)),
    "token classification": lambda request, batch: _class_ids(
        request, *batch["input_ids"].shape
    ),
    "multiple choice": lambda request, _: request.integers(
        (request.batch_size,), 0, CHOICE_COUNT
    ),
    "next sentence": lambda request, _: request.integers((request.batch_size,), 0, 2),
    "audio classification": lambda request, _: _class_ids(request, request.batch_size),
    "audio frame classification": lambda request, batch: audio.frame_labels(
        request, request.model.config, _first(batch)
    ),
    "speaker recognition": lambda request, _: _class_ids(request, request.batch_size),
    "semantic segmentation": lambda request, batch: _class_ids(
        request, request.batch_size, *batch["pixel_values"].shape[-2:]
    ),
}
_ARGUMENTS: dict[str, _Make] = {
    "text to spectrogram": lambda request, batch: audio.spoken_targets(
        request, batch["input_ids"]
    ),
    "transducer": _transducer,
    "speech to text": _transcripts,
    "sequence to sequence": _target_tokens,
    "masked LM": _language_modeling,
    "image and text LM": _captions,
    "causal LM": _language_modeling,
    "sequence classification": _classes,
    "question answering": _spans,
    "image classification": _image_classes,
    "video classification": _classes,
    "visual question answering": _visual_answers,
    "universal segmentation": _object_masks,
    "object detection": _objects,
    "masked images": lambda request, _: {
        "bool_masked_pos": images.masked_patch_positions(request, request.model.config)
    },
    "image and text contrast": lambda _, __: {"return_loss": True},
    "keypoint matching": lambda _, __: None,
    "video grounding": lambda request, _: {"labels": _moments(request)},
    "pretraining": _pretraining,
}


def make_labels(request: BatchRequest, task: str, batch: Arguments) -> Arguments | None:
    """Return the keyword arguments for the loss of a task of ``transformers_inputs``.

    None if there can be no loss; an empty mapping if the model needs no labels.
    """
    if task in _LABELS_ONLY:
        return {"labels": _LABELS_ONLY[task](request, batch)}
    return _ARGUMENTS[task](request, batch)
