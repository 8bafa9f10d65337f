"""Sizes of latents and texts that diffusers' models train on.

A model's config says how many latents it was trained on (``sample_size``) or nothing;
how many pixels a latent stands for is the VAE's, which is another model. So there are
tables here, by the beginning of the class, longest first. Source: diffusers 0.42.1, the
defaults of the pipelines' ``__call__`` (``height``, ``width``, ``num_frames``,
``max_sequence_length``) and of their ``vae_scale_factor``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

from torch import nn

from budgetfit.errors import InputError
from budgetfit.example_batches.request import BatchRequest, forward_arguments

RGB: Final = 3
_VIDEO_NAMES: Final = ("3D", "Video", "UNetMotion", "SpatioTemporal", "I2VGen")
_PACKED_TOKEN: Final = 2  # latents on each side of a token of packed latents
# Frames before channels: [batch, frames, channels, height, width].
_FRAMES_FIRST: Final = ("CogVideoX", "ConsisID", "UNetSpatioTemporal", "AnyFlow")
# Sequences of latents that are made outside of the model.
_PACKED_BY: Final = frozenset({"img_ids", "img_shapes", "position_ids"})

# Pixels for each latent, and frames for each latent frame.
_PER_LATENT: Final = {
    "": (8, 4),
    "BriaFibo": (16, 1),
    "Cosmos3": (16, 4),
    "HunyuanImage": (32, 1),
    "HunyuanVideo15": (16, 4),
    "I2VGenXL": (8, 1),
    "Kandinsky6SR": (16, 4),
    "LTX": (32, 8),
    "Latte": (8, 1),
    "Mochi": (8, 6),
    "QwenImage21": (16, 1),
    "Sana": (32, 1),
    "SanaControlNet": (32, 1),
    "SanaVideo": (8, 4),
    "SanaWM": (32, 8),
    "StableCascade": (32, 1),
    "UNet1D": (1, 1),
    "UNet2DModel": (1, 1),
    "UNet3D": (8, 1),
    "UNetMotion": (8, 1),
    "UNetSpatioTemporal": (8, 1),
}
_WIDE_WAN: Final = 48  # latent channels of Wan 2.2's VAE, which has (16, 4)
# Height, width and frames in pixels, where the config names no size of latents.
_PIXELS: Final = {
    "": (1024, 1024, 1),
    "3D": (480, 832, 81),
    "CogVideoX": (480, 720, 49),
    "Cosmos": (704, 1280, 93),
    "EasyAnimate": (512, 512, 49),
    "Helios": (384, 640, 132),
    "HunyuanImage": (2048, 2048, 1),
    "HunyuanVideo": (720, 1280, 129),
    "I2VGenXL": (704, 1280, 16),
    "Ideogram4": (2048, 2048, 1),
    "Kandinsky5": (512, 768, 121),
    "LTX": (512, 704, 161),
    "LTX2": (512, 768, 121),
    "Latte": (512, 512, 16),
    "Mochi": (480, 848, 19),
    "MotifVideo": (736, 1280, 121),
    "SkyReels": (544, 960, 97),
    "UNet": (512, 512, 1),
    "UNet2DModel": (256, 256, 1),
    "UNet3D": (256, 256, 16),
    "UNetMotion": (512, 512, 16),
    "UNetSpatioTemporal": (576, 1024, 14),
}
# Tokens of a text where the config does not say.
_TEXT_TOKENS: Final = {
    "": 512,
    "AudioLDM2": 77,
    "AuraFlow": 256,
    "Bria": 128,
    "BriaFibo": 3000,
    "CogVideoX": 226,
    "CogView3": 224,
    "CogView4": 1024,
    "ConsisID": 226,
    "ControlNet": 77,
    "GlmImage": 2048,
    "HiDream": 128,
    "HunyuanVideo": 256,
    "I2VGenXL": 77,
    "Ideogram4": 2048,
    "JoyImage": 4096,
    "Kandinsky3": 128,
    "LTX": 128,
    "LTX2": 1024,
    "Latte": 120,
    "Lumina": 256,
    "Mochi": 256,
    "Ovis": 256,
    "PixArt": 300,
    "SD3": 333,  # 77 of CLIP and 256 of T5
    "Sana": 300,
    "SparseControlNet": 77,
    "StableCascade": 77,
    "Transformer2D": 77,
    "UNet": 77,
    "UVit": 77,
}
_TEXT_FIELDS: Final = ("max_text_seq_length", "text_len")


class LatentSize(NamedTuple):
    """Frames, height and width of the latents of one sample."""

    frames: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class DiffusionSizes:
    """Sizes of one sample.

    Attributes:
        latents: Of the model's main input.
        pixels_per_latent: On each side.
        is_video: Whether the main input has a dimension of frames.
        frames_first: Whether frames come before channels.
        is_packed: Whether latents are a sequence ``[batch, tokens, channels]``.
        text_tokens: Length of the text states.
    """

    latents: LatentSize
    pixels_per_latent: int
    is_video: bool
    frames_first: bool
    is_packed: bool
    text_tokens: int

    @property
    def grid(self) -> LatentSize:
        """Frames, rows and columns of packed tokens."""
        if self.is_video:
            return self.latents
        frames, height, width = self.latents
        return LatentSize(frames, height // _PACKED_TOKEN, width // _PACKED_TOKEN)

    @property
    def tokens(self) -> int:
        """How many tokens packed latents are."""
        return prod(self.grid)


def diffusion_sizes(request: BatchRequest) -> DiffusionSizes:
    """Return the sizes for a batch: as requested, configured or usual; with notes."""
    model = request.model
    name = type(model).__name__
    takes, _ = forward_arguments(model)
    is_video = is_video_model(model)
    per_latent, per_frame = _factors(model, takes)
    latents = _latents(request, per_latent, per_frame, is_video=is_video)
    return DiffusionSizes(
        latents=latents,
        pixels_per_latent=per_latent,
        is_video=is_video,
        frames_first=name.startswith(_FRAMES_FIRST)
        and not name.startswith("AnyFlowTransformer"),
        is_packed=_is_packed(takes),
        text_tokens=_text_tokens(request),
    )


def is_video_model(model: nn.Module) -> bool:
    """Whether the samples of a diffusers model have frames."""
    name = type(model).__name__
    return any(part in name for part in _VIDEO_NAMES) or name in _VIDEO_AUTOENCODERS


_VIDEO_AUTOENCODERS: Final = frozenset(
    f"AutoencoderKL{name}"
    for name in (
        *("Allegro", "CogVideoX", "Cosmos", "HunyuanImageRefiner", "Magvit"),
        *("MiniMaxH3", "Mochi", "QwenImage", "QwenImage21", "Wan"),
    )
) | {"AutoencoderVidTok", "Kandinsky6SRVAE"}


def by_class(table: Mapping[str, object], model: nn.Module) -> Any:
    """Return the entry for the longest beginning of the model's class name."""
    name = type(model).__name__
    return table[max((key for key in table if name.startswith(key)), key=len)]


def _is_packed(takes: frozenset[str]) -> bool:
    if {"num_frames", "height", "width"} <= takes:
        return True
    return not takes.isdisjoint(_PACKED_BY) and "img_sizes" not in takes


def _factors(model: nn.Module, takes: frozenset[str]) -> tuple[int, int]:
    channels = getattr(model.config, "in_channels", None)
    is_wan = type(model).__name__.startswith("Wan")
    if is_autoencoder(model):
        return 1, 1
    if channels == RGB and "sample" in takes:
        return 1, 1  # a model of pixels, such as DeepFloyd's
    if channels is not None and channels >= _WIDE_WAN and is_wan:
        return 16, 4
    return by_class(_PER_LATENT, model)


def is_autoencoder(model: nn.Module) -> bool:
    """Whether a diffusers model encodes and decodes samples."""
    name = type(model).__name__
    return "Autoencoder" in name or name in ("VQModel", "ConsistencyDecoderVAE")


def _latents(
    request: BatchRequest, per_latent: int, per_frame: int, *, is_video: bool
) -> LatentSize:
    config: Any = request.model.config
    usual = _usual_pixels(request.model, is_video=is_video)
    frames = _frames(request, per_frame, usual[2], is_video=is_video)
    configured = _configured(config)
    if request.image_size is None and configured is not None:
        request.used.add("image_size")
        request.notes.append(
            f"latents of {configured[0]} x {configured[1]}, as configured"
        )
        return LatentSize(frames, *configured)
    height, width = request.image_size_or((usual[0], usual[1]))
    _check_multiple(request, per_latent * _patch(request.model))
    latents = LatentSize(
        frames, max(1, height // per_latent), max(1, width // per_latent)
    )
    if per_latent > 1:
        request.notes.append(
            f"{height} x {width} pixels are latents of {latents.height} x "
            f"{latents.width}: {per_latent} pixels of the VAE for each"
        )
    return latents


def _patch(model: nn.Module) -> int:
    """Return how many latents on each side are one token of a transformer."""
    takes, _ = forward_arguments(model)
    if _is_packed(takes) and not is_video_model(model):
        return _PACKED_TOKEN
    patch = getattr(model.config, "patch_size", None)
    patch = patch[-1] if isinstance(patch, (list, tuple)) and patch else patch
    return patch if isinstance(patch, int) else 1


def _check_multiple(request: BatchRequest, step: int) -> None:
    """Raise an InputError where the requested pixels are no whole number of tokens."""
    size = request.image_size
    if size is None or not any(side % step for side in size):
        return
    nearest = [max(step, (side + step // 2) // step * step) for side in size]
    raise InputError(
        f"{type(request.model).__name__} takes images whose height and width are "
        f"multiples of {step} pixels, not {size[0]}x{size[1]}. Use the nearest, "
        f"{nearest[0]}x{nearest[1]}."
    )


def _usual_pixels(model: nn.Module, *, is_video: bool) -> tuple[int, int, int]:
    found: tuple[int, int, int] = by_class(_PIXELS, model)
    known = found is not _PIXELS[""]
    if is_autoencoder(model):
        return 256, 256, 17
    return found if known or not is_video else _PIXELS["3D"]


def _configured(config: Any) -> tuple[int, int] | None:
    """Return height and width of the latents that a config names."""
    size = getattr(config, "sample_size", None)
    if size is None and getattr(config, "sample_height", None):
        size = config.sample_height, config.sample_width
    if isinstance(size, int):
        return size, size
    return (int(size[-2]), int(size[-1])) if size else None


def _frames(
    request: BatchRequest, per_frame: int, usual: int, *, is_video: bool
) -> int:
    """Return the frames of the latents."""
    if not is_video:
        return 1
    config: Any = request.model.config
    frames = request.frames
    request.used.add("frames")
    if frames is None:
        for name in ("video_length", "num_frames"):  # not compressed in time
            if isinstance(getattr(config, name, None), int):
                return int(getattr(config, name))
        frames = getattr(config, "sample_frames", None) or usual
    elif (frames - 1) % per_frame:
        fewer = (frames - 1) // per_frame * per_frame + 1
        raise InputError(
            f"{type(request.model).__name__} takes videos of a multiple of {per_frame} "
            f"frames and one more, not {frames}. Use {fewer} or {fewer + per_frame}."
        )
    request.notes.append(f"videos of {frames} frames")
    return (frames - 1) // per_frame + 1


def _text_tokens(request: BatchRequest) -> int:
    """Return the tokens of the text states."""
    config: Any = request.model.config
    if "proj_embedding" in forward_arguments(request.model)[0]:
        return int(config.num_embeddings)  # a prior has one position for each token
    if request.max_length is not None:
        return request.max_length
    for name in _TEXT_FIELDS:
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    return by_class(_TEXT_TOKENS, request.model)
