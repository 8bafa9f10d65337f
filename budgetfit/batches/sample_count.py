"""Infer the batch size of nested tensors, and the sample dimension of each.

Each tensor of a batch has one sample dimension, unless

* it is in a list or tuple with one tensor, or one mapping, per sample (Mask2Former's
  masks, torchvision's targets);
* its rows are assigned to samples by another tensor of the same mapping
  (``packed_rows.py``): boxes, nodes and edges of graphs, patches, bags of ids.

What the user specified (``SampleDims``) has precedence. Parts have paths, for example
``"targets.boxes"``; that of the batch itself is empty.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from budgetfit.batches.packed_rows import (
    PackedRows,
    is_tensor,
    packed_tensors,
    tensors_without_vote,
)
from budgetfit.core.samples.sample_dims import FIRST_DIM, SINGLE_TENSOR, SampleDims

Shape = tuple[int, ...]

_MAX_NON_TENSORS: Final = 64  # flags and numbers among the tensors of a tuple


@dataclasses.dataclass(frozen=True, slots=True)
class _ShapeOnly:
    """Placeholder of a tensor without values."""

    shape: Shape
    dtype: str

    def dim(self) -> int:
        return len(self.shape)


def batch_from_shapes(described: Mapping[str, tuple[Shape, str]]) -> object:
    """Rebuild a nested batch from shapes by path; numbers are list indices."""
    top: dict[str, Any] = {}
    for path, (shape, dtype) in described.items():
        *parents, last = path.split(".")
        place = top
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = _ShapeOnly(shape, dtype)

    def listed(part: object) -> Any:
        if not isinstance(part, dict):
            return part
        parts = {name: listed(each) for name, each in part.items()}
        places = [str(place) for place in range(len(parts) + _MAX_NON_TENSORS)]
        if not parts.keys() <= set(places):
            return parts
        last = max(map(int, parts))  # other leaves are not described
        return [parts.get(place) for place in places[: last + 1]]

    found = listed(top) if top else {}
    # A single mapping is a positional argument rather than a list of one sample.
    return tuple(found) if isinstance(found, list) and len(found) == 1 else found


def count_samples(batch: object, dims: SampleDims = FIRST_DIM) -> int | None:
    """Infer the number of samples in a batch.

    The parts named in ``dims`` decide. Without any it is the size that most parts
    allow, of equally frequent ones the first; None if no part has one.

    Raises:
        InputError: Named parts disagree, are missing, or lack the dimension.
    """
    if dims.named:
        dims.check_names(path for path, _ in _tensors(batch))
    allowed = list(_possible_sizes(batch, dims, ""))
    named = {path: sizes for path, sizes in allowed if dims.is_named(path)}
    votes = Counter(size for _, sizes in allowed for size in dict.fromkeys(sizes))
    if named:
        return dims.agreed_batch_size(named, votes)
    # Empty tensors (no boxes) do not vote.
    sized = Counter({size: votes[size] for size in votes if size})
    return (sized or votes).most_common(1)[0][0] if votes else None


def sample_dimension(
    tensor: Any, samples: int | None, dims: SampleDims, path: str
) -> int | None:
    """Return the sample dimension of a tensor, or None."""
    dim = dims.of(path or SINGLE_TENSOR)
    if dim is None or tensor.dim() <= dim or tensor.shape[dim] != samples:
        return None
    return dim


def sample_dimensions(batch: object, dims: SampleDims) -> dict[str, int | None]:
    """Return the sample dimension of each tensor of a batch, by path.

    None for tensors shared by all samples, and for entries or packed rows of samples.
    """
    samples = count_samples(batch, dims)

    def found(part: object, path: str) -> Iterator[tuple[str, int | None]]:
        if is_tensor(part):
            yield path or SINGLE_TENSOR, sample_dimension(part, samples, dims, path)
        elif is_list_of_other_items(part, dims, path) or (
            samples is not None and has_entry_per_sample(part, samples, dims, path)
        ):
            yield from ((name, None) for name, _ in _tensors(part, path))
        else:
            rows = packed_rows(part, samples, dims, path)
            for name, child in children_of(part) or ():
                if name in rows:
                    yield join_path(path, name), None
                else:
                    yield from found(child, join_path(path, name))

    return dict(found(batch, ""))


def has_entry_per_sample(
    part: object, samples: int, dims: SampleDims = FIRST_DIM, path: str = ""
) -> bool:
    """Whether a list or tuple of a batch has one entry per sample.

    If its tensors have as many rows as well, a list of equal shapes counts as one entry
    per sample, and a tuple (keys and values) does not.

    ``path``: of the part; empty for the batch itself.
    """
    if not isinstance(part, (list, tuple)) or len(part) != samples:
        return False
    if not _may_have_entry_per_sample(part, dims, path):
        return False
    if all_mappings(part):
        return True
    if _shared_size(part, dims.of(path)) != samples:
        return True
    shapes = {tuple(tensor.shape) for _, tensor in _tensors(part)}
    return isinstance(part, list) and len(shapes) == 1


def is_list_of_other_items(part: object, dims: SampleDims, path: str) -> bool:
    """Whether a list of mappings has no sample dimension inside."""
    # For lists without one entry per sample.
    if dims.is_named(path) or dims.names_below(path):
        return False
    return isinstance(part, list) and bool(part) and all_mappings(part)


def packed_rows(
    part: object, samples: int | None, dims: SampleDims, path: str
) -> dict[str, PackedRows]:
    """Return ``packed_tensors`` of the unnamed parts of a mapping."""
    if samples is None or not isinstance(part, Mapping):
        return {}
    return packed_tensors(_without_named(part, dims, path), samples)


def _without_named(
    part: Mapping[Any, object], dims: SampleDims, path: str
) -> dict[Any, Any]:
    return {
        name: child
        for name, child in part.items()
        if not dims.is_named(join_path(path, str(name)))
    }


def _possible_sizes(
    part: Any, dims: SampleDims, path: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield for each part of a batch its path and the possible numbers of samples."""
    if is_tensor(part):
        path = path or SINGLE_TENSOR
        dim = dims.of(path)
        if dim is not None and part.dim() > dim:
            yield path, (part.shape[dim],)
        elif dim is not None and dims.is_named(path):
            raise dims.missing_dim_error(path, tuple(part.shape))
    elif isinstance(part, (list, tuple)) and _may_have_entry_per_sample(
        part, dims, path
    ):
        shared = None if all_mappings(part) else _shared_size(part, dims.of(path))
        sizes = (len(part),) if shared is None else (shared, len(part))
        # By default a list with dimension 0 has one entry per sample, a tuple not.
        is_list = dims.is_named(path) and isinstance(part, list)
        yield path, sizes[::-1] if is_list else sizes
    else:
        without_vote, samples = (
            tensors_without_vote(_without_named(part, dims, path))
            if isinstance(part, Mapping)
            else (set(), None)
        )
        found = [
            each
            for name, child in children_of(part) or ()
            if name not in without_vote
            for each in _possible_sizes(child, dims, join_path(path, name))
        ]
        if not found and samples is not None:
            found = [(path, (samples,))]
        yield from found


def _may_have_entry_per_sample(
    part: list[Any] | tuple[object, ...], dims: SampleDims, path: str
) -> bool:
    """Whether a list or tuple may have one entry per sample."""
    # At the top level, a tuple or list of tensors is the model's arguments. Below it, a
    # part with dimension 0 in ``dims`` may have entries of any kind.
    if not part or dims.names_below(path):
        return False
    if hasattr(part, "_fields"):  # fields of a named tuple are different things
        return False
    is_named = dims.is_named(path)
    if is_named and dims.of(path) != 0:
        return False
    if all_mappings(part):
        return isinstance(part, list) or bool(path)
    if is_named and path:
        return any(True for _ in _tensors(part))
    return bool(path) and all(map(is_tensor, part))


def all_mappings(part: Iterable[object]) -> bool:
    """Whether every entry is a mapping."""
    return all(isinstance(item, Mapping) for item in part)


def _shared_size(part: object, dim: int | None) -> int | None:
    """Return the common size of all tensors in a dimension; None if they differ."""
    sizes = {
        x.shape[dim] if dim is not None and x.dim() > dim else None
        for _, x in _tensors(part)
    }
    return sizes.pop() if len(sizes) == 1 else None


def _tensors(part: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors in a part of a batch with their paths."""
    if is_tensor(part):
        yield path or SINGLE_TENSOR, part
        return
    for name, child in children_of(part) or ():
        yield from _tensors(child, join_path(path, name))


def join_path(path: str, name: str) -> str:
    """Return the path of a part from its container's path and its name."""
    return f"{path}.{name}" if path else name


def children_of(part: object) -> list[tuple[str, Any]] | None:
    """Return the named children of a container; None for a leaf."""
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
