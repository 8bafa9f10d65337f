"""Example images and videos of the size in a transformers config."""

import torch
from torch import Tensor

from budgetfit.example_batches.request import BatchRequest
from budgetfit.example_batches.token_ids import ConfigValue, first_field

_DEFAULT_PIXELS = 224  # ImageNet's training crop
_DEFAULT_MASK_PIXELS = 512  # ADE20K's training crop, what segmentation models see
_DEFAULT_FRAMES = 16
# Interpolates position embeddings for other image sizes than the configured one.
_INTERPOLATE_ARGUMENT = "interpolate_pos_encoding"
_MASKED_SHARE = 0.4  # BEiT's share of masked patches


def pixel_values(
    request: BatchRequest,
    config: object,
    *,
    for_masks: bool = False,
    per_sample: tuple[int, ...] = (),
) -> Tensor:
    """Return images, float ``[batch, *per_sample, channels, height, width]``."""
    vision = vision_config(config)
    count = channel_count(vision)
    height, width = _image_size(request, vision, for_masks=for_masks)
    each = f"{per_sample[0]} " if per_sample else ""
    request.notes.append(f"{each}images of {count} x {height} x {width} pixels")
    return request.floats((request.batch_size, *per_sample, count, height, width))


def video_pixel_values(request: BatchRequest, config: object) -> Tensor:
    """Return videos, float ``[batch, frames, channels, height, width]``."""
    vision = vision_config(config)
    frames = first_field(vision, "num_frames", "frames_per_clip")
    if frames is None:
        request.used.add("frames")
        frames = request.frames or _DEFAULT_FRAMES
    height, width = _image_size(request, vision)
    count = channel_count(vision)
    request.notes.append(
        f"videos of {frames} frames of {count} x {height} x {width} pixels"
    )
    return request.floats((request.batch_size, frames, count, height, width))


def masked_patch_positions(request: BatchRequest, config: object) -> Tensor:
    """Return ``bool_masked_pos``, bool ``[batch, patches]``."""
    vision = vision_config(config)
    height, width = _image_size(request, vision)
    patch = first_field(vision, "patch_size") or 16
    rows, columns = (patch, patch) if isinstance(patch, int) else tuple(patch)[-2:]
    patches = (height // rows) * (width // columns)
    frames = first_field(vision, "num_frames")
    if frames is not None:
        patches *= frames // (first_field(vision, "tubelet_size") or 1)
    # The same patches in each row: VideoMAE reshapes what is masked into a rectangle.
    order = torch.randperm(patches, generator=request.generator, device="cpu")
    is_masked = order < max(1, int(patches * _MASKED_SHARE))
    return is_masked.expand(request.batch_size, patches).clone()


def interpolation_arguments(
    request: BatchRequest, takes: frozenset[str]
) -> dict[str, ConfigValue]:
    """Return extra arguments for images that are not of the configured size."""
    usual = configured_image_size(vision_config(request.model.config))
    if request.image_size in (None, usual) or _INTERPOLATE_ARGUMENT not in takes:
        return {}
    return {_INTERPOLATE_ARGUMENT: True}


def reads_videos(config: object) -> bool:
    """Whether the config says that samples are videos."""
    return "num_frames" in vars(vision_config(config))


def vision_config(config: object) -> ConfigValue:
    """Return the vision part of a config."""
    return first_field(config, "vision_config", "image_config", "encoder") or config


def channel_count(config: object) -> int:
    """Return the number of image channels: 3 unless configured."""
    count = first_field(
        config, "num_channels", "in_channels", "in_chans", "num_input_channels"
    )
    return count if isinstance(count, int) else 3


def _image_size(
    request: BatchRequest, config: object, *, for_masks: bool = False
) -> tuple[int, int]:
    return request.image_size_or(configured_image_size(config, for_masks=for_masks))


def configured_image_size(
    config: object, *, for_masks: bool = False
) -> tuple[int, int]:
    """Return the configured image height and width."""
    fields = ("image_size", "img_size", "crop_size", "input_size", "max_img_size")
    size = first_field(config, *fields)
    if size is None and (backbone := first_field(config, "backbone_config")):
        size = _whole_windows(backbone, first_field(backbone, "image_size"))
    if size is None and (scales := first_field(config, "scaled_images_ratios")):
        # Depth Pro cuts patches of one size out of the image at each scale.
        size = int(first_field(config, "patch_size") / min(scales))
    if isinstance(size, dict):
        size = (size["height"], size["width"]) if "height" in size else None
    if isinstance(size, (list, tuple)) and len(size) in (1, 2):
        return int(size[0]), int(size[-1])
    if isinstance(size, int):
        return size, size
    pixels = _DEFAULT_MASK_PIXELS if for_masks else _DEFAULT_PIXELS
    return pixels, pixels


def _whole_windows(config: object, size: ConfigValue) -> ConfigValue:
    """Return an image size in whole windows of patches, as RF-DETR's processor has."""
    patch, windows = (first_field(config, x) for x in ("patch_size", "num_windows"))
    if not isinstance(size, int) or not isinstance(patch, int) or not windows:
        return size
    return max(round(size / patch / windows), 1) * patch * windows
