"""DDP's buckets, which hold gradients of several blocks, in a trace of all blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.core.parallelism import Parallelism
from budgetfit.utils.lazy_import import lazy_import

# What DDP itself runs, and all that has the same tensors on any number of ranks.
_OF_EQUAL_SIZE = {"c10d.allreduce_.default", "c10d.broadcast_.default"}

if TYPE_CHECKING:
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.tracing.cuda.target import CudaTarget

# Needs torch.distributed, which not every build has.
_BUCKETS = "budgetfit.tracing.recording.distributed.gradient_buckets"


def with_ddp_buckets(
    trace: StepTrace, parallelism: Parallelism | None, target: CudaTarget | None
) -> StepTrace:
    """Return a trace at full depth with DDP's buckets; without DDP as it is.

    ``trace``: of one rank; ``target``: the GPU whose semantics are imitated; None for
    CPU semantics.
    """
    if parallelism is None or parallelism.engine != "ddp":
        return trace
    return lazy_import(_BUCKETS).with_buckets(trace, parallelism, target)


def gathers_nothing(trace: StepTrace) -> bool:
    """Whether no collective makes tensors that grow with the number of ranks.

    Then DDP's traces are the same for any number. A model may gather by itself, such as
    statistics of batch norms, or the other ranks' samples for a contrastive loss.
    """
    collectives = {name for name in trace.op_names if "c10d" in name}
    return collectives <= _OF_EQUAL_SIZE
