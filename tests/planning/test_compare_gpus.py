from collections.abc import Sequence

import pytest
import torch

from budgetfit.api.compare import compare
from budgetfit.core.budget import Budget
from budgetfit.core.plan import GpuComparison
from budgetfit.errors import InputError
from budgetfit.gpus.table import Gpu, find_gpu
from budgetfit.planning.alternatives.compare_gpus import compare_gpus
from budgetfit.planning.session import Request
from budgetfit.workload.workload import Workload
from tests.models import MIB, Mebi

ADA = find_gpu("rtx-4090")


def card(name: str, mib: int) -> tuple[Gpu, Budget]:
    budget = Budget(total_bytes=mib * MIB, context_bytes=0, headroom_bytes=0)
    return find_gpu(name), budget


def compared(
    cards: Sequence[tuple[Gpu, Budget]],
    precision: str = "fp32",
    said: list[str] | None = None,
) -> tuple[GpuComparison, ...]:
    workload = Workload(model=Mebi(4), batch=torch.zeros(2, 512, 512), gpu=ADA)
    return compare_gpus(
        workload.with_found_blocks(),
        cards,
        Request(),
        precision=precision,
        optimizer="adamw_torch_fused",
        effective_batch_size=64,
        progress=None if said is None else said.append,
    )


def test_each_card_has_the_settings_that_fit_it() -> None:
    small, large, tiny = compared(
        [card("rtx-4090", 120), card("rtx-4090", 400), card("rtx-4090", 20)]
    )
    assert small.fits
    assert large.fits
    assert small.estimate is not None
    assert large.estimate is not None
    assert small.estimate.reserved_bytes <= 120 * MIB
    assert large.estimate.samples_per_s >= small.estimate.samples_per_s
    assert {row.blocks for row in (small, large)} == {4}
    # What needs least is shown where nothing fits.
    assert not tiny.fits
    assert tiny.estimate is not None
    assert tiny.estimate.reserved_bytes > 20 * MIB
    for row in (small, large, tiny):
        assert row.estimate is not None
        assert row.estimate.recipe.effective_batch_size == 64


def test_cards_of_one_capability_share_their_traces() -> None:
    once: list[str] = []
    alone = compared([card("rtx-4090", 400)], said=once)
    twice: list[str] = []
    both = compared([card("rtx-4090", 400), card("rtx-4090", 400)], said=twice)
    assert both == (*alone, *alone)
    assert [text for text in twice if "tracing" in text] == [
        text for text in once if "tracing" in text
    ]


def test_a_faster_card_is_faster() -> None:
    both = compared([card("rtx-4090", 400), card("l4", 400)])
    estimates = [row.estimate for row in both]
    assert estimates[0] is not None
    assert estimates[1] is not None
    assert estimates[0].samples_per_s > estimates[1].samples_per_s


def test_a_card_without_the_hardware_says_why() -> None:
    (row,) = compared([card("t4", 400)], precision="bf16")
    assert not row.fits
    assert row.estimate is None
    assert "would only be emulated" in row.problem


def test_precision_is_chosen_for_each_card() -> None:
    t4, ada = compared([card("t4", 400), card("rtx-4090", 400)], precision="auto")
    assert t4.estimate is not None
    assert ada.estimate is not None
    assert t4.estimate.recipe.precision == "fp16-mixed"
    assert ada.estimate.recipe.precision == "bf16-mixed"


def test_cards_are_named_as_everywhere() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(InputError, match="Name the cards to compare"):
        compare(model, [])
    with pytest.raises(InputError, match="Name the cards to compare"):
        compare(model, "t4")
    with pytest.raises(InputError, match="rtx-4090"):
        compare(model, ["rtx-409"])
