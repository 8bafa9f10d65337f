"""The batch that a plan was made for, and how a batch that comes compares with it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from budgetfit.applying.nested import map_tensors, named_tensors_in
from budgetfit.core.batch_samples import (
    all_mappings,
    count_samples,
    holds_samples,
    index_of_samples,
    rows_of_samples,
)

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


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor of which only the shape is known."""

    shape: Shape

    def dim(self) -> int:
        return len(self.shape)


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
        cls, example: dict[str, tuple[Shape, str]], batch_size: int, batch_dim: int
    ) -> PlannedBatch:
        """Return the planned shapes: the example's, with ``batch_size`` samples."""
        samples = count_samples(_nested(example), batch_dim)

        def resized(shape: Shape) -> Shape:
            if len(shape) <= batch_dim or shape[batch_dim] != samples:
                return shape
            return (*shape[:batch_dim], batch_size, *shape[batch_dim + 1 :])

        return cls({name: resized(shape) for name, (shape, _) in example.items()})

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


def _nested(example: dict[str, tuple[Shape, str]]) -> Any:  # noqa: ANN401
    """Return a batch with these shapes; numbers in paths are places in a list."""
    top: dict[str, Any] = {}
    for path, (shape, _) in example.items():
        *parents, last = path.split(".")
        place = top
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = _Shape(shape)

    def listed(part: Any) -> Any:  # noqa: ANN401
        if not isinstance(part, dict):
            return part
        parts = {name: listed(each) for name, each in part.items()}
        numbered = all(name.isdigit() for name in parts)
        return list(parts.values()) if numbered else parts

    return listed(top)


def samples_in(batch: Any, batch_dim: int = 0) -> int | None:  # noqa: ANN401
    """Return how many samples a batch holds; None where no part tells."""
    return count_samples(batch, batch_dim)


def parts_of(batch: Any, size: int, batch_dim: int = 0) -> Iterator[Any]:  # noqa: ANN401
    """Cut a batch into parts of ``size`` samples; the last one may be shorter.

    Rows of boxes, nodes or patches go with their sample. Tensors and lists that do not
    hold entries of samples are in every part. A batch that is no larger is handed on as
    it is.
    """
    samples = samples_in(batch, batch_dim)
    if samples is None or samples <= size:
        yield batch
        return
    for start in range(0, samples, size):
        taken = range(start, min(start + size, samples))
        yield _cut(batch, samples, taken, batch_dim, is_top=True)


def _cut(
    part: Any,  # noqa: ANN401
    samples: int,
    taken: range,
    batch_dim: int,
    *,
    is_top: bool = False,
) -> Any:  # noqa: ANN401
    """Return the samples that are taken; tensors are views."""

    def cut(tensor: Any) -> Any:  # noqa: ANN401
        if tensor.dim() <= batch_dim or tensor.shape[batch_dim] != samples:
            return tensor
        return tensor.narrow(batch_dim, taken.start, len(taken))

    if isinstance(part, Mapping):
        rows = rows_of_samples(part, samples)
        index = index_of_samples(part)
        return {
            name: _cut(each, samples, taken, batch_dim)
            if name not in rows
            else _rows(each, rows[name], taken, is_index=name == index)
            for name, each in part.items()
        }
    if holds_samples(part, samples, batch_dim, is_top=is_top):
        return part[taken.start : taken.stop]
    if isinstance(part, list) and part and all_mappings(part):
        return part  # of something else: rows inside are not samples
    if isinstance(part, (list, tuple)):
        parts = [_cut(each, samples, taken, batch_dim) for each in part]
        return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
    return map_tensors(part, cut)


def _rows(tensor: Any, shares: list[int], taken: range, *, is_index: bool) -> Any:  # noqa: ANN401
    """Return the rows of the samples that are taken, numbered from 0 on."""
    start, count = sum(shares[: taken.start]), sum(shares[taken.start : taken.stop])
    rows = tensor.narrow(0, start, count)
    return rows - taken.start if is_index else rows


def _shapes(batch: Any) -> dict[str, Shape]:  # noqa: ANN401
    return {
        name or "batch": tuple(tensor.shape) for name, tensor in named_tensors_in(batch)
    }


def _exceeds(shape: Shape, planned: Shape) -> bool:
    """Whether ``shape`` has more in a dimension; of another rank, more elements."""
    if len(shape) != len(planned):
        return math.prod(shape) > math.prod(planned)
    return any(size > known for size, known in zip(shape, planned, strict=True))
