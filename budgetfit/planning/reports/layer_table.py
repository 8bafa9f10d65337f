"""The layer table of ``budgetfit layers``: memory of each layer by precision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from budgetfit.core.plan import Layer, LayerMemory
from budgetfit.core.step_trace import RATES, Phase, StepTrace
from budgetfit.memory.chain.stages import steady_micro_step

if TYPE_CHECKING:
    from torch import nn


WEIGHT_BYTES = {"bf16": 2, "fp32": 4, "tf32": 4, "fp16-mixed": 4, "bf16-mixed": 4}
_ELEMENTS = RATES.index("elements")  # that are moved, and no arithmetic


def layer_rows(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that get a row: the blocks, and modules outside of them."""
    modules = dict(model.named_modules())
    above = {
        name.rsplit(".", depth)[0]
        for name in blocks
        for depth in range(1, name.count(".") + 1)
    }
    rows: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if name in blocks:
            rows[name] = module
        elif name == "" or name in above or _inside(name, rows):
            continue
        else:
            rows[name] = module
    return rows


def _inside(name: str, rows: Mapping[str, object]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:depth]) in rows for depth in range(1, len(parts)))


def layer_table(
    model: nn.Module, blocks: Sequence[str], traces: Mapping[str, StepTrace]
) -> tuple[Layer, ...]:
    """Return one ``Layer`` per row, from a trace without recomputation per precision.

    Saved bytes are those that a layer's forward keeps for the backward pass.
    """
    rows = layer_rows(model, blocks)
    saved = {name: _saved(trace, rows) for name, trace in traces.items()}
    flops = _flops(next(iter(traces.values())), rows)
    table = []
    for row, module in rows.items():
        parameters = list(module.parameters())
        by_precision = {}
        for policy in traces:
            fixed, slope = saved[policy].get(row, (0, 0))
            width = WEIGHT_BYTES.get(policy)
            by_precision[policy] = LayerMemory(
                weight_bytes=sum(
                    p.numel()
                    * (width if width and p.is_floating_point() else p.element_size())
                    for p in parameters
                ),
                saved_bytes=fixed,
                saved_bytes_per_sample=slope,
            )
        count = sum(p.numel() for p in parameters)
        if count or any(m.saved_bytes_per_sample for m in by_precision.values()):
            table.append(
                Layer(
                    name=row,
                    type=type(module).__name__,
                    parameter_count=count,
                    recompute_flops_per_sample=flops.get(row, 0.0),
                    by_precision=by_precision,
                )
            )
    return tuple(table)


def _row_of(trace: StepTrace, rows: Mapping[str, object]) -> list[str | None]:
    """Return, for each traced layer, the row that contains it."""
    found: list[str | None] = []
    for layer in trace.layers:
        parts = layer.split(".")
        names = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
        found.append(next((name for name in names if name in rows), None))
    return found


def _steady_forward(trace: StepTrace) -> Phase:
    """Return the forward phase of the steady micro-step."""
    moment = ("forward", *steady_micro_step(trace))
    return next(
        phase
        for phase in trace.phases
        if (phase.name, phase.step, phase.micro_step) == moment
    )


def _saved(trace: StepTrace, rows: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    """Return the (fixed, per sample) bytes saved by each row's forward."""
    phase = _steady_forward(trace)
    alive: set[int] = set()
    for event in trace.events[phase.start : phase.end].tolist():
        if event > 0:
            alive.add(event - 1)
        else:
            alive.discard(-event - 1)
    owner = _row_of(trace, rows)
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for storage in alive:
        layer = int(trace.layer[storage])
        row = owner[layer] if layer >= 0 else None
        if row is not None:
            sums[row][0] += int(trace.fixed_bytes[storage])
            sums[row][1] += int(trace.bytes_per_sample[storage])
    return {row: (fixed, slope) for row, (fixed, slope) in sums.items()}


def _flops(trace: StepTrace, rows: Mapping[str, object]) -> dict[str, float]:
    """Return FLOPs per sample of each row's forward."""
    phase = _steady_forward(trace)
    owner = _row_of(trace, rows)
    inside = (trace.ops.event > phase.start) & (trace.ops.event <= phase.end)
    sums: dict[str, float] = defaultdict(float)
    for index in np.flatnonzero(inside).tolist():
        layer = int(trace.ops.layer[index])
        row = owner[layer] if layer >= 0 else None
        if row is not None and trace.ops.rate[index] != _ELEMENTS:
            sums[row] += float(trace.ops.flops_per_sample[index])
    return dict(sums)
