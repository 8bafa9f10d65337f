"""StorageLog: a dispatch mode that records storage allocations and frees in order.

Storages, not tensors: a view allocates nothing and ``weight.t()`` is the weight. Only
weak references are kept, otherwise autograd would clone gradients instead of stealing
them. It works on fake tensors (traces) and on real ones (``verify`` on a CPU).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeGuard

import torch
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from budgetfit.core.step_trace import (
    CATEGORIES,
    TO_HOST,
    Category,
    KernelScratch,
    SizeLimit,
)
from budgetfit.tracing.call_cache import Args, CallKey, Kwargs, call_key
from budgetfit.tracing.cuda.dispatch.thread_kernels import is_composite, run_composite
from budgetfit.tracing.op_costs import (
    OpCost,
    op_cost,
    stored_bytes,
    tensor_passes,
    tensors_in,
)
from budgetfit.tracing.records import (
    Free,
    MovedStorages,
    OpMemory,
    OpRecord,
    OpSemantics,
    Output,
    RunOp,
    call_op,
    op_name,
)

# What a log records, by the names of its attributes.
_RECORDS: Final = (
    "sizes",
    "categories",
    "layers",
    "made_from",
    "scratch",
    "streams",
    "unverified",
    "limits",
    "events",
    "ops",
)
_LIFT_FRESH = torch.ops.aten.lift_fresh.default  # what ``torch.tensor`` runs
PRIM_DEVICE = torch.ops.prim.device.default
_CATEGORY = {name: index for index, name in enumerate(CATEGORIES)}


@functools.cache
def _name_and_is_view(func: OpOverload) -> tuple[str, bool]:
    """Return an op's name, and whether it is a view op."""
    return op_name(func), func.is_view


# Whether dynamo can be told once to leave a function alone, and all that it calls.
_SKIPS: Final = hasattr(eval_frame, "set_code_exec_strategy")


class StorageLog(TorchDispatchMode):
    """Records allocations, frees and ops of everything that runs inside it.

    Attributes:
        sizes: Unrounded bytes of each storage, by index.
        categories: Index into ``CATEGORIES`` of each storage.
        layers: Layer index of each storage, from ``current_layer``.
        made_from: Storage allocated outside modules (in the optimizer) -> the input
            storages of its op; ``storage_owners`` resolves them to layers.
        scratch: Storage index -> the kernel rule that sizes it.
        streams: Storage index -> its CUDA stream, if that is not the default one.
        unverified: Storage index -> its op, if that op's kernels are unverified.
        limits: The sizes that kernels refuse to exceed, one entry per call.
        events: ``k + 1`` for the allocation of storage k, ``-(k + 1)`` for its free.
        ops: The ops that ran, with what they ask of the GPU.
        in_optimizer: Whether the optimizer's phase runs.
        unread: Names of the batch's tensors that no op has read, by their storages.
        on_op: Called before each op; ``on_reduced`` where FSDP2 has reduced gradients.
        take_key: Returns the cache key of the call that has just run, if that decides
            its result too.
        live_bytes, peak_bytes: Unrounded live bytes, and their maximum since
        ``reset_peak``.
    """

    def __init__(
        self, semantics: OpSemantics | None = None, run: RunOp = call_op
    ) -> None:
        super().__init__()
        self._run = run
        self._stopped = False
        self._backward = False
        self._in_modules = False
        self.sizes: list[int] = []
        self.categories: list[int] = []
        self.layers: list[int] = []
        self.made_from: dict[int, tuple[int, ...]] = {}
        self.scratch: dict[int, KernelScratch[int]] = {}
        self.streams: dict[int, int] = {}
        self.unverified: dict[int, str] = {}
        self.limits: list[SizeLimit[int]] = []
        self.events: list[int] = []
        self.ops: list[OpRecord] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self.in_optimizer = False
        self.unread: dict[int, str] = {}
        self.category = _CATEGORY["temporaries"]
        self.current_layer: Callable[[], int] = lambda: -1
        self.on_op: Callable[[], None] | None = None
        self.on_reduced: Callable[[], None] | None = None
        self.take_key: Callable[..., CallKey | None] = lambda *_: None
        self._semantics = semantics
        self._alive: dict[int, tuple[int, int, weakref.ref[Any]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to switch dynamo off and on around each call: see the end."""
        return not _SKIPS

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run the op and log what it allocates."""
        if func is PRIM_DEVICE:  # more than half of all calls: answered here
            return getattr(args[0], "fake_device", None) or func(*args)
        if torch.is_inference_mode_enabled() and is_composite(func):
            with self:
                return run_composite(func, args, kwargs or {})
        return self.run_and_log(func, args, kwargs or {})

    def run_and_log(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run the op and log what it allocates."""
        if self._stopped:
            return func(*args, **kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if self.on_op is not None:
            self.on_op()
        if self.unread and not func.is_view:
            self.note_reads(args, kwargs)
        semantics = self._semantics
        out = self.run_op(func, args, kwargs)
        # Of a cached result the arguments decide all else, on one target.
        call = self.take_key(func, args)  # of views too: it holds their arguments
        name, is_view = _name_and_is_view(func)
        if self._is_on_host(func, name, out) or is_meta(out):
            self.log_storage(out, size_bytes=0)
        if semantics is None or is_view:
            self.log_outputs(out)
            return out
        call = call or call_key(func, args, kwargs, out)
        memory = semantics.memory(func, args, kwargs, out, call)
        first = len(self.sizes)
        self._log_memory(memory, out)
        self.limits += memory.limits
        touched: MovedStorages = ()
        if not self._in_modules:
            touched = note_sources(self, first, func, args, kwargs, out)
        if memory.cost.kernels:
            # The gradient of the loss is made before the engine runs.
            in_a_node = torch._C._current_autograd_node() is not None
            self.ops.append(
                OpRecord(
                    name,
                    len(self.events),
                    self.current_layer(),
                    memory.cost,
                    self.in_optimizer,
                    touched,
                    recomputed=self._recomputes() and in_a_node,
                )
            )
        return out

    def run_op(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run the op, and log nothing."""
        if self._semantics is None:
            return self._run(func, args, kwargs)
        return self._semantics.run(self._run, func, args, kwargs)

    def cost(self, func: OpOverload, args: Args, out: Any) -> OpCost:
        """Return the cost of an op that is not run."""
        return op_cost(func, args, {}, out)

    def _is_on_host(self, func: OpOverload, name: str, out: Any) -> bool:
        """Whether an op's output allocates no device memory."""
        # torch's optimizers count steps on the host, with scalars that they make there.
        return name == TO_HOST or (
            self.is_of_cuda
            and self.in_optimizer
            and func is _LIFT_FRESH
            and not out.dim()
        )

    def _log_memory(self, memory: OpMemory, out: Any) -> None:
        """Log an op's scratch buffers and outputs, in the order of its kernels."""
        if not memory.steps and not memory.unverified:  # as of most ops
            self.log_outputs(out)
            return
        first = len(self.sizes)
        held: list[tuple[KernelScratch[int], int]] = []
        for step in memory.steps:
            if isinstance(step, KernelScratch):
                held.append((step, self._allocate_scratch(step, "temporaries")))
            elif isinstance(step, Free):
                last = max(k for k, row in enumerate(held) if row[0] is step.scratch)
                self.events.append(-(held.pop(last)[1] + 1))
            elif isinstance(step, Output):
                output = out
                if step.position is not None and isinstance(out, (tuple, list)):
                    output = out[step.position]
                self.log_outputs(output)
                if step.size_bytes is not None and isinstance(output, torch.Tensor):
                    self._resize(output, step.size_bytes)
            else:
                self._allocate_scratch(step.scratch, "workspace")
        self.log_outputs(out)
        self.events.extend(-(index + 1) for _, index in reversed(held))
        if memory.unverified:
            new = range(first, len(self.sizes))
            self.unverified.update(dict.fromkeys(new, memory.unverified))

    def log_outputs(self, out: Any) -> None:
        """Log the allocation of new storages in an op's outputs."""
        if isinstance(out, torch.Tensor):
            if out.layout is torch.sparse_coo and self.is_of_cuda:
                self.log_outputs((out._indices(), out._values()))
            else:
                self.log_storage(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self.log_outputs(item)

    def note_reads(self, *values: Any) -> None:
        """Take the tensors in ``values`` off those that nothing has read."""
        for each in values:
            if isinstance(each, torch.Tensor):
                if each.layout is torch.strided:
                    self.unread.pop(each.untyped_storage()._cdata, None)
            elif isinstance(each, (tuple, list)):
                self.note_reads(*each)
            elif isinstance(each, dict):
                self.note_reads(*each.values())

    @contextlib.contextmanager
    def default_category(self, category: Category) -> Iterator[None]:
        """Give every storage that is allocated in the context this category."""
        before, self.category = self.category, _CATEGORY[category]
        try:
            yield
        finally:
            self.category = before

    def log_storage(
        self,
        tensor: torch.Tensor,
        category: Category | None = None,
        size_bytes: int | None = None,
    ) -> int:
        """Log a tensor's storage if it is new; return its index (-1: sparse, none)."""
        # One that has grown (``resize_``, ``out=``) is new: its old memory is freed
        # once it is copied.
        if tensor.layout is not torch.strided:
            return -1
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is not None and nbytes <= known[1]:
            return known[0]
        index = self._allocate(
            nbytes if size_bytes is None else size_bytes,
            self._category_now() if category is None else _CATEGORY[category],
        )
        self._log_free(key, None)
        self._watch(storage, index, nbytes)
        return index

    def _watch(self, storage: torch.UntypedStorage, index: int, nbytes: int) -> None:
        """Log the free of a storage when it dies."""
        key = storage._cdata
        free = functools.partial(self._log_free, key)
        self._alive[key] = index, nbytes, weakref.ref(storage, free)

    def index_of(self, tensor: torch.Tensor) -> int:
        """Return the index of a tensor's live storage, or -1 if it is not logged."""
        if tensor.layout is not torch.strided:
            return -1
        known = self._alive.get(tensor.untyped_storage()._cdata)
        return -1 if known is None else known[0]

    def exclude_host_storage(self, tensor: torch.Tensor) -> None:
        """Set a storage's size to 0, because training on CUDA has it in host memory."""
        self._resize(tensor, 0)

    @property
    def is_of_cuda(self) -> bool:
        """Whether the GPU's memory is logged, and not a CPU's."""
        return self._semantics is not None

    def _resize(self, tensor: torch.Tensor, size_bytes: int) -> None:
        index = self.index_of(tensor)
        if index >= 0:
            self.live_bytes += size_bytes - self.sizes[index]
            self.sizes[index] = size_bytes

    def assign(self, tensor: torch.Tensor, category: Category, layer: int) -> None:
        """Set the category and the layer of a tensor's storage; log it if new."""
        index = self.log_storage(tensor, category)
        if index >= 0:
            self.categories[index] = _CATEGORY[category]
            self.layers[index] = layer
            self.made_from.pop(index, None)

    def inherit_layer(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Attribute a tensor's storage to the layer that owns another tensor's."""
        # One that is shared, as by the gradients of a block under FSDP2, has several.
        index, source = self.index_of(tensor), self.index_of(other)
        if index >= 0 and source >= 0:
            known = [
                each
                for each in self.made_from.get(index, ())
                if self.categories[each] == _CATEGORY["parameters"]
            ]
            self.made_from[index] = tuple(dict.fromkeys((*known, source)))

    def set_category(self, tensor: torch.Tensor, category: Category) -> None:
        """Change the category of a live storage."""
        index = self.index_of(tensor)
        if index >= 0:
            self.categories[index] = _CATEGORY[category]

    def start_phase(self, phase: str) -> None:
        """Enter a phase of the step, which decides the category of new storages."""
        self._backward = phase == "backward"
        self._in_modules = phase in {"forward", "backward"}
        self.category = _CATEGORY[
            "activations" if phase == "forward" else "temporaries"
        ]

    def reset_peak(self) -> None:
        """Reset ``peak_bytes`` to the live bytes."""
        self.peak_bytes = self.live_bytes

    def stop(self) -> None:
        """Stop logging: what still runs is the end of a loop, not a part of it."""
        self._stopped = True
        self.close()

    def copy(self) -> StorageLog:
        """Return a log with copies of the records, to be changed; it logs no more."""
        other = StorageLog()
        for name in _RECORDS:
            setattr(other, name, getattr(self, name).copy())
        return other

    def close(self) -> None:
        """Stop logging frees: storages alive now outlive the trace."""
        self._alive.clear()

    def _category_now(self) -> int:
        return _CATEGORY["activations"] if self._recomputes() else self.category

    def _recomputes(self) -> bool:
        # In backward only recomputation runs with gradients enabled.
        return self._backward and torch.is_grad_enabled()

    def _allocate_scratch(self, row: KernelScratch[int], category: Category) -> int:
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

    def _log_free(self, key: int, _: object) -> None:
        known = self._alive.pop(key, None)
        if known is not None:
            self.events.append(-(known[0] + 1))
            self.live_bytes -= self.sizes[known[0]]


if _SKIPS:
    eval_frame.set_code_exec_strategy(
        StorageLog.__torch_dispatch__.__code__,
        eval_frame._FrameExecStrategy(
            eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
        ),
    )


def is_meta(out: Any) -> bool:
    """Whether an op's output is a tensor on meta, which has no memory anywhere."""
    # PyTorch makes them to find the shapes of results with ``_efficientzerotensor``.
    device = getattr(out, "fake_device", None) or getattr(out, "device", None)
    return isinstance(device, torch.device) and device.type == "meta"


def note_sources(  # noqa: PLR0913, PLR0917 - one call, and where its outputs are
    log: StorageLog, first: int, func: OpOverload, args: Args, kwargs: Kwargs, out: Any
) -> MovedStorages:
    """Note the input storages of the storages from ``first`` on, made by one op.

    Returns:
        The bytes of every tensor that the op moved, with the storages that decide which
        layer owns them. In tensor lists (``_foreach``) those are all storages at the
        same position; a scalar shared by all counts for each.
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
                own = [each[position] for each in lists]
                log.made_from[storage] = tuple(_storages(log, own))
    touched: list[tuple[tuple[int, ...], int]] = []
    by_length: dict[int, list[tuple[Any, int]]] = defaultdict(list)
    for value, passes in tensor_passes(func, args, kwargs, out):
        if _is_list(value):
            by_length[len(value)].append((value, passes))
        else:
            touched += [_moved(log, [value], [passes])]
    for rows in by_length.values():
        times = [passes for _, passes in rows]
        columns = zip(*(value for value, _ in rows), strict=True)
        touched += [_moved(log, column, times) for column in columns]
    return tuple(row for row in touched if row[1])


def _moved(
    log: StorageLog, values: Sequence[Any], passes: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Return the storages of some values, and the bytes that passes over them move."""
    moved_bytes, storages = 0, []
    for value, times in zip(values, passes, strict=True):
        for x in tensors_in(value):
            moved_bytes += times * stored_bytes(x)
            storage = log.index_of(x)
            if storage >= 0:
                storages.append(storage)
    return tuple(storages), moved_bytes


def _storages(log: StorageLog, values: Sequence[Any]) -> Iterator[int]:
    for tensor in tensors_in(tuple(values)):
        storage = log.index_of(tensor)
        if storage >= 0:
            yield storage


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (tuple, list))
