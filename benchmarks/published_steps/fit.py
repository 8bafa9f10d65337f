"""Fit the shares by kind of op on published steps; judge them on other models.

    python -m benchmarks.published_steps.fit

Half of the models gives the shares that judge the other half, and the other way round.
The shares of the product are fitted on all rows.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.published_steps.predict import Shares, Step, fold, steps
from budgetfit.timing.kind_shares import KIND_SHARES, KindShares

if TYPE_CHECKING:
    from collections.abc import Sequence

# Where the fit begins, and what it is drawn to: measured kernels, where there are some.
# A product's share of the GPU's matrix rate, other kinds' share of its bandwidth.
PRIOR: Final = {
    "elementwise": 0.95,  # NeuSight: 0.83 to 0.91 of the data sheet
    "copy": 0.95,
    "reduction": 0.70,
    "softmax": 0.70,  # NeuSight: 0.55 to 0.78 of the data sheet
    "norm": 0.68,  # NeuSight, layer norm: 0.57 to 0.65 of the data sheet
    "norm_backward": 0.60,
    "batch_norm": 0.75,
    "pooling": 0.60,
    "optimizer": 0.90,
    "matmul": 1.0,
    "small_batched_matmul": 0.65,
    "unaligned_matmul": 0.45,
    "attention": 0.79,  # A100: 0.66 of the peak, FlashAttention-2
    "attention_backward": 0.66,  # 0.28 (H100) to 0.70 (A5000) of the peak
    "convolution": 0.80,  # DeepBench: V100 and T4 0.47 of the peak
    "convolution_backward": 0.70,
    "grouped_convolution": 0.50,
    "depthwise_convolution": 0.50,
    "depthwise_convolution_memory": 0.50,
    "grouped_convolution_memory": 0.90,
}
UPPER: Final = 1.15  # of the achieved bandwidth
CLOSE: Final = (-0.2, 0.25)  # relative errors that count as close
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


def fit(rows: Sequence[Step]) -> tuple[Constants, float]:
    """Return the constants, and the factor on the host's issue time."""
    used = [row for row in rows if row.is_eager and row.is_single_gpu]
    groups = Counter((row.row["group"], row.row["cls"]) for row in used)
    weights = np.array(
        [1 / math.sqrt(groups[row.row["group"], row.row["cls"]]) for row in used]
    )
    constants, issue = dict(PRIOR), 1.0

    def loss(constants: Constants, issue: float) -> float:
        shares = shares_of(constants)
        errors = [
            abs(math.log(row.predicted_ms(shares, issue) / row.measured_ms))
            for row in used
        ]
        drawn = sum(math.log(constants[k] / PRIOR[k]) ** 2 for k in PRIOR)
        drawn += math.log(issue) ** 2
        return float(np.average(errors, weights=weights)) + PRIOR_WEIGHT * drawn

    best, step = loss(constants, issue), 0.25
    while step > 0.01:  # noqa: PLR2004 - a percent
        before = best
        for name in (*PRIOR, "issue"):
            for factor in (1 + step, 1 / (1 + step)):
                if name == "issue":
                    tried, tried_issue = constants, issue * factor
                else:
                    tried = {**constants, name: constants[name] * factor}
                    tried_issue = issue
                    memory = name.endswith("_memory") or name in KIND_SHARES
                    if memory and not KIND_SHARES.get(name, KindShares(0, 1)).rate:
                        tried[name] = min(tried[name], UPPER)
                value = loss(tried, tried_issue)
                if value < best - 1e-6:
                    best, constants, issue = value, tried, tried_issue
                    break
        if best > before - 1e-4:
            step /= 1.6
    return constants, issue


def held_out(rows: Sequence[Step]) -> list[float]:
    """Return each row's predicted time by the constants of the other half."""
    halves = [fit([row for row in rows if fold(row.row) == half]) for half in (1, 0)]
    made = [(shares_of(constants), issue) for constants, issue in halves]
    return [row.predicted_ms(*made[fold(row.row)]) for row in rows]


def main() -> None:
    """Print the constants of both halves and of all rows."""
    rows = steps()
    fits = [fit([row for row in rows if fold(row.row) == half]) for half in (0, 1)]
    fits.append(fit(rows))
    print(f"{'':24} {'prior':>8} {'half 0':>8} {'half 1':>8} {'all':>8}")
    for name in PRIOR:
        values = (PRIOR[name], *(constants[name] for constants, _ in fits))
        print(f"{name:24} " + " ".join(f"{value:8.2f}" for value in values))
    print(f"{'issue':24} " + " ".join(f"{v:8.2f}" for v in (1, *(i for _, i in fits))))
    made = [(shares_of(constants), issue) for constants, issue in fits]
    single = [row for row in rows if row.is_single_gpu]
    for title, predict in (
        ("prior", lambda row: row.predicted_ms(shares_of(PRIOR))),
        ("held out", lambda row: row.predicted_ms(*made[1 - fold(row.row)])),
        ("fitted on all", lambda row: row.predicted_ms(*made[2])),
    ):
        errors = np.array([predict(row) / row.measured_ms - 1 for row in single])
        print(
            f"{title}: {len(errors)} rows of one GPU, signed median "
            f"{np.median(errors):+.1%}, median {np.median(abs(errors)):.1%}, "
            f"p90 {np.quantile(abs(errors), 0.9):.1%}, worst "
            f"{errors[np.argmax(abs(errors))]:+.0%}, inside 0.8 to 1.25 "
            f"{np.mean((errors > CLOSE[0]) & (errors < CLOSE[1])):.1%}"
        )


if __name__ == "__main__":
    main()
