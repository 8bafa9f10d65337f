"""Where a twin's layers and blocks, and a run's periods, lie in the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.columnar_trace import FlatTrace
from budgetfit.tracing.depth_extrapolation.period_labels import RunLayout

if TYPE_CHECKING:
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.tracing.blocks.repeated_runs import BlockRun
    from budgetfit.tracing.depth_extrapolation.columnar_trace import Names
    from budgetfit.tracing.fake.shortened_model import Shortening
    from budgetfit.tracing.recording.raw_trace import RawTrace


def run_layout(run: BlockRun, names: Names) -> RunLayout:
    """Return where the periods of ``run`` lie.

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


def flat_trace(
    trace: StepTrace, raw: RawTrace, short: Shortening, names: Names
) -> FlatTrace:
    """Take a twin's trace apart, with the indices of the whole model.

    Raises:
        NotRepeatedError: If the twin has other modules than the model without what was
            left out.
    """
    if tuple(raw.layers) != short.twin_layers:
        raise NotRepeatedError("the twin has other modules than the model")
    layers = [n for n, path in enumerate(short.paths.values()) if path is not None]
    blocks = [n for n, name in enumerate(names.blocks) if name not in short.left_out]
    return FlatTrace.of(trace, raw, layers, np.array(blocks, np.int64))
