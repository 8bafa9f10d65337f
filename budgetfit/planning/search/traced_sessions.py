"""The sessions of a first trace, in the way that a model can be traced."""

from typing import Unpack

from budgetfit.batches.batch_tree import batch_size_of, has_sparse_tensors
from budgetfit.errors import TraceError
from budgetfit.planning.session import (
    PlanningSession,
    Request,
    SessionSettings,
    open_sessions,
)
from budgetfit.workload.workload import Workload


def traced_sessions(
    workload: Workload,
    request: Request,
    **settings: Unpack[SessionSettings],
) -> list[PlanningSession]:
    """Return a session in each precision, after the first trace.

    For all batch sizes, except where a model does not run at the first two. Without an
    effective batch size where its accumulation cannot be traced, as that of sparse
    gradients, and the batch size is as large.

    Raises:
        TraceError: If the model cannot be traced.
    """
    whole = settings.get("effective_batch_size")
    ways: list[SessionSettings] = [settings]
    if whole is not None and whole == request.batch_size:
        ways.append({**settings, "effective_batch_size": None})
    failed: TraceError | None = None
    # Of sparse batches and on several GPUs, other sizes say nothing.
    fixed = settings.get("parallelisms") or has_sparse_tensors(workload.batch)
    for at_one_size in (False,) if fixed else (False, True):
        size = None
        if at_one_size:
            own = batch_size_of(workload.batch, dims=workload.batch_dims)
            size = request.batch_size or own
        for asked in ways:
            try:
                return open_sessions(
                    workload,
                    request,
                    sizes=(size,),
                    failed=None if size is None else failed,
                    **asked,
                )
            except TraceError as error:
                failed = failed or error
    assert failed is not None  # noqa: S101 - every way has failed
    raise failed
