import collections
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from budgetfit.applying.out_of_memory.expected_batch import ExpectedBatch, split_batch
from budgetfit.applying.run.step_monitor import StepMonitor
from budgetfit.batches.batch_tree import describe_batch
from budgetfit.batches.sample_count import count_samples
from budgetfit.core.samples.sample_dims import FIRST_DIM, SampleDims
from budgetfit.errors import InputError
from tests.core.test_sample_count import bags, boxes, graphs, masks, patches
from tests.reporting.sample_plans import sample_lengths, sample_plan

# Made with 2 samples of 16 tokens; a plan for micro-batches of 4.
EXAMPLE = {
    "input_ids": ((2, 16), "int64"),
    "labels": ((2, 16), "int64"),
    "table": ((5,), "float32"),
}


def planned() -> ExpectedBatch:
    return ExpectedBatch.of(EXAMPLE, 4, FIRST_DIM)


def batch(samples: int = 4, length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.zeros(samples, length, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids, "table": torch.zeros(5)}


def said(plan: ExpectedBatch, *batches: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for item in batches:
            plan.warn_if_larger(item)
    return [str(item.message) for item in caught]


def test_the_planned_shapes_have_the_planned_batch_size() -> None:
    assert planned().shapes == {"input_ids": (4, 16), "labels": (4, 16), "table": (5,)}


def test_what_is_as_planned_or_smaller_says_nothing() -> None:
    assert said(planned(), batch(), batch(3), batch(4, 9)) == []
    assert said(ExpectedBatch(), batch(99, 99)) == []  # nothing was planned


def test_a_longer_batch_is_named_with_what_was_planned() -> None:
    (text,) = said(planned(), batch(length=32))
    assert "input_ids [4, 32], planned [4, 16]; labels [4, 32], planned" in text
    assert "max_length=" in text


def test_a_size_is_warned_of_once_and_a_still_larger_one_again() -> None:
    plan = planned()
    assert len(said(plan, batch(length=32), batch(length=32), batch(length=20))) == 1
    assert len(said(plan, batch(length=33))) == 1
    assert len(said(plan, batch(samples=5))) == 1
    assert said(plan, batch(samples=5, length=33)) == []


def test_samples_of_other_sizes_are_told_from_fewer_samples() -> None:
    plan = planned()
    assert not plan.has_samples_of_other_size(batch())
    assert not plan.has_samples_of_other_size(batch(samples=1))  # an epoch's last
    assert plan.has_samples_of_other_size(batch(length=15))
    assert plan.has_samples_of_other_size(batch(samples=1, length=17))
    assert not ExpectedBatch().has_samples_of_other_size(batch())  # nothing planned


def test_a_batch_is_padded_where_it_is_as_long_as_a_multiple_or_as_planned() -> None:
    plan = planned()
    assert plan.is_padded(batch(), 12)  # the longest is padded no further
    assert plan.is_padded(batch(samples=3, length=12), 12)
    assert not plan.is_padded(batch(length=8), 12)
    assert ExpectedBatch().is_padded(batch(), 12)


def test_a_run_warns_once_of_batches_that_are_not_padded_as_planned() -> None:
    plan = sample_plan(varying_lengths=sample_lengths(pad_to_multiple_of=128))
    monitor = StepMonitor(nn.Module(), torch.device("cpu"), plan, FIRST_DIM)
    monitor.expect_recipe(plan.recipe)

    def warned_of(length: int) -> list[str]:
        ids = torch.zeros(plan.recipe.batch_size, length, dtype=torch.int64)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            given = {"input_ids": ids, "labels": ids}
            monitor.before_micro_batch(given, is_first=False)
        return [str(each.message) for each in caught]

    assert warned_of(1024) == warned_of(2048) == []
    (text,) = warned_of(1000)
    assert "Collate with pad_to_multiple_of=128" in text
    assert warned_of(1001) == []


def test_growth_is_that_of_the_most_grown_tensor() -> None:
    assert planned().growth(batch()) == 1.0
    assert planned().growth(batch(length=24)) == 1.5
    assert planned().growth(batch(samples=2, length=24)) == 0.75


def test_a_tensor_of_another_rank_is_compared_by_its_elements() -> None:
    plan = ExpectedBatch.of({"batch": ((2, 8), "float32")}, 2, FIRST_DIM)
    assert said(plan, torch.zeros(16)) == []
    assert len(said(plan, torch.zeros(17))) == 1
    assert said(plan, torch.zeros(17)) == []


def test_batches_of_length_first_models_are_counted_along_their_dimension() -> None:
    example = {"batch": ((10, 2, 3), "float32")}
    assert ExpectedBatch.of(example, 4, SampleDims(1)).shapes == {"batch": (10, 4, 3)}
    assert count_samples(torch.zeros(10, 4, 3), SampleDims(1)) == 4
    parts = split_batch(torch.zeros(10, 4, 3), 3, SampleDims(1))
    assert [part.shape[1] for part in parts] == [3, 1]


def test_samples_are_the_size_that_most_tensors_share() -> None:
    assert count_samples(batch(3)) == 3
    assert count_samples({"scalar": torch.zeros(())}) is None
    images = [torch.zeros(3, 5, 5) for _ in range(2)]
    targets = [{"boxes": torch.zeros(7, 4)}, {"boxes": torch.zeros(1, 4)}]
    assert count_samples([torch.stack(images), targets]) == 2


Pair = collections.namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - as loaders make


def test_parts_hold_every_sample_once_and_shared_tensors_each_time() -> None:
    whole = {**batch(7), "ids": torch.arange(7), "flag": True}
    parts = list(split_batch(whole, 3))
    assert [len(part["input_ids"]) for part in parts] == [3, 3, 1]
    assert torch.cat([part["ids"] for part in parts]).tolist() == list(range(7))
    assert all(part["table"] is whole["table"] for part in parts)
    assert all(part["flag"] is True for part in parts)


def test_parts_keep_tuples_and_lists_of_samples() -> None:
    pair = Pair(torch.arange(3), [{"boxes": torch.zeros(n, 4)} for n in range(3)])
    first, second = split_batch(pair, 2)
    assert isinstance(first, Pair)
    assert [len(item["boxes"]) for item in (*first.y, *second.y)] == [0, 1, 2]


def test_masks_and_classes_go_with_their_image() -> None:
    # images 2 and 3 were trained on the targets of 0 and 1
    first, second = split_batch(masks(3, 3, 1, 2), 2)
    for part, counts in ((first, [3, 3]), (second, [1, 2])):
        assert len(part["pixel_values"]) == 2
        assert [len(item) for item in part["mask_labels"]] == counts
        assert [len(item) for item in part["class_labels"]] == counts


def test_boxes_and_patches_go_with_their_image() -> None:
    whole = boxes(2, 0, 1, 3)
    first, second = split_batch(whole, 2)
    assert first["batch_idx"].tolist() == [0, 0]
    assert second["batch_idx"].tolist() == [0, 1, 1, 1]
    assert [len(part["bboxes"]) for part in (first, second)] == [2, 4]
    assert whole["batch_idx"].tolist() == [0, 0, 2, 3, 3, 3]
    first, second = split_batch(patches((1, 2, 2), (1, 4, 2), (1, 2, 4)), 2)
    assert [len(part["pixel_values"]) for part in (first, second)] == [12, 8]
    assert second["image_grid_thw"].tolist() == [[1, 2, 4]]


def test_graphs_and_bags_are_cut_with_their_samples() -> None:
    first, second = split_batch(graphs(4, 2, 3), 2)
    assert first["ptr"].tolist() == [0, 4, 6]
    assert second["edge_index"].tolist() == [[0, 1, 2], [2, 0, 1]]
    assert second["batch"].tolist() == [0, 0, 0]
    assert second["edge_attr"][:, 0].tolist() == [7, 8, 9]
    for with_end in (False, True):
        first, second = split_batch(bags(3, 2, 4, 3, with_end=with_end), 2)
        assert first["offsets"].tolist() == [0, 3] + [5] * with_end
        assert second["offsets"].tolist() == [0, 4] + [7] * with_end
        assert second["ids"].tolist() == [5, 6, 7, 8, 9, 10, 11]
    mixed = graphs(2, 2) | {"batch": torch.tensor([0, 1, 0, 1])}
    assert next(split_batch(mixed, 2)) is mixed
    with pytest.raises(InputError, match="cannot be cut into graphs"):
        list(split_batch(mixed, 1))


def test_a_plan_for_lists_of_samples_knows_how_many_there_are() -> None:
    described = {
        "pixel_values": ((2, 3, 8, 8), "float32"),
        "class_labels.0": ((5,), "int64"),
        "class_labels.1": ((5,), "int64"),
    }
    planned = ExpectedBatch.of(described, batch_size=4, dims=FIRST_DIM)
    assert planned.shapes["pixel_values"] == (4, 3, 8, 8)
    assert planned.shapes["class_labels.0"] == (5,)


def test_a_plan_for_one_mapping_as_the_only_input_counts_what_is_in_it() -> None:
    described = describe_batch((boxes(3, 1),))
    assert ExpectedBatch.of(described, 4, FIRST_DIM).shapes["0.img"] == (4, 3, 8, 8)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_batch_that_is_no_larger_is_handed_on_as_it_is(samples: int) -> None:
    whole = batch(samples)
    (part,) = split_batch(whole, 3)
    assert part is whole
