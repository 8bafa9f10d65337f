"""Everything that makes fake CPU tensors behave like CUDA, switched on together."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from budgetfit.tracing.cuda.dispatch.autocast import cuda_autocast
from budgetfit.tracing.cuda.dispatch.composite_ops import cuda_branches
from budgetfit.tracing.cuda.semantics.op_semantics import CudaOps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from budgetfit.tracing.cuda.target import CudaTarget

# The registrations are the process's, so one trace at a time makes them.
_ONE_AT_A_TIME = threading.RLock()


def imitate_cuda(
    target: CudaTarget | None,
) -> tuple[CudaOps | None, AbstractContextManager[None]]:
    """Return the op semantics for a storage log and the context that goes with them.

    Without a target both do nothing: the trace is then what a CPU does.
    """
    if target is None:
        return None, contextlib.nullcontext()
    return CudaOps(target), _imitation(target)


@contextlib.contextmanager
def _imitation(target: CudaTarget) -> Iterator[None]:
    with _ONE_AT_A_TIME, cuda_autocast(), cuda_branches(target):
        yield
