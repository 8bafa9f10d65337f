from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding

from budgetfit.applying.pytree import map_tensors, tensors_in

Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - what data loaders use
ONE, TWO, THREE = torch.ones(1), torch.ones(2), torch.ones(3)


def test_containers_keep_their_kind_and_all_else_its_identity() -> None:
    thing = object()
    value = {"a": [ONE, (TWO, thing)], "b": Pair(THREE, "text"), "c": None}
    changed = map_tensors(value, len)
    assert changed == {"a": [1, (2, thing)], "b": Pair(3, "text"), "c": None}
    assert isinstance(changed["b"], Pair)


def test_dataclasses_stay_what_they_are() -> None:
    @dataclass
    class Batch:
        x: torch.Tensor | int
        name: str

    batch = Batch(TWO, "text")
    assert map_tensors(batch, len) == Batch(2, "text")
    assert list(tensors_in(batch)) == [TWO]
    assert map_tensors(Batch, len) is Batch


def test_packed_sequences_keep_their_batch_sizes() -> None:
    packed = pack_sequence([torch.ones(1), torch.ones(2)], enforce_sorted=False)
    moved = map_tensors(packed, lambda tensor: tensor.clone())
    assert isinstance(moved, PackedSequence)
    assert moved.batch_sizes is packed.batch_sizes
    assert moved.sorted_indices is not packed.sorted_indices
    assert torch.equal(moved.data, packed.data)


def test_a_tokenizers_batch_becomes_a_dict() -> None:
    batch = BatchEncoding({"input_ids": TWO})
    assert map_tensors(batch, len) == {"input_ids": 2}


def test_tensors_come_in_order() -> None:
    value = OrderedDict(a=[ONE, (TWO, 5)], b=Pair("text", THREE))
    assert [len(tensor) for tensor in tensors_in(value)] == [1, 2, 3]
    assert list(tensors_in("text")) == []
