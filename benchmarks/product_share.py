"""Shares of an H100's rates that recorded products ask for."""

import math
import statistics
from collections.abc import Sequence
from typing import Final

from budgetfit.gpus.kernel_shares import find_shares
from budgetfit.gpus.table import find_gpu
from budgetfit.timing.kernel_times import PRODUCT_NS
from budgetfit.timing.kind_shares import KIND_SHARES

H100: Final = find_gpu("h100-80gb")
_BYTES: Final = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
_TFLOPS: Final = {
    "bf16": H100.bf16_tflops,
    "fp16": H100.fp16_tflops,
    "tf32": H100.tf32_tflops,
    "fp32": H100.fp32_tflops,
}


def product_share(rows: Sequence[tuple[int, int, int, float]], dtype: str) -> float:
    """Return the share of the rate that misses the times least in the median.

    Args:
        rows: Rows, columns, inner dimension and microseconds of each product.
        dtype: ``bf16``, ``fp16``, ``tf32`` or ``fp32``.
    """
    kind, tflops = KIND_SHARES["matmul"], _TFLOPS[dtype] or 0.0
    bandwidth = H100.memory_gb_per_s * find_shares(H100).bandwidth * kind.bandwidth

    def missed(share: float) -> float:
        return statistics.median(
            abs(
                math.log(
                    (
                        PRODUCT_NS / 1e3
                        + 2 * m * n * k / (share * kind.rate * tflops * 1e6)
                        + (m * n + m * k + n * k) * _BYTES[dtype] / bandwidth / 1e3
                    )
                    / us
                )
            )
            for m, n, k, us in rows
        )

    return min((step / 100 for step in range(40, 130)), key=missed)
