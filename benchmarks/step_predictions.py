"""What a plan would print as the step time of an accuracy case."""

from typing import NamedTuple

from budgetfit.timing.kernel_times import (
    PHASES,
    StepTime,
    last_ops,
    op_times,
    step_time_ns,
)
from budgetfit.timing.step_time_range import step_time_range
from budgetfit.traces.session import TraceSession
from tests.accuracy.case import Case
from tests.accuracy.predict import cudnn_attention, recipe_of, segments_of, subject_of
from tests.accuracy.training import allowed_attention


class StepPrediction(NamedTuple):
    """Times in milliseconds; ``low_ms`` to ``high_ms`` is the printed range."""

    step_ms: float
    low_ms: float
    high_ms: float
    kernels_ms: float
    host_bound: bool


def predict(case: Case, *, tf32: bool) -> StepPrediction:
    """Predict a case with cuDNN on.

    Args:
        case: The case.
        tf32: Whether fp32 products may run in TF32.
    """
    workload = subject_of(case, cudnn=True)
    recipe = recipe_of(case, workload, segments_of(case, workload))
    own = case.model.settings.get("use_cache", False)
    with cudnn_attention(enabled=True), allowed_attention(case):
        traces = TraceSession(workload)
        trace = traces.exact(recipe, keep_own_checkpointing=own)
    accumulation, size = case.gradient_accumulation_steps, case.batch_size
    times = op_times(trace, size, workload.gpu, tf32=tf32, micro_steps=accumulation)
    step_ms = step_time_ns(trace, times.times_ns).total_ns(accumulation) / 1e6
    expected = step_time_range(trace, times, workload.gpu)
    kernels = StepTime(
        *(round(times.kernels_ns[last_ops(trace)[name]].sum()) for name in PHASES)
    )
    return StepPrediction(
        step_ms,
        step_ms * expected.low,
        step_ms * expected.high,
        kernels.total_ns(accumulation) / 1e6,
        times.host_bound,
    )
