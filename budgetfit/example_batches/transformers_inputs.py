"""Example arguments for transformers models: inputs by modality, labels by task.

The modality is the model's ``main_input_name``; the task comes from transformers' auto
class tables, or the suffix of the class name.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from budgetfit.errors import InputError
from budgetfit.example_batches import audio, image_patches, images, token_ids
from budgetfit.example_batches.extra_arguments import add_extra_arguments
from budgetfit.example_batches.labels import CHOICE_COUNT, make_labels
from budgetfit.example_batches.multimodal_prompts import (
    has_placeholders,
    multimodal_inputs,
    refuse_unset_placeholder,
    spoken_text_inputs,
)
from budgetfit.example_batches.request import Arguments, BatchRequest, forward_arguments
from budgetfit.example_batches.time_series import time_series_inputs, trajectory_inputs
from budgetfit.example_batches.token_ids import text_inputs
from budgetfit.utils.lazy_import import lazy_import

# Task -> table of transformers.models.auto.modeling_auto; the first match decides, so
# specific ones come first.
_AUTO_TABLES = {
    "text to spectrogram": "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES",
    "transducer": "MODEL_FOR_TDT_MAPPING_NAMES",
    "speech to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "CTC": "MODEL_FOR_CTC_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked LM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image and text LM": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "causal LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "visual question answering": "MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES",
    "question answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "multiple choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "next sentence": "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES",
    "image classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "video classification": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "audio classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "audio frame classification": "MODEL_FOR_AUDIO_FRAME_CLASSIFICATION_MAPPING_NAMES",
    "speaker recognition": "MODEL_FOR_AUDIO_XVECTOR_MAPPING_NAMES",
    "semantic segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "universal segmentation": "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES",
    "object detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "masked images": "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES",
    "image and text contrast": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "keypoint matching": "MODEL_FOR_KEYPOINT_MATCHING_MAPPING_NAMES",
}

# For classes outside the tables: other heads, remote code, user models.
_TASKS_BY_SUFFIX = {
    "ForCausalLM": "causal LM",
    "LMHeadModel": "causal LM",
    "DoubleHeadsModel": "causal LM",
    "ForMaskedLM": "masked LM",
    "ForConditionalGeneration": "sequence to sequence",
    "EncoderDecoderModel": "sequence to sequence",
    "DualEncoderModel": "image and text contrast",
    "ForSequenceClassification": "sequence classification",
    "ForTokenClassification": "token classification",
    "ForQuestionAnswering": "question answering",
    "ForQuestionAnsweringSimple": "question answering",
    "ForMultipleChoice": "multiple choice",
    "ForImageClassification": "image classification",
    "ForVideoClassification": "video classification",
    "ForAudioClassification": "audio classification",
    "ForSemanticSegmentation": "semantic segmentation",
    "ForCTC": "CTC",
    "ForObjectDetection": "object detection",
    "ForUniversalSegmentation": "universal segmentation",
    "ForInstanceSegmentation": "universal segmentation",
    "ForPreTraining": "pretraining",
    "ForVideoGrounding": "video grounding",
    "WithHifiGan": "text to spectrogram",
    "ForTextToSpeech": "sequence to sequence",
}

_PADDED_PART = 8  # of a padded sample; which part it is changes no memory


def make_transformers_batch(request: BatchRequest) -> Arguments:
    """Return keyword arguments for the model, with labels where it returns a loss.

    Raises:
        InputError: No example of an input can be made.
    """
    model: Any = request.model
    _refuse_without_forward(model)
    takes, needs = forward_arguments(model)
    task = _task_of(type(model))
    without_labels = task is None or "labels" not in takes
    if (
        without_labels
        and task in (None, "sequence to sequence")
        and ({"return_loss", "input_ids"} <= takes)
    ):
        task = "image and text contrast"
    batch = _inputs(request, task)
    add_extra_arguments(request, batch)
    if getattr(model.config, "is_encoder_decoder", False) and task is None:
        _add_decoder_input(request, batch, takes)
    # Time series models return a loss with a future or target, or by masking.
    returns_loss = model.main_input_name == "past_values" and (
        not {"future_values", "target_values"}.isdisjoint(batch)
        or type(model).__name__.endswith("ForPretraining")
    )
    if task is not None:
        labels = make_labels(request, task, batch)
        returns_loss = labels is not None and takes.issuperset(labels)
        if labels is not None and returns_loss:
            batch.update(labels)
    if request.padded:
        _add_padding(request, batch, takes)
    missing = [name for name in needs if name not in batch]
    if missing:
        raise _no_example_batch(model, "needs", *missing)
    if not returns_loss:
        request.notes.append(
            f"no labels: {type(model).__name__} returns no loss for a made batch"
        )
    if "use_cache" in takes and _fills_generation_cache(model.config):
        request.notes.append(
            "config.use_cache is on: training keeps keys and values that only "
            "generation needs; set model.config.use_cache = False"
        )
    return batch


def _fills_generation_cache(config: Any) -> bool:
    """Whether a forward fills a generation cache; encoders ignore ``use_cache``."""
    modeling_auto = lazy_import("transformers.models.auto.modeling_auto")

    is_encoder = (
        config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and not getattr(config, "is_decoder", False)
        and not getattr(config, "is_encoder_decoder", False)
    )
    return bool(getattr(config, "use_cache", False)) and not is_encoder


def _task_of(model_class: type[nn.Module]) -> str | None:
    """Return the task of the first base class in transformers' tables, else None."""
    for parent in model_class.__mro__:
        name = parent.__name__
        if name == "PreTrainedModel":
            return None
        if (task := _tasks_by_class().get(name)) is not None:
            return task
        for end, task in _TASKS_BY_SUFFIX.items():
            if name.endswith(end):
                return task
    return None


@cache
def _tasks_by_class() -> dict[str, str]:
    modeling_auto = lazy_import("transformers.models.auto.modeling_auto")

    tasks: dict[str, str] = {}
    for task, table in _AUTO_TABLES.items():
        for names in getattr(modeling_auto, table, {}).values():
            for name in (names,) if isinstance(names, str) else names:
                tasks.setdefault(name, task)
    return tasks


def _inputs(request: BatchRequest, task: str | None) -> Arguments:
    """Return the model's inputs, without labels."""
    model: Any = request.model
    takes, _ = forward_arguments(model)
    if task == "image and text contrast":
        names = ("pixel_values", "pixel_values_videos")
        other = next((name for name in names if name in takes), "input_features")
        return text_inputs(request) | _INPUTS_BY_NAME[other](request, task)
    if "input_values_cutoffs" in takes:
        return spoken_text_inputs(request)
    if "input_features" in takes and hasattr(model.config, "audio_length_per_tok"):
        return audio.streamed_inputs(request)
    if has_placeholders(model.config) and "input_ids" in takes:
        return multimodal_inputs(request)
    if request.text_only and "input_ids" in takes:
        return _input_ids(request, task)
    if {"input_ids", "pixel_values"} <= takes:
        refuse_unset_placeholder(model)
    main = model.main_input_name
    main = main[0] if isinstance(main, (list, tuple)) else main
    if (
        task == "speech to text"
        and {"input_features", "decoder_input_ids"} <= takes
        and main == "input_ids"
    ):
        main = "input_features"  # Pop2Piano keeps the default name
    if main == "inputs":  # depends on the encoder
        main = next((name for name in _INPUTS_BY_NAME if name in takes), main)
    if main not in _INPUTS_BY_NAME:
        raise _no_example_batch(model, "reads", main)
    return _INPUTS_BY_NAME[main](request, task)


def _input_ids(request: BatchRequest, task: str | None) -> Arguments:
    if task == "multiple choice":
        return _choices(request)
    if task == "causal LM" and token_ids.count_codebooks(request.model):
        return {}  # it shifts its labels itself
    return text_inputs(request)


def _choices(request: BatchRequest) -> Arguments:
    config = token_ids.text_config(request.model)
    length = token_ids.text_length(request, config)
    rows = request.batch_size * CHOICE_COUNT
    ids = token_ids.random_token_ids(request, length, rows)
    return {"input_ids": ids.view(request.batch_size, CHOICE_COUNT, length)}


def _image_inputs(request: BatchRequest, task: str | None) -> Arguments:
    config = request.model.config
    takes, needs = forward_arguments(request.model)
    is_video = task == "video classification" or (
        task != "image classification" and images.reads_videos(config)
    )
    if "spatial_shapes" in takes:
        batch: Arguments = image_patches.padded_patches(request)
    elif task == "keypoint matching":
        batch = {"pixel_values": images.pixel_values(request, config, per_sample=(2,))}
    elif is_video:
        batch = {"pixel_values": images.video_pixel_values(request, config)}
    else:
        for_masks = task == "semantic segmentation"
        pixels = images.pixel_values(request, config, for_masks=for_masks)
        batch = {"pixel_values": pixels}
    batch.update(images.interpolation_arguments(request, takes))
    if "bool_masked_pos" in needs:
        batch["bool_masked_pos"] = images.masked_patch_positions(request, config)
    reads_text = task is None or task == "image and text LM" or "input_ids" in needs
    if "input_ids" in takes and reads_text:
        batch.update(text_inputs(request))
    return batch


# By main_input_name; for a generic encoder the first that the forward takes.
_INPUTS_BY_NAME: dict[str, Callable[[BatchRequest, str | None], Arguments]] = {
    "input_values": lambda request, _: {
        "input_values": audio.waveforms(request, request.model.config)
    },
    "input_features": lambda request, _: {
        "input_features": audio.spectrograms(request, request.model.config)
    },
    "pixel_values": _image_inputs,
    "flattened_patches": lambda request, _: image_patches.flattened_patches(request),
    "pixel_values_videos": lambda request, _: {
        "pixel_values_videos": images.video_pixel_values(request, request.model.config)
    },
    "input_ids": _input_ids,
    "past_values": lambda request, _: time_series_inputs(request),
    "states": lambda request, _: trajectory_inputs(request),
}


def _add_decoder_input(
    request: BatchRequest, batch: Arguments, takes: frozenset[str]
) -> None:
    """Add decoder inputs for an encoder-decoder without a head and labels."""
    if "decoder_input_ids" not in takes:
        return
    if "input_ids" in batch:
        length = batch["input_ids"].shape[-1]
        ids = token_ids.random_token_ids(request, length)
    elif token_ids.first_field(request.model.config, "blank_token_id") is not None:
        ids = audio.transducer_targets(request, batch["input_features"])[1]
    else:
        ids = audio.transcripts(request, request.model.config)
    batch["decoder_input_ids"] = ids


def _add_padding(
    request: BatchRequest, batch: Arguments, takes: frozenset[str]
) -> None:
    """Add the attention mask of text whose samples but the first end in padding."""
    ids = batch.get("input_ids")
    if ids is None or ids.dim() != 2 or "attention_mask" not in takes:  # noqa: PLR2004
        return
    mask = batch.get("attention_mask", request.ones(ids.shape)).clone()
    mask[1:, ids.shape[1] - ids.shape[1] // _PADDED_PART :] = 0
    batch["attention_mask"] = mask


def _refuse_without_forward(model: nn.Module) -> None:
    """Refuse a container of models, such as a text model and a vocoder.

    Raises:
        InputError: It has no forward of its own.
    """
    if type(model).forward is not nn.Module.forward:
        return
    parts = [
        f"{name} ({type(part).__name__})"
        for name, part in model.named_children()
        if hasattr(part, "main_input_name")
    ]
    raise InputError(
        f"{type(model).__name__} has no forward, so it is not trained as a whole. "
        f"Plan one of its parts: {', '.join(parts) or 'none is a model'}. Pass that "
        "module, or a function that returns it: model.py:build."
    )


def _no_example_batch(model: nn.Module, verb: str, *names: str) -> InputError:
    example = ", ".join(f'"{name}": ...' for name in names)
    return InputError(
        f"No batch can be made for {type(model).__name__}: it {verb} "
        f"{', '.join(names)}. Pass one that your data loader gives, of two samples: "
        f"batch={{{example}, ...}}."
    )
