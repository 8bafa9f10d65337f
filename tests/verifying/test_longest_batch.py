"""The longest batch runs first."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from budgetfit.errors import InputError
from budgetfit.measuring.longest_batch import MAX_OTHERS_RUN, select_batches

LENGTHS: Any = [8, 64, 16, 64]


def of_length(length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(2, length), "labels": torch.zeros(2, length)}


def length(batch: Any) -> int:
    return int(batch["input_ids"].shape[1])


def generated() -> Iterator[dict[str, torch.Tensor]]:
    yield from map(of_length, LENGTHS)


@pytest.mark.parametrize(
    "batches",
    [
        [of_length(n) for n in LENGTHS],
        generated(),
        DataLoader(LENGTHS, collate_fn=lambda ns: of_length(ns[0])),
    ],
    ids=["list", "generator", "loader"],
)
def test_the_longest_of_many_comes_first_and_each_other_shape_once(
    batches: object,
) -> None:
    found = select_batches(batches)
    assert length(found.longest) == 64
    assert [length(item) for item in found.others] == [16, 8]
    assert found.seen == 4


def test_of_many_shapes_a_few_run_the_shortest_among_them() -> None:
    found = select_batches([of_length(n) for n in range(1, 101)])
    lengths = [length(item) for item in found.others]
    assert len(lengths) == MAX_OTHERS_RUN
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (99, 1)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(2, 3),
        of_length(4),
        (torch.zeros(2, 3), torch.zeros(2)),
        [torch.zeros(2, 3), torch.zeros(2)],
    ],
    ids=["tensor", "mapping", "tuple", "list of tensors"],
)
def test_one_batch_is_itself(batch: object) -> None:
    found = select_batches(batch)
    assert found.longest is batch
    assert found.others == ()


def test_batches_by_position_are_told_from_one_batch() -> None:
    pairs = [(torch.zeros(2, n), torch.zeros(2)) for n in (3, 9)]
    assert select_batches(pairs).longest is pairs[1]


@pytest.mark.parametrize("empty", [iter([]), iter([{}])])
def test_an_empty_loader_is_refused(empty: object) -> None:
    with pytest.raises(InputError, match="the loader or list is empty"):
        select_batches(empty)
