"""``gpus="auto"``: how many GPUs a plan needs, and what it says about the others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit import DoesNotFitError, InputError
from budgetfit.api.how_many_gpus import COUNTS, _Search, plan_auto
from budgetfit.api.plan import estimate_settings
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import Plan
from budgetfit.core.plan_json import from_json, to_json
from budgetfit.errors import TraceError
from budgetfit.inputs.arguments import Arguments
from budgetfit.inputs.several_gpus import parse_gpus
from tests.models import alone
from tests.reporting.sample_plans import sample_plan

pytestmark = pytest.mark.usefixtures("kept_traces")
WIDTH, LAYERS = 6144, 6
WHOLE_BYTES = 4 * LAYERS * 4 * WIDTH**2  # weights, gradients and Adam's two states


class Wide(nn.Module):
    """Layers of 144 MiB each, on meta: 3.4 GiB with gradients and states."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
            self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def planned(**given: Any) -> Plan:
    return budgetfit.plan(
        Wide(),
        precision="fp32",
        optimizer="adamw_torch",
        **{
            "batch": torch.zeros(1, WIDTH),
            "engine": "fsdp2",
            "batch_size": 1,
            "checkpointing": "none",
            **given,
        },
    )


def test_the_fewest_that_fit_are_taken_and_the_others_are_said() -> None:
    plan = planned(gpu="a100-80gb", vram="4300MiB", gpus="auto", link="25GB/s")
    parallelism = plan.recipe.parallelism
    assert parallelism is not None
    assert parallelism.gpus == 4
    assert plan.fits
    assert plan.estimate.network == "25 GB/s"
    tried = dict(plan.provenance["gpus_tried"])
    assert list(tried) == ["1", "2", "4"]
    # Half is more than what NCCL and the context leave: no trace is needed.
    assert "weights, gradients and optimizer states take" in tried["2"]
    assert WHOLE_BYTES / 4 < plan.budget.usable_bytes < plan.budget.total_bytes / 2
    assert tried["4"].startswith("fits, ")
    plan = alone(plan)
    for text in (str(plan), plan.details(), str(from_json(to_json(plan)))):
        assert "HOW MANY GPUS" in text
        assert "taken: 4, the fewest that fit" in text


def test_more_gpus_are_taken_rather_than_the_hosts_memory() -> None:
    auto: dict[str, Any] = {"gpu": "a100-80gb", "vram": "4500MiB", "gpus": "auto"}
    plan = planned(**auto, host_ram="8GiB")
    tried = dict(plan.provenance["gpus_tried"])
    assert tried["2"].startswith("fits offloaded to the CPU, ")
    assert tried["4"].startswith("fits, ")
    assert not plan.recipe.cpu_offload
    assert plan.recipe.ranks == 4
    tried = dict(planned(**auto, host_ram="2GiB").provenance["gpus_tried"])
    assert tried["2"].startswith("the lowest peak found on each is 2.")


def test_one_is_taken_where_it_fits() -> None:
    auto = planned(gpu="a100-80gb", gpus="auto")
    plain = planned(gpu="a100-80gb", engine="auto")
    assert auto.recipe == plain.recipe
    assert auto.estimate == plain.estimate
    assert auto.provenance["gpus_tried"][0][0] == "1"


def test_what_more_gpus_do_not_help_is_refused() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        planned(gpu="a100-80gb", vram="3700MiB", gpus="auto", engine="ddp")
    text = str(caught.value)
    assert "GPUs tried: 1: " in text
    assert "DDP keeps the whole model on each GPU" in text
    assert "2:" not in text
    with pytest.raises(DoesNotFitError, match="more GPUs would not help") as caught:
        planned(gpu="a100-80gb", vram="3700MiB", gpus="auto", batch_size=100_000)
    assert caught.value.needed_bytes > caught.value.usable_bytes
    with pytest.raises(DoesNotFitError, match="GPUs tried: 1: ") as caught:
        planned(gpu="a100-80gb", vram="3700MiB", gpus="auto", effective_batch_size=1)
    assert "more GPUs have no share of 1 samples" in str(caught.value)


def test_where_nccl_leaves_nothing_no_more_gpus_are_tried() -> None:
    with pytest.raises(DoesNotFitError, match=r"1: .*2: .*NCCL") as caught:
        planned(gpu="a100-80gb", vram="1400MiB", headroom=0, gpus="auto")
    assert "more GPUs were not tried" in str(caught.value)


def test_numbers_are_doubled_to_whole_nodes() -> None:
    assert COUNTS[:6] == ("1", "2", "4", "8", "8x2", "8x4")
    counted = [per_node * nodes for per_node, nodes in map(parse_gpus, COUNTS)]
    assert counted == [2**power for power in range(11)]


def chosen(
    rates: dict[int, float], price: float | None = None, **given: Any
) -> tuple[list[str], str]:
    """Plan with these samples/s by number; return what was tried and taken."""

    def plan(here: Arguments) -> Plan:
        per_node, nodes = parse_gpus(here.gpus)
        count = per_node * nodes
        if count not in rates:
            raise TraceError("The engine cannot train it.", module="m", op="")
        made = sample_plan()
        several = None if count == 1 else Parallelism(engine="ddp", gpus=count)
        recipe = replace(made.recipe, segments=(), parallelism=several)
        step_ms = 1e3 * recipe.effective_batch_size / rates[count]
        estimate = replace(made.estimate, recipe=recipe, step_ms=step_ms)
        return made.changed(recipe=recipe, estimate=estimate)

    given = {"model": "m", "gpu": "t4", "gpus": "auto", **given}
    made = plan_auto(plan, Arguments(**given), price)
    tried = [gpus for gpus, _ in made.provenance["gpus_tried"]]
    return tried, made.provenance["gpus_chosen"]


def test_with_a_price_numbers_are_doubled_while_samples_get_cheaper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Search, "is_too_much", lambda *_: False)
    rates = {1: 10.0, 2: 25.0, 4: 60.0, 8: 110.0}
    tried, taken = chosen(rates, price=0.35)
    assert tried == ["1", "2", "4", "8"]  # 10, 12.5, 15 and 13.75 for each
    assert taken.startswith("4, the cheapest")
    assert chosen(rates) == (["1"], "1, the fewest that fit")
    # As cheap as fewer is not cheaper; what does not divide the batch is passed over.
    assert chosen({1: 1.0, 2: 2.0}, price=1)[1].startswith("1, ")
    tried, taken = chosen({1: 1.0, 2: 3.0}, price=1, effective_batch_size=6)
    assert (tried, taken[0]) == (["1", "2", "4"], "2")
    # What no engine trains on several, one trains.
    assert chosen({1: 1.0}, price=1)[0] == ["1", "2"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"price": 0.5}, "add gpus='auto'"),
        ({"price": 0.5, "gpus": 8}, "add gpus='auto'"),
        ({"price": 0, "gpus": "auto"}, "must be a number above 0"),
        ({"price": "much", "gpus": "auto"}, "must be a number above 0"),
        ({"gpus": "auto", "objective": "length"}, "at a given length"),
        ({"gpus": "auto", "link": "pcie-9"}, "Nearest: pcie"),
    ],
)
def test_what_is_wrong_is_refused(given: dict[str, Any], says: str) -> None:
    given = {"gpu": "a100-80gb", **given}
    if given.get("objective") == "length":
        given["batch"] = None
    with pytest.raises(budgetfit.BudgetfitError, match=says):
        planned(**given)


def test_an_estimate_takes_no_decision() -> None:
    with pytest.raises(InputError, match="is a decision that plan takes"):
        estimate_settings(Wide(), gpus="auto", gpu="t4")
