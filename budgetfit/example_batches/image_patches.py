"""Example images cut into patches, as processors of some models hand them over."""

import math
from collections.abc import Iterator

import torch

from budgetfit.example_batches import images
from budgetfit.example_batches.request import Arguments, BatchRequest, forward_arguments
from budgetfit.example_batches.token_ids import first_field

_GRID_PATCHES = 16  # per side, 224 pixels for patches of 14
_DEFAULT_PATCH = 14
_PAGE_PATCHES = (64, 32)  # 2048, the default max_patches of Pix2Struct's processor


def packed_patches(request: BatchRequest) -> Iterator[Arguments]:
    """Yield one image per sample as patches packed along dimension 0.

    Patches are flat (Qwen) or images themselves (Kimi).
    """
    takes, _ = forward_arguments(request.model)
    vision = images.vision_config(request.model.config)
    patch = first_field(vision, "patch_size") or _DEFAULT_PATCH
    frames = first_field(vision, "temporal_patch_size", "patch_temporal") or 1
    channels = images.channel_count(vision)
    high, wide = _patches(request, patch, (_GRID_PATCHES,) * 2)
    grid = torch.tensor([[1, high, wide]] * request.batch_size, device="cpu")
    rows = request.batch_size * high * wide
    others: Arguments = {"image_grid_thw": grid}
    if "image_merge_sizes" in takes:
        merged = merged_patches(request.model.config)
        others["image_merge_sizes"] = torch.full_like(grid[:, 0], merged)
    request.notes.append(f"images of {high * patch} x {wide * patch} pixels")
    flat = request.floats((rows, channels * frames * patch * patch))
    yield {"pixel_values": flat, **others}
    if frames == 1:
        yield {"pixel_values": flat.view(rows, channels, patch, patch), **others}


def padded_patches(request: BatchRequest) -> Arguments:
    """Return rows of flat patches and ``spatial_shapes`` (SigLIP 2)."""
    vision = images.vision_config(request.model.config)
    patch = first_field(vision, "patch_size") or _DEFAULT_PATCH
    positions = first_field(vision, "num_patches") or _GRID_PATCHES**2
    high, wide = _patches(request, patch, (math.isqrt(positions),) * 2)
    rows = request.batch_size
    width = images.channel_count(vision) * patch * patch
    request.notes.append(f"images of {high * patch} x {wide * patch} pixels")
    return {
        "pixel_values": request.floats((rows, high * wide, width)),
        "spatial_shapes": torch.tensor([[high, wide]] * rows, device="cpu"),
        "pixel_attention_mask": request.ones((rows, high * wide)),
    }


def flattened_patches(request: BatchRequest) -> Arguments:
    """Return rows of row number, column number and pixels of a patch (Pix2Struct)."""
    vision = images.vision_config(request.model.config)
    pixels = first_field(vision, "patch_embed_hidden_size")
    patch = math.isqrt(pixels // images.channel_count(vision))
    high, wide = _patches(request, patch, _PAGE_PATCHES)
    request.notes.append(f"images of {high * patch} x {wide * patch} pixels")
    numbers = torch.cartesian_prod(
        *(torch.arange(1, count + 1, device="cpu") for count in (high, wide))
    )
    places = numbers.to(request.float_dtype).expand(request.batch_size, -1, -1)
    patches = request.floats((request.batch_size, high * wide, pixels))
    return {
        "flattened_patches": torch.cat([places, patches], dim=-1),
        "attention_mask": request.ones((request.batch_size, high * wide)),
    }


def merged_patches(config: object) -> int:
    """Return how many patches per side become one token."""
    vision = images.vision_config(config)
    merged = first_field(
        vision, "spatial_merge_size", "merge_size", "merge_kernel_size"
    )
    return int(merged[0] if isinstance(merged, (list, tuple)) else merged or 1)


def _patches(
    request: BatchRequest, patch: int, usual: tuple[int, int]
) -> tuple[int, int]:
    """Return the number of patches per side, at least those merged into one token.

    Processors round an image to whole tokens, so its patches are multiples of them.
    """
    sides = request.image_size_or((usual[0] * patch, usual[1] * patch))
    merged = merged_patches(request.model.config)
    high, wide = (max(round(s / patch / merged), 1) * merged for s in sides)
    return high, wide
