"""The batch that a plan was made for, and how a batch that comes compares with it."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from budgetfit.applying.nested import map_tensors, named_tensors_in, tensors_in

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
        cls, example: dict[str, tuple[Shape, str]], batch_size: int, batch_dim: int
    ) -> PlannedBatch:
        """Return the planned shapes: the example's, with ``batch_size`` samples."""
        sizes = [shape for shape, _ in example.values() if len(shape) > batch_dim]
        samples = _most_common(shape[batch_dim] for shape in sizes)

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


def samples_in(batch: Any, batch_dim: int = 0) -> int | None:  # noqa: ANN401
    """Return how many samples a batch holds: the size that most tensors share.

    A list with one mapping per sample (detection targets) counts as one size. None
    where no tensor has the dimension.
    """
    return _most_common(_sizes(batch, batch_dim))


def parts_of(batch: Any, size: int, batch_dim: int = 0) -> Iterator[Any]:  # noqa: ANN401
    """Cut a batch into parts of ``size`` samples; the last one may be shorter.

    Tensors and lists that do not hold one entry per sample are in every part. A batch
    that is no larger is handed on as it is.
    """
    samples = samples_in(batch, batch_dim)
    if samples is None or samples <= size:
        yield batch
        return
    for start in range(0, samples, size):
        yield _cut(batch, samples, start, min(size, samples - start), batch_dim)


def _cut(batch: Any, samples: int, start: int, size: int, batch_dim: int) -> Any:  # noqa: ANN401
    """Return ``size`` samples from ``start`` on; tensors are views."""

    def cut(tensor: Any) -> Any:  # noqa: ANN401
        if tensor.dim() <= batch_dim or tensor.shape[batch_dim] != samples:
            return tensor
        return tensor.narrow(batch_dim, start, size)

    if isinstance(batch, Mapping):
        return {
            name: _cut(part, samples, start, size, batch_dim)
            for name, part in batch.items()
        }
    if _holds_samples(batch):
        return batch[start : start + size] if len(batch) == samples else batch
    if isinstance(batch, (list, tuple)):
        parts = [_cut(part, samples, start, size, batch_dim) for part in batch]
        named = hasattr(batch, "_fields")
        return type(batch)(*parts) if named else type(batch)(parts)
    return map_tensors(batch, cut)


def _sizes(batch: Any, batch_dim: int) -> Iterator[int]:  # noqa: ANN401
    if _holds_samples(batch):
        yield len(batch)
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _sizes(part, batch_dim)
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _sizes(part, batch_dim)
    else:
        for tensor in tensors_in(batch):
            if tensor.dim() > batch_dim:
                yield tensor.shape[batch_dim]


def _holds_samples(part: object) -> bool:
    """Whether this is a list with one mapping per sample."""
    return (
        isinstance(part, list)
        and bool(part)
        and all(isinstance(sample, Mapping) for sample in part)
    )


def _shapes(batch: Any) -> dict[str, Shape]:  # noqa: ANN401
    return {
        name or "batch": tuple(tensor.shape) for name, tensor in named_tensors_in(batch)
    }


def _exceeds(shape: Shape, planned: Shape) -> bool:
    """Whether ``shape`` has more in a dimension; of another rank, more elements."""
    if len(shape) != len(planned):
        return math.prod(shape) > math.prod(planned)
    return any(size > known for size, known in zip(shape, planned, strict=True))


def _most_common(sizes: Any) -> int | None:  # noqa: ANN401 - any iterable of ints
    counted = Counter(sizes).most_common(1)
    return counted[0][0] if counted else None
