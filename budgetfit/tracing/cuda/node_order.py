"""The order in which autograd runs nodes that a backward pass has made, as on CUDA.

Of the nodes that are ready the engine runs the one with the highest number first. Each
thread counts the nodes that it makes, and on CUDA backward passes run in a thread of
their own: gradients with ``create_graph=True`` number their nodes apart from those of
the forward. On a CPU one thread counts both.

Of two counts the one that grows by more in a step is ahead for good. So all nodes of
backward passes come before all others, or after them.

Sources: ``at::sequence_number`` and ``torch/csrc/autograd/engine.cpp``
(``CompareNodeTaskTime``).
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import torch

AHEAD: Final = 1 << 48  # more than a process counts; gradients of weights are beyond


class _Counts:
    """The nodes that were made in a trace: by backward passes, and all."""

    def __init__(self) -> None:
        self._start = _count()
        self._made = 0
        # Of each pass that made a graph the first node, and the first behind it.
        self._passes: list[tuple[int, int]] = []

    @contextmanager
    def backward(
        self, roots: Iterable[torch.Tensor], create_graph: bool
    ) -> Iterator[None]:
        """Number the nodes of a graph as on CUDA, and note what its backward makes."""
        self._reorder(roots)
        first, made = _count(), self._made
        try:
            yield
        finally:
            self._made = made + _count() - first  # passes inside of this one, too
            if create_graph:
                inside = bisect_left(self._passes, (first, 0))
                self._passes[inside:] = [(first, _count())]

    def _reorder(self, roots: Iterable[torch.Tensor]) -> None:
        if not self._passes:
            return
        in_front = 2 * self._made > _count() - self._start
        for node in _nodes(roots):
            number = node._sequence_nr()
            renumber = getattr(node, "_set_sequence_nr", None)  # not in every torch
            if renumber is None or number >= 2 * AHEAD:
                continue
            number %= AHEAD
            place = bisect_left(self._passes, (number + 1, 0)) - 1
            of_backward = place >= 0 and number < self._passes[place][1]
            renumber(number + AHEAD * (of_backward == in_front))


def _count() -> int:
    return int(torch._C._autograd._get_sequence_nr())


def _nodes(roots: Iterable[torch.Tensor]) -> Iterator[Any]:
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)


@contextmanager
def cuda_node_order() -> Iterator[None]:
    """Run the backward passes of this thread in CUDA's order."""
    counts, thread = _Counts(), threading.get_ident()
    engine = vars(torch.autograd)["_engine_run_backward"]

    def run_backward(roots: Any, *args: Any, **kwargs: Any) -> object:
        if threading.get_ident() != thread:
            return engine(roots, *args, **kwargs)
        _gradients, _retain_graph, create_graph, *_ = args
        with counts.backward(roots, create_graph):
            return engine(roots, *args, **kwargs)

    with mock.patch.object(torch.autograd, "_engine_run_backward", run_backward):
        yield
