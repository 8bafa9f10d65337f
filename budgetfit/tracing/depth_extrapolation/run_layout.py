"""RunLayout: index map between a shortened model's periods and the full model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from budgetfit.tracing.blocks.repeated_runs import (
    KEPT_PERIODS,
    BlockRun,
    NotRepeatedError,
)
from budgetfit.tracing.depth_extrapolation.owned_trace import IntArray

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


def run_layout(
    run: BlockRun, layers: Sequence[str], blocks: Sequence[str]
) -> RunLayout:
    """Return the layout of a run in the full model, of its module and block paths.

    Raises:
        NotRepeatedError: If the periods left out have other modules than their
            neighbours.
    """
    block_index = {name: n for n, name in enumerate(blocks)}
    # The first period is the end of one.
    missing = len(run.periods[1]) - len(run.periods[0])
    within = {
        name: (number, place)
        for number, period in enumerate(run.periods)
        for place, name in enumerate(period, start=0 if number else missing)
    }
    columns: dict[tuple[int, str], int] = {}
    entries: list[tuple[int, int, int]] = []  # period, column, layer
    depths = {name.count(".") + 1 for name in within}
    for layer, path in enumerate(layers):
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
    period_of = np.full(len(layers) + 1, -1, np.int64)
    path_of = np.full(len(layers) + 1, -1, np.int64)
    for number, column, layer in entries:
        table[number, column] = layer
        period_of[layer], path_of[layer] = number, column
    if (table[1:-1] != np.sort(table[1:-1], axis=0)).any() or (
        (table[1:-1] < 0) != (table[1] < 0)
    ).any():
        raise NotRepeatedError("its middle blocks have different modules")
    indices = tuple(
        tuple(block_index[name] for name in period) for period in run.periods
    )
    return RunLayout(indices, table, period_of, path_of)
