"""Where a model cannot run in 16 bits, "auto" is fp32, and says why (decision 0026)."""

from pathlib import Path

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit.api.compare import compare
from budgetfit.api.plan import estimate_settings
from budgetfit.reporting.compare_text import compare_text
from budgetfit.reporting.layout import render

BATCH = torch.zeros(2, 12)
WHY = "fp32 instead of {}, because: "


class Fourier(nn.Module):
    """Its transform knows no 16-bit floats, on a CPU or on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(self.linear(x)).real


def test_a_plan_is_in_fp32_and_says_why() -> None:
    plan = budgetfit.plan(Fourier(), gpu="rtx-4090", batch=BATCH, batch_size=2)
    assert plan.recipe.precision == "fp32"
    assert any(WHY.format("bf16-mixed") in text for text in plan.warnings)
    with pytest.raises(budgetfit.TraceError):
        budgetfit.plan(Fourier(), gpu="rtx-4090", batch=BATCH, precision="bf16-mixed")


def test_a_comparison_is_that_of_the_plans_and_says_why_once() -> None:
    cards = ["t4", "rtx-4090", "l4"]
    rows, model = compare(Fourier(), cards, batch=BATCH, batch_size=2)

    for row, name in zip(rows, cards, strict=True):
        plan = budgetfit.plan(Fourier(), gpu=name, batch=BATCH, batch_size=2)
        assert row.estimate is not None
        assert row.estimate.recipe == plan.recipe
        assert row.estimate.reserved_bytes == plan.estimate.reserved_bytes
        assert row.warnings
    assert set(row.warnings) <= set(plan.warnings)
    assert [row.estimate.recipe.precision for row in rows if row.estimate] == [
        "fp32",
        "fp32",
        "fp32",
    ]
    text = " ".join(render(compare_text(rows, model)).split())
    assert text.count(WHY.format("fp16-mixed")) == 1  # the T4's
    assert text.count(WHY.format("bf16-mixed")) == 1  # for both others


def test_a_comparison_keeps_a_precision_that_was_asked_for() -> None:
    for precision in ("bf16-mixed", ["auto", "fp32"]):
        with pytest.raises(budgetfit.TraceError):
            compare(Fourier(), ["l4"], batch=BATCH, precision=precision)


def test_an_estimate_by_name_falls_back_for_auto_only(tmp_path: Path) -> None:
    file = tmp_path / "fourier.py"
    file.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Fourier(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Linear(12, 12)\n"
        "    def forward(self, x):\n"
        "        return torch.fft.fft(self.linear(x)).real\n"
    )
    found, _ = estimate_settings(f"{file}:Fourier", gpu="l4", precision="auto")
    exact, _ = estimate_settings(f"{file}:Fourier", gpu="l4", precision="fp32")

    assert found.recipe == exact.recipe
    assert found.reserved_bytes == exact.reserved_bytes
    assert any(WHY.format("bf16-mixed") in text for text in found.notes)
    with pytest.raises(budgetfit.TraceError):
        estimate_settings(f"{file}:Fourier", gpu="l4", precision="bf16-mixed")


def test_a_model_that_cannot_run_at_all_gives_the_first_error() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            msg = f"not with {list(x.shape)}"
            raise RuntimeError(msg)

    with pytest.raises(budgetfit.TraceError, match="not with") as first:
        compare(Wrong(), ["l4"], batch=BATCH, precision="bf16-mixed")
    with pytest.raises(budgetfit.TraceError) as auto:
        compare(Wrong(), ["l4"], batch=BATCH)
    assert str(auto.value) == str(first.value)
