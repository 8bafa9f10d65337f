"""What makes ``DistributedDataParallel`` run on fake tensors, and its memory known.

What depends on all parameters at once is logged parameter by parameter, so that a
shortened model shows it: an op ``ddp.broadcast`` for each tensor that rank 0 sends, and
an op ``ddp.reduce`` where a gradient goes into its bucket. The reducer is C++. It
allocates one bucket of each dtype, and at the start of the second step it frees them
and allocates buckets of ``bucket_cap_mb`` MiB; for that it reads tensors, which fakes
have not. Here it keeps the first, logged without a size, and the log has
``ddp.rebuild``. ``gradient_buckets`` puts the real ones there.

Sources: ``torch/nn/parallel/distributed.py`` and
``torch/csrc/distributed/c10d/reducer.cpp``, ``rebuild_buckets``, of torch 2.13.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final
from unittest import mock

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

from budgetfit.core.step_trace import OP_KINDS, RATES
from budgetfit.tracing.op_costs import OpCost
from budgetfit.tracing.recording.distributed.rank_log import RankLog
from budgetfit.tracing.records import OpRecord

BROADCAST: Final = "ddp.broadcast"
BUCKET: Final = "ddp.bucket"
REDUCE: Final = "ddp.reduce"
REBUILD: Final = "ddp.rebuild"


@contextlib.contextmanager
def data_parallel_on_fakes(log: RankLog) -> Iterator[None]:
    """Let DDP wrap fake modules, and log what its C++ does with all parameters."""
    original = DistributedDataParallel.__init__

    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        before = len(log.sizes)
        original(self, module, *args, **kwargs)
        buckets = [index for index in log.alive() if index >= before]
        reducer = _ReducerOnFakes(self, log, buckets)
        # torch reads the annotations of a hook: this one has none.
        self.register_comm_hook(None, lambda _, bucket: reducer.reduce(bucket))
        self.reducer = reducer

    def broadcast(
        _group: Any, tensors: Sequence[torch.Tensor], *_args: Any, **_kwargs: Any
    ) -> None:
        for tensor in tensors:
            _log_op(log, BROADCAST, tensor)

    verify = "_verify_param_shape_across_processes"
    with (
        mock.patch.object(DistributedDataParallel, "__init__", init),
        mock.patch.object(ddp_module, verify),
        mock.patch.object(distributed, "_broadcast_coalesced", broadcast),
    ):
        yield


def _log_op(
    log: RankLog, name: str, tensor: torch.Tensor, *, size_bytes: int | None = None
) -> None:
    """Log what happens to one tensor, with its size and, in the name, its dtype."""
    size = tensor.numel() * tensor.element_size() if size_bytes is None else size_bytes
    # Outside modules an op belongs to the layer of its tensors.
    index = log.index_of(tensor) if name == BROADCAST else -1
    log.ops.append(
        OpRecord(
            f"{name} {str(tensor.dtype).removeprefix('torch.')}",
            len(log.events),
            log.current_layer(),
            OpCost(OP_KINDS.index("copy"), RATES.index("none"), 0.0, size, 1),
            touched=(((index,), size),) if index >= 0 else (),
        )
    )


class _ReducerOnFakes:
    """The reducer, with the rebuilding of its buckets in the log alone."""

    def __init__(
        self, wrapped: DistributedDataParallel, log: RankLog, buckets: list[int]
    ) -> None:
        self._reducer = wrapped.reducer
        self._log, self._buckets = log, buckets
        self._dense = [
            parameter
            for parameter, sparse in zip(
                *wrapped._build_params_for_reducer(), strict=True
            )
            if not sparse
        ]
        self._has_reduced = self._rebuilt = False
        self._waiting = len(buckets)
        for index in buckets:
            log.live_bytes -= log.sizes[index]
            log.sizes[index] = 0
        self._log_buckets(BUCKET)

        def note(parameter: torch.Tensor) -> None:
            if wrapped.require_backward_grad_sync:
                self._has_reduced = True
                _log_op(log, REDUCE, parameter)

        for parameter in self._dense:
            parameter.register_post_accumulate_grad_hook(note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Return a bucket as if it was reduced: work of a fake group has no result."""
        self._waiting -= 1
        if self._waiting == 0:  # now each gradient is copied out of its bucket
            self._waiting = len(self._buckets)
            self._log.leave_modules()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _log_buckets(self, name: str) -> None:
        """Log that there are new buckets: one of each dtype, in the order of these."""
        of_dtype = {each.dtype: each for each in reversed(self._dense)}
        for parameter in reversed(of_dtype.values()):
            _log_op(self._log, name, parameter, size_bytes=0)

    def _rebuild_buckets(self) -> bool:
        if self._rebuilt or not self._has_reduced:
            return False
        self._rebuilt = True
        for index in self._buckets:
            self._log.free(index)
        for _ in self._buckets:
            self._log.allocate(0)
        self._log_buckets(REBUILD)
        return False
