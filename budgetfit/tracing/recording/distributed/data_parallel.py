"""What makes ``DistributedDataParallel`` run on fake tensors, and its memory known.

Its reducer is C++. It allocates one bucket for all gradients, and at the start of the
second step it frees that and allocates buckets of ``bucket_cap_mb`` MiB (left out: of 1
and then 25) in the order in which gradients arrived. For that it reads tensors, which
fakes have not: the reducer keeps its first bucket, and the log has what it would do.

Sources: ``torch/nn/parallel/distributed.py`` and
``torch/csrc/distributed/c10d/reducer.cpp``, ``rebuild_buckets`` and
``sync_bucket_indices``, of torch 2.13.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from budgetfit.tracing.recording.distributed.rank_log import RankLog

_INDEX_BYTES = 4


@contextlib.contextmanager
def data_parallel_on_fakes(log: RankLog) -> Iterator[None]:
    """Let DDP wrap fake modules, and log what its C++ allocates later."""
    original = DistributedDataParallel.__init__

    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        before = len(log.sizes)
        original(self, module, *args, **kwargs)
        buckets = [index for index in log.alive() if index >= before]
        # torch reads the annotations of a hook: this one has none.
        self.register_comm_hook(None, lambda _, bucket: _reduce(bucket))
        self.reducer = _ReducerOnFakes(self, log, buckets)

    verify = "_verify_param_shape_across_processes"
    with (
        mock.patch.object(DistributedDataParallel, "__init__", init),
        mock.patch.object(ddp_module, verify),
    ):
        yield


def _reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Reduce as DDP does: work of the fake process group has no result to read."""
    buffer = bucket.buffer()
    buffer.div_(distributed.get_world_size())
    distributed.all_reduce(buffer)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


class _ReducerOnFakes:
    """The reducer, with the rebuilding of its buckets as events of the log alone."""

    def __init__(
        self, wrapped: DistributedDataParallel, log: RankLog, buckets: list[int]
    ) -> None:
        self._reducer = wrapped.reducer
        self._log, self._buckets = log, buckets
        cap = wrapped.bucket_bytes_cap
        is_default = wrapped.bucket_bytes_cap_default
        self._limits = [c10d._DEFAULT_FIRST_BUCKET_BYTES if is_default else cap, cap]
        self._arrived: list[torch.Tensor] = []
        self._rebuilt = False

        def note(parameter: torch.Tensor) -> None:
            if wrapped.require_backward_grad_sync and not self._rebuilt:
                self._arrived.append(parameter)

        for parameter in wrapped.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        if self._rebuilt or not self._arrived:
            return False
        self._rebuilt = True
        log, arrived = self._log, self._arrived
        groups, _ = c10d._compute_bucket_assignment_by_size(arrived, self._limits, [])
        exchanged = [
            log.allocate(_INDEX_BYTES * number)
            for number in (len(arrived) + 1, len(groups))
        ]
        for index in (*reversed(exchanged), *self._buckets):
            log.free(index)
        for group in groups:
            log.allocate(
                sum(arrived[n].numel() * arrived[n].element_size() for n in group)
            )
        return False
