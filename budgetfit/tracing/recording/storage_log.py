"""StorageLog: every storage's birth and death, in order, while torch code runs.

Storages, not tensors (tracing T3): a view costs nothing and ``weight.t()`` is the
weight. Only weak references are kept, otherwise autograd would clone gradients instead
of taking them. It works on fake tensors (the trace) and on real ones (``verify`` on a
CPU).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from budgetfit.core.step_trace import CATEGORIES, TO_HOST
from budgetfit.tracing.op_costs import cost_of, tensors_in
from budgetfit.tracing.op_signature import Calls, call_key
from budgetfit.tracing.records import (
    NO_SCRATCH,
    OpRow,
    OpScratch,
    OpSemantics,
    RunOp,
    ScratchRow,
    Step,
    Touched,
    op_name,
    run_plainly,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from budgetfit.core.step_trace import Category
    from budgetfit.tracing.op_signature import Key

_DEVICE = torch.ops.prim.device.default
_DROPOUT = torch.ops.aten.native_dropout.default
_COSTS: Calls[tuple[int, float, int]] = Calls()
_CATEGORY = {name: index for index, name in enumerate(CATEGORIES)}


@functools.cache
def _name_and_kind(func: torch._ops.OpOverload) -> tuple[str, bool]:
    """Return an op's name, and whether it only makes views."""
    return op_name(func), func.is_view


def _cost(
    call: Key | None,
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,  # noqa: ANN401 - whatever an op returned
) -> tuple[int, float, int]:
    """Return ``cost_of`` a call, worked out once."""
    if call is None:
        return cost_of(func, args, kwargs, out)
    known = _COSTS.get(call)
    return (
        _COSTS.keep(call, cost_of(func, args, kwargs, out)) if known is None else known
    )


class StorageLog(TorchDispatchMode):
    """Records allocations and frees of everything that runs inside it.

    Attributes:
        sizes: Unrounded bytes of each storage, by index.
        categories: Index into ``CATEGORIES`` of each storage.
        layers: Layer index of each storage, from ``current_layer``.
        made_from: Storages born where no module runs, in the optimizer -> the storages
            that they were made from; ``storage_owners`` follows them to their layers.
        scratch: Storage index -> the rule that sizes it.
        unverified: Storage index -> the op that made it, whose memory nobody checked.
        events: ``k + 1`` for the birth of storage k, ``-(k + 1)`` for its death.
        ops: What was computed, for the roofline.
        live_bytes, peak_bytes: Unrounded bytes alive now, and the most since
        ``reset_peak``.
    """

    def __init__(
        self, semantics: OpSemantics | None = None, run: RunOp = run_plainly
    ) -> None:
        super().__init__()
        self._run = run
        self._backward = False
        self._in_modules = False
        self.sizes: list[int] = []
        self.categories: list[int] = []
        self.layers: list[int] = []
        self.made_from: dict[int, tuple[int, ...]] = {}
        self.scratch: dict[int, ScratchRow] = {}
        self.unverified: dict[int, str] = {}
        self.events: list[int] = []
        self.ops: list[OpRow] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self.category = _CATEGORY["temporaries"]
        self.current_layer: Callable[[], int] = lambda: -1
        self.watch: Callable[[], None] | None = None
        self._semantics = semantics
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the op returns
        """Run the op and log what it allocates."""
        if func is _DEVICE:  # asked for at every turn: answered without a dispatch
            return getattr(args[0], "fake_device", None) or func(*args)
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if self.watch is not None:
            self.watch()
        semantics = self._semantics
        if semantics is None:
            out = self._run(func, args, kwargs)
        else:
            out = semantics.run(self._run, func, args, kwargs)
        name, is_view = _name_and_kind(func)
        if name == TO_HOST:  # not a byte, not even for a moment
            self.born(out, size_bytes=0)
        if semantics is None or is_view:
            self.see(out)
            return out
        call = call_key(func, args, kwargs, out)
        taken = semantics.scratch(func, args, kwargs, out, call)
        first = len(self.sizes)
        self._log_allocations(func, taken, out)
        touched: Touched = ()
        if not self._in_modules:
            touched = _note_sources(self, first, args, kwargs, out)
        rate, flops, moved_bytes = _cost(call, func, args, kwargs, out)
        if flops or moved_bytes:
            layer, event = self.current_layer(), len(self.events)
            self.ops.append(
                OpRow(name, event, layer, rate, flops, moved_bytes, touched)
            )
        return out

    def _log_allocations(
        self,
        func: torch._ops.OpOverload,
        taken: OpScratch,
        out: Any,  # noqa: ANN401 - whatever an op returns
    ) -> None:
        """Log what an op takes, makes and gives back."""
        if taken is NO_SCRATCH and func is not _DROPOUT:
            self.see(out)
            return
        first = len(self.sizes)
        held = [self._allocate_scratch(row, "temporaries") for row in taken.before]
        held += self._follow(taken.steps, out)
        self.see(out if func is not _DROPOUT else out[::-1])  # its mask comes first
        if taken.output_bytes is not None:
            self._resize(out, taken.output_bytes)
        for position in taken.host_outputs:
            self._resize(out[position], 0)
        for row in taken.lasting:
            self._allocate_scratch(row, "workspace")
        held += [self._allocate_scratch(row, "temporaries") for row in taken.after]
        self.events.extend(-(index + 1) for index in reversed(held))
        if taken.unverified:
            made = range(first, len(self.sizes))
            self.unverified.update(dict.fromkeys(made, taken.unverified))

    def _follow(
        self,
        steps: Sequence[Step],
        out: Any,  # noqa: ANN401 - whatever an op returns
    ) -> list[int]:
        """Log what happens inside an op; return the storages that it still holds."""
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        held: dict[int, list[int]] = {}
        for step in steps:
            if step.kind == "take":
                held[step.number] = [
                    self._allocate_scratch(row, "temporaries") for row in step.rows
                ]
            elif step.kind == "keep":
                for row in step.rows:
                    self._allocate_scratch(row, "workspace")
            elif step.kind == "give":
                given = reversed(held.pop(step.number))
                self.events.extend(-(index + 1) for index in given)
            else:
                self.see(outputs[step.number])
        return [index for taken in held.values() for index in taken]

    def see(self, out: Any) -> None:  # noqa: ANN401 - whatever an op returns
        """Log the birth of storages in ``out`` that are not known yet."""
        if isinstance(out, torch.Tensor):
            self.born(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self.see(item)

    @contextlib.contextmanager
    def of_category(self, category: Category) -> Iterator[None]:
        """Give everything that is born in the context this category."""
        before, self.category = self.category, _CATEGORY[category]
        try:
            yield
        finally:
            self.category = before

    def born(
        self,
        tensor: torch.Tensor,
        category: Category | None = None,
        size_bytes: int | None = None,
    ) -> int:
        """Log a tensor's storage if it is new; return its index (-1: it has none)."""
        if tensor.layout is not torch.strided:
            return -1
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._alive.get(key)
        if known is not None:
            return known[0]
        index = self._allocate(
            storage.nbytes() if size_bytes is None else size_bytes,
            self._category_now() if category is None else _CATEGORY[category],
        )
        self._alive[key] = (
            index,
            weakref.ref(storage, functools.partial(self._died, key)),
        )
        return index

    def index_of(self, tensor: torch.Tensor) -> int:
        """Return the index of a tensor's storage, or -1 if this log has none alive."""
        if tensor.layout is not torch.strided:
            return -1
        known = self._alive.get(tensor.untyped_storage()._cdata)
        return -1 if known is None else known[0]

    def ignore(self, tensor: torch.Tensor) -> None:
        """Take back a storage that CUDA would keep in host memory."""
        self._resize(tensor, 0)

    def _resize(self, tensor: torch.Tensor, size_bytes: int) -> None:
        index = self.index_of(tensor)
        if index >= 0:
            self.live_bytes += size_bytes - self.sizes[index]
            self.sizes[index] = size_bytes

    def name(self, tensor: torch.Tensor, category: Category, layer: int) -> None:
        """Say what a tensor's storage is and to which layer it belongs."""
        index = self.born(tensor, category)
        if index >= 0:
            self.categories[index] = _CATEGORY[category]
            self.layers[index] = layer
            self.made_from.pop(index, None)

    def belongs_to(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Say that a tensor belongs to the layer of another, whichever was running."""
        index, source = self.index_of(tensor), self.index_of(other)
        if index >= 0 and source >= 0:
            self.made_from[index] = (source,)

    def set_category(self, tensor: torch.Tensor, category: Category) -> None:
        """Say what a live storage turned out to be."""
        index = self.index_of(tensor)
        if index >= 0:
            self.categories[index] = _CATEGORY[category]

    def start_phase(self, phase: str) -> None:
        """From here on storages are born in this phase of the step."""
        self._backward = phase == "backward"
        self._in_modules = phase in {"forward", "backward"}
        self.category = _CATEGORY[
            "activations" if phase == "forward" else "temporaries"
        ]

    def reset_peak(self) -> None:
        """Start measuring the peak again, from what is alive now."""
        self.peak_bytes = self.live_bytes

    def close(self) -> None:
        """Stop logging deaths: what is alive now outlives the trace."""
        self._alive.clear()

    def _category_now(self) -> int:
        # In the backward pass only a recomputation builds a graph.
        if self._backward and torch.is_grad_enabled():
            return _CATEGORY["activations"]
        return self.category

    def _allocate_scratch(self, row: ScratchRow, category: Category) -> int:
        index = self._allocate(0, _CATEGORY[category])
        self.scratch[index] = row
        return index

    def _allocate(self, size_bytes: int, category: int) -> int:
        index = len(self.sizes)
        self.sizes.append(size_bytes)
        self.categories.append(category)
        self.layers.append(self.current_layer())
        self.events.append(index + 1)
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return index

    def _died(self, key: int, _: object) -> None:
        known = self._alive.pop(key, None)
        if known is not None:
            self.events.append(-(known[0] + 1))
            self.live_bytes -= self.sizes[known[0]]


def _note_sources(
    log: StorageLog,
    first: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,  # noqa: ANN401 - whatever an op returned
) -> Touched:
    """Note what the storages from ``first`` on were made from, by one op.

    Returns:
        What the op moved: the bytes of every tensor, with the storages that say whose
        they are. In lists those are all at the same position: a number that all share
        counts for each.
    """
    inputs = [*args, *kwargs.values()]
    sources = tuple(_storages(log, inputs))
    for storage in range(first, len(log.sizes)):
        log.made_from[storage] = sources
    if isinstance(out, (tuple, list)):
        lists = [x for x in inputs if _is_list(x) and len(x) == len(out)]
        for position, tensor in enumerate(out):
            storage = log.index_of(tensor) if isinstance(tensor, torch.Tensor) else -1
            if storage >= first:
                own = [given[position] for given in lists]
                log.made_from[storage] = tuple(_storages(log, own))
    touched: list[tuple[tuple[int, ...], int]] = []
    by_length: dict[int, list[Any]] = defaultdict(list)
    for value in (*inputs, out):
        if _is_list(value):
            by_length[len(value)].append(value)
        else:
            touched += [_moved(log, [value])]
    for lists in by_length.values():
        touched += [_moved(log, row) for row in zip(*lists, strict=True)]
    return tuple(row for row in touched if row[1])


def _moved(log: StorageLog, values: Sequence[Any]) -> tuple[tuple[int, ...], int]:
    """Return the storages of some values, and the bytes of their tensors."""
    tensors = tensors_in(tuple(values))
    moved_bytes = sum(x.numel() * x.element_size() for x in tensors)
    return tuple(_storages(log, values)), moved_bytes


def _storages(log: StorageLog, values: Sequence[Any]) -> Iterator[int]:
    for tensor in tensors_in(tuple(values)):
        storage = log.index_of(tensor)
        if storage >= 0:
            yield storage


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (tuple, list))
