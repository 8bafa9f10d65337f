"""RankLog: the storage log of one rank, with CUDA streams and DTensors."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

from budgetfit.core.step_trace import EMPTY_CACHE, Category
from budgetfit.tracing.call_cache import Args, Kwargs
from budgetfit.tracing.recording.storage_log import (
    PRIM_DEVICE,
    StorageLog,
    is_meta,
)
from budgetfit.tracing.records import OpSemantics, RunOp, call_op


class RankLog(StorageLog):
    """Records what one rank allocates, and on which stream.

    ``torch.cpu`` has streams in name only, and FSDP2 uses them on the CPU as it uses
    those of ``torch.cuda``: which one is current decides the allocator's pool.

    Attributes:
        mode: That of the trace's own fakes; others are not memory. None where the
            tensors are real.
        paused: Nothing is logged meanwhile: what runs is not on the device.
        is_zero_3: Whether weights have no elements between their module's runs.
    """

    def __init__(
        self,
        semantics: OpSemantics | None = None,
        run: RunOp = call_op,
        mode: FakeTensorMode | None = None,
    ) -> None:
        super().__init__(semantics, run)
        self.mode = mode
        self.paused = self.is_zero_3 = False
        self._numbers: dict[int, int] = {id(torch.cpu.current_stream()): 0}
        self._known: list[Any] = []  # streams, so that no id is used again
        self._host_layers: dict[int, int] = {}  # of tensors assigned while paused
        self._sharded_layer = -1
        # Storages that are there, without memory; others may get their keys.
        self._freed: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run the op and log what it allocates; ops of DTensors come as local ones."""
        if func is PRIM_DEVICE and type(args[0]) is FakeTensor:  # more than half of all
            return args[0].fake_device
        for kind in types:
            if kind is not FakeTensor and issubclass(kind, DTensor):
                return NotImplemented
        if func.namespace == "profiler":  # FSDP2's names for profilers: frequent
            if self.on_op is not None:
                self.on_op()
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs or {})
        kwargs = kwargs or {}
        if (
            self.paused
            or self._is_foreign(args)
            or (kwargs and self._is_foreign(kwargs.values()))
        ):
            return func(*args, **kwargs)
        if not func.is_view and (engine := self._reads_freed(args)):
            raise RuntimeError(f"a weight is read that {engine} has freed")
        try:
            return self.run_and_log(func, args, kwargs)
        except RuntimeError as error:
            if self.is_zero_3 and _has_empty(args):  # as one saved for backward
                raise RuntimeError("a weight is read that ZeRO-3 has freed") from error
            raise

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Log nothing that runs inside."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def log_storage(
        self,
        tensor: torch.Tensor,
        category: Category | None = None,
        size_bytes: int | None = None,
    ) -> int:
        """Log a tensor's storage if it is new and on the device; return its index."""
        tensor = local_tensor(tensor)
        of_other_mode = isinstance(tensor, FakeTensor) and (
            tensor.fake_mode is not self.mode
        )
        if self.paused or of_other_mode or is_meta(tensor):
            return -1
        return super().log_storage(tensor, category, size_bytes)

    def index_of(self, tensor: torch.Tensor) -> int:
        """Return the index of a tensor's live storage, or -1 if it is not logged."""
        return super().index_of(local_tensor(tensor))

    def assign(self, tensor: torch.Tensor, category: Category, layer: int) -> None:
        """Set the category and the layer of a tensor's storage; log it if new."""
        if self.paused:  # in host memory: logged when it is moved
            self._host_layers[id(tensor)] = layer
        super().assign(tensor, category, layer)

    def move(self, tensor: torch.Tensor, category: Category) -> None:
        """Log a tensor that comes from the host."""
        # Until the next one comes, what is allocated outside modules is for its layer.
        self._sharded_layer = self._host_layers.get(id(tensor), -1)
        self.assign(tensor, category, self._sharded_layer)

    def end_moves(self) -> None:
        """Attribute what is allocated from here on outside modules to no layer."""
        self._sharded_layer = -1

    def leave_modules(self) -> None:
        """Attribute what follows in this phase to the layers of its tensors."""
        self._in_modules = False

    def start_phase(self, phase: str) -> None:
        """Enter a phase of the step; sharding is over."""
        self.end_moves()
        super().start_phase(phase)

    def log_resize(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Log that a storage is freed (0 bytes) or allocated again, without an op."""
        key = storage._cdata
        known = self._alive.get(key)
        if size_bytes == 0:
            self._log_free(key, None)
            if storage.nbytes():  # an empty tensor is no weight
                self._freed[key] = weakref.ref(storage)
            return
        self._freed.pop(key, None)
        if known is None and not self.paused:
            index = self._allocate(size_bytes, self._category_now())
            self._watch(storage, index, size_bytes)

    def allocate(self, size_bytes: int) -> int:
        """Log an allocation that no op makes; return the storage's index."""
        return self._allocate(size_bytes, self._category_now())

    def free(self, index: int) -> None:
        """Log that a storage is freed: one of ``allocate``, or one that stays alive."""
        self.events.append(-(index + 1))
        self.live_bytes -= self.sizes[index]

    def empty_cache(self) -> None:
        """Log that the allocator gives back the segments that it does not use."""
        self.events.append(EMPTY_CACHE)

    def alive(self) -> list[int]:
        """Return the indices of the live storages of tensors."""
        return sorted(row[0] for row in self._alive.values())

    def _allocate(self, size_bytes: int, category: int) -> int:
        index = super()._allocate(size_bytes, category)
        if self.layers[index] < 0:
            self.layers[index] = self._sharded_layer
        stream = self._stream()
        if stream:
            self.streams[index] = stream
        return index

    def _stream(self) -> int:
        stream = torch.cpu.current_stream()
        if id(stream) not in self._numbers:
            self._numbers[id(stream)] = len(self._numbers)
            self._known.append(stream)
        return self._numbers[id(stream)]

    def _reads_freed(self, values: Iterable[Any]) -> str:
        """Return what has freed a weight that is among the values; empty if none."""
        for value in values:
            found = ""
            if isinstance(value, FakeTensor):
                freed = self._freed.get(value.untyped_storage()._cdata)
                if freed is not None and freed() is not None:
                    return "fully_shard"
                # DeepSpeed knows how many elements it has otherwise.
                if self.is_zero_3 and hasattr(value, "ds_numel") and not value.numel():
                    return "ZeRO-3"
            elif isinstance(value, (list, tuple)):
                found = self._reads_freed(value)
            if found:
                return found
        return ""

    def _is_foreign(self, values: Iterable[Any]) -> bool:
        """Whether there is a fake of another mode: DTensor asks for global shapes."""
        for value in values:
            if isinstance(value, FakeTensor):
                if value.fake_mode is not self.mode:
                    return True
            elif isinstance(value, (list, tuple)) and self._is_foreign(value):
                return True
        return False


def _has_empty(values: Iterable[Any]) -> bool:
    return any(isinstance(x, FakeTensor) and not x.numel() for x in values)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that this rank holds; others are returned."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
