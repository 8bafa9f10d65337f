"""The batch that a plan was made for, and how a batch that comes compares with it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from budgetfit.applying.pytree import named_tensors_in
from budgetfit.batches.sample_count import (
    batch_of_shapes,
    children_of,
    count_samples,
    dimension_of,
    dimensions_of,
    goes_whole,
    holds_samples,
    is_tensor,
    join,
    packed_rows,
)
from budgetfit.core.sample_dims import FIRST, LONE, SampleDims

if TYPE_CHECKING:
    from collections.abc import Iterator

    Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LargerTensor:
    """A tensor of a batch that has more in some dimension than was planned."""

    name: str
    shape: Shape
    planned: Shape

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}, planned {list(self.planned)}"


@dataclass(slots=True)
class PlannedBatch:
    """The shapes of a planned micro-batch; warns of larger ones, once for each size.

    Attributes:
        shapes: Of the tensors of one micro-batch, by their paths.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    _warned: dict[str, Shape] = field(default_factory=dict)

    @classmethod
    def of(
        cls, example: dict[str, tuple[Shape, str]], batch_size: int, dims: SampleDims
    ) -> PlannedBatch:
        """Return the planned shapes: the example's, with ``batch_size`` samples."""

        def resized(shape: Shape, dim: int | None) -> Shape:
            if dim is None:
                return shape
            return (*shape[:dim], batch_size, *shape[dim + 1 :])

        found = dimensions_of(batch_of_shapes(example), dims) if example else {}
        return cls(
            {
                name: resized(shape, found.get(name))
                for name, (shape, _) in example.items()
            }
        )

    def larger(self, batch: Any) -> tuple[LargerTensor, ...]:  # noqa: ANN401 - any nesting
        """Return the batch's tensors that exceed the plan in a dimension.

        Tensors that the plan does not know are passed over: it cannot say anything.
        """
        return tuple(
            LargerTensor(name, shape, planned)
            for name, shape in _shapes(batch).items()
            if (planned := self.shapes.get(name)) is not None
            and _exceeds(shape, planned)
        )

    def growth(self, batch: Any) -> float:  # noqa: ANN401 - any nesting
        """Return how many times the plan's elements the most grown tensor has."""
        return max(
            (
                math.prod(item.shape) / max(1, math.prod(item.planned))
                for item in self.larger(batch)
            ),
            default=1.0,
        )

    def warn_if_unknown(self, batch: Any) -> None:  # noqa: ANN401 - any nesting
        """Say that a batch has tensors that the plan's had not, once for each."""
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

    def warn_if_larger(self, batch: Any) -> None:  # noqa: ANN401 - any nesting
        """Say that a batch is larger than planned, before it runs (user-needs U5)."""
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


def parts_of(batch: Any, size: int, dims: SampleDims = FIRST) -> Iterator[Any]:  # noqa: ANN401
    """Cut a batch into parts of ``size`` samples; the last one may be shorter.

    Rows of boxes, nodes or patches go with their sample. Tensors and lists that do not
    hold entries of samples are in every part. A batch that is no larger is handed on as
    it is.

    Raises:
        InputError: The batch is not what the user says of it.
    """
    samples = count_samples(batch, dims)
    if samples is None or samples <= size:
        yield batch
        return
    for start in range(0, samples, size):
        taken = range(start, min(start + size, samples))
        yield _cut(batch, samples, taken, dims, "")


def _cut(
    part: Any,  # noqa: ANN401
    samples: int,
    taken: range,
    dims: SampleDims,
    path: str,
) -> Any:  # noqa: ANN401
    """Return the samples that are taken; tensors are views."""
    if is_tensor(part):
        dim = dimension_of(part, samples, dims, path)
        return part if dim is None else part.narrow(dim, taken.start, len(taken))
    if holds_samples(part, samples, dims, path):
        return part[taken.start : taken.stop]
    children = children_of(part)
    if children is None or goes_whole(part, dims, path):
        return part
    if isinstance(part, Mapping):
        rows, index = packed_rows(part, samples, dims, path)
        return {
            name: _cut(each, samples, taken, dims, join(path, str(name)))
            if name not in rows
            else _rows(each, rows[name], taken, is_index=name == index)
            for name, each in part.items()
        }
    parts = {
        name: _cut(each, samples, taken, dims, join(path, name))
        for name, each in children
    }
    if not isinstance(part, (list, tuple)):
        return dataclasses.replace(part, **parts)
    values = parts.values()
    return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)


def _rows(tensor: Any, shares: list[int], taken: range, *, is_index: bool) -> Any:  # noqa: ANN401
    """Return the rows of the samples that are taken, numbered from 0 on."""
    start, count = sum(shares[: taken.start]), sum(shares[taken.start : taken.stop])
    rows = tensor.narrow(0, start, count)
    return rows - taken.start if is_index else rows


def _shapes(batch: Any) -> dict[str, Shape]:  # noqa: ANN401
    return {
        name or LONE: tuple(tensor.shape) for name, tensor in named_tensors_in(batch)
    }


def _exceeds(shape: Shape, planned: Shape) -> bool:
    """Whether ``shape`` has more in a dimension; of another rank, more elements."""
    if len(shape) != len(planned):
        return math.prod(shape) > math.prod(planned)
    return any(size > known for size, known in zip(shape, planned, strict=True))
