"""Example prompts with image or audio placeholder tokens, one per feature.

The number of tokens per image comes from the model itself: its ``get_image_features``
runs on meta in milliseconds.
"""

import contextlib
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
from budgetfit.example_batches import audio, image_patches, images, token_ids
from budgetfit.example_batches.dry_run import call_on_fakes
from budgetfit.example_batches.request import Arguments, BatchRequest, forward_arguments
from budgetfit.example_batches.token_ids import first_field, text_inputs

_MIN_TEXT_TOKENS = 32  # text tokens added if an image alone would fill the row
_TILE_COUNT = 5  # of a tiled image: two by two and the whole
IGNORE_INDEX = -100  # torch.nn.CrossEntropyLoss.ignore_index
_HIDDEN_SIZE_FIELDS = ("hidden_size", "d_model", "n_embd")
_PLACEHOLDER_FIELDS = {
    "image": ("image_token_id", "image_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
    "video": ("video_token_id", "video_token_index"),
}


def has_placeholders(config: object) -> bool:
    """Whether the config has placeholder tokens for images, audio or videos."""
    return any(
        isinstance(first_field(config, *names), int)
        for names in _PLACEHOLDER_FIELDS.values()
    )


def refuse_unset_placeholder(model: nn.Module) -> None:
    """Refuse a config that leaves open which token stands for an image or a video.

    Raises:
        InputError: Says how to set it.
    """
    for kind in ("image", "video"):
        for name in _PLACEHOLDER_FIELDS[kind]:
            if name in vars(model.config) and not has_placeholders(model.config):
                raise InputError(
                    f"The config of {type(model).__name__} does not say which token "
                    f"stands for the {kind}: {name} is None. Set it to the id of its "
                    f"processor's {kind} token, as its newer checkpoints do, or pass "
                    "batch=."
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
        return _text_alone(request)
    kinds = {"image": _images, "audio": _sounds}
    if first_field(request.model.config, *_PLACEHOLDER_FIELDS["image"]) is None:
        kinds["video"] = _videos
    for kind, candidates in kinds.items():
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
    return _text_alone(request)


def _text_alone(request: BatchRequest) -> Arguments:
    ids = text_inputs(request)["input_ids"]
    return {"input_ids": ids, **_token_types(request, torch.zeros_like(ids))}


def spoken_text_inputs(request: BatchRequest) -> Arguments:
    """Return a text that is followed by its sound, one token for a codec's frame.

    The model encodes the sound itself (CSM); ``input_values_cutoffs`` are its ends.
    """
    config: Any = request.model.config
    sound = audio.codec_waveforms(request, config.codec_config)
    samples = sound.shape[-1]
    rate = config.codec_config.frame_rate / config.codec_config.sampling_rate
    frames = math.ceil(samples * rate)
    ends = torch.full((request.batch_size, 1), samples, device="cpu")
    words = token_ids.random_token_ids(request, _MIN_TEXT_TOKENS)
    said = torch.full(
        (request.batch_size, frames + 1), config.audio_token_id, device="cpu"
    )
    said[:, -1] = config.audio_eos_token_id
    request.notes.append(
        f"rows of {_MIN_TEXT_TOKENS} text tokens and {frames} frames of sound"
    )
    return {
        "input_ids": torch.cat([words, said], dim=1),
        "input_values": sound,
        "input_values_cutoffs": ends,
        "labels": torch.cat([torch.full_like(words, IGNORE_INDEX), said], dim=1),
    }


def mask_placeholders(labels: Tensor, model: nn.Module) -> Tensor:
    """Set the labels of placeholder tokens to -100 (``ignore_index``)."""
    for names in _PLACEHOLDER_FIELDS.values():
        token = first_field(model.config, *names)
        if isinstance(token, int):
            labels = labels.masked_fill(labels == token, IGNORE_INDEX)
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
    return dict.fromkeys(sorted({"token_type_ids", "mm_token_type_ids"} & takes), types)


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
        forms = [*image_patches.packed_patches(request)]
        taken = (form for form in forms if _reaches_a_layer(request, form))
        yield forms[0] if len(forms) == 1 else next(taken, forms[0])
        return
    pixels = images.pixel_values(request, config)
    height, width = pixels.shape[-2:]
    note = request.notes[-1:]
    others = images.interpolation_arguments(request, takes)
    sizes = torch.tensor([[height, width]] * rows, device="cpu")
    tiles = request.floats((rows, _TILE_COUNT, *pixels.shape[1:]))
    forms = [{"pixel_values": pixels}]
    if "image_sizes" in takes:
        forms.append({"pixel_values": pixels, "image_sizes": sizes})
        forms.append({"pixel_values": tiles, "image_sizes": sizes})
    if "spatial_shapes" in takes:
        forms.insert(0, image_patches.padded_patches(request))
    elif "pixel_attention_mask" in takes:  # all images of a sample have tiles
        forms += [{"pixel_values": tiles}, {"pixel_values": tiles[:, :1]}]
    for form in forms:
        request.notes.extend(note)
        for count in form["pixel_values"].shape[1:-3]:
            request.notes.append(
                f"{count} of them in a sample, as of an image in tiles"
            )
        yield {**form, **others}


def _videos(request: BatchRequest) -> Iterator[Arguments]:
    takes, _ = forward_arguments(request.model)
    if "pixel_values" in takes:
        yield {"pixel_values": images.video_pixel_values(request, request.model.config)}


def _sounds(request: BatchRequest) -> Iterator[Arguments]:
    takes, _ = forward_arguments(request.model)
    if "input_features" not in takes:
        return
    sound = audio.spectrograms(request, request.model.config)
    note = request.notes[-1:]
    mask = request.ones((request.batch_size, max(sound.shape[1:])))
    names = {"feature_attention_mask", "input_features_mask", "padding_mask"} & takes
    for features in (sound, sound.transpose(1, 2).contiguous()):
        request.notes.extend(note)
        yield {"input_features": features, **dict.fromkeys(sorted(names), mask)}


def _feature_count(request: BatchRequest, kind: str, inputs: Arguments) -> int:
    """Return the number of tokens of a sample's image or audio; 0 if unknown."""
    config = request.model.config
    if "image_grid_thw" in inputs:
        patches = int(inputs["image_grid_thw"][0].prod())
        return patches // image_patches.merged_patches(config) ** 2
    if queries := first_field(config, "num_query_tokens"):
        frames = math.prod(inputs["pixel_values"].shape[1:-3])
        return int(queries) * frames  # a Q-Former has a fixed number per image
    getter = _meta_method(request.model, f"get_{kind}_features")
    if getter is None:
        return 0
    try:
        features = _call_on_meta(getter, inputs)
    except Exception:  # noqa: BLE001 - it reads values, or takes another format
        try:
            features = _call_on_fakes(getter, inputs)
        except Exception:  # noqa: BLE001 - not this model's format
            return 0
    features = getattr(features, "pooler_output", features)
    width = first_field(token_ids.text_config(request.model), *_HIDDEN_SIZE_FIELDS)
    found = [leaf for leaf in tree_leaves(features) if isinstance(leaf, Tensor)]
    if not width or not found or any(leaf.shape[-1] != width for leaf in found):
        return 0
    return sum(leaf.numel() for leaf in found) // width // request.batch_size


def _reaches_a_layer(request: BatchRequest, inputs: Arguments) -> bool:
    """Whether the first layer that sees images takes these; True if unknown.

    What follows may need values of their sizes, which mix devices on meta.
    """
    getter: Any = _meta_method(request.model, "get_image_features")
    if getter is None:
        return True
    ran: list[nn.Module] = []
    for module in getter.__self__.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
            module.register_forward_hook(lambda layer, *_: ran.append(layer))
    with contextlib.suppress(Exception):
        _call_on_meta(getter, inputs)
    return bool(ran)


def _call_on_meta(getter: Callable[..., object], inputs: Arguments) -> object:
    with torch.no_grad():
        return getter(**map_batch(_arguments_of(getter, inputs), _on_meta))


def _call_on_fakes(getter: Callable[..., object], inputs: Arguments) -> object:
    """Call a method on fake tensors, which have the values of masks and sizes."""
    bound: Any = getter

    def call(fake: nn.Module, arguments: Arguments) -> Any:
        return getattr(fake, bound.__name__)(**arguments)

    return call_on_fakes(bound.__self__, call, _arguments_of(getter, inputs))


def _arguments_of(getter: Callable[..., object], inputs: Arguments) -> Arguments:
    known = inspect.signature(getter).parameters
    return {name: value for name, value in inputs.items() if name in known}


def _on_meta(value: Tensor) -> Tensor:
    """Move floats to meta; integers (sizes) keep their values."""
    return value.to("meta") if value.is_floating_point() else value


def _meta_method(model: nn.Module, name: str) -> Callable[..., object] | None:
    """Return a method of a meta copy of the model; None if there is none."""
    # A copy, because transformers adds hooks to modules that it runs.
    homes = (model, getattr(model, "base_model", model))
    if not any(callable(getattr(home, name, None)) for home in homes):
        return None
    try:
        if all(parameter.is_meta for parameter in model.parameters()):
            meta_model = copy.deepcopy(model)
        else:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                meta_model = type(model)(copy.deepcopy(model.config))
    except Exception:  # noqa: BLE001 - cannot be built from a config alone
        return None
    # A head may hand on more than its signature names.
    home = getattr(meta_model, "base_model", meta_model)
    return getattr(home, name, None) or getattr(meta_model, name)
