"""Which parts of a batch have one entry for each sample."""

import functools
from typing import Any

import pytest
import torch

from budgetfit.batches.batch_tree import describe_batch
from budgetfit.batches.packed_rows import packed_tensors
from budgetfit.batches.sample_count import (
    batch_from_shapes,
    count_samples,
    has_entry_per_sample,
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
    batch: object, samples: int | None
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


def graphs(*nodes: int, width: int = 3) -> dict[str, torch.Tensor]:
    """Return what PyTorch Geometric's loaders make: each graph is a ring."""
    edges, first = [], 0
    for count in nodes:
        ring = torch.arange(count)
        edges.append(torch.stack([ring, ring.roll(1)]) + first)
        first += count
    return {
        "x": torch.arange(1.0, sum(nodes) + 1)[:, None].expand(-1, width),
        "edge_index": torch.cat(edges, 1),
        "edge_attr": torch.arange(1.0, sum(nodes) + 1)[:, None],
        "batch": torch.arange(len(nodes)).repeat_interleave(torch.tensor(nodes)),
        "ptr": torch.tensor([0, *torch.tensor(nodes).cumsum(0)]),
        "y": torch.arange(float(len(nodes))),
    }


def bags(*sizes: int, with_end: bool = False) -> dict[str, torch.Tensor]:
    """Return what ``nn.EmbeddingBag`` takes, and a label for each bag."""
    ends = torch.tensor([0, *sizes]).cumsum(0)
    return {
        "ids": torch.arange(sum(sizes)),
        "offsets": ends if with_end else ends[:-1],
        "per_sample_weights": torch.arange(float(sum(sizes))),
        "y": torch.arange(len(sizes)) % 2,
    }


def without(batch: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: each for name, each in batch.items() if name not in names}


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (graphs(4, 6, 5), 3),
        (graphs(2, 2), 2),
        (without(graphs(4, 6, 5), "y", "ptr"), 3),
        (without(graphs(4, 6, 5), "batch", "ptr", "y"), 1),  # one graph
        (graphs(4, 6, 5) | {"batch": torch.tensor([2, 0, 1] * 5)}, 3),
        # All samples share the edges of their 3 nodes.
        ({"x": torch.zeros(8, 3, 4), "edge_index": graphs(3)["edge_index"]}, 8),
        (bags(3, 2, 4, 3), 4),
        (bags(3, 2, 4, 3, with_end=True), 4),
        (without(bags(3, 2, 4, 3), "y"), 4),
        (without(bags(3, 2, 4, 3, with_end=True), "y"), 4),
        (bags(1, 1, 1), 3),
        (bags(0, 5) | {"dense": torch.zeros(2, 13)}, 2),
        ({"x": torch.zeros(5, 2), "offsets": torch.tensor([0, 1, 1, 2, 2])}, 5),
    ],
)
def test_nodes_edges_and_bags_do_not_count(
    batch: dict[str, torch.Tensor], samples: int
) -> None:
    assert count_samples(batch) == samples
    described = batch_from_shapes(describe_batch(batch))
    if {"edge_index", "batch"} <= batch.keys() and "y" not in batch:
        return  # only the values of the index say how many graphs there are
    if "offsets" not in batch or "y" in batch or "dense" in batch:
        assert count_samples(described) == samples


def counts(batch: dict[str, Any], samples: int) -> dict[str, list[int]]:
    found = packed_tensors(batch, samples).items()
    return {name: list(rows.counts) for name, rows in found}


def test_rows_of_boxes_and_patches_belong_to_samples() -> None:
    rows = [3, 0, 1]
    assert counts(boxes(*rows), 3) == {"cls": rows, "bboxes": rows, "batch_idx": rows}
    assert counts(boxes(3, 1), 1) == {}  # an index of another batch
    grids = (1, 2, 2), (1, 4, 2)
    assert counts(patches(*grids), 2) == {
        "pixel_values": [4, 8],
        "image_grid_thw": [1, 1],
    }
    on_meta = {name: x.to("meta") for name, x in patches(*grids).items()}
    assert counts(on_meta, 2) == {}
