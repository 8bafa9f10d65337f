"""How many samples a batch holds, and which of its parts have an entry for each.

A batch is any nesting of tensors. Each tensor counts samples in one dimension, unless

* it is in a list or tuple that holds one tensor, or one mapping, for each sample
  (Mask2Former's masks, torchvision's targets);
* its rows are told apart by an index of samples beside it (``batch_idx`` of boxes in
  Ultralytics, ``batch`` of nodes in PyTorch Geometric), or are patches of images whose
  numbers are in ``image_grid_thw`` (Qwen's processors).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

INDICES: Final = ("batch_idx", "batch_index", "batch")
_GRIDS: Final = (
    ("image_grid_thw", "pixel_values"),
    ("video_grid_thw", "pixel_values_videos"),
)


def is_tensor(part: object) -> bool:
    """Whether a part of a batch is a tensor; without asking torch."""
    return hasattr(part, "shape") and hasattr(part, "dim")


def count_samples(batch: Any, batch_dim: int = 0) -> int | None:  # noqa: ANN401
    """Return how many samples a batch holds: the number that most of its parts allow.

    Of equally frequent ones the first; None where no part tells.

    Args:
        batch: Any nesting of tensors.
        batch_dim: The dimension of tensors that counts samples.
    """
    counted = Counter(
        size
        for sizes in _allowed(batch, batch_dim, is_top=True)
        for size in dict.fromkeys(sizes)
    )
    return counted.most_common(1)[0][0] if counted else None


def holds_samples(
    part: object, samples: int, batch_dim: int = 0, *, is_top: bool = False
) -> bool:
    """Whether a list or tuple of a batch has one entry for each sample.

    Where its tensors have as many rows as well, a list of equal shapes is taken to have
    one, and a tuple (keys and values) not.

    Args:
        part: The batch or something in it.
        samples: How many samples the batch holds.
        batch_dim: The dimension of tensors that counts samples.
        is_top: Whether it is the batch itself.
    """
    if not isinstance(part, (list, tuple)) or len(part) != samples:
        return False
    if not part or not _may_hold(part, is_top=is_top):
        return False
    if all_mappings(part):
        return True
    if _shared_size(part, batch_dim) != samples:
        return True
    return isinstance(part, list) and len({tuple(x.shape) for x in part}) == 1


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


def index_of_samples(part: Mapping[Any, Any]) -> str | None:
    """Return the name of the tensor that says which sample a row belongs to."""
    return _index_in(part)[0]


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


def _allowed(part: Any, batch_dim: int, *, is_top: bool) -> Iterator[tuple[int, ...]]:  # noqa: ANN401
    """Yield for each part of a batch the numbers of samples that it allows."""
    if is_tensor(part):
        if part.dim() > batch_dim:
            yield (part.shape[batch_dim],)
    elif isinstance(part, (list, tuple)) and part and _may_hold(part, is_top=is_top):
        shared = None if all_mappings(part) else _shared_size(part, batch_dim)
        yield (len(part),) if shared is None else (shared, len(part))
    else:
        name, rows = _index_in(part) if isinstance(part, Mapping) else (None, 0)
        children = list(_children(part))
        others = [
            child
            for child in children
            if name is None
            or not (is_tensor(child) and child.dim() and child.shape[0] == rows)
        ]
        found = [
            sizes
            for child in others
            for sizes in _allowed(child, batch_dim, is_top=False)
        ]
        if not found and len(others) < len(children):
            found = [(rows,)]
        yield from found


def _may_hold(part: list[Any] | tuple[Any, ...], *, is_top: bool) -> bool:
    """Whether a list or tuple may have an entry for each sample.

    At the top, a tuple is what the model is called with, and a list of tensors as well.
    """
    if hasattr(part, "_fields"):  # a named tuple's entries are not alike
        return False
    if all_mappings(part):
        return isinstance(part, list) or not is_top
    return not is_top and all(map(is_tensor, part))


def all_mappings(part: Iterable[Any]) -> bool:
    """Whether every entry is a mapping."""
    return all(isinstance(item, Mapping) for item in part)


def _shared_size(part: Iterable[Any], batch_dim: int) -> int | None:
    """Return the rows that all tensors have, None where they differ."""
    sizes = {x.shape[batch_dim] if x.dim() > batch_dim else None for x in part}
    return sizes.pop() if len(sizes) == 1 else None


def _children(part: Any) -> Iterable[Any]:  # noqa: ANN401
    if isinstance(part, Mapping):
        return part.values()
    if isinstance(part, (list, tuple)):
        return part
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return [
            getattr(part, item.name) for item in dataclasses.fields(part) if item.init
        ]
    return ()
