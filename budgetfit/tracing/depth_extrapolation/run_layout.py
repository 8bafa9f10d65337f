"""RunLayout: index map between a shortened model's periods and the full model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from budgetfit.tracing.blocks.repeated_runs import KEPT_PERIODS, NotRepeatedError
from budgetfit.tracing.depth_extrapolation.columnar_trace import ColumnarTrace, IntArray

if TYPE_CHECKING:
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.tracing.blocks.repeated_runs import BlockRun
    from budgetfit.tracing.depth_extrapolation.columnar_trace import ModulePaths
    from budgetfit.tracing.fake.shortened_model import Shortening
    from budgetfit.tracing.recording.raw_trace import RawTrace

# The middle periods of the four that a shortened model has, counted from 1.
FIRST_MIDDLE, SECOND_MIDDLE = 2, 3


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Index map from the periods of a run to layers and blocks of the full model.

    Attributes:
        blocks: Block indices of each period.
        layers: The layer of each period (row) and module path within a period (column);
            -1 where a period has no such module.
        period_of_layer: The period of each layer, from 0; -1 outside the run. The last
            entry, for layer -1, is -1.
        path_of_layer: The column of ``layers`` for each layer.
    """

    blocks: tuple[tuple[int, ...], ...]
    layers: IntArray
    period_of_layer: IntArray
    path_of_layer: IntArray

    @property
    def kept(self) -> tuple[int, int, int, int]:
        """The periods of the full model that the shortened one has, from 0."""
        total = len(self.blocks)
        return 0, 1, total - 2, total - 1

    def kept_period_of_layers(self) -> IntArray:
        """Return each layer's period in the shortened model, from 1; 0: none."""
        number = np.zeros(len(self.blocks) + 1, np.int64)
        number[list(self.kept)] = np.arange(1, KEPT_PERIODS + 1)
        return number[self.period_of_layer]

    def kept_period_of_blocks(self) -> dict[int, int]:
        """Return each kept block's period in the shortened model, from 1."""
        return {
            block: number
            for number, period in enumerate(self.kept, start=1)
            for block in self.blocks[period]
        }

    def kept_blocks(self, period: int) -> tuple[int, ...]:
        """Return the blocks of a period of the shortened model, counted from 1."""
        return self.blocks[self.kept[period - 1]]

    def extended(self, extra: int) -> IntArray:
        """Return the full model's index of each period, from 1, with ``extra`` more."""
        return np.array([-1, 0, 1, *range(2, 2 + extra), *self.kept[2:]], np.int64)


def run_layout(run: BlockRun, names: ModulePaths) -> RunLayout:
    """Return the layout of a run in the full model.

    Raises:
        NotRepeatedError: If the periods left out have other modules than their
            neighbours.
    """
    block_index = {name: n for n, name in enumerate(names.blocks)}
    within = {
        name: (number, place)
        for number, period in enumerate(run.periods)
        for place, name in enumerate(period)
    }
    columns: dict[tuple[int, str], int] = {}
    entries: list[tuple[int, int, int]] = []  # period, column, layer
    depths = {name.count(".") + 1 for name in within}
    for layer, path in enumerate(names.layers):
        parts = path.split(".")
        for depth in depths:
            found = within.get(".".join(parts[:depth]))
            if found is not None and len(parts) >= depth:
                number, place = found
                key = (place, ".".join(parts[depth:]))
                column = columns.setdefault(key, len(columns))
                entries.append((number, column, layer))
                break
    table = np.full((len(run.periods), len(columns)), -1, np.int64)
    period_of = np.full(len(names.layers) + 1, -1, np.int64)
    path_of = np.full(len(names.layers) + 1, -1, np.int64)
    for number, column, layer in entries:
        table[number, column] = layer
        period_of[layer], path_of[layer] = number, column
    if (table[1:-1] != np.sort(table[1:-1], axis=0)).any() or (
        (table[1:-1] < 0) != (table[1] < 0)
    ).any():
        raise NotRepeatedError("its middle blocks have different modules")
    blocks = tuple(
        tuple(block_index[name] for name in period) for period in run.periods
    )
    return RunLayout(blocks, table, period_of, path_of)


def columnar_trace(
    trace: StepTrace, raw: RawTrace, short: Shortening, names: ModulePaths
) -> ColumnarTrace:
    """Convert a shortened model's trace to columns, with indices of the full model.

    Raises:
        NotRepeatedError: If the shortened model has other modules than the kept ones of
            the full model.
    """
    if tuple(raw.layers) != short.short_layers:
        raise NotRepeatedError("the twin has other modules than the model")
    layers = [n for n, path in enumerate(short.paths.values()) if path is not None]
    blocks = [n for n, name in enumerate(names.blocks) if name not in short.left_out]
    return ColumnarTrace.from_step_trace(trace, raw, layers, np.array(blocks, np.int64))
