"""Example labels for detection and segmentation: boxes, classes and masks."""

from typing import Any

import torch
from torch import Tensor

from budgetfit.example_batches.request import BatchRequest

Arguments = dict[str, Any]

_OBJECTS_PER_IMAGE = 7  # COCO's mean for each image, 860 001 objects in 117 266 images
_MAX_BOX_SIZE = 0.4  # so that centred boxes lie inside the image


def detection_labels(request: BatchRequest, batch: Arguments) -> Arguments | None:
    """Return DETR's labels: one mapping per image with boxes and classes.

    None without Pillow, which transformers' box losses need.
    """
    from transformers.utils.import_utils import is_vision_available  # noqa: PLC0415, slow

    if not is_vision_available():
        request.notes.append("the loss of boxes needs Pillow: pip install pillow")
        return None
    config: Any = request.model.config
    pixels: Tensor = batch["pixel_values"]
    with_masks = "Segmentation" in type(request.model).__name__
    request.notes.append(f"{_OBJECTS_PER_IMAGE} objects in each image")
    labels = []
    for _ in range(request.batch_size):
        middles = request.integers((_OBJECTS_PER_IMAGE, 2), 30, 70) / 100
        sizes = (
            request.integers((_OBJECTS_PER_IMAGE, 2), 10, int(100 * _MAX_BOX_SIZE))
            / 100
        )
        target = {
            "class_labels": request.integers(
                (_OBJECTS_PER_IMAGE,), 0, config.num_labels
            ),
            "boxes": torch.cat([middles, sizes], dim=1).to(request.float_dtype),
        }
        if with_masks:
            target["masks"] = _masks(request, (_OBJECTS_PER_IMAGE, *pixels.shape[-2:]))
        labels.append(target)
    return {"labels": labels}


def segmentation_labels(request: BatchRequest, batch: Arguments) -> Arguments:
    """Return a mask ``[batch, objects, height, width]`` and class per object.

    All images have equally many: models take lists, and a tensor iterates like one.
    """
    config: Any = request.model.config
    pixels: Tensor = batch["pixel_values"]
    rows = (request.batch_size, _OBJECTS_PER_IMAGE)
    request.notes.append(f"{_OBJECTS_PER_IMAGE} objects in each image")
    return {
        "mask_labels": _masks(request, (*rows, *pixels.shape[-2:])),
        "class_labels": request.integers(rows, 0, config.num_labels),
    }


def _masks(request: BatchRequest, shape: tuple[int, ...]) -> Tensor:
    return request.integers(shape, 0, 2).to(torch.float32)
