"""What detection and segmentation models learn from: boxes, classes and masks."""

from typing import Any

import torch
from torch import Tensor

from budgetfit.example_batches.request import BatchRequest

Arguments = dict[str, Any]

_OBJECTS = 7  # COCO's mean for each image, 860 001 objects in 117 266 images
_WIDEST = 0.4  # of an object, so that boxes around the middle lie inside the image


def boxes_and_classes(request: BatchRequest, batch: Arguments) -> Arguments | None:
    """Return one mapping for each image, as DETR's processors make them.

    None without Pillow: transformers' losses of boxes need it.
    """
    from transformers.utils.import_utils import is_vision_available  # noqa: PLC0415, slow

    if not is_vision_available():
        request.notes.append("the loss of boxes needs Pillow: pip install pillow")
        return None
    config: Any = request.model.config
    pixels: Tensor = batch["pixel_values"]
    with_masks = "Segmentation" in type(request.model).__name__
    request.notes.append(f"{_OBJECTS} objects in each image")
    labels = []
    for _ in range(request.batch_size):
        middles = request.integers((_OBJECTS, 2), 30, 70) / 100
        sizes = request.integers((_OBJECTS, 2), 10, int(100 * _WIDEST)) / 100
        target = {
            "class_labels": request.integers((_OBJECTS,), 0, config.num_labels),
            "boxes": torch.cat([middles, sizes], dim=1).to(request.float_dtype),
        }
        if with_masks:
            target["masks"] = _masks(request, (_OBJECTS, *pixels.shape[-2:]))
        labels.append(target)
    return {"labels": labels}


def masks_and_classes(request: BatchRequest, batch: Arguments) -> Arguments:
    """Return a mask and a class for each object: ``[batch, objects, height, width]``.

    As many in each image: the models take lists, and a tensor is a list of its rows.
    """
    config: Any = request.model.config
    pixels: Tensor = batch["pixel_values"]
    rows = (request.batch_size, _OBJECTS)
    request.notes.append(f"{_OBJECTS} objects in each image")
    return {
        "mask_labels": _masks(request, (*rows, *pixels.shape[-2:])),
        "class_labels": request.integers(rows, 0, config.num_labels),
    }


def _masks(request: BatchRequest, shape: tuple[int, ...]) -> Tensor:
    return request.integers(shape, 0, 2).to(torch.float32)
