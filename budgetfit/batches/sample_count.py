"""How many samples a batch holds, and which of its parts have an entry for each.

A batch is any nesting of tensors. Each tensor counts samples in one dimension, unless

* it is in a list or tuple that holds one tensor, or one mapping, for each sample
  (Mask2Former's masks, torchvision's targets);
* its rows are told apart by an index of samples beside it (``batch_idx`` of boxes in
  Ultralytics, ``batch`` of nodes in PyTorch Geometric), or are patches of images whose
  numbers are in ``image_grid_thw`` (Qwen's processors).

What the user has said of a part (``SampleDims``) goes before what is found. Parts have
paths: ``"targets.boxes"``; the batch itself has the empty one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from budgetfit.core.sample_dims import FIRST, LONE, SampleDims

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Shape = tuple[int, ...]

INDICES: Final = ("batch_idx", "batch_index", "batch")
_MOST_OTHERS: Final = 64  # flags and numbers between the tensors of a tuple
_GRIDS: Final = (
    ("image_grid_thw", "pixel_values"),
    ("video_grid_thw", "pixel_values_videos"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Shaped:
    """A tensor of which only the shape is known."""

    shape: Shape

    def dim(self) -> int:
        return len(self.shape)


def batch_of_shapes(described: Mapping[str, tuple[Shape, str]]) -> Any:  # noqa: ANN401
    """Return a batch with these shapes, by path; numbers are places in a list."""
    top: dict[str, Any] = {}
    for path, (shape, _) in described.items():
        *parents, last = path.split(".")
        place = top
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = _Shaped(shape)

    def listed(part: Any) -> Any:  # noqa: ANN401
        if not isinstance(part, dict):
            return part
        parts = {name: listed(each) for name, each in part.items()}
        places = [str(place) for place in range(len(parts) + _MOST_OTHERS)]
        if not parts.keys() <= set(places):
            return parts
        last = max(map(int, parts))  # what is no tensor is not described
        return [parts.get(place) for place in places[: last + 1]]

    found = listed(top) if top else {}
    # One mapping alone is rather what a model is called with than a list of a sample.
    return tuple(found) if isinstance(found, list) and len(found) == 1 else found


def is_tensor(part: object) -> bool:
    """Whether a part of a batch is a tensor; without asking torch."""
    return hasattr(part, "shape") and hasattr(part, "dim")


def count_samples(batch: Any, dims: SampleDims = FIRST) -> int | None:  # noqa: ANN401
    """Return how many samples a batch holds: as the named parts say.

    Without any it is the number that most parts allow; of equally frequent ones the
    first; None where no part tells.

    Args:
        batch: Any nesting of tensors.
        dims: The dimension of tensors that counts samples.

    Raises:
        InputError: Named parts do not agree, are not there, or lack the dimension.
    """
    if dims.named:
        dims.check_names(path for path, _ in _tensors(batch))
    allowed = list(_allowed(batch, dims, ""))
    named = {path: sizes for path, sizes in allowed if dims.is_named(path)}
    votes = Counter(size for _, sizes in allowed for size in dict.fromkeys(sizes))
    if named:
        return dims.agreed(named, votes)
    sized = Counter({size: votes[size] for size in votes if size})  # no boxes: no vote
    return (sized or votes).most_common(1)[0][0] if votes else None


def dimension_of(
    tensor: Any,  # noqa: ANN401
    samples: int | None,
    dims: SampleDims,
    path: str,
) -> int | None:
    """Return in which dimension a tensor counts the batch's samples; None: in none."""
    dim = dims.of(path or LONE)
    if dim is None or tensor.dim() <= dim or tensor.shape[dim] != samples:
        return None
    return dim


def dimensions_of(batch: Any, dims: SampleDims = FIRST) -> dict[str, int | None]:  # noqa: ANN401
    """Return in which dimension each tensor of a batch counts samples, by its path.

    None for those that go with every sample, or that are themselves entries or rows of
    samples.
    """
    samples = count_samples(batch, dims)

    def found(part: Any, path: str) -> Iterator[tuple[str, int | None]]:  # noqa: ANN401
        if is_tensor(part):
            yield path or LONE, dimension_of(part, samples, dims, path)
        elif goes_whole(part, dims, path) or (
            samples is not None and holds_samples(part, samples, dims, path)
        ):
            yield from ((name, None) for name, _ in _tensors(part, path))
        else:
            rows, _ = packed_rows(part, samples, dims, path)
            for name, child in children_of(part) or ():
                if name in rows:
                    yield join(path, name), None
                else:
                    yield from found(child, join(path, name))

    return dict(found(batch, ""))


def holds_samples(
    part: object, samples: int, dims: SampleDims = FIRST, path: str = ""
) -> bool:
    """Whether a list or tuple of a batch has one entry for each sample.

    Where its tensors have as many rows as well, a list of equal shapes is taken to have
    one, and a tuple (keys and values) not.

    Args:
        part: The batch or something in it.
        samples: How many samples the batch holds.
        dims: The dimension of tensors that counts samples.
        path: Of the part; empty if it is the batch itself.
    """
    if not isinstance(part, (list, tuple)) or len(part) != samples:
        return False
    if not _may_hold(part, dims, path):
        return False
    if all_mappings(part):
        return True
    if _shared_size(part, dims.of(path)) != samples:
        return True
    shapes = {tuple(tensor.shape) for _, tensor in _tensors(part)}
    return isinstance(part, list) and len(shapes) == 1


def goes_whole(part: object, dims: SampleDims, path: str) -> bool:
    """Whether a list of mappings is of something else: rows inside are not samples.

    Asked of what does not hold samples.
    """
    if dims.is_named(path) or dims.names_below(path):
        return False
    return isinstance(part, list) and bool(part) and all_mappings(part)


def packed_rows(
    part: Any,  # noqa: ANN401
    samples: int | None,
    dims: SampleDims,
    path: str,
) -> tuple[dict[str, list[int]], str | None]:
    """Return ``rows_of_samples`` of those parts of a mapping that are not named.

    And the name of the tensor among them that says which sample a row belongs to.
    """
    if samples is None or not isinstance(part, Mapping):
        return {}, None
    others = _not_named(part, dims, path)
    return rows_of_samples(others, samples), _index_in(others)[0]


def rows_of_samples(part: Mapping[Any, Any], samples: int) -> dict[str, list[int]]:
    """Return how many rows of a tensor belong to each sample, by the tensor's name.

    For tensors whose rows are no samples; empty where nothing tells, or where values
    cannot be read.
    """
    rows: dict[str, list[int]] = {}
    name, count = _index_in(part)
    if name is not None:
        shares = _shares_of(_values(part[name]), samples)
        if shares is not None:
            rows |= {
                other: shares
                for other, tensor in part.items()
                if is_tensor(tensor) and tensor.dim() and tensor.shape[0] == count
            }
    for grid, pixels in _GRIDS:
        if not (is_tensor(part.get(grid)) and is_tensor(part.get(pixels))):
            continue
        images = [math.prod(image) for image in _values(part[grid])]
        if not images or len(images) % samples:
            continue
        each = len(images) // samples
        patches = [sum(images[i * each : (i + 1) * each]) for i in range(samples)]
        if sum(patches) == part[pixels].shape[0]:
            rows |= {pixels: patches, grid: [each] * samples}
    return rows


def _index_in(part: Mapping[Any, Any]) -> tuple[str | None, int]:
    """Return the index's name, and its rows, which stand in the order of samples."""
    for name in INDICES:
        tensor = part.get(name)
        if tensor is None or not is_tensor(tensor) or not tensor.dim():
            continue
        rows, values = tensor.shape[0], _values(tensor)
        if math.prod(tensor.shape) == rows and values == sorted(values):
            return name, rows
    return None, 0


def _shares_of(index: list[Any], samples: int) -> list[int] | None:
    """Return the rows of each sample; None where they are of other samples."""
    numbers = [int(item[0]) if isinstance(item, list) else int(item) for item in index]
    if not numbers or numbers[0] < 0 or numbers[-1] >= samples:
        return None
    counted = Counter(numbers)
    return [counted[sample] for sample in range(samples)]


def _values(tensor: Any) -> list[Any]:  # noqa: ANN401
    try:
        return list(tensor.tolist())
    except Exception:  # noqa: BLE001 - meta and fake tensors have none
        return []


def _not_named(part: Mapping[Any, Any], dims: SampleDims, path: str) -> dict[Any, Any]:
    return {
        name: child
        for name, child in part.items()
        if not dims.is_named(join(path, str(name)))
    }


def _allowed(
    part: Any,  # noqa: ANN401
    dims: SampleDims,
    path: str,
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield for each part of a batch its path and the numbers of samples it allows."""
    if is_tensor(part):
        path = path or LONE
        dim = dims.of(path)
        if dim is not None and part.dim() > dim:
            yield path, (part.shape[dim],)
        elif dim is not None and dims.is_named(path):
            raise dims.lacks(path, tuple(part.shape))
    elif isinstance(part, (list, tuple)) and _may_hold(part, dims, path):
        shared = None if all_mappings(part) else _shared_size(part, dims.of(path))
        sizes = (len(part),) if shared is None else (shared, len(part))
        # Where nothing else tells, a list that is named 0 has entries, a tuple not.
        is_list = dims.is_named(path) and isinstance(part, list)
        yield path, sizes[::-1] if is_list else sizes
    else:
        is_mapping = isinstance(part, Mapping)
        index, rows = (
            _index_in(_not_named(part, dims, path)) if is_mapping else (None, 0)
        )

        def is_row(name: str, child: Any) -> bool:  # noqa: ANN401
            return (
                index is not None
                and is_tensor(child)
                and bool(child.dim())
                and child.shape[0] == rows
                and not dims.is_named(join(path, name))
            )

        children = children_of(part) or []
        others = [each for each in children if not is_row(*each)]
        found = [
            each
            for name, child in others
            for each in _allowed(child, dims, join(path, name))
        ]
        if not found and len(others) < len(children):
            found = [(path, (rows,))]
        yield from found


def _may_hold(part: list[Any] | tuple[Any, ...], dims: SampleDims, path: str) -> bool:
    """Whether a list or tuple may have an entry for each sample.

    At the top, a tuple is what the model is called with, and a list of tensors as well.
    Below it, what is named 0 may have entries of any kind.
    """
    if not part or dims.names_below(path):
        return False
    if hasattr(part, "_fields"):  # a named tuple's entries are not alike
        return False
    is_named = dims.is_named(path)
    if is_named and dims.of(path) != 0:
        return False
    if all_mappings(part):
        return isinstance(part, list) or bool(path)
    if is_named and path:
        return any(True for _ in _tensors(part))
    return bool(path) and all(map(is_tensor, part))


def all_mappings(part: Iterable[Any]) -> bool:
    """Whether every entry is a mapping."""
    return all(isinstance(item, Mapping) for item in part)


def _shared_size(part: object, dim: int | None) -> int | None:
    """Return the rows that all tensors have, None where they differ."""
    sizes = {
        x.shape[dim] if dim is not None and x.dim() > dim else None
        for _, x in _tensors(part)
    }
    return sizes.pop() if len(sizes) == 1 else None


def _tensors(part: Any, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield the tensors in a part of a batch with their paths."""
    if is_tensor(part):
        yield path or LONE, part
        return
    for name, child in children_of(part) or ():
        yield from _tensors(child, join(path, name))


def join(path: str, name: str) -> str:
    """Return the path of a part, from its container's and its own name."""
    return f"{path}.{name}" if path else name


def children_of(part: Any) -> list[tuple[str, Any]] | None:  # noqa: ANN401
    """Return the named parts of a container; None for a leaf."""
    if isinstance(part, Mapping):
        return [(str(key), value) for key, value in part.items()]
    if isinstance(part, (list, tuple)):
        return [(str(index), value) for index, value in enumerate(part)]
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return [
            (item.name, getattr(part, item.name))
            for item in dataclasses.fields(part)
            if item.init
        ]
    return None
