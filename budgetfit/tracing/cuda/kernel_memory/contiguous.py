"""Ops whose kernels allocate contiguous copies of some arguments, and nothing else.

Sources: ``SoftMax.cu``, ``NLLLoss.cu``, ``MultiMarginLoss.cu``, ``Distance.cpp``, and
the files of the ops on images.
"""

from typing import Final

from budgetfit.tracing.cuda.kernel_memory.registry import (
    OUTPUTS,
    Call,
    Steps,
    contiguous_copies,
    kernel_memory,
)

AFTER, BEFORE = False, True  # the outputs
# When which arguments are copied (the first, and the end), by which ops.
_COPIED: Final = (
    (AFTER, 0, 1, ("_softmax", "_log_softmax", "cummax", "cummin")),
    (AFTER, 0, 1, ("_adaptive_avg_pool3d_backward", "upsample_nearest1d_backward")),
    (AFTER, 0, 1, ("_upsample_nearest_exact3d_backward", "upsample_nearest1d")),
    (AFTER, 0, 1, ("adaptive_max_pool3d", "adaptive_max_pool3d_backward")),
    (AFTER, 0, 1, ("avg_pool3d", "avg_pool3d_backward", "upsample_linear1d_backward")),
    (AFTER, 0, 1, ("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")),
    (AFTER, 0, 1, ("reflection_pad1d_backward", "reflection_pad2d_backward")),
    (AFTER, 0, 1, ("upsample_bicubic2d_backward", "upsample_nearest3d_backward")),
    (AFTER, 0, 2, ("_log_softmax_backward_data",)),
    (AFTER, 0, 3, ("nll_loss_forward",)),
    (AFTER, 1, 3, ("multi_margin_loss_backward",)),
    (AFTER, 1, 4, ("nll_loss_backward",)),
    (BEFORE, 0, 1, ("_adaptive_avg_pool3d", "median.dim", "nanmedian.dim", "kthvalue")),
    (BEFORE, 0, 2, ("_cdist_forward",)),
)


def _register(before: bool, first: int, end: int, ops: tuple[str, ...]) -> None:
    @kernel_memory(*ops)
    def copies(call: Call) -> Steps:
        yield from contiguous_copies(*call.args[first:end])
        if before:
            yield OUTPUTS


for _row in _COPIED:
    _register(*_row)
