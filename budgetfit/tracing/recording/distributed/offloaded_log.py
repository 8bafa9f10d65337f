"""OffloadedLog: the log of a rank with weights in host memory, by ``CPUOffloadPolicy``.

In a trace host and device are one, so storages are known by how they came to be: what
``fully_shard`` has copied to the host is there, and what ops make of that alone. Such a
storage takes no device memory; an op on it takes the CPU's time.
"""

import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch._ops import OpOverload

from budgetfit.core.step_trace import (
    HOST_STATE,
    SHARD_TO_DEVICE,
    SHARD_TO_HOST,
    Category,
)
from budgetfit.tracing.call_cache import Args, Kwargs
from budgetfit.tracing.op_costs import NO_COST, OpCost, cpu_cost
from budgetfit.tracing.recording.distributed.rank_log import RankLog, local_tensor
from budgetfit.tracing.recording.storage_log import note_sources
from budgetfit.tracing.records import MovedStorages, OpRecord, op_name

_COPIES: Final = (SHARD_TO_HOST, SHARD_TO_DEVICE)


class OffloadedLog(RankLog):
    """Records what a rank allocates, and what its CPU does to weights and gradients."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._host: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def run_and_log(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run the op; log what it allocates, or what it takes on the CPU."""
        if op_name(func) not in _COPIES:
            on_host = self._are_on_host([*args, *kwargs.values()])
            if on_host or (on_host is None and self.in_optimizer):
                return self._run_on_host(func, args, kwargs)
        return super().run_and_log(func, args, kwargs)

    def run_op(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run the op, and note a copy that is in host memory."""
        out = super().run_op(func, args, kwargs)
        if op_name(func) == SHARD_TO_HOST:
            self._keep_on_host(out)
        return out

    def log_storage(
        self,
        tensor: torch.Tensor,
        category: Category | None = None,
        size_bytes: int | None = None,
    ) -> int:
        """Log a tensor's storage if it is new, without bytes in host memory."""
        if self._are_on_host([local_tensor(tensor)]):
            size_bytes = 0
        return super().log_storage(tensor, category, size_bytes)

    def assign(self, tensor: torch.Tensor, category: Category, layer: int) -> None:
        """Set the category and the layer of a tensor's storage; log it if new."""
        super().assign(tensor, category, layer)
        local = local_tensor(tensor)
        if category == "optimizer_state" and self._are_on_host([local]):
            self._log_op(HOST_STATE, layer, NO_COST._replace(moved_bytes=local.nbytes))

    def cost(self, func: OpOverload, args: Args, out: Any) -> OpCost:
        """Return the cost of an op that is not run."""
        if self._are_on_host(args):
            return cpu_cost(func, args, {}, out)
        return super().cost(func, args, out)

    def _run_on_host(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        first, out = len(self.sizes), self._run(func, args, kwargs)
        self.take_key(func, args)  # it holds the arguments
        self._keep_on_host(out)
        self.log_outputs(out)
        cost = cpu_cost(func, args, kwargs, out)
        if cost.moved_bytes:
            touched: MovedStorages = ()
            if not self._in_modules:
                touched = note_sources(self, first, func, args, kwargs, out)
            self._log_op(op_name(func), self.current_layer(), cost, touched)
        return out

    def _log_op(
        self, name: str, layer: int, cost: OpCost, touched: MovedStorages = ()
    ) -> None:
        position = len(self.events)
        self.ops.append(
            OpRecord(name, position, layer, cost, self.in_optimizer, touched)
        )

    def _keep_on_host(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            self._host[storage._cdata] = weakref.ref(storage)
        elif isinstance(value, (list, tuple)):
            for each in value:
                self._keep_on_host(each)

    def _are_on_host(self, values: Iterable[Any]) -> bool | None:
        """Whether all tensors are in host memory; None where there are none."""
        found = None
        for value in values:
            inside: bool | None = None
            if isinstance(value, torch.Tensor):
                if value.layout is not torch.strided:
                    return False
                host = self._host.get(value.untyped_storage()._cdata)
                inside = host is not None and host() is not None
            elif isinstance(value, (list, tuple)):
                inside = self._are_on_host(value)
            if inside is False:
                return False
            found = found or inside
        return found
