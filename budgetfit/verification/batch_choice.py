"""Choose the batches that a verification runs: the longest first."""

from dataclasses import dataclass
from typing import Any

from budgetfit.batches.batch_tree import batch_size_of, describe_batch, resize_batch
from budgetfit.batches.sample_count import batch_from_shapes, count_samples
from budgetfit.core.plan import Plan
from budgetfit.core.samples.sample_dims import SampleDims
from budgetfit.measuring.longest_batch import (
    BatchSelection,
    element_count,
    select_batches,
    shapes_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBatch:
    """The longest batch, shorter ones to run after it, and notes on them."""

    batch: Any
    shorter: tuple[Any, ...]
    notes: tuple[str, ...]


def choose_batch(plan: Plan, batch: object, *, dims: SampleDims) -> ChosenBatch:
    """Choose from one batch or a loader of batches, which must have some."""
    # A tuple of one mapping may be a batch: a model that takes the mapping itself.
    is_one = describe_batch(batch).keys() == plan.model.batch.keys()
    found = BatchSelection(longest=batch) if is_one else select_batches(batch)
    notes = []
    if found.seen > 1:
        notes.append(
            f"The longest of {found.seen} batches ran first; of the others, "
            f"{len(found.others)} of other shapes ran a step each."
        )
    samples = count_samples(batch_from_shapes(plan.model.batch), dims)
    shapes = tuple(shape for shape, _ in plan.model.batch.values())
    planned = element_count(shapes) / samples if samples else 0.0
    longest = shapes_of(found.longest)
    size = batch_size_of(found.longest, dims=dims)
    if planned and element_count(longest) / size > planned:
        notes.append(
            f"A sample of the longest batch has {element_count(longest) / size:,.0f} "
            f"elements and the planned one {planned:,.0f}: plan for it, with batch=, "
            "max_length= or lengths=."
        )
    most = plan.recipe.batch_size
    return ChosenBatch(
        batch=found.longest,
        shorter=tuple(_at_most(item, most, dims) for item in found.others),
        notes=tuple(notes),
    )


def _at_most(batch: object, batch_size: int, dims: SampleDims) -> object:
    """Resize a batch to the planned number of samples if it has more."""
    if batch_size_of(batch, dims=dims) <= batch_size:
        return batch
    return resize_batch(batch, batch_size, dims=dims)
