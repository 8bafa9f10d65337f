"""Fit the shares by kind of op on published steps.

    python -m benchmarks.published_steps.fit

Half of the models gives the shares that judge the other half, and the other way round
(``benchmarks.step_times``). The shares of the product are fitted on all rows.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.published_steps.predict import Shares, Step, fold, steps
from benchmarks.shared import table
from budgetfit.timing.kind_shares import KIND_SHARES, KindShares

if TYPE_CHECKING:
    from collections.abc import Sequence

# Where the fit begins, and what it is drawn to: measured kernels, where there are some.
# A product's share of the GPU's matrix rate, other kinds' share of its bandwidth.
PRIOR: Final = {
    "elementwise": 0.95,  # NeuSight: 0.83 to 0.91 of the data sheet
    "copy": 0.95,
    "reduction": 0.70,
    "softmax": 0.93,  # an H100, forward and backward, also of 50,257 classes
    "norm": 0.68,  # NeuSight, layer norm: 0.57 to 0.65 of the data sheet
    "norm_backward": 0.60,
    "batch_norm": 0.75,
    "pooling": 0.60,
    "optimizer": 0.90,
    "matmul": 1.0,
    "small_batched_matmul": 0.65,
    "unaligned_matmul": 0.14,  # an H100
    "attention": 0.79,  # A100: 0.66 of the peak, FlashAttention-2
    "attention_backward": 0.57,  # an H100, FlashAttention: 0.53 to 0.66
    "convolution": 0.80,  # DeepBench: V100 and T4 0.47 of the peak
    "convolution_backward": 0.70,
    "grouped_convolution": 0.50,
    "depthwise_convolution": 0.50,
    "depthwise_convolution_memory": 0.50,
    "grouped_convolution_memory": 0.90,
    "issue": 1.0,  # factor on the host's time to issue a kernel
}
# Shares of the achieved bandwidth, and the largest that is plausible.
BANDWIDTH: Final = {
    name
    for name in PRIOR
    if name.endswith("_memory") or (name in KIND_SHARES and not KIND_SHARES[name].rate)
}
UPPER: Final = 1.15
PRIOR_WEIGHT: Final = 0.003  # of a squared logarithm, against the mean error
Constants = dict[str, float]


def shares_of(constants: Constants) -> Shares:
    """Return the shares by kind of op that some constants mean."""
    result = {}
    for kind, shares in KIND_SHARES.items():
        name = _constant_of(kind)
        if name not in constants:
            result[kind] = shares
        elif shares.rate:
            bandwidth = constants.get(f"{name}_memory", shares.bandwidth)
            result[kind] = KindShares(constants[name], bandwidth)
        else:
            result[kind] = KindShares(0, constants[name])
    return result


def _constant_of(kind: str) -> str:
    """Return the constant of a kind; some kinds share one, which rows cannot tell."""
    for library in ("flash_", "efficient_", "cudnn_"):
        kind = kind.removeprefix(library)
    return kind.replace("_3x3", "")


def fit(rows: Sequence[Step]) -> Constants:
    """Return the constants, by coordinate descent from ``PRIOR``.

    Steps of one H100 are left out: they are of 2023, with libraries from before those
    that ran the ops of its shares.
    """
    used = [
        row
        for row in rows
        if row.is_eager and row.is_single_gpu and row.row["gpu"] != "h100-80gb"
    ]
    groups = Counter((row.row["group"], row.row["cls"]) for row in used)
    weights = np.array(
        [1 / math.sqrt(groups[row.row["group"], row.row["cls"]]) for row in used]
    )

    def loss(constants: Constants) -> float:
        shares, issue = shares_of(constants), constants["issue"]
        errors = [
            abs(math.log(row.predicted_ms(shares, issue) / row.measured_ms))
            for row in used
        ]
        drawn = sum(math.log(constants[k] / PRIOR[k]) ** 2 for k in PRIOR)
        return float(np.average(errors, weights=weights)) + PRIOR_WEIGHT * drawn

    constants = dict(PRIOR)
    best, step = loss(constants), 0.25
    while step > 0.01:  # noqa: PLR2004 - a percent
        before = best
        for name in PRIOR:
            most = UPPER if name in BANDWIDTH else math.inf
            for factor in (1 + step, 1 / (1 + step)):
                tried = {**constants, name: min(constants[name] * factor, most)}
                value = loss(tried)
                if value < best - 1e-6:
                    best, constants = value, tried
                    break
        if best > before - 1e-4:
            step /= 1.6
    return constants


def fits_of_halves(rows: Sequence[Step]) -> list[Constants]:
    """Return the constants that each half of the models gives."""
    return [fit([row for row in rows if fold(row.row) == half]) for half in (0, 1)]


def held_out(rows: Sequence[Step]) -> list[float]:
    """Return each row's predicted time by the constants of the other half."""
    halves = [(shares_of(made), made["issue"]) for made in fits_of_halves(rows)]
    return [row.predicted_ms(*halves[1 - fold(row.row)]) for row in rows]


def main() -> None:
    """Print the constants of both halves and of all rows."""
    rows = steps()
    columns = [PRIOR, *fits_of_halves(rows), fit(rows)]
    titles = ("prior", "half 0", "half 1", "all")
    lines = [(name, *(f"{each[name]:.2f}" for each in columns)) for name in PRIOR]
    print(table(("constant", *titles), lines, left=0))


if __name__ == "__main__":
    main()
