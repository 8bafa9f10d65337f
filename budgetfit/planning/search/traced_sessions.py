"""The sessions of a first trace, in the way that a model can be traced."""

from typing import Unpack

from budgetfit.batches.batch_tree import batch_size_of, has_sparse_tensors
from budgetfit.errors import TraceError
from budgetfit.planning.search.accumulation import planned_accumulation
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

    With accumulation, except where that cannot be traced: that of sparse gradients. For
    all batch sizes, except where a model does not run at the first two.

    Raises:
        TraceError: If the model cannot be traced.
    """
    whole = settings.get("effective_batch_size")
    accumulation = planned_accumulation(
        whole, optimizer_in_backward=settings.get("optimizer_in_backward", False)
    )
    ways: list[tuple[int | None, SessionSettings]] = [(accumulation, settings)]
    if accumulation is not None or (whole is not None and whole == request.batch_size):
        ways.append((None, {**settings, "effective_batch_size": None}))
    failed: TraceError | None = None
    # Of sparse batches and on several GPUs, other sizes say nothing.
    fixed = settings.get("parallelisms") or has_sparse_tensors(workload.batch)
    for at_one_size in (False,) if fixed else (False, True):
        size = None
        if at_one_size:
            own = batch_size_of(workload.batch, dims=workload.batch_dims)
            size = request.batch_size or own
        for micro_batches, asked in ways:
            try:
                return open_sessions(
                    workload,
                    request,
                    accumulation=micro_batches,
                    sizes=(size,),
                    failed=None if size is None else failed,
                    **asked,
                )
            except TraceError as error:
                failed = failed or error
    assert failed is not None  # noqa: S101 - every way has failed
    raise failed
