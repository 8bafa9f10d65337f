"""Tensors whose rows belong to samples in runs: nodes, edges, boxes, patches, bags.

Recognised in a mapping, by names of widely used libraries:

* a sample index (``SAMPLE_INDEX_NAMES``) numbers the sample of each row;
* ``edge_index`` ``[2, edges]`` holds numbers of nodes, and what is called ``edge_...``
  has a row for each edge (PyTorch Geometric); without a sample index, its nodes are
  those of one graph, which is one sample;
* ``...offsets`` holds the first row of each sample (``nn.EmbeddingBag``);
* ``image_grid_thw`` holds the patches of each image.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from budgetfit.errors import InputError
from budgetfit.utils.lazy_import import lazy_import

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE_INDEX_NAMES: Final = ("batch_idx", "batch_index", "batch")
_EDGES: Final = "edge_index"
_GRIDS: Final = (
    ("image_grid_thw", "pixel_values"),
    ("video_grid_thw", "pixel_values_videos"),
)
_AS_IT_IS: Final = (
    "or ask budgetfit.estimate(model, batch=...), which takes it as it is."
)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """How the rows of one tensor belong to samples.

    Attributes:
        counts: Rows of each sample, in order.
        numbered: For values that are numbers of rows or samples of the whole batch: how
            many of those each sample has. They are renumbered with the samples.
        has_end: The last row belongs to no sample and holds the total of ``numbered``.
        problem: Why the rows cannot be assigned; ``counts`` is then empty.
    """

    counts: Sequence[int] = ()
    dim: int = 0
    numbered: Sequence[int] | None = None
    has_end: bool = False
    problem: str = ""

    def take(self, tensor: "Tensor", samples: Sequence[int]) -> "Tensor":
        """Return the rows of some samples; of a range and not renumbered: a view.

        Raises:
            InputError: The rows cannot be assigned to samples.
        """
        if self.problem:
            raise InputError(self.problem)
        starts = [0, *accumulate(self.counts)]
        if isinstance(samples, range):
            first, last = starts[samples.start], starts[samples.stop]
            rows = tensor.narrow(self.dim, first, last - first)
        else:
            rows = lazy_import("torch").cat(
                [
                    tensor.narrow(self.dim, starts[sample], self.counts[sample])
                    for sample in samples
                ],
                dim=self.dim,
            )
        if self.numbered is None:
            return rows
        before = [0, *accumulate(self.numbered)]
        after = [0, *accumulate(self.numbered[sample] for sample in samples)]
        shift = [
            after[place] - before[sample]
            for place, sample in enumerate(samples)
            for _ in range(self.counts[sample])
        ]
        shape = [-1 if dim == self.dim else 1 for dim in range(tensor.dim())]
        rows = rows + rows.new_tensor(shift).view(shape)
        if self.has_end:
            end = rows.new_tensor(after[-1:])
            rows = lazy_import("torch").cat([rows, end])
        return rows


def is_tensor(part: object) -> TypeGuard["Tensor"]:
    """Whether a part of a batch is a tensor, without importing torch."""
    return hasattr(part, "shape") and hasattr(part, "dim")


def packed_tensors(part: Mapping[Any, object], samples: int) -> dict[str, PackedRows]:
    """Return how rows belong to samples, by the names of a mapping's packed tensors."""
    found: dict[str, PackedRows] = {}
    name, rows = sample_index(part)
    counts = None
    if name is not None:
        counts = _count_rows(_values(part[name]), samples)
    elif samples == 1:
        nodes = _nodes_of_one_graph(part)
        rows, counts = nodes or 0, [nodes] if nodes else None
    if counts is not None:
        found |= {each: PackedRows(counts) for each in _with_rows(part, rows)}
        if name is not None:
            found[name] = PackedRows(counts, numbered=[1] * samples)
        if _size(part.get("ptr")) == samples + 1:
            found["ptr"] = PackedRows([1] * samples, numbered=counts, has_end=True)
    found |= _edges(part, counts)
    for offsets in _offset_names(part):
        found |= _bags(part, offsets, samples)
    return found | _patches(part, samples)


def tensors_without_vote(part: Mapping[Any, Any]) -> tuple[set[str], int | None]:
    """Return the tensors whose sizes say nothing about the number of samples."""
    # And the number of samples if no other tensor of the batch has one, or None.
    edges = set(_edge_names(part))
    if edges:
        edges |= {"ptr"} & part.keys()
    name, rows = sample_index(part)
    if name is not None:
        numbers = _values(part[name]) if edges else []
        graphs = int(numbers[-1]) + 1 if numbers else rows
        return {*_with_rows(part, rows), *edges}, graphs
    if _nodes_of_one_graph(part):
        return {each for each, child in part.items() if is_tensor(child)}, 1
    names, samples = edges, None
    for index in _index_names(part) if edges else ():  # not sorted
        names |= {index, *_with_rows(part, part[index].shape[0])}
        samples = max(_values(part[index]), default=0) + 1
    for offsets in _offset_names(part):
        rows = max(part[name].shape[0] for name in _flat_names(part, offsets))
        names |= {offsets, *_with_rows(part, rows)}
        last = _values(part[offsets])[-1:]
        taken = part[offsets].shape[0]
        # Without labels: include_last_offset=True, rather than a last bag of none.
        samples = samples or (taken - 1 if last == [rows] else taken)
    return names, samples


def unnamed_offsets(parts: Mapping[Any, Any]) -> list[str]:
    """Return the integer vectors that look like offsets and are not known as such."""
    # They begin with 0, never fall, and there is a longer vector that they could cut.
    if _offset_names(parts):
        return []
    vectors = {n: each for n, each in parts.items() if _is_vector_of_integers(each)}
    return [
        name
        for name, tensor in vectors.items()
        for values in [_values(tensor)]
        if values[:1] == [0]
        and values == sorted(values)
        and any(
            max(len(values) + 1, values[-1]) <= other.shape[0]
            for other in vectors.values()
        )
    ]


def sample_index(part: Mapping[Any, Any]) -> tuple[str | None, int]:
    """Return name and length of the sample index tensor, which has to be sorted."""
    for name in SAMPLE_INDEX_NAMES:
        tensor = part.get(name)
        if not is_tensor(tensor) or not _size(tensor):
            continue
        rows, values = tensor.shape[0], _values(tensor)
        if math.prod(tensor.shape) == rows and values == sorted(values):
            return name, rows
    return None, 0


def _edge_names(part: Mapping[Any, Any]) -> list[str]:
    """Return the names of ``edge_index`` and of what has a row for each edge."""
    edges = part.get(_EDGES)
    match edges.shape if is_tensor(edges) else ():
        case (2, count):
            others = [
                name
                for name, child in part.items()
                if str(name).startswith("edge_")
                and name != _EDGES
                and _size(child) == count
            ]
            return [_EDGES, *others]
    return []


def _nodes_of_one_graph(part: Mapping[Any, Any]) -> int | None:
    """Return the number of nodes of a mapping that holds one graph; else None."""
    # Its nodes are the rows of ``x`` ``[nodes, features]``. Of three dimensions ``x``
    # is ``[samples, nodes, features]``, and all samples share the edges.
    nodes = part.get("x")
    if not _edge_names(part) or not is_tensor(nodes) or nodes.dim() != 2:  # noqa: PLR2004
        return None
    if _index_names(part):
        return None
    rows = nodes.shape[0]
    try:
        largest = int(part[_EDGES].max())
    except Exception:  # noqa: BLE001 - no edges, or no values
        return rows
    return rows if largest < rows else None


def _offset_names(part: Mapping[Any, object]) -> list[str]:
    """Return the names of integer vectors that hold the first row of each sample."""
    found = []
    for name, tensor in part.items():
        if not str(name).endswith("offsets") or not _is_vector_of_integers(tensor):
            continue
        values = _values(tensor)
        if values[:1] in ([], [0]) and values == sorted(values):
            found.append(str(name))
    return [name for name in found if _flat_names(part, name)]


def _flat_names(part: Mapping[Any, Any], offsets: str) -> list[str]:
    """Return the tensors that offsets may cut: those as long as the flat indices."""
    # Those are an integer vector that the offsets do not leave. Of several lengths it
    # is that of the names that share the offsets' prefix, and not that of the offsets,
    # as labels have.
    last = max(_values(part[offsets]), default=0)
    prefix = offsets.removesuffix("offsets")
    lengths = {
        name: tensor.shape[0]
        for name, tensor in part.items()
        if not str(name).endswith("offsets")
        and _is_vector_of_integers(tensor)
        and tensor.shape[0] >= last
    }
    for rule in (
        lambda name, _: bool(prefix) and str(name).startswith(prefix),
        lambda _, rows: rows != part[offsets].shape[0],
    ):
        lengths = {n: rows for n, rows in lengths.items() if rule(n, rows)} or lengths
    return [
        name
        for rows in dict.fromkeys(lengths.values())
        for name in _with_rows(part, rows)
    ]


def _bags(part: Mapping[Any, Any], offsets: str, samples: int) -> dict[str, PackedRows]:
    """Return how flat indices, and weights of them, belong to bags."""
    names = [name for name in _flat_names(part, offsets) if name != offsets]
    lengths = {part[name].shape[0] for name in names}
    rows, starts = max(lengths), _values(part[offsets])
    has_end = len(starts) == samples + 1 and starts[-1] == rows
    ends = [*starts[1:], *([] if has_end else [rows])]
    counts = [end - start for start, end in zip(starts, ends, strict=False)]
    one_each = set(counts) == {1}
    if len(counts) != samples or len(lengths) > 1 or (rows == samples and not one_each):
        shapes = ", ".join(
            f"{name} {list(part[name].shape)}" for name in (offsets, *names)
        )
        problem = PackedRows(
            problem=f"{offsets} holds the first row of each sample, and which tensor "
            f"is cut there is not clear: {shapes}, of {samples} samples. Use names "
            "with a common start (words, words_offsets), tensors with values, and "
            f"labels with one row per sample; {_AS_IT_IS}"
        )
        return dict.fromkeys([offsets, *names], problem)
    found = {name: PackedRows(counts) for name in names}
    first = PackedRows([1] * samples, numbered=counts, has_end=has_end)
    return found | {offsets: first}


def _edges(
    part: Mapping[Any, Any], nodes: Sequence[int] | None
) -> dict[str, PackedRows]:
    """Return how edges belong to graphs, given the number of nodes of each graph."""
    # None for edges that all samples share.
    names = _edge_names(part)
    is_shared = nodes is None and not _index_names(part)
    if not names or is_shared:
        return {}
    counts: list[int] | None = None
    if nodes is not None and _values(part[_EDGES]):
        torch = lazy_import("torch")
        graphs = torch.arange(len(nodes)).repeat_interleave(torch.tensor(nodes))
        edges = part[_EDGES].detach().cpu()
        if not edges.numel() or 0 <= int(edges.min()) <= int(edges.max()) < len(graphs):
            first, second = graphs[edges]
            if first.equal(second) and bool((first.diff() >= 0).all()):
                counts = first.bincount(minlength=len(nodes)).tolist()
    if counts is None:
        problem = PackedRows(
            problem="edge_index cannot be cut into graphs: each edge must connect "
            "nodes of one graph, with the edges and nodes of the graphs in order, as "
            "PyTorch Geometric's Batch has them. Use such a batch, with a sorted "
            f"batch tensor [nodes]; {_AS_IT_IS}"
        )
        return dict.fromkeys(names, problem)
    found = {name: PackedRows(counts) for name in names}
    return found | {_EDGES: PackedRows(counts, dim=1, numbered=nodes)}


def _patches(part: Mapping[Any, Any], samples: int) -> dict[str, PackedRows]:
    """Return how the patches of images, and their grids, belong to samples."""
    found = {}
    for grid, pixels in _GRIDS:
        if not (is_tensor(part.get(grid)) and is_tensor(part.get(pixels))):
            continue
        images = [math.prod(image) for image in _values(part[grid])]
        if not images or len(images) % samples:
            continue
        each = len(images) // samples
        patches = [sum(images[i * each : (i + 1) * each]) for i in range(samples)]
        if sum(patches) == part[pixels].shape[0]:
            found[pixels] = PackedRows(patches)
            found[grid] = PackedRows([each] * samples)
    return found


def _count_rows(index: list[Any], samples: int) -> list[int] | None:
    """Return the number of rows of each sample; None for an invalid index."""
    numbers = [int(item[0]) if isinstance(item, list) else int(item) for item in index]
    if not numbers or numbers[0] < 0 or numbers[-1] >= samples:
        return None
    counted = Counter(numbers)
    return [counted[sample] for sample in range(samples)]


def _index_names(part: Mapping[Any, object]) -> list[str]:
    return [name for name in SAMPLE_INDEX_NAMES if is_tensor(part.get(name))]


def _with_rows(part: Mapping[Any, object], rows: int) -> list[str]:
    return [name for name, child in part.items() if _size(child) == rows]


def _size(part: Any) -> int | None:
    """Return the size of a tensor's first dimension, or None."""
    return part.shape[0] if is_tensor(part) and part.dim() else None


def _is_vector_of_integers(part: Any) -> bool:
    return is_tensor(part) and part.dim() == 1 and "int" in str(part.dtype)


def _values(tensor: Any) -> list[Any]:
    """Return the values of a tensor; empty for meta and fake tensors."""
    try:
        return list(tensor.tolist())
    except Exception:  # noqa: BLE001 - meta and fake tensors have none
        return []
