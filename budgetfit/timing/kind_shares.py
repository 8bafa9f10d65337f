"""What shares of a GPU's achieved rates kernels reach, by kind of op.

On top of the GPU's own (``gpus.kernel_shares``), and the same on every GPU.
"""

from typing import Final, NamedTuple

from budgetfit.core.step_trace import OpKind


class KindShares(NamedTuple):
    """Shares of a GPU's achieved rate and bandwidth; a rate of 0: memory-bound."""

    rate: float
    bandwidth: float


# Fitted on whole steps of single GPUs (``benchmarks/published_steps/fit.py``), but for
# the bandwidth of products, which comes from fits of measured matrix products, of
# PyTorch's own batch norm (``python -m benchmarks.kernel_times``), and copies to the
# host.
KIND_SHARES: Final[dict[OpKind, KindShares]] = {
    "elementwise": KindShares(0, 0.95),
    "copy": KindShares(0, 1.11),
    "reduction": KindShares(0, 0.68),
    "softmax": KindShares(0, 0.88),
    "norm": KindShares(0, 0.78),
    "norm_backward": KindShares(0, 0.78),
    "batch_norm": KindShares(0, 1.00),
    "plain_batch_norm": KindShares(0, 0.50),
    "pooling": KindShares(0, 0.62),
    "optimizer": KindShares(0, 0.60),
    "matmul": KindShares(0.94, 1.1),
    "small_batched_matmul": KindShares(0.86, 1.1),
    "unaligned_matmul": KindShares(0.15, 1.1),
    # Rows cannot tell the libraries of attention, nor 3x3 kernels, from each other.
    **dict.fromkeys(
        ("flash_attention", "efficient_attention", "cudnn_attention"),
        KindShares(0.68, 1.0),
    ),
    **dict.fromkeys(
        (
            "flash_attention_backward",
            "efficient_attention_backward",
            "cudnn_attention_backward",
        ),
        KindShares(0.46, 1.0),
    ),
    **dict.fromkeys(("convolution", "convolution_3x3"), KindShares(1.22, 0.90)),
    **dict.fromkeys(
        ("convolution_backward", "convolution_3x3_backward"), KindShares(1.10, 0.90)
    ),
    "grouped_convolution": KindShares(0.38, 0.68),
    "depthwise_convolution": KindShares(0.39, 0.47),
    **dict.fromkeys(("host", "cpu"), KindShares(0, 1.0)),
}
