"""Categories at the peak, predicted against what real objects take."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from budgetfit.core.memory_timeline import MemoryTimeline, TimelinePoint
from budgetfit.measuring.categories import (
    category_checks,
    gradient_bytes,
    model_bytes,
    state_bytes,
)

CPU = torch.device("cpu")


def timeline(phase: str, *, step: int = 1, micro_step: int = 0) -> MemoryTimeline:
    point = TimelinePoint(
        step=step,
        micro_step=micro_step,
        phase=phase,
        block="",
        allocated_bytes=100,
        reserved_bytes=100,
    )
    return MemoryTimeline(
        points=(point,),
        allocated_bytes=100,
        reserved_bytes=100,
        at_peak_bytes={
            "parameters": 20,
            "gradients": 12,
            "optimizer_state": 40,
            "activations": 28,
        },
    )


COUNTED = {"parameters": 20, "gradients": 20, "optimizer_state": 40}


@pytest.mark.parametrize(
    ("found", "rows"),
    [
        # In backward some gradients are still to come: they cannot be counted apart.
        (
            timeline("backward"),
            {
                "parameters": (20, 20),
                "optimizer_state": (40, 40),
                "gradients, activations, the rest": (40, 50),
            },
        ),
        (
            timeline("optimizer"),
            {
                "parameters": (20, 20),
                "gradients": (12, 20),
                "optimizer_state": (40, 40),
                "activations and the rest": (28, 30),
            },
        ),
        # The first step makes the state, at the very end of it.
        (
            timeline("backward", step=0, micro_step=1),
            {
                "parameters": (20, 20),
                "gradients": (12, 20),
                "activations and the rest": (68, 70),
            },
        ),
    ],
    ids=["backward", "optimizer", "first step, accumulating"],
)
def test_what_is_complete_at_the_peak_is_a_row_and_the_rows_add_up(
    found: MemoryTimeline, rows: dict[str, tuple[int, int]]
) -> None:
    checks = category_checks(found, COUNTED, 110)
    assert {
        row.name: (row.predicted_bytes, row.measured_bytes) for row in checks
    } == rows
    assert sum(row.predicted_bytes for row in checks) == 100
    assert sum(row.measured_bytes for row in checks) == 110


def test_reduced_gradients_are_a_row_in_the_optimizer_alone() -> None:
    """A rank of FSDP2 has its part of them once the last micro-batch is through."""
    accumulating = timeline("backward", step=1, micro_step=1)
    names = [row.name for row in category_checks(accumulating, COUNTED, 110, ranks=2)]
    assert names == [
        "parameters",
        "optimizer_state",
        "gradients, activations, the rest",
    ]
    stepping = category_checks(timeline("optimizer"), COUNTED, 110, ranks=2)
    assert "gradients" in [row.name for row in stepping]


def test_without_a_measurement_there_are_no_rows() -> None:
    assert category_checks(timeline("backward"), {}, 110) == ()
    assert category_checks(timeline("backward"), COUNTED, -1) == ()
    unknown = replace(timeline("backward"), at_peak_bytes={})
    assert category_checks(unknown, COUNTED, 110) == ()


def test_real_objects_are_counted_once_each() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight  # tied: 8 x 8 x 4 bytes in all
    model.register_buffer("table", torch.zeros(4))
    optimizer = torch.optim.Adam(model.parameters())
    assert model_bytes(model, CPU) == {"parameters": 256, "buffers": 16}
    assert gradient_bytes(model, CPU) == 0
    model(torch.ones(1, 8)).sum().backward()
    assert gradient_bytes(model, CPU) == 256
    optimizer.step()
    assert state_bytes(optimizer, CPU) == 2 * 256 + 4  # and the step's count
    assert model_bytes(model, torch.device("cuda")) == {}


def test_states_within_a_tensor_subclass_count_as_they_are_stored() -> None:
    optim = pytest.importorskip("torchao", reason="not installed").optim
    weight = nn.Parameter(torch.ones(64, 64))  # 4096 codes, 16 scales, 256 values
    weight.grad = torch.ones_like(weight)
    optimizer = optim.AdamW8bit([weight])
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    each = 4096 + 16 * 4 + 256 * 4
    assert state_bytes(optimizer, CPU) == 2 * each + 4  # and the number of steps
