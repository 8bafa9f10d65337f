"""Compare batches with the planned batch shapes, and split them into micro-batches."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from budgetfit.applying.pytree import named_tensors_in
from budgetfit.batches.packed_rows import is_tensor
from budgetfit.batches.sample_count import (
    batch_from_shapes,
    children_of,
    count_samples,
    has_entry_per_sample,
    is_list_of_other_items,
    join_path,
    packed_rows,
    sample_dimension,
    sample_dimensions,
)
from budgetfit.core.samples.sample_dims import FIRST_DIM, SINGLE_TENSOR, SampleDims

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LargerTensor:
    """A tensor of a batch that exceeds the planned shape in some dimension."""

    name: str
    shape: Shape
    planned: Shape

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}, planned {list(self.planned)}"


@dataclass(slots=True)
class ExpectedBatch:
    """Shapes of the planned micro-batch; warns of larger ones, once for each size.

    Attributes:
        shapes: Of the tensors of one micro-batch, by path.
        sample_dims: The dimension of each that counts samples; None: none does.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    sample_dims: dict[str, int | None] = field(default_factory=dict)
    _warned: dict[str, Shape] = field(default_factory=dict)

    @classmethod
    def of(
        cls, example: dict[str, tuple[Shape, str]], batch_size: int, dims: SampleDims
    ) -> ExpectedBatch:
        """Build from the shapes of an example, resized to ``batch_size`` samples."""

        def resized(shape: Shape, dim: int | None) -> Shape:
            if dim is None:
                return shape
            return (*shape[:dim], batch_size, *shape[dim + 1 :])

        found = sample_dimensions(batch_from_shapes(example), dims) if example else {}
        return cls(
            {
                name: resized(shape, found.get(name))
                for name, (shape, _) in example.items()
            },
            {name: found.get(name) for name in example},
        )

    def larger(self, batch: object) -> tuple[LargerTensor, ...]:
        """Return what exceeds the plan in a dimension, of tensors that were planned."""
        return tuple(
            LargerTensor(name, shape, planned)
            for name, shape in _shapes(batch).items()
            if (planned := self.shapes.get(name)) is not None
            and _exceeds(shape, planned)
        )

    def growth(self, batch: object) -> float:
        """Return the largest ratio of a tensor's elements to the planned ones."""
        return max(
            (
                math.prod(item.shape) / max(1, math.prod(item.planned))
                for item in self.larger(batch)
            ),
            default=1.0,
        )

    def has_samples_of_other_size(self, batch: object) -> bool:
        """Whether a tensor has other sizes than planned, but for how many samples."""
        return any(True for _ in self._other_sizes(batch))

    def is_padded(self, batch: object, multiple: int) -> bool:
        """Whether all lengths that are not the planned ones are multiples."""
        return not any(
            len(shape) == len(planned)
            and any(
                size != known and size % multiple
                for size, known in zip(shape, planned, strict=True)
            )
            for shape, planned in self._other_sizes(batch)
        )

    def _other_sizes(self, batch: object) -> Iterator[tuple[Shape, Shape]]:
        """Yield shapes that differ from the planned ones, without their samples."""
        for name, shape in _shapes(batch).items():
            planned = self.shapes.get(name)
            dim = self.sample_dims.get(name)
            if planned is None or shape == planned:
                continue
            if dim is not None:
                shape = (*shape[:dim], *shape[dim + 1 :])  # noqa: PLW2901
                planned = (*planned[:dim], *planned[dim + 1 :])
            if shape != planned:
                yield shape, planned

    def warn_if_unknown(self, batch: object) -> None:
        """Warn of tensors that the planned batch does not have, once for each."""
        news = [
            (name, shape)
            for name, shape in (_shapes(batch) if self.shapes else {}).items()
            if name not in self.shapes and name not in self._warned
        ]
        if news:
            self._warned |= dict(news)
            listed = ", ".join(f"{name} {list(shape)}" for name, shape in news)
            warnings.warn(
                f"This batch has {listed}, which the plan's batch had not: the model "
                "may take more memory than planned. Plan with it: "
                "budgetfit.plan(..., batch=...).",
                stacklevel=4,
            )

    def warn_if_larger(self, batch: object) -> None:
        """Warn of a batch that is larger than planned, before it runs."""
        news = [
            item
            for item in self.larger(batch)
            if _exceeds(item.shape, self._warned.get(item.name, item.planned))
        ]
        if not news:
            return
        for item in news:
            known = self._warned.get(item.name, item.planned)
            self._warned[item.name] = (
                tuple(max(pair) for pair in zip(item.shape, known, strict=True))
                if len(known) == len(item.shape)
                else item.shape
            )
        warnings.warn(
            f"This batch is larger than the plan's: {'; '.join(map(str, news))}. It "
            "may not fit, whatever the plan says. Plan for the largest one: "
            "budgetfit.plan(..., max_length=...) or batch=, or cut the samples.",
            stacklevel=4,
        )


def split_batch(
    batch: object, size: int, dims: SampleDims = FIRST_DIM
) -> Iterator[object]:
    """Split a batch into micro-batches of ``size`` samples; the last may be shorter.

    Rows of boxes, nodes, edges, patches or bags go with their sample. Tensors and lists
    without an entry per sample are in every part. A smaller batch is yielded unchanged.

    Raises:
        InputError: The batch contradicts ``dims``, or its rows cannot be assigned to
            samples (``packed_rows``).
    """
    samples = count_samples(batch, dims)
    if samples is None or samples <= size:
        yield batch
        return
    for start in range(0, samples, size):
        taken = range(start, min(start + size, samples))
        yield _slice(batch, samples, taken, dims, "")


def _slice(part: Any, samples: int, taken: range, dims: SampleDims, path: str) -> Any:
    """Return a range of samples; tensors are views."""
    if is_tensor(part):
        dim = sample_dimension(part, samples, dims, path)
        return part if dim is None else part.narrow(dim, taken.start, len(taken))
    if has_entry_per_sample(part, samples, dims, path):
        return part[taken.start : taken.stop]
    children = children_of(part)
    if children is None or is_list_of_other_items(part, dims, path):
        return part
    if isinstance(part, Mapping):
        rows = packed_rows(part, samples, dims, path)
        return {
            name: _slice(each, samples, taken, dims, join_path(path, str(name)))
            if name not in rows
            else rows[name].take(each, taken)
            for name, each in part.items()
        }
    parts = {
        name: _slice(each, samples, taken, dims, join_path(path, name))
        for name, each in children
    }
    if not isinstance(part, (list, tuple)):
        return dataclasses.replace(part, **parts)
    values = parts.values()
    return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)


def _shapes(batch: object) -> dict[str, Shape]:
    return {
        name or SINGLE_TENSOR: tuple(tensor.shape)
        for name, tensor in named_tensors_in(batch)
    }


def _exceeds(shape: Shape, planned: Shape) -> bool:
    """Whether a dimension is larger; of another rank, the number of elements."""
    if len(shape) != len(planned):
        return math.prod(shape) > math.prod(planned)
    return any(size > known for size, known in zip(shape, planned, strict=True))
