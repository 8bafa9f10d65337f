"""What is said of a batch's parts decides how it is counted, cut and resized."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from budgetfit.applying.out_of_memory.expected_batch import ExpectedBatch, split_batch
from budgetfit.batches.batch_tree import describe_batch, resize_batch
from budgetfit.batches.sample_count import count_samples, sample_dimensions
from budgetfit.core.samples.sample_dims import SampleDims
from budgetfit.errors import InputError
from tests.core.test_sample_count import boxes, masks

# Parts with 9 rows outvote x; nothing but a name says that x has the samples.
MISVOTING = {"x": torch.rand(4, 3), "table": torch.rand(9, 4), "other": torch.rand(9)}


def dims(given: object, default: int = 0) -> SampleDims:
    return SampleDims.parse(given, default)


@st.composite
def named_batches(draw: st.DrawFn) -> tuple[Any, dict[str, int | None], int]:
    """Return a batch of which each part is named, and its samples."""
    samples = draw(st.integers(1, 6))
    named: dict[str, int | None] = {}
    parts: list[Any] = []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(shape) - 1))
        has_none = number > 0 and draw(st.booleans())
        if not has_none:
            shape[dim] = samples
        parts.append(torch.rand(shape))
        named[str(number)] = None if has_none else dim
    if draw(st.booleans()):
        return tuple(parts), named, samples
    inner = {f"x.{name}": dim for name, dim in named.items()}
    below = {str(number): part for number, part in enumerate(parts)}
    return {"flag": True, "x": below}, inner, samples


def tensors(batch: Any) -> dict[str, torch.Tensor]:
    if isinstance(batch, tuple):
        return {str(number): part for number, part in enumerate(batch)}
    return {f"x.{name}": part for name, part in batch["x"].items()}


@given(named_batches(), st.integers(1, 7))
def test_parts_put_together_are_the_batch(
    made: tuple[Any, dict[str, int | None], int], size: int
) -> None:
    batch, named, samples = made
    parts = [tensors(part) for part in split_batch(batch, size, dims(named))]
    assert len(parts) == max(1, -(-samples // size))
    for name, whole in tensors(batch).items():
        dim = named[name]
        if dim is None:
            assert all(part[name] is whole for part in parts)
        else:
            assert torch.equal(torch.cat([part[name] for part in parts], dim), whole)


@given(named_batches(), st.integers(1, 7))
def test_a_batch_resized_to_a_size_has_it(
    made: tuple[Any, dict[str, int | None], int], size: int
) -> None:
    batch, named, samples = made
    found = dims(named)
    assert count_samples(batch, found) == samples
    resized = resize_batch(batch, size, dims=found)
    assert count_samples(resized, found) == size
    assert sample_dimensions(resized, found).items() >= named.items()
    for name, tensor in tensors(resized).items():
        if named[name] is None:
            assert tensor is tensors(batch)[name]
        else:
            expected = ExpectedBatch.of(describe_batch(batch), size, found).shapes[name]
            assert tensor.shape == expected


@pytest.mark.parametrize("given", [{"x": 0}, {"x": 0, "table": None, "other": None}])
def test_a_named_part_outvotes_all_others(given: dict[str, int | None]) -> None:
    assert count_samples(MISVOTING) == 9
    assert count_samples(MISVOTING, dims(given)) == 4
    first, second = split_batch(MISVOTING, 3, dims(given))
    assert (len(first["x"]), len(second["x"])) == (3, 1)
    assert first["table"] is second["table"] is MISVOTING["table"]
    assert resize_batch(MISVOTING, 2, dims=dims(given))["other"] is MISVOTING["other"]


def test_what_has_as_many_rows_by_chance_stays_if_it_is_named_none() -> None:
    batch = {"x": torch.rand(4, 3), "class_weights": torch.rand(4)}
    found = dims({"class_weights": None})
    assert all(
        part["class_weights"] is batch["class_weights"]
        for part in split_batch(batch, 2, found)
    )
    assert resize_batch(batch, 3, dims=found)["x"].shape == (3, 3)
    assert count_samples({"w": torch.rand(9), **batch}, dims({"w": None})) == 4


def test_the_name_of_a_container_stands_for_all_in_it_but_what_has_its_own() -> None:
    batch = {"y": torch.rand(7), "in": {"a": torch.rand(5, 2), "b": torch.rand(2, 5)}}
    found = dims({"in": 1, "in.a": 0})
    assert count_samples(batch, found) == 5
    assert sample_dimensions(batch, found) == {"y": None, "in.a": 0, "in.b": 1}
    nothing = dims({"in": None})
    assert sample_dimensions(batch, nothing) == {"y": 0, "in.a": None, "in.b": None}


def test_one_dimension_is_that_of_all_tensors() -> None:
    batch = (torch.rand(7, 4, 2), torch.rand(3, 4))
    assert count_samples(batch, dims(1)) == 4
    assert [part[1].shape for part in split_batch(batch, 3, dims(1))] == [
        (3, 3),
        (3, 1),
    ]
    assert count_samples(torch.rand(5, 2), dims({"batch": 1})) == 2
    assert resize_batch(torch.rand(5, 2), 3, dims=dims(1)).shape == (5, 3)
    assert count_samples([{"image": torch.rand(3, 8)}] * 2, dims(0)) == 2


def test_0_of_a_list_with_one_entry_for_each_sample_means_its_entries() -> None:
    batch = masks(3, 1, 2)
    found = dims({"mask_labels": 0, "class_labels": 0})
    first, second = split_batch(batch, 2, found)
    assert [len(each) for each in first["mask_labels"]] == [3, 1]
    assert [len(each) for each in second["class_labels"]] == [2]
    assert len(resize_batch(batch, 5, dims=found)["class_labels"]) == 5
    assert sample_dimensions(batch, found)["mask_labels.0"] is None
    # Entries of any kind, where they are named: boxes and labels of each image.
    pairs = [(torch.rand(n, 4), torch.rand(n)) for n in (2, 3)]
    of_pairs = {"x": torch.rand(2, 3), "table": torch.rand(9), "targets": pairs}
    (_, last) = split_batch(of_pairs, 1, dims({"targets": 0}))
    assert last["targets"] == pairs[1:]
    levels = {"levels": [torch.rand(5, 2), torch.rand(5, 4)], "x": torch.rand(5)}
    assert count_samples(levels, dims({"levels": 0})) == 5
    cut, _ = split_batch(levels, 3, dims({"levels": 0}))
    assert [each.shape for each in cut["levels"]] == [(3, 2), (3, 4)]


def test_rows_of_boxes_go_with_their_image_unless_they_are_named() -> None:
    batch = boxes(2, 0, 1, 3)
    first, second = split_batch(batch, 2, dims({"img": 0}))
    assert [len(part["bboxes"]) for part in (first, second)] == [2, 4]
    kept, _ = split_batch(batch, 2, dims({"img": 0, "bboxes": None}))
    assert kept["bboxes"] is batch["bboxes"]
    assert len(kept["cls"]) == 2
    nodes = {"x": torch.rand(4, 3), "batch": torch.tensor([0, 0, 1, 1])}
    assert count_samples(nodes, dims({"x": 0, "batch": 0})) == 4


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    weights: torch.Tensor


def test_fields_of_dataclasses_have_names_too() -> None:
    batch = (Sample(torch.rand(4, 2), torch.rand(4)),)
    first, _ = split_batch(batch, 3, dims({"0.weights": None}))
    assert first[0].x.shape == (3, 2)
    assert first[0].weights is batch[0].weights


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"y": 0}, r"names 'y', which the batch does not have; it has x, table, other"),
        ({"tab": None}, "names 'tab'"),
        ({"x": 2}, r"x counts samples in dimension 2, but its shape is \[4, 3\]"),
        ({"x": 0, "table": 0}, r"different numbers of samples: x 4, table 9\."),
        (0, r"different numbers of samples: x 4, table 9, other 9\."),
        (1, r"other counts samples in dimension 1, but its shape is \[9\]"),
    ],
)
def test_what_the_batch_is_not_is_refused(given: object, message: str) -> None:
    for use in (
        lambda: count_samples(MISVOTING, dims(given)),
        lambda: resize_batch(MISVOTING, 2, dims=dims(given)),
        lambda: list(split_batch(MISVOTING, 2, dims(given))),
    ):
        with pytest.raises(InputError, match=message) as error:
            use()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "given", [-1, True, "x", 0.0, {"x": -1}, {"x": "0"}, {0: 0}, {"": 0}, ["x"]]
)
def test_what_says_nothing_about_dimensions_is_refused(given: object) -> None:
    with pytest.raises(InputError, match="batch_dims must be a dimension, counted"):
        dims(given)


def test_places_of_what_is_no_tensor_are_kept_in_a_description() -> None:
    batch = (torch.rand(4, 2), True, torch.rand(4), torch.rand(9), torch.rand(9))
    found = dims({"2": 0})
    planned = ExpectedBatch.of(describe_batch(batch), 3, found)
    assert planned.shapes == {"0": (3, 2), "2": (3,), "3": (9,), "4": (9,)}
