"""How far predicted step times are from published ones, on one GPU each.

Measured by others: timm's tables, Lambda's, NVIDIA's, rasbt's, torchtune's, mli's, and
fitcheck's runs on a T4. Each row is predicted with shares by kind of op and a launch
time that were fitted on the other half of the models; the shares by GPU are from
kernels, but for three GPUs whose rows name the steps they are from. Of compiled models,
each block is predicted as compiled. Rows of llm-foundry trained on eight GPUs, whose
communication is not predicted: they are apart. Nothing was fitted on them but the
rate of 16-bit products of H100s that train together, on other rows of MPT-760m and
MPT-7b.

python -m benchmarks.step_times          # this summary; docs/times.md with every row
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from benchmarks.published_steps.fit import held_out
from benchmarks.published_steps.predict import Step, steps
from benchmarks.recorded_steps import HEADING
from benchmarks.shared import ROOT, table
from docs.answers import write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from budgetfit.timing.step_time_range import StepTimeRange

PAGE: Final = ROOT / "docs" / "times.md"
# Measured ratios of time per sample at which a pair is hard to order.
HARD_PAIR: Final = (1.02, 1.5)
CLOSE: Final = (-0.2, 0.25)  # relative errors that count as close
SMALL_BATCH, LARGE_BATCH = 2, 64
NO_WAVES: Final = """\
What is missing in rows of 512 tokens is not known. It is not tiles that fill the GPU's
last wave in part: on the same GPU, the notebook measures 71.5 TFLOPS for a product of
2,048 rows and columns, 256 tiles of 128 x 128 on 84 multiprocessors, as are those of
1,024 by 4,096; the sum of its kernel's parts is 70 (decision 0039)."""


@dataclass(frozen=True)
class Row:
    """A published step, its predicted time and its signed relative error."""

    step: Step
    predicted_ms: float

    @property
    def units(self) -> int:
        """Images or tokens of the step."""
        return int(self["batch"] * (self["seq"] or 1))

    @property
    def measured_per_unit_ms(self) -> float:
        """Measured for one image or token."""
        return self.step.measured_ms / self.units

    @property
    def predicted_per_unit_ms(self) -> float:
        """Predicted for one image or token."""
        return self.predicted_ms / self.units

    @property
    def error(self) -> float:
        """Relative, signed: below zero where the prediction is too fast."""
        return self.predicted_ms / self.step.measured_ms - 1

    @property
    def expected(self) -> StepTimeRange:
        """The range that a plan would print."""
        return self.step.expected_range

    @property
    def is_inside(self) -> bool:
        """Whether the measured time is in the range around the predicted one."""
        found = self.step.measured_ms / self.predicted_ms
        return self.expected.low <= found <= self.expected.high

    def __getitem__(self, name: Any) -> Any:  # noqa: ANN401 - a field of the row
        """Return a field of the published row."""
        return self.step.row.get(name)


def predicted_rows() -> list[Row]:
    """Return all rows, each predicted by the constants of the other half."""
    found = steps()
    return [Row(*pair) for pair in zip(found, held_out(found), strict=True)]


def figures(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return number, signed median, median, p90 and worst error, and shares inside."""
    rows = list(rows)
    errors = np.array([row.error for row in rows])
    low, high = CLOSE
    return (
        f"{len(errors)}",
        f"{np.median(errors):+.1%}",
        f"{np.median(abs(errors)):.1%}",
        f"{np.quantile(abs(errors), 0.9):.1%}",
        f"{errors[np.argmax(abs(errors))]:+.0%}",
        f"{np.mean((errors > low) & (errors < high)):.0%}",
        f"{np.mean([row.is_inside for row in rows]):.0%}",
    )


HEADERS: Final = (
    *("rows", "signed median", "median", "p90", "worst"),
    *("x 0.8 to 1.25", "in the printed range"),
)


def by(rows: Sequence[Row], key: Callable[[Row], str], title: str) -> str:
    """Return a table of figures by some field, worst median first."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)

    def median(name: str) -> float:
        return -float(np.median([abs(row.error) for row in groups[name]]))

    lines = [(name, *figures(groups[name])) for name in sorted(groups, key=median)]
    return table((title, *HEADERS), lines, left=0)


class Orders(NamedTuple):
    """Pairs in the order of their measured time per image or token, and all pairs."""

    right: int
    pairs: int

    @classmethod
    def of(cls, pairs: Iterable[tuple[Row, Row]], highest: float) -> Orders:
        """Count pairs of rows whose measured times are apart, but not by too much."""
        right = count = 0
        for one, other in pairs:
            measured = one.measured_per_unit_ms / other.measured_per_unit_ms
            predicted = one.predicted_per_unit_ms / other.predicted_per_unit_ms
            if predicted == 1:  # the same program, measured twice
                continue
            if HARD_PAIR[0] <= max(measured, 1 / measured) <= highest:
                right += (measured > 1) == (predicted > 1)
                count += 1
        return cls(right, count)

    def __str__(self) -> str:
        return f"{self.right} of {self.pairs}, {self.right / self.pairs:.1%}"


def hard_pairs(rows: Iterable[Row]) -> Orders:
    """Compare the models of timm's tables with each other."""
    images = [row for row in rows if row["group"] == "timm"]
    pairs = itertools.combinations(images, 2)
    other = ((a, b) for a, b in pairs if a["model"] != b["model"])
    return Orders.of(other, HARD_PAIR[1])


def pairs_of_settings(rows: Iterable[Row], *also: str) -> Orders:
    """Compare settings of the same model: batch, length, layout, attention.

    ``also``: fields of the rows that have to be the same, too.
    """
    return Orders.of(_same_model(rows, *also), math.inf)


def _same_model(rows: Iterable[Row], *also: str) -> Iterator[tuple[Row, Row]]:
    same: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        fields = ("group", "card", "model", "cls", *also)
        same[tuple(row[name] for name in fields)].append(row)
    for each in same.values():
        yield from itertools.combinations(each, 2)


def _run_again(rows: Iterable[Row]) -> tuple[int, float]:
    """Count pairs of runs of one program with the same libraries, and how far apart."""
    again = [
        abs(math.log(one.step.measured_ms / other.step.measured_ms))
        for one, other in _same_model(rows, "framework")
        if one.predicted_ms == other.predicted_ms
    ]
    return len(again), math.exp(max(again))


def _orders(rows: Sequence[Row], on_eight: Sequence[Row]) -> str:
    """Return how many pairs are in the right order, and the ratios on the T4."""
    on_t4 = [row for row in rows if row["gpu"] == "t4"]
    ratios = [1 + row.error for row in on_t4]
    again, apart = _run_again(on_t4)
    return (
        f"* In the right order, hard pairs of timm's models (measured {HARD_PAIR[0]} "
        f"to {HARD_PAIR[1]} times apart): {hard_pairs(rows)}.\n"
        f"* The same model with other settings: {pairs_of_settings(rows)}; both run "
        f"with the same libraries: {pairs_of_settings(rows, 'framework')}; on eight "
        f"GPUs: {pairs_of_settings(on_eight)}.\n"
        f"* T4: predicted over measured {np.median(ratios):.2f} in the median, "
        f"{min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} runs. Of {again} pairs "
        "of runs of one program with the same libraries, the slower one took up to "
        f"{apart:.2f} times as long."
    )


def batch_growth(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield time per sample at a small over a large batch: measured and predicted."""
    layers: dict[tuple[str, int], dict[int, Row]] = defaultdict(dict)
    for row in rows:
        if row["group"] == "mli":
            layers[row["model"], row["seq"]][row["batch"]] = row
    for (name, length), found in sorted(layers.items()):
        small, large = found[SMALL_BATCH], found[LARGE_BATCH]
        scale = LARGE_BATCH / SMALL_BATCH
        yield (
            f"{name}, {length} tokens",
            f"{scale * small.step.measured_ms / large.step.measured_ms:.2f}",
            f"{scale * small.predicted_ms / large.predicted_ms:.2f}",
        )


def every_row(rows: Sequence[Row]) -> str:
    """Return a table of all rows, the worst first."""
    lines = [
        (
            f"{row.error:+.0%}",
            row["card"],
            row["model"],
            f"{row['batch']}",
            f"{row['seq'] or row['img']}",
            row["precision"] + (", compiled" if row["mode"] == "compiled" else ""),
            f"{row.step.measured_ms:,.1f}",
            f"{row.predicted_ms:,.1f}",
            "yes" if row.is_inside else "no",
            row["group"],
        )
        for row in sorted(rows, key=lambda row: -abs(row.error))
    ]
    headers = (
        *("error", "GPU", "model", "batch", "length or size", "precision"),
        *("measured ms", "predicted ms", "in range", "by"),
    )
    return table(headers, lines, left=0)


def main() -> int:
    """Print the summary, and write the page with every row."""
    everything = predicted_rows()
    rows = [row for row in everything if row.step.is_single_gpu]
    on_eight = [row for row in everything if not row.step.is_single_gpu]
    parts = [
        table(
            ("", *HEADERS),
            [("one GPU", *figures(rows)), ("eight GPUs", *figures(on_eight))],
            left=0,
        ),
        by(rows, lambda row: row["cls"], "kind"),
        by(rows, lambda row: row["card"], "GPU"),
        _orders(rows, on_eight),
        "Time per sample, batch 2 over batch 64:",
        table(("layer", "measured", "predicted"), [*batch_growth(rows)], left=0),
        NO_WAVES,
    ]
    summary = "\n\n".join(parts)
    print(summary)
    introduction = (__doc__ or "").split("\n\npython -m")[0]
    _, heading, recorded = PAGE.read_text("utf-8").partition(HEADING)
    write(
        PAGE,
        f"# Step times\n\n`python -m benchmarks.step_times` writes this page. "
        f"{introduction}\n\nErrors are predicted over measured, less one.\n\n{summary}"
        f"\n\n## Every row of one GPU\n\n{every_row(rows)}"
        f"\n\n## Eight GPUs\n\n{every_row(on_eight)}"
        f"\n\n{heading}{recorded.rstrip()}\n",
    )
    print(f"\nWritten to {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
