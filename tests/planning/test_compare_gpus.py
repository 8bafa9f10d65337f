from collections.abc import Sequence
from typing import Any

import pytest
import torch

from budgetfit.api.compare import compare
from budgetfit.core.budget import Budget
from budgetfit.core.plan import GpuComparison
from budgetfit.errors import InputError
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.alternatives import best_settings
from budgetfit.planning.alternatives.compare_gpus import Card, compare_gpus
from budgetfit.planning.session import PlanningSession, Request
from budgetfit.workload.workload import Workload
from tests.models import MIB, Mebi
from tests.traced import ROOMY

ADA = find_gpu("rtx-4090")


def card(name: str, mib: int) -> Card:
    budget = Budget(total_bytes=mib * MIB, context_bytes=0, headroom_bytes=0)
    return Card(find_gpu(name), budget, effective_batch_size=64)


def compared(
    cards: Sequence[Card], precision: str = "fp32", said: list[str] | None = None
) -> tuple[GpuComparison, ...]:
    workload = Workload(model=Mebi(4), batch=torch.zeros(2, 512, 512), gpu=ADA)
    return compare_gpus(
        workload.with_found_blocks(),
        cards,
        Request(budget=ROOMY),
        precision=precision,
        optimizer="adamw_torch_fused",
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


def test_a_card_that_cannot_hold_the_optimizer_step_is_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Weights of 4 MiB, as much in gradients, and twice as much in states.
    (before,) = compared([card("rtx-4090", 15)])
    searched: list[PlanningSession] = []
    monkeypatch.setattr(best_settings, "search_with_loss_chunks", searched.append)
    assert compared([card("rtx-4090", 15)]) == (before,)
    assert searched == []
    assert not before.fits


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


def of_mebi(gpus: Sequence[str], **given: Any) -> tuple[GpuComparison, ...]:
    batch = torch.zeros(2, 512, 512)
    return compare(Mebi(2), gpus, batch=batch, **{"engine": "ddp", **given})[0]


def test_a_batch_that_no_rank_can_have_is_said_in_the_row_of_its_group() -> None:
    given: dict[str, Any] = {"batch_size": 4, "effective_batch_size": 8}
    one, four = of_mebi(["rtx-4090", "rtx-4090x4"], precision="fp32", **given)
    assert one.estimate is not None
    assert one.estimate.recipe.effective_batch_size == 8
    assert four.estimate is None
    assert "effective_batch_size 8 over 4 ranks (2 on each)" in four.problem


def test_groups_are_rows_beside_single_cards() -> None:
    given: dict[str, Any] = {"effective_batch_size": 12, "precision": "fp32"}
    prices = {"rtx-4090": 0.5}
    (alone,) = of_mebi(["rtx-4090"], prices=prices, engine="auto", **given)
    one, two, eight = of_mebi(
        ["rtx-4090", "rtx-4090x2", "rtx-4090x4x2"], prices=prices, link="2GB/s", **given
    )
    assert one == alone
    names = [row.name for row in (one, two, eight)]
    assert names == ["rtx-4090", "rtx-4090x2", "rtx-4090x4x2"]
    assert two.fits
    assert two.estimate is not None
    recipe = two.estimate.recipe
    assert recipe.parallelism is not None
    assert (recipe.parallelism.engine, recipe.effective_batch_size) == ("ddp", 12)
    assert two.estimate.network == "2 GB/s"
    assert two.budget.usable_bytes < one.budget.usable_bytes  # NCCL's is set aside
    # All cards are paid for.
    assert two.price_per_hour == 1.0
    hours = two.estimate.hours(12_000)
    assert two.cost(12_000) == pytest.approx(hours * 1.0)
    assert not eight.fits
    assert "12 is no multiple of 8 ranks" in eight.problem


def test_a_link_without_a_group_is_refused() -> None:
    with pytest.raises(InputError, match="between several GPUs, and there is one"):
        of_mebi(["rtx-4090"], link="pcie-4", engine="auto")
    with pytest.raises(InputError, match="connects machines"):
        of_mebi(["rtx-4090x2"], link="infiniband")
