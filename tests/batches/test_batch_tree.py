import dataclasses
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from budgetfit.batches.batch_tree import (
    Batch,
    batch_size_of,
    describe_batch,
    map_batch,
    resize_batch,
)
from budgetfit.core.samples.sample_dims import SampleDims
from budgetfit.errors import InputError
from tests.core.test_sample_count import bags, boxes, graphs, masks, without


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    scale: float = 0.5


def rows(count: int, width: int = 3) -> torch.Tensor:
    return torch.arange(count * width).reshape(count, width)


@pytest.mark.parametrize(
    "batch",
    [
        rows(4),
        (rows(4), torch.zeros(4)),
        [rows(4), torch.zeros(4)],
        {"x": rows(4), "y": {"z": torch.zeros(4, 2)}},
        OrderedDict(x=rows(4)),
        Pair(rows(4), torch.zeros(4)),
        Sample(rows(4)),
        BatchEncoding({"input_ids": rows(4)}),
        BaseModelOutput(last_hidden_state=torch.zeros(4, 2)),
        {"x": rows(4), "return_loss": True, "name": "a", "none": None},
    ],
    ids=[
        "tensor",
        "tuple",
        "list",
        "mapping",
        "ordered",
        "named",
        "dataclass",
        "encoding",
        "output",
        "flags",
    ],
)
def test_every_nesting_is_resized_into_the_same_nesting(batch: Batch) -> None:
    assert batch_size_of(batch) == 4
    for size in (1, 3, 4, 9):
        resized = resize_batch(batch, size)
        assert type(resized) is type(batch)
        assert batch_size_of(resized) == size
        assert describe_batch(resized).keys() == describe_batch(batch).keys()
    assert batch_size_of(batch) == 4


def test_the_batch_size_is_what_most_tensors_share() -> None:
    batch = {
        "positions": torch.zeros(7, 5),
        "x": torch.zeros(3, 5),
        "y": torch.zeros(3),
        "temperature": torch.tensor(0.5),
    }
    assert batch_size_of(batch) == 3


def test_of_two_equally_frequent_sizes_the_first_one_wins() -> None:
    assert batch_size_of((torch.zeros(8, 3), torch.zeros(10, 4))) == 8


def test_tensors_without_the_batch_dimension_stay_the_same_objects() -> None:
    anchors, scalar = torch.zeros(7, 5), torch.tensor(1.0)
    batch = {"x": torch.zeros(3, 5), "y": torch.zeros(3), "a": anchors, "s": scalar}
    resized = resize_batch(batch, 6)
    assert resized["a"] is anchors
    assert resized["s"] is scalar


def test_rows_are_repeated_in_order_and_so_stay_valid() -> None:
    resized = resize_batch({"x": torch.tensor([[1, 2], [3, 4]])}, 5)["x"]
    assert resized.tolist() == [[1, 2]] * 3 + [[3, 4]] * 2
    assert resize_batch(torch.tensor([5, 6, 7]), 2).tolist() == [5, 6]
    of_first = resize_batch(torch.tensor([5, 6, 7]), 4, of_first=2)
    assert of_first.tolist() == [5, 5, 6, 6]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64])
def test_sorted_samples_stay_sorted_at_every_size(size: int) -> None:
    lengths = resize_batch({"lengths": torch.tensor([9, 5, 1])}, size)["lengths"]
    assert lengths.tolist() == sorted(lengths.tolist(), reverse=True)


def test_a_resized_tensor_owns_a_storage_of_exactly_its_size() -> None:
    # A view of the given batch would be counted with the given batch's bytes.
    given = torch.zeros(8, 4)
    for size in (1, 3, 12):
        storage = resize_batch(given, size).untyped_storage()
        assert storage.nbytes() == size * 4 * 4
    assert given.shape == (8, 4)


def test_a_resized_image_keeps_channels_last() -> None:
    images = torch.zeros(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for size in (1, 5):
        resized = resize_batch(images, size)
        assert resized.is_contiguous(memory_format=torch.channels_last)


def test_a_resized_tensor_requires_gradients_as_before_and_is_a_leaf() -> None:
    resized = resize_batch(torch.zeros(2, 3, requires_grad=True), 5)
    assert resized.requires_grad
    assert resized.is_leaf


def test_meta_tensors_are_resized_without_values() -> None:
    batch = {"x": torch.zeros(2, 3, device="meta")}
    assert resize_batch(batch, 5)["x"].shape == (5, 3)
    assert resize_batch(batch, 5)["x"].is_meta


def test_fake_tensors_are_resized_outside_their_mode() -> None:
    with FakeTensorMode():
        batch = {"x": torch.zeros(2, 3)}
    assert resize_batch(batch, 5)["x"].shape == (5, 3)
    assert resize_batch(batch, 1)["x"].shape == (1, 3)


def test_a_batch_dimension_behind_the_length_is_resized_there() -> None:
    batch = (torch.zeros(128, 2, 16), torch.zeros(64, 2, 16))
    assert batch_size_of(batch, dims=SampleDims(1)) == 2
    source, target = resize_batch(batch, 5, dims=SampleDims(1))
    assert source.shape == (128, 5, 16)
    assert target.shape == (64, 5, 16)


def test_detection_targets_are_repeated_as_a_list_of_samples() -> None:
    targets = [{"boxes": torch.zeros(n, 4), "classes": torch.zeros(n)} for n in (3, 3)]
    batch = {"pixel_values": torch.zeros(2, 3, 8, 8), "labels": targets}
    assert batch_size_of(batch) == 2
    resized = resize_batch(batch, 3)["labels"]
    assert [sample["boxes"].shape for sample in resized] == [(3, 4)] * 3


def test_lists_of_tensors_are_repeated_sample_by_sample() -> None:
    found = resize_batch(masks(1, 3), 3)
    assert found["pixel_values"].shape[0] == 3
    assert [len(item) for item in found["mask_labels"]] == [1, 1, 3]
    assert found["mask_labels"][0] is not found["mask_labels"][1]
    images = (torch.zeros(3, 8, 8), torch.zeros(3, 9, 9))
    targets = tuple({"boxes": torch.zeros(n, 4)} for n in (3, 3))
    cut, kept = resize_batch((images, targets), 1)
    assert (len(cut), len(kept)) == (1, 1)


def test_boxes_are_repeated_with_their_image_and_numbered_anew() -> None:
    found = resize_batch(boxes(1, 2), 4)
    assert found["img"].shape[0] == 4
    assert found["batch_idx"].tolist() == [0, 1, 2, 2, 3, 3]
    assert found["bboxes"].shape == (6, 4)
    assert resize_batch(boxes(1, 2), 1)["batch_idx"].tolist() == [0]


def test_graphs_are_repeated_with_their_edges() -> None:
    found = resize_batch(graphs(2, 3), 3)
    assert found["x"][:, 0].tolist() == [1, 2, 1, 2, 3, 4, 5]
    assert found["edge_index"].tolist() == [
        [0, 1, 2, 3, 4, 5, 6],
        [1, 0, 3, 2, 6, 4, 5],
    ]
    assert found["edge_attr"][:, 0].tolist() == [1, 2, 1, 2, 3, 4, 5]
    assert found["batch"].tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert found["ptr"].tolist() == [0, 2, 4, 7]
    one = resize_batch(without(graphs(2), "batch", "ptr", "y"), 2)
    assert one["edge_index"].tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]
    assert one["x"].shape == (4, 3)


@pytest.mark.parametrize("with_end", [False, True])
def test_bags_are_cut_at_their_offsets(*, with_end: bool) -> None:
    found = resize_batch(bags(2, 0, 3, with_end=with_end), 4)
    assert found["ids"].tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert found["per_sample_weights"].tolist() == found["ids"].tolist()
    assert found["offsets"].tolist() == [0, 2, 4, 4] + [7] * with_end
    assert found["y"].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (graphs(2, 3) | {"edge_index": torch.tensor([[0, 1], [1, 4]])}, "edge_index"),
        (graphs(2, 3) | {"edge_index": torch.tensor([[4, 0], [3, 1]])}, "edge_index"),
        (graphs(2, 3) | {"batch": torch.tensor([0, 1, 0, 1, 1])}, "edge_index"),
        ({name: each.to("meta") for name, each in graphs(2, 3).items()}, "edge_index"),
        (bags(2, 0, 1), "offsets"),  # as many ids as labels
        (bags(2, 3) | {"others": torch.zeros(7, dtype=torch.long)}, "offsets"),
        ({name: each.to("meta") for name, each in bags(2, 3).items()}, "offsets"),
    ],
)
def test_rows_that_belong_to_no_sample_are_refused_in_one_line(
    batch: Batch, message: str
) -> None:
    samples = batch_size_of(batch)
    assert describe_batch(resize_batch(batch, samples)) == describe_batch(batch)
    with pytest.raises(InputError, match=rf"^{message}.*Use .*estimate") as error:
        resize_batch(batch, samples - 1)
    assert "\n" not in str(error.value)


def test_several_bags_have_names_with_a_common_start() -> None:
    words = {f"words_{name}": each for name, each in bags(2, 3).items() if name != "y"}
    others = {f"tags_{name}": each for name, each in bags(1, 3).items() if name != "y"}
    found = resize_batch({**words, **others, "y": torch.zeros(2)}, 1)
    assert found["words_ids"].tolist() == [0, 1]
    assert found["tags_ids"].tolist() == [0]
    assert found["tags_per_sample_weights"].tolist() == [0]


def test_a_list_of_mappings_that_are_no_samples_stays_as_it_is() -> None:
    batch = {"x": torch.zeros(2, 3), "levels": [{"y": torch.zeros(2, 3)}] * 3}
    assert resize_batch(batch, 5)["levels"][0]["y"].shape == (2, 3)


def test_a_batch_encoding_keeps_its_attribute_access() -> None:
    resized = resize_batch(BatchEncoding({"input_ids": rows(2)}), 3)
    assert resized.input_ids.shape == (3, 3)


def test_a_defaultdict_keeps_its_factory() -> None:
    batch = defaultdict(list, x=rows(2))
    assert resize_batch(batch, 3).default_factory is list


def test_tensors_are_described_by_path_shape_and_dtype() -> None:
    batch = {
        "x": torch.zeros(2, 3, dtype=torch.bfloat16),
        "t": [{"boxes": torch.zeros(1, 4)}],
        "n": 1,
    }
    assert describe_batch(batch) == {
        "x": ((2, 3), "bfloat16"),
        "t.0.boxes": ((1, 4), "float32"),
    }
    assert describe_batch(torch.zeros(2)) == {"batch": ((2,), "float32")}


def test_tensors_are_changed_wherever_they_are() -> None:
    changed = map_batch({"x": (torch.zeros(2), 1)}, lambda tensor: tensor + 1)
    assert changed["x"][0].tolist() == [1.0, 1.0]
    assert changed["x"][1] == 1


@pytest.mark.parametrize(
    "batch", [{}, (), None, 3, {"a": "text"}, {"x": torch.tensor(1.0)}]
)
def test_a_batch_without_a_batch_dimension_is_refused_with_an_example(
    batch: Batch,
) -> None:
    with pytest.raises(InputError, match=r"no tensor with a batch dimension.*batch="):
        batch_size_of(batch)
    with pytest.raises(InputError, match="no tensor with a batch dimension"):
        resize_batch(batch, 2)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InputError, match="batch dimension of 0"):
        batch_size_of(torch.zeros(0, 3))


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_sample_is_refused(size: int) -> None:
    with pytest.raises(InputError, match=f"at least 1 sample, not {size}"):
        resize_batch(torch.zeros(2, 3), size)


def test_a_packed_sequence_is_refused_with_the_way_out() -> None:
    packed = pack_padded_sequence(torch.zeros(2, 5, 3), [5, 3], batch_first=True)
    with pytest.raises(InputError, match="Pass the padded tensor"):
        batch_size_of({"x": packed})
