"""Context that makes fake CPU tensors behave as on CUDA."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from budgetfit.tracing.cuda.dispatch.autocast import cuda_autocast
from budgetfit.tracing.cuda.dispatch.composite_ops import cuda_composite_ops
from budgetfit.tracing.cuda.semantics.op_semantics import CudaOpSemantics

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from budgetfit.tracing.cuda.target import CudaTarget

# Registrations at the dispatcher are process-wide: one trace at a time.
_ONE_AT_A_TIME = threading.RLock()


def imitate_cuda(
    target: CudaTarget | None,
) -> tuple[CudaOpSemantics | None, AbstractContextManager[None]]:
    """Return the op semantics for a storage log, and the context to trace in.

    Without a target both do nothing, and the trace is that of a CPU.
    """
    if target is None:
        return None, contextlib.nullcontext()
    return CudaOpSemantics(target), _imitation(target)


@contextlib.contextmanager
def _imitation(target: CudaTarget) -> Iterator[None]:
    with _ONE_AT_A_TIME, cuda_autocast(), cuda_composite_ops(target):
        yield
