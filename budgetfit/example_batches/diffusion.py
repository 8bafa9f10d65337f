"""Example arguments of diffusers' models: latents, time steps, texts and conditions.

The names that a model's forward takes say what it needs, and its config how large that
is; ``diffusion_sizes`` knows the rest. Optional arguments are made only where the
training scripts of diffusers pass them. Source: diffusers 0.42.1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn

from budgetfit.applying.loss.prediction_loss import TARGET
from budgetfit.example_batches.diffusion_sizes import (
    RGB,
    DiffusionSizes,
    diffusion_sizes,
    is_autoencoder,
)
from budgetfit.example_batches.plain_modules import no_example_batch
from budgetfit.example_batches.request import Arguments, BatchRequest, forward_arguments

_STEPS: Final = 1000  # time steps of the noise schedules that are trained with
_TIME_IDS: Final = 6  # of SDXL: original size, crop, target size
_VIDEO_IDS: Final = 3  # of Stable Video Diffusion: frame rate, motion, noise
_MICRO_CONDITIONS: Final = 5  # of aMUSEd: original size, crop, aesthetic score
_IMAGE_TOKENS: Final = 257  # of CLIP's ViT at 224 pixels, for videos from images
_MAIN: Final = ("sample", "hidden_states", "x", "latents", "input_ids", "z")
# Names of the width of the text states in configs; the first one counts.
_TEXT_WIDTHS: Final = (
    *("caption_channels", "joint_attention_dim", "text_embed_dim", "text_dim"),
    *("cap_feat_dim", "text_hidden_dim", "llm_features_dim", "in_text_dim"),
    *("text_in_dim", "context_in_dim", "encoder_hid_dim", "cross_attention_dim"),
    *("encoder_hidden_size", "embedding_dim"),
)
_POOLED_WIDTHS: Final = (
    *("pooled_projection_dim", "cond_embed_dim", "text_emb_dim", "in_text_dim2"),
)


@dataclass(frozen=True, slots=True)
class _Making:
    """What one batch is made from."""

    request: BatchRequest
    sizes: DiffusionSizes
    takes: frozenset[str]

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.request.model.config

    @property
    def rows(self) -> int:
        """Samples in the batch."""
        return self.request.batch_size

    def first(self, *names: str) -> Any:
        """Return the first field of the config that is set; else None."""
        values = (getattr(self.config, name, None) for name in names)
        return next((value for value in values if value), None)

    def floats(self, *shape: int) -> Tensor:
        """Return random values for each sample."""
        return self.request.floats((self.rows, *shape))

    def mask(self, *shape: int) -> Tensor:
        """Return a mask for each sample that masks nothing."""
        return torch.ones((self.rows, *shape), dtype=torch.bool, device="cpu")


def is_diffusers_model(model: nn.Module) -> bool:
    """Whether it is a model of diffusers, which is not imported for it."""
    return any(
        parent.__name__ == "ModelMixin" and parent.__module__.startswith("diffusers.")
        for parent in type(model).__mro__
    )


def make_diffusion_batch(request: BatchRequest) -> Arguments:
    """Return the arguments of a forward, and the target where it predicts latents.

    Raises:
        InputError: It needs an argument that is not known here.
    """
    model = request.model
    takes, needs = forward_arguments(model)
    making = _Making(request, diffusion_sizes(request), takes)
    batch: Arguments = {}
    for name in signature(model.forward).parameters:
        make = _ARGUMENTS.get(name)
        value = None if make is None else make(making)
        if value is not None:
            batch[name] = value
    missing = [name for name in needs if name not in batch]
    if missing:
        raise no_example_batch(
            model, f"its forward needs {', '.join(missing)}", tuple(needs)
        )
    target = _target(making, batch)
    if target is not None:
        batch[TARGET] = target
        request.notes.append("loss: mean squared error of the prediction")
    if making.sizes.text_tokens and any(
        name.startswith(("encoder_hidden", "cap_")) for name in batch
    ):
        request.notes.append(
            f"texts of {making.sizes.text_tokens} tokens: max_length= changes that"
        )
    return batch


def _main(making: _Making) -> Any:
    """Return the noisy latents, or the pixels of an autoencoder."""
    sizes = making.sizes
    channels = _channels(making)
    frames, height, width = sizes.latents
    if "cap_feats" in making.takes:  # Z-Image takes a list of samples
        one = (channels, frames, height, width)
        return [making.request.floats(one) for _ in range(making.rows)]
    if sizes.is_packed:
        text = sizes.text_tokens if "indicator" in making.takes else 0
        return making.floats(sizes.tokens + text, channels)
    if "proj_embedding" in making.takes:  # a prior predicts an embedding of an image
        return making.floats(making.config.embedding_dim)
    if not sizes.is_video:
        return making.floats(channels, height, width)
    if sizes.frames_first:
        return making.floats(frames, channels, height, width)
    return making.floats(channels, frames, height, width)


def _channels(making: _Making) -> int:
    config = making.config
    channels = making.first("in_channels", "in_visual_dim", "latent_channels") or RGB
    if is_autoencoder(making.request.model):
        return int(making.first("in_channels") or RGB)
    has_mask = getattr(config, "out_channels", None) == channels - 1
    return int(
        channels - 1 if has_mask and "condition_mask" in making.takes else channels
    )


def _pixels(making: _Making) -> Tensor:
    """Return an image, as large in pixels as the latents."""
    _, height, width = making.sizes.latents
    side = making.sizes.pixels_per_latent
    return making.floats(
        int(making.first("conditioning_channels") or RGB), height * side, width * side
    )


def _condition(making: _Making) -> Any:
    """Return what a ControlNet sees: latents, or pixels for those of UNets."""
    if "sample" in making.takes:
        return _pixels(making)
    extra = making.first("extra_conditioning_channels") or 0
    main = _main(making)
    if extra:
        _, height, width = making.sizes.latents
        return making.floats(main.shape[1] + extra, height, width)
    return main


def _times(making: _Making) -> Tensor:
    """Return a time step for each sample: a number, which UNets take as an integer."""
    steps = making.request.integers((making.rows,), 0, _STEPS)
    if "sample" in making.takes:
        return steps
    return (steps / _STEPS).to(making.request.float_dtype)


def _text_width(making: _Making) -> int | None:
    width = making.first(*_TEXT_WIDTHS)
    width = width[0] if isinstance(width, (list, tuple)) else width
    return int(width) if width else None


def _text(making: _Making) -> Tensor | None:
    """Return text states ``[batch, tokens, width]``."""
    width = _text_width(making)
    if width is None or making.first("encoder_hid_dim_type") == "image_proj":
        return None
    tokens = making.sizes.text_tokens
    if "indicator" in making.takes:  # one sequence of texts and latents
        return making.floats(tokens + making.sizes.tokens, width)
    layers = making.first("num_text_layers")
    return (
        making.floats(tokens, layers, width) if layers else making.floats(tokens, width)
    )


def _text_list(making: _Making) -> list[Tensor]:
    shape = making.sizes.text_tokens, int(making.config.cap_feat_dim)
    return [making.request.floats(shape) for _ in range(making.rows)]


def _text_mask(making: _Making) -> Tensor | None:
    """Return a mask of the text, which most UNets are trained without."""
    if "sample" in making.takes and making.first("cross_attention_norm", "act_fn"):
        return None
    return making.mask(making.sizes.text_tokens)


def _prior_mask(making: _Making) -> Tensor | None:
    if "proj_embedding" not in making.takes:
        return None
    return making.mask(int(making.config.num_embeddings))


def _t5_text(making: _Making) -> Tensor | None:
    width = making.first("cross_attention_dim_t5", "text_embed_dim_t5")
    tokens = making.first("text_len_t5") or making.sizes.text_tokens
    captions = making.first("caption_channels")
    if width is None and isinstance(captions, (list, tuple)):
        width = captions[0]
    return None if width is None else making.floats(int(tokens), int(width))


def _layers_of_text(making: _Making) -> list[Tensor]:
    """Return Llama's states of each layer, of which HiDream uses some."""
    layers = 1 + max(making.config.llama_layers)
    shape = making.sizes.text_tokens, int(making.config.caption_channels[1])
    return [making.floats(*shape) for _ in range(layers)]


def _pooled(making: _Making) -> Tensor | None:
    width = making.first(*_POOLED_WIDTHS)
    return None if width is None else making.floats(int(width))


def _classes(making: _Making) -> Tensor | None:
    """Return class labels: ids, or embeddings that the model projects."""
    kind = making.first("class_embed_type")
    if kind in ("projection", "simple_projection"):
        return making.floats(int(making.config.projection_class_embeddings_input_dim))
    if kind == "timestep":
        return _times(making)
    if kind == "identity":
        return making.floats(4 * int(making.config.block_out_channels[0]))
    count = making.first("num_class_embeds")
    if count is None and making.first("norm_type") == "ada_norm_zero":
        count = making.first("num_embeds_ada_norm")
    return None if count is None else making.request.integers((making.rows,), 0, count)


def _added_conditions(making: _Making) -> dict[str, Tensor | None] | None:
    """Return ``added_cond_kwargs``: of SDXL, DeepFloyd, Kandinsky and PixArt."""
    config, kind = making.config, making.first("addition_embed_type")
    found: dict[str, Tensor | None] = {}
    if kind == "text_time":
        ids = _TIME_IDS * int(config.addition_time_embed_dim)
        width = int(config.projection_class_embeddings_input_dim) - ids
        found = {
            "text_embeds": making.floats(width),
            "time_ids": making.floats(_TIME_IDS),
        }
    image = making.first("encoder_hid_dim_type") in ("image_proj", "text_image_proj")
    if image or kind in ("image", "image_hint", "text_image"):
        width = making.first("encoder_hid_dim", "cross_attention_dim")
        found["image_embeds"] = making.floats(int(width))
    if kind == "image_hint":
        found["hint"] = _pixels(making)
    if getattr(making.request.model, "use_additional_conditions", False):
        found |= {"resolution": making.floats(2), "aspect_ratio": making.floats(1)}
    if "PixArt" in type(making.request.model).__name__ and not found:
        return {"resolution": None, "aspect_ratio": None}
    return found or None


def _image_ids(making: _Making) -> Tensor | None:
    """Return the positions of packed latents: those of the batch, or of each sample."""
    if "img_sizes" in making.takes:
        return None
    return _ids(making, making.sizes.tokens)


def _ids(making: _Making, tokens: int) -> Tensor:
    axes = making.first("axes_dims_rope", "axes_dim", "axes_dims") or (0, 0, 0)
    return torch.zeros((tokens, len(axes)), device="cpu")


def _positions(making: _Making) -> Tensor:
    """Return three coordinates of each token of the text and the latents."""
    count = making.sizes.text_tokens + making.sizes.tokens
    of_sample = (making.rows,) if "indicator" in making.takes else ()
    return torch.zeros((*of_sample, count, 3), dtype=torch.int64, device="cpu")


def _segments(making: _Making) -> Tensor:
    """Return the number of the sample to which each token belongs: one in a row."""
    return making.request.ones(
        (making.rows, making.sizes.text_tokens + making.sizes.tokens)
    )


def _indicator(making: _Making) -> Tensor:
    """Return the role of each token: 3 for the text, 2 for the image."""
    roles = _segments(making) * 3
    roles[:, making.sizes.text_tokens :] = 2
    return roles


def _rotary(making: _Making) -> tuple[Tensor, Tensor] | None:
    """Return cosine and sine for each token, where they are made outside the model."""
    if not making.first("use_rotary_positional_embeddings"):
        return None
    config = making.config
    patch, frames = int(config.patch_size), making.sizes.latents.frames
    steps = frames // int(getattr(config, "patch_size_t", None) or 1)
    tokens = steps * (making.sizes.latents.height // patch)
    shape = tokens * (making.sizes.latents.width // patch), config.attention_head_dim
    return making.request.floats(shape), making.request.floats(shape)


def _latent_extent(making: _Making, dimension: str) -> int | None:
    packed = {"num_frames", "height", "width"} <= making.takes
    size: int = getattr(making.sizes.latents, dimension)
    return size if packed else None


def _frame_count(making: _Making) -> int | None:
    # Cosmos takes frames for each second.
    if making.first("extra_pos_embed_type", "mid_block_type"):
        return None
    return _latent_extent(making, "frames")


def _padding_mask(making: _Making) -> Tensor | None:
    if not making.first("concat_padding_mask"):
        return None
    _, height, width = making.sizes.latents
    return torch.zeros((1, 1, height, width), device="cpu")


def _condition_mask(making: _Making) -> Tensor | None:
    channels = making.first("in_channels")
    if channels is None or _channels(making) == channels:
        return None
    return making.floats(1, *making.sizes.latents)


def _codes(making: _Making) -> Tensor | None:
    """Return the codes of an image, for masked image models."""
    count = making.first("codebook_size")
    if count is None:
        return None
    _, height, width = making.sizes.latents
    return making.request.integers((making.rows, height, width), 0, count)


def _image_states(making: _Making) -> Tensor | None:
    """Return states of an image, for models that make videos from images."""
    width = making.first("image_dim", "image_embed_dim")
    return None if width is None else making.floats(_IMAGE_TOKENS, int(width))


def _target(making: _Making, batch: Arguments) -> Tensor | None:
    """Return a target shaped as the prediction; None where that is not known."""
    model = making.request.model
    main = next((batch[name] for name in _MAIN if name in batch), None)
    if main is None or not _predicts_its_input(model):
        return None
    if isinstance(main, list):
        main = torch.stack(main)
    if not main.is_floating_point():
        return main.clone()
    shape = list(main.shape)
    if making.sizes.is_packed:
        projection = getattr(model, "proj_out", None)
        shape[-1] = getattr(projection, "out_features", shape[-1])
    elif getattr(making.config, "force_inference_output", None) is False:
        # HiDream in training mode leaves its prediction in patches.
        patch = int(making.config.patch_size)
        shape = [making.rows, shape[1], making.sizes.tokens, patch**2]
    elif "proj_embedding" not in making.takes:
        out = (
            making.first("out_channels", "out_visual_dim")
            or shape[_channel_dim(making)]
        )
        dim = _channel_dim(making)
        shape[dim] = min(shape[dim], int(out))
    return making.request.floats(shape)


def _channel_dim(making: _Making) -> int:
    return 2 if making.sizes.is_video and making.sizes.frames_first else 1


def _predicts_its_input(model: nn.Module) -> bool:
    """Whether a model predicts noise or flow, rather than a ControlNet's states."""
    name = type(model).__name__
    return not any(part in name for part in ("ControlNet", "Adapter"))


_ARGUMENTS: Final[dict[str, Callable[[_Making], Any]]] = {
    **dict.fromkeys(("sample", "hidden_states", "x", "latents"), _main),
    **dict.fromkeys(("timestep", "timesteps", "t", "r_timestep"), _times),
    **dict.fromkeys(
        ("pooled_projections", "pooled_embeds", "pooled_text_emb"), _pooled
    ),
    **dict.fromkeys(
        ("encoder_attention_mask", "encoder_hidden_states_mask", "encoder_mask"),
        _text_mask,
    ),
    **dict.fromkeys(
        ("original_size", "target_size", "crop_coords"), lambda making: making.floats(2)
    ),
    "added_cond_kwargs": _added_conditions,
    "attention_mask": _prior_mask,
    "added_time_ids": lambda making: making.floats(_VIDEO_IDS),
    "cap_feats": _text_list,
    "class_labels": _classes,
    "condition_mask": _condition_mask,
    "clip_text_pooled": lambda making: making.floats(
        1, int(making.config.clip_text_pooled_in_channels)
    ),
    "controlnet_cond": _condition,
    "encoder_hidden_states": _text,
    "encoder_hidden_states_image": _image_states,
    "encoder_hidden_states_llama3": _layers_of_text,
    "encoder_hidden_states_t5": _t5_text,
    "guidance": lambda making: (
        making.floats() if making.first("guidance_embeds") else None
    ),
    "height": lambda making: _latent_extent(making, "height"),
    "image_rotary_emb": _rotary,
    "img_ids": _image_ids,
    "img_shapes": lambda making: [tuple(making.sizes.grid)],
    "indicator": _indicator,
    "input_ids": _codes,
    "micro_conds": lambda making: making.floats(_MICRO_CONDITIONS),
    "num_frames": _frame_count,
    "padding_mask": _padding_mask,
    "position_ids": _positions,
    "proj_embedding": lambda making: making.floats(
        int(making.first("embedding_proj_dim", "embedding_dim"))
    ),
    "segment_ids": _segments,
    "timestep_ratio": lambda making: making.floats(),
    "txt_ids": lambda making: _ids(making, making.sizes.text_tokens),
    "width": lambda making: _latent_extent(making, "width"),
}
