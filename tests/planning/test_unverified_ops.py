"""What an estimate says about ops that nobody checked."""

from dataclasses import replace

import torch
from torch import nn

import budgetfit
from budgetfit.core.step_trace import Affine, StepTrace, UnverifiedOp
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.judge import held_bytes, unverified_op_notes
from tests.memory.made_traces import MIB, TraceMaker

GPU = find_gpu("rtx-4090")


def trace() -> StepTrace:
    """Two storages of one op that never meet, and scratch of another."""
    made = TraceMaker()
    with made.phase("forward"):
        made.malloc("a", 6 * MIB, MIB)  # 8 MiB for two samples
        made.free("a")
        made.malloc("b", 4 * MIB)
        made.scratch("c", "buffer", Affine(0, MIB))
        made.free("c")
        made.malloc("d", 100)
    return replace(
        made.trace(),
        unverified_ops=(
            UnverifiedOp("aten.foo.default", (0, 1)),
            UnverifiedOp("aten.bar.Tensor", (2,)),
            UnverifiedOp("aten.tiny.default", (3,)),
        ),
    )


def test_an_op_counts_with_the_most_that_it_held_at_one_time() -> None:
    assert held_bytes(trace(), 2, GPU) == {
        "aten.foo.default": 8 * MIB,  # 8 before 4, not 12
        "aten.bar.Tensor": 2 * MIB,  # a rule sizes it: 1 MiB a sample
        "aten.tiny.default": 512,  # a block of the allocator
    }


def test_a_note_names_what_exceeds_one_percent_of_the_peak() -> None:
    (note,) = unverified_op_notes(trace(), 2, GPU, 160 * MIB)
    assert note == (
        "ops without a verified memory rule: aten.foo.default allocated 8 MiB (5% of "
        "the peak), aten.bar.Tensor allocated 2 MiB (1% of the peak)"
    )


def test_small_ops_are_not_worth_a_note() -> None:
    assert unverified_op_notes(trace(), 2, GPU, 10_000 * MIB) == ()
    assert unverified_op_notes(replace(trace(), unverified_ops=()), 2, GPU, 1) == ()


class Spectrum(nn.Module):
    """A Fourier transform between two layers; cuFFT's plans are known to a card."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 64), nn.Linear(33, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.fft.rfft(self.into(x)).abs())


def test_an_estimate_tells_which_ops_nobody_checked() -> None:
    result = budgetfit.estimate(
        Spectrum(),
        batch=(torch.empty(4, 5000, 64), torch.empty(4, 5000, 8)),
        loss=lambda out, batch: nn.functional.mse_loss(out, batch[1]),
        recipe=budgetfit.Recipe(batch_size=4),
        gpu="rtx-4090",
    )
    (note,) = (note for note in result.notes if "without a verified" in note)
    assert "aten._fft_r2c.default allocated" in note
    assert "aten.addmm.default" not in note


class Most(nn.Module):
    """Divides by the commonest number: one result, of all that the layer made."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        return (x / x.detach().flatten().mode().values).mean()


def test_an_op_with_a_small_result_is_named_by_what_it_read() -> None:
    result = budgetfit.estimate(
        Most(),
        batch={"x": torch.empty(4, 5000, 64)},
        loss=lambda out, _: out,
        recipe=budgetfit.Recipe(batch_size=4),
        gpu="rtx-4090",
    )
    (note,) = (note for note in result.notes if "without a verified" in note)
    assert "aten.mode.default read or wrote" in note
