"""Example prompts with image or audio placeholder tokens, one per feature.

The number of tokens per image comes from the model itself: its ``get_image_features``
runs on meta in milliseconds.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from budgetfit.batches.batch_tree import map_batch
from budgetfit.errors import InputError
from budgetfit.example_batches import audio, images, token_ids
from budgetfit.example_batches.request import Arguments, BatchRequest, forward_arguments
from budgetfit.example_batches.token_ids import first_field, text_inputs

_MIN_TEXT_TOKENS = 32  # text tokens added if an image alone would fill the row
_TILE_COUNT = 5  # of a tiled image: two by two and the whole
_GRID_PATCHES = 16  # per side, 224 pixels for patches of 14
_IGNORE_INDEX = -100  # torch.nn.CrossEntropyLoss.ignore_index
_HIDDEN_SIZE_FIELDS = ("hidden_size", "d_model", "n_embd")
_PLACEHOLDER_FIELDS = {
    "image": ("image_token_id", "image_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}


def has_placeholders(config: object) -> bool:
    """Whether the config has placeholder tokens for images or audio."""
    return any(
        isinstance(first_field(config, *names), int)
        for names in _PLACEHOLDER_FIELDS.values()
    )


def multimodal_inputs(request: BatchRequest) -> Arguments:
    """Return ``input_ids`` with placeholders, and the images or audio for them.

    Text only if requested and, with a note, if the number of placeholders is unknown.

    Raises:
        InputError: The model does not accept images of the requested size, or
            ``max_length`` leaves no room for them.
    """
    if request.text_only:
        request.notes.append("text only, as asked for")
        ids = text_inputs(request)["input_ids"]
        return {"input_ids": ids, **_token_types(request, torch.zeros_like(ids))}
    for kind, candidates in (("image", _images), ("audio", _sounds)):
        placeholder = first_field(request.model.config, *_PLACEHOLDER_FIELDS[kind])
        if not isinstance(placeholder, int):
            continue
        notes = list(request.notes)
        too_long: list[int] = []
        for inputs in candidates(request):
            count = _feature_count(request, kind, inputs)
            if count and count < (request.max_length or math.inf):
                request.notes.append(f"{count} of a row's tokens stand for its {kind}")
                return {
                    **inputs,
                    **_text_with_placeholders(request, count, placeholder),
                }
            too_long += [count] if count else []
            request.notes[:] = notes
        if kind == "image" and request.image_size is not None:
            raise _image_size_error(request)
        if too_long:
            least = min(too_long)
            raise InputError(
                f"max_length {request.max_length} is too short for "
                f"{type(request.model).__name__}: its {kind} takes {least} tokens. Use "
                f"max_length={least + 1} or more, or text_only=True."
            )
        request.notes.append(
            f"text only: pass batch= with {kind} inputs to plan for {kind} tokens"
        )
    return text_inputs(request)


def mask_placeholders(labels: Tensor, model: nn.Module) -> Tensor:
    """Set the labels of placeholder tokens to -100 (``ignore_index``)."""
    for names in _PLACEHOLDER_FIELDS.values():
        token = first_field(model.config, *names)
        if isinstance(token, int):
            labels = labels.masked_fill(labels == token, _IGNORE_INDEX)
    return labels


def _text_with_placeholders(
    request: BatchRequest, count: int, placeholder: int
) -> Arguments:
    """Return rows of text with ``count`` placeholders after the first token."""
    config = request.model.config
    ids: Tensor = text_inputs(request)["input_ids"]
    if (missing := count + _MIN_TEXT_TOKENS - ids.shape[1]) > 0:
        more = token_ids.random_token_ids(request, missing)
        ids = torch.cat([more, ids], dim=1)
        request.notes.append(f"rows of {ids.shape[1]} tokens, to hold all of those")
    opening = first_field(config, "vision_start_token_id")
    if isinstance(opening, int):  # Qwen computes positions from it
        ids[:, 0] = opening
    ids[:, 1 : count + 1] = placeholder
    types = (ids == placeholder).to(torch.int64)
    return {"input_ids": ids, **_token_types(request, types)}


def _token_types(request: BatchRequest, types: Tensor) -> Arguments:
    """Return token types, 1 for placeholders, under the argument names of the model."""
    takes, _ = forward_arguments(request.model)
    return dict.fromkeys({"token_type_ids", "mm_token_type_ids"} & takes, types)


def _image_size_error(request: BatchRequest) -> InputError:
    height, width = request.image_size or (0, 0)
    config = images.vision_config(request.model.config)
    usual = images.configured_image_size(config)
    return InputError(
        f"{type(request.model).__name__} reads no images of {height} x {width} pixels "
        f"in rows of {request.max_length or 'the usual number of'} tokens. Use the "
        f"size that it was configured for, image_size={usual}, or a larger max_length."
    )


def _images(request: BatchRequest) -> Iterator[Arguments]:
    """Yield image arguments in the formats that models take, the simplest first."""
    config, rows = request.model.config, request.batch_size
    takes, _ = forward_arguments(request.model)
    if "pixel_values" not in takes:
        return
    if "image_grid_thw" in takes:
        yield _packed_patches(request)
        return
    pixels = images.pixel_values(request, config)
    height, width = pixels.shape[-2:]
    note = request.notes[-1:]
    others = images.interpolation_arguments(request, takes)
    sizes = torch.tensor([[height, width]] * rows, device="cpu")
    tiles = request.floats((rows, _TILE_COUNT, *pixels.shape[1:]))
    forms: list[Arguments] = [{"pixel_values": pixels}]
    if "image_sizes" in takes:
        forms.append({"pixel_values": pixels, "image_sizes": sizes})
        forms.append({"pixel_values": tiles, "image_sizes": sizes})
    if "spatial_shapes" in takes:
        forms.insert(0, _patch_rows(request, pixels))
    for form in forms:
        request.notes.extend(note)
        yield {**form, **others}


def _packed_patches(request: BatchRequest) -> Arguments:
    """Return one image per sample as patches packed along dimension 0 (Qwen)."""
    vision = images.vision_config(request.model.config)
    patch = first_field(vision, "patch_size") or 14
    frames = first_field(vision, "temporal_patch_size") or 1
    channels = images.channel_count(vision)
    high, wide = _patches(request, vision, patch, (_GRID_PATCHES,) * 2)
    grid = torch.tensor([[1, high, wide]] * request.batch_size, device="cpu")
    rows = request.batch_size * high * wide
    request.notes.append(f"images of {high * patch} x {wide * patch} pixels")
    return {
        "pixel_values": request.floats((rows, channels * frames * patch * patch)),
        "image_grid_thw": grid,
    }


def _patches(
    request: BatchRequest, vision: object, patch: int, usual: tuple[int, int]
) -> tuple[int, int]:
    """Return the number of patches per side, at least those merged into one token."""
    # Processors round an image to whole tokens, so its patches are multiples of them.
    sides = request.image_size_or((usual[0] * patch, usual[1] * patch))
    merged = first_field(vision, "spatial_merge_size", "merge_size") or 1
    high, wide = (max(round(s / patch / merged), 1) * merged for s in sides)
    return high, wide


def _patch_rows(request: BatchRequest, pixels: Tensor) -> Arguments:
    """Return flattened patches and ``spatial_shapes`` (SigLIP 2)."""
    vision = images.vision_config(request.model.config)
    patch = first_field(vision, "patch_size")
    positions = first_field(vision, "num_patches") or 256
    high, wide = _patches(request, vision, patch, (math.isqrt(positions),) * 2)
    rows = request.batch_size
    width = pixels.shape[1] * patch * patch
    return {
        "pixel_values": request.floats((rows, high * wide, width)),
        "spatial_shapes": torch.tensor([[high, wide]] * rows, device="cpu"),
        "pixel_attention_mask": request.ones((rows, high * wide)),
    }


def _sounds(request: BatchRequest) -> Iterator[Arguments]:
    takes, _ = forward_arguments(request.model)
    if "input_features" not in takes:
        return
    sound = audio.spectrograms(request, request.model.config)
    mask = request.ones((request.batch_size, max(sound.shape[1:])))
    names = {"feature_attention_mask", "input_features_mask"} & takes
    yield {"input_features": sound, **dict.fromkeys(names, mask)}


def _feature_count(request: BatchRequest, kind: str, inputs: Arguments) -> int:
    """Return the number of tokens of a sample's image or audio; 0 if unknown."""
    if "image_grid_thw" in inputs:
        vision = images.vision_config(request.model.config)
        merged = first_field(vision, "spatial_merge_size", "merge_size") or 1
        return int(inputs["image_grid_thw"][0].prod()) // merged**2
    if queries := first_field(request.model.config, "num_query_tokens"):
        return int(queries)  # a Q-Former has a fixed number per image
    getter = _meta_method(request.model, f"get_{kind}_features")
    if getter is None:
        return 0
    known = inspect.signature(getter).parameters
    arguments = {name: value for name, value in inputs.items() if name in known}
    try:
        with torch.no_grad():
            features = getter(**map_batch(arguments, _on_meta))
    except Exception:  # noqa: BLE001 - not this model's format
        return 0
    features = getattr(features, "pooler_output", features)
    width = first_field(token_ids.text_config(request.model), *_HIDDEN_SIZE_FIELDS)
    found = [leaf for leaf in tree_leaves(features) if isinstance(leaf, Tensor)]
    if not width or not found or any(leaf.shape[-1] != width for leaf in found):
        return 0
    return sum(leaf.numel() for leaf in found) // width // request.batch_size


def _on_meta(value: Tensor) -> Tensor:
    """Move floats to meta; integers (sizes) keep their values."""
    return value.to("meta") if value.is_floating_point() else value


def _meta_method(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return a method of a meta copy of the model; None if there is none."""
    # A copy, because transformers adds hooks to modules that it runs.
    if not callable(getattr(model, name, None)):
        return None
    try:
        if all(parameter.is_meta for parameter in model.parameters()):
            meta_model = copy.deepcopy(model)
        else:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                meta_model = type(model)(copy.deepcopy(model.config))
    except Exception:  # noqa: BLE001 - cannot be built from a config alone
        return None
    return getattr(meta_model, name)
