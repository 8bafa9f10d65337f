"""Example labels for the loss of transformers models, one function per task.

Each returns the keyword arguments to add to the inputs, or None if there can be no
loss; an empty mapping means that the model needs no labels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from budgetfit.errors import InputError
from budgetfit.example_batches import audio, images, token_ids
from budgetfit.example_batches.detection_targets import (
    detection_labels,
    segmentation_labels,
)
from budgetfit.example_batches.multimodal_prompts import mask_placeholders
from budgetfit.example_batches.request import BatchRequest, forward_arguments

Arguments = dict[str, Any]  # keyword arguments of a model's forward

CHOICE_COUNT = 4  # answers per question in SWAG


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
    if token_ids.count_codebooks(request.model):
        return {"labels": token_ids.audio_codes(request, length)}
    labels = token_ids.random_token_ids(request, length)
    return _with_decoder_input(request, labels)


def _captions(request: BatchRequest, batch: Arguments) -> Arguments:
    """Captions: the input ids, or the targets of a decoder."""
    if "input_ids" in batch:
        return {"labels": _token_labels(request, batch["input_ids"])}
    return _target_tokens(request, batch)


def _transcripts(request: BatchRequest, batch: Arguments) -> Arguments | None:
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
    return {"labels": request.integers((request.batch_size,), 0, count)}


def _class_count(request: BatchRequest) -> int:
    config: Any = request.model.config
    return int(config.num_labels)


def _refuse_missing_padding(request: BatchRequest) -> None:
    """Decoders classify at the last non-padding token: they need ``pad_token_id``."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415, slow

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


def _class_per_token(request: BatchRequest, batch: Arguments) -> Arguments:
    shape = tuple(batch["input_ids"].shape)
    return {"labels": request.integers(shape, 0, _class_count(request))}


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


def _choice(request: BatchRequest, _: Arguments) -> Arguments:
    return {"labels": request.integers((request.batch_size,), 0, CHOICE_COUNT)}


def _next_sentence(request: BatchRequest, _: Arguments) -> Arguments:
    return {"labels": request.integers((request.batch_size,), 0, 2)}


def _one_class(request: BatchRequest, _: Arguments) -> Arguments:
    count = _class_count(request)
    return {"labels": request.integers((request.batch_size,), 0, count)}


def _class_per_pixel(request: BatchRequest, batch: Arguments) -> Arguments:
    pixels: Tensor = batch["pixel_values"]
    shape = (request.batch_size, *pixels.shape[-2:])
    return {"labels": request.integers(shape, 0, _class_count(request))}


def _class_per_frame(request: BatchRequest, batch: Arguments) -> Arguments:
    sound = next(iter(batch.values()))
    config = request.model.config
    return {"labels": audio.frame_labels(request, config, sound)}


def _ctc(request: BatchRequest, batch: Arguments) -> Arguments:
    sound = next(iter(batch.values()))
    return {"labels": audio.ctc_labels(request, sound)}


def _masked_patches(request: BatchRequest, _: Arguments) -> Arguments:
    config = request.model.config
    return {"bool_masked_pos": images.masked_patch_positions(request, config)}


def _contrastive(_: BatchRequest, __: Arguments) -> Arguments:
    return {"return_loss": True}


def _pretraining(request: BatchRequest, batch: Arguments) -> Arguments | None:
    """Masked tokens and, with the second head, sentence order."""
    ids = batch.get("input_ids")
    if ids is None:
        # ViTMAE and the like mask patches themselves; the speech models' losses need
        # masks and negative samples from their data collators.
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
    for name in ("next_sentence_label", "sentence_order_label"):
        if name in takes:
            labels[name] = request.integers((request.batch_size,), 0, 2)
    return labels


LABELS: dict[str, Callable[[BatchRequest, Arguments], Arguments | None]] = {
    "speech to text": _transcripts,
    "CTC": _ctc,
    "sequence to sequence": _target_tokens,
    "masked LM": _language_modeling,
    "image and text LM": _captions,
    "causal LM": _language_modeling,
    "sequence classification": _classes,
    "token classification": _class_per_token,
    "question answering": _spans,
    "multiple choice": _choice,
    "next sentence": _next_sentence,
    "image classification": _classes,
    "video classification": _classes,
    "audio classification": _one_class,
    "audio frame classification": _class_per_frame,
    "speaker recognition": _one_class,
    "semantic segmentation": _class_per_pixel,
    "visual question answering": _visual_answers,
    "universal segmentation": segmentation_labels,
    "object detection": detection_labels,
    "masked images": _masked_patches,
    "image and text contrast": _contrastive,
    "pretraining": _pretraining,
}
