"""Which parts of a batch have one entry for each sample."""

import functools
from typing import Any

import pytest
import torch

from budgetfit.batches.sample_count import (
    count_samples,
    has_entry_per_sample,
    rows_per_sample,
)


def masks(*counts: int) -> dict[str, Any]:
    """Return what Mask2Former is called with: masks and classes in lists."""
    return {
        "pixel_values": torch.zeros(len(counts), 3, 8, 8),
        "mask_labels": [torch.zeros(count, 8, 8) for count in counts],
        "class_labels": [torch.zeros(count, dtype=torch.long) for count in counts],
    }


def boxes(*counts: int) -> dict[str, Any]:
    """Return what Ultralytics' detectors are called with: the boxes of all images."""
    index = [float(image) for image, count in enumerate(counts) for _ in range(count)]
    return {
        "img": torch.zeros(len(counts), 3, 8, 8),
        "cls": torch.zeros(sum(counts), 1),
        "bboxes": torch.zeros(sum(counts), 4),
        "batch_idx": torch.tensor(index),
    }


def patches(*grids: tuple[int, int, int]) -> dict[str, Any]:
    """Return what Qwen's processors make: the patches of all images in one tensor."""
    rows = sum(time * height * width for time, height, width in grids)
    return {
        "pixel_values": torch.zeros(rows, 6),
        "image_grid_thw": torch.tensor(grids),
        "input_ids": torch.zeros(len(grids), 5, dtype=torch.long),
        "attention_mask": torch.ones(len(grids), 5, dtype=torch.long),
    }


IMAGES = tuple(torch.zeros(3, size, size) for size in (8, 9))


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (masks(3, 3), 2),
        (masks(2, 2), 2),
        (masks(1, 4, 2), 3),
        (boxes(3, 1), 2),
        (boxes(1, 1, 1), 3),
        (boxes(0, 5), 2),
        (patches((1, 2, 2), (1, 4, 2)), 2),
        ((IMAGES, ({"boxes": torch.zeros(5, 4)},) * 2), 2),
        ((list(IMAGES), [{"boxes": torch.zeros(3, 4)}] * 2), 2),
        ([{"image": torch.zeros(3, 8, 8)}] * 4, 4),
        ({"x": torch.zeros(5, 3), "levels": [torch.zeros(5, 2), torch.zeros(5, 4)]}, 5),
        ((torch.zeros(2, 6), (torch.zeros(2, 4), torch.zeros(2, 4))), 2),
        ([torch.zeros(8, 3), torch.zeros(8)], 8),
        ({"x": torch.zeros(6, 2), "batch": torch.tensor([0, 0, 0, 1, 1, 1])}, 6),
        ({"x": torch.zeros(6, 2), "batch": torch.zeros(6), "y": torch.zeros(1)}, 1),
        ({"x": torch.zeros(4, 2), "batch": torch.tensor([3, 0, 2, 1])}, 4),
        ({"n": torch.tensor(3)}, None),
        ("text", None),
    ],
)
def test_samples_are_counted_from_the_structure(
    batch: Any,  # noqa: ANN401
    samples: int | None,
) -> None:
    assert count_samples(batch) == samples


def test_a_list_of_as_many_tensors_as_samples_holds_one_for_each() -> None:
    two = torch.zeros(2, 4)
    below = functools.partial(has_entry_per_sample, samples=2, path="x")
    assert below([torch.zeros(3, 4), torch.zeros(5, 4)])
    assert below([two, two])
    assert not below((two, two))  # keys and values
    assert not below([two, torch.zeros(2, 5)])  # levels of features
    assert not has_entry_per_sample([two, two], 2)  # inputs and targets
    assert not below([two, two, two])
    assert below(({}, {}))
    assert not has_entry_per_sample(({}, {}), 2)
    assert has_entry_per_sample([{}, {}], 2)


def test_rows_of_boxes_and_patches_belong_to_samples() -> None:
    rows = [3, 0, 1]
    found = rows_per_sample(boxes(*rows), 3)
    assert found == {"cls": rows, "bboxes": rows, "batch_idx": rows}
    assert rows_per_sample(boxes(3, 1), 1) == {}  # an index of another batch
    grids = (1, 2, 2), (1, 4, 2)
    assert rows_per_sample(patches(*grids), 2) == {
        "pixel_values": [4, 8],
        "image_grid_thw": [1, 1],
    }
    on_meta = {name: x.to("meta") for name, x in patches(*grids).items()}
    assert rows_per_sample(on_meta, 2) == {}
