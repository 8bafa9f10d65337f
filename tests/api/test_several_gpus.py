"""Plans for several GPUs: what is asked for, what is refused, what one GPU is."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import budgetfit
from budgetfit import InputError, Loop, Recipe, TraceError
from budgetfit.api.compare import compare
from budgetfit.api.estimate import estimate_settings
from budgetfit.api.in_loop import plan_in_loop
from budgetfit.applying.sharding import for_batch_norms
from budgetfit.core.budget import Budget
from budgetfit.core.loop import RUN
from budgetfit.core.plan import Plan
from budgetfit.core.plan_json import from_json, to_json
from budgetfit.inputs.engines_for_model import worth_tracing
from budgetfit.inputs.several_gpus import (
    find_counted_gpu,
    parallelisms,
    parse_gpus,
    samples_per_rank,
)
from tests.api.planned import plan_of_config
from tests.models import EXAMPLES, MIB, Mebi, alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("kept_traces")


@pytest.mark.parametrize(
    ("value", "found"),
    [(1, (1, 1)), (8, (8, 1)), ("8", (8, 1)), ("8x4", (8, 4)), ("1X3", (1, 3))],
)
def test_gpus_are_counted(value: int | str, found: tuple[int, int]) -> None:
    assert parse_gpus(value) == found


@pytest.mark.parametrize(
    "value", [0, -1, True, 2.0, "", "8x", "8x2x2", "many", None, "9" * 5000]
)
def test_other_numbers_are_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"gpus must be|8x4"):
        parse_gpus(value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("rtx-4090", ("rtx-4090", 1, 1)),
        ("RTX 4090 x 2", ("rtx-4090", 2, 1)),
        ("h100-80gbx8x4", ("h100-80gb", 8, 4)),
        ("gtx1080", ("gtx-1080", 1, 1)),  # and not 1,080 of a gt
        ("gtx1080X2", ("gtx-1080", 2, 1)),
    ],
)
def test_cards_are_counted(text: str, found: tuple[str, int, int]) -> None:
    counted = find_counted_gpu(text)
    assert (counted.gpu.name, *counted[1:]) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rtx-409x2", "'rtx-409' is not in the card table"),
        ("rtx-4090x0", "Write rtx-4090x8 for eight"),
        ("h100-80gbx100000", "16,384 at most; got 100000"),
        ("a100x2", "name of 2 cards"),
    ],
)
def test_other_cards_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        find_counted_gpu(text)


def test_what_there_is_to_choose_from() -> None:
    assert parallelisms(1, "auto") == ()
    engines = [each.engine for each in parallelisms(8, "auto")]
    assert engines == ["ddp", *["fsdp2"] * 8]
    offloaded = [each.cpu_offload for each in parallelisms("8x4", "fsdp2")]
    assert offloaded == sorted(offloaded)  # last: tried where no other fits
    assert offloaded.count(True) == 4
    assert {each.shard for each in parallelisms("8x4", "fsdp2")} == {None, 8}
    assert parallelisms("8x4", "ddp")[0].nodes == 4
    stages = [
        (each.zero_stage, each.overlap_comm)
        for each in parallelisms("8x4", "deepspeed")
    ]
    assert stages == [(1, None), (2, None), (3, None), (1, True), (2, True)]
    assert [each.zero_stage for each in parallelisms(8, "zero2")] == [2, 2]
    assert [each.zero_stage for each in parallelisms(8, "zero3")] == [3]
    with pytest.raises(InputError, match="Tensor, context, pipeline and expert"):
        parallelisms(8, "tp")


def test_an_engine_that_cannot_fit_is_not_traced() -> None:
    candidates, model = parallelisms(8, "auto"), Mebi()
    large, small, none = (
        Budget(total_bytes=1600 + size << 20, context_bytes=0, headroom_bytes=0)
        for size in (100, 2, 1)  # beside NCCL's memory
    )
    assert worth_tracing(candidates, model, large) == candidates
    for budget in (small, none):
        found = worth_tracing(candidates, model, budget)
        assert {e.reshard_after_forward for e in found if not e.cpu_offload} == {True}
        assert [e for e in found if e.cpu_offload] == [*candidates[-4:]]
        assert found[0].engine == "fsdp2"
    assert worth_tracing((), model, large) == ()


def test_an_effective_batch_is_divided_among_ranks() -> None:
    assert samples_per_rank(None, 8) is None
    assert samples_per_rank(64, 8) == 8
    with pytest.raises(InputError, match="Use 96 or 104"):
        samples_per_rank(100, 8)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"compile": "model"}, "compile='model' is not planned for"),
        ({"compile": "blocks", "engine": "zero2"}, "compile='blocks' is not planned"),
        ({"optimizer_in_backward": True}, "optimizer_in_backward="),
        ({"effective_batch_size": 7}, "no multiple of 2 ranks"),
        (
            {"batch_size": 4, "effective_batch_size": 12},
            r"batch_size 4 does not divide effective_batch_size 12 over 2 ranks \(6 on",
        ),
        ({"compile": "blocks", "engine": "ZeRO-2"}, "compile='blocks' is not planned"),
        ({"engine": "tp"}, "Tensor, context, pipeline"),
        ({"link": "pcie-9"}, "Nearest: pcie, pcie-5, pcie-4"),
        ({"link": "infiniband"}, "connects machines, and all GPUs are in one"),
    ],
)
def test_refused_before_anything_is_traced(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        budgetfit.plan(Mebi(), "1GB", gpus=2, **given)


@pytest.mark.parametrize("gpus", [{}, {"gpus": 1}])
def test_an_engine_for_one_gpu_is_refused(gpus: dict[str, int]) -> None:
    with pytest.raises(InputError, match="engine='ddp' is for several GPUs"):
        budgetfit.plan(Mebi(), "1GB", engine="ddp", **gpus)
    with pytest.raises(InputError, match="engine='zero2' is for several GPUs"):
        compare(Mebi(), ["rtx-4090", "t4"], engine="zero2")


def planned(**given: Any) -> Plan:
    return budgetfit.plan(
        Mebi(), "3GB", batch=EXAMPLES["mebi"].batch, precision="fp32", **given
    )


def test_one_gpu_is_the_plan_without_gpus() -> None:
    one, plain = planned(gpus=1), planned()
    assert one.recipe == plain.recipe
    assert one.recipe.parallelism is None
    assert one.estimate == plain.estimate
    assert "rank" not in str(one)


@pytest.mark.parametrize(("vram", "each"), [("1800MiB", True), ("3GB", False)])
def test_gradients_are_whole_until_the_last_micro_batch_where_they_fit(
    vram: str, each: bool
) -> None:
    """Beside what else is there: 16 MiB of weights, and as much of gradients."""
    given: dict[str, Any] = {"gpu": "t4", "vram": vram, "headroom": 0, "gpus": 8}
    plan = budgetfit.plan(
        Mebi(16),
        **given,
        engine="fsdp2",
        batch=torch.zeros(2, 512),
        precision="fp32",
        optimizer="sgd",
        batch_size=128,
        effective_batch_size=8 * 512,
    )
    parallelism = plan.recipe.parallelism
    assert parallelism is not None
    assert parallelism.sync_each_batch == each
    assert plan.recipe.gradient_accumulation_steps == 4
    assert ("gradients reduced in each micro-batch" in str(plan)) == each


def test_shards_are_in_host_memory_where_nothing_else_fits() -> None:
    """Beside NCCL's memory: a shard of 12 MiB of weights, and Adam's states of it."""
    given: dict[str, Any] = {
        "gpu": "a100-40gb",
        "headroom": 0,
        "gpus": 2,
        "batch": torch.zeros(2, 512),
        "precision": "fp32",
        "batch_size": 2,
        "engine": "fsdp2",
    }

    def planned_in(vram: str, **further: Any) -> budgetfit.Plan:
        return budgetfit.plan(Mebi(24), vram=vram, **given, **further)

    roomy = planned_in("2600MiB", host_ram="8GiB")
    assert not roomy.recipe.cpu_offload
    plan = planned_in("2220MiB", host_ram="8GiB")
    recipe, estimate = plan.recipe, plan.estimate
    assert recipe.cpu_offload
    # Weights and gradients are pinned, in powers of two; two states are not.
    assert estimate.unpinned_bytes == pytest.approx(24 * MIB, rel=1e-3)
    assert estimate.host_bytes - estimate.unpinned_bytes == 24 * MIB
    assert estimate.optimizer_ms > roomy.estimate.optimizer_ms
    text = str(plan)
    assert "offloaded to the CPU" in text
    assert "  host memory 48 MiB" in text
    assert "OMP_NUM_THREADS sets more" in " ".join(text.split())
    # Its weights and gradients alone, or its states as well, are too much.
    for limit in ("40MiB", "80MiB"):
        with pytest.raises(budgetfit.DoesNotFitError) as refused:
            planned_in("2220MiB", host_ram=limit)
        assert refused.value.host_bytes == 0  # of the lowest peak without it
        assert refused.value.proven == (limit == "40MiB")
        first = refused.value.suggestions[0]
        assert first.arguments == {"host_ram": "1GiB"}
        assert first.recipe.cpu_offload
        assert first.host_bytes == 2 * estimate.host_bytes


def test_a_plan_for_two() -> None:
    plan = planned(gpus=2, effective_batch_size=16, link="PCIe 3.0")
    recipe = plan.recipe
    assert recipe.effective_batch_size == 16
    assert recipe.parallelism is not None
    assert recipe.parallelism.gpus == 2
    text = str(plan)
    for word in (recipe.parallelism.engine, "2 ranks", "on each rank", "NCCL"):
        assert word in text
    assert "wait for the network (PCIe 3)" in text
    loaded = from_json(to_json(alone(plan)))
    assert loaded.gpu.interconnect == "pcie-3"
    assert loaded.recipe == recipe
    estimate = plan.estimate
    assert estimate.nccl_bytes is not None
    assert estimate.reserved_bytes <= plan.budget.usable_bytes
    again = budgetfit.estimate(Mebi(), recipe, vram="3GB", batch=EXAMPLES["mebi"].batch)
    assert again.reserved_bytes == estimate.reserved_bytes
    assert not torch.distributed.is_initialized()


def test_a_link_changes_the_time_alone() -> None:
    recipe = Recipe(batch_size=2, parallelism=parallelisms(8, "ddp")[0])
    usual, slow = (
        budgetfit.estimate(
            Mebi(), recipe, gpu="a100-80gb", batch=EXAMPLES["mebi"].batch, link=link
        )
        for link in (None, "2GB/s")
    )
    assert (usual.network, slow.network) == ("NVLink 3", "2 GB/s")
    assert slow.network_ms > usual.network_ms
    assert slow.step_ms - usual.step_ms == pytest.approx(
        slow.network_ms - usual.network_ms
    )
    assert slow.reserved_bytes == usual.reserved_bytes
    assert "of it wait for the network (2 GB/s)" in str(slow)
    with pytest.raises(InputError, match="between several GPUs, and there is one"):
        budgetfit.estimate(Mebi(), gpu="t4", link="pcie")


def test_what_is_around_the_steps_is_run_alone() -> None:
    recipe = Recipe(batch_size=2, parallelism=parallelisms(2, "ddp")[0])
    given = {"gpu": "t4", "batch": EXAMPLES["mebi"].batch}
    for name, loop in (
        ("loop", "plain"),
        ("ema", Loop(ema=True)),
        ("max_grad_norm", Loop(kind="run", max_grad_norm=1.0)),
        ("evaluation_batch_size", Loop(evaluation_batch_size=4)),
        ("set_to_none", Loop(set_to_none=False)),
    ):
        with pytest.raises(InputError, match=rf"budgetfit\.Run .* Leave {name}= out"):
            budgetfit.estimate(Mebi(), recipe, loop=loop, **given)


def test_a_plan_for_deepspeed_is_read_as_it_was_saved() -> None:
    """Also where a block's backward takes less than what precedes it: not below 0."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    plan = budgetfit.plan(
        model,
        gpu="rtx-4090",
        gpus=2,
        engine="zero3",
        batch=torch.zeros(4, 512),
        batch_size=8,
    )
    assert plan.recipe.zero_stage == 3
    assert "ZeRO-3   2 ranks" in str(plan)
    verify = "torchrun --nproc-per-node 2 -m budgetfit verify plan.json"
    assert verify in str(plan)
    assert from_json(to_json(alone(plan))).recipe == plan.recipe
    with pytest.raises(InputError, match="for example engine='zero2'"):
        estimate_settings(
            model, gpu="rtx-4090", gpus=2, engine="deepspeed", batch=torch.zeros(4, 512)
        )


def test_an_estimate_has_whole_gradients_until_the_last_micro_batch() -> None:
    """As the libraries accumulate by default."""
    found, _ = estimate_settings(
        Mebi(),
        gpu="t4",
        gpus=2,
        engine="fsdp2",
        precision="fp32",
        batch=torch.zeros(2, 512),
        batch_size=2,
        effective_batch_size=8,
    )
    assert found.recipe.gradient_accumulation_steps == 2
    assert found.recipe.parallelism is not None
    assert not found.recipe.parallelism.sync_each_batch


def test_an_estimate_keeps_the_effective_batch_of_all_ranks(config: Path) -> None:
    given: dict[str, Any] = {"gpu": "rtx-4090", "gpus": 4, "engine": "ddp"}
    given |= {"max_length": 16, "precision": "fp32", "effective_batch_size": 4}
    found, _ = estimate_settings(str(config), **given)
    assert found.recipe.effective_batch_size == 4
    assert found.recipe.batch_size == 1  # two samples are made where more are free
    message = r"effective_batch_size 4 over 4 ranks \(1 on each\)"
    with pytest.raises(InputError, match=message):
        estimate_settings(str(config), batch_size=2, **given)
    own = {"batch": torch.zeros(2, 512, 512), "gpus": 4, "engine": "ddp"}
    with pytest.raises(InputError, match=message):
        estimate_settings(Mebi(), gpu="t4", effective_batch_size=4, **own)


def test_a_plan_of_many_lengths_is_over_the_lengths_and_the_ranks(config: Path) -> None:
    lengths = {8: 1, 20: 1, 32: 1}
    given: dict[str, Any] = {"gpus": 2, "batch_size": 4, "effective_batch_size": 8}
    given["checkpointing"] = "none"
    plan = plan_of_config(config, engine="fsdp2", lengths=lengths, **given)
    over = plan.varying_lengths
    assert over is not None
    assert (over.measure, over.shortest, over.longest) == ("longest first", 8, 32)
    assert plan.recipe.longest_batch_first
    assert plan.estimate.reserved_bytes >= over.reserved_bytes
    assert "all ranks wait for the longest" in " ".join(str(plan).split())
    # Other loops do not begin with the longest: their segments have to expand.
    with warnings.catch_warnings(action="error"):
        exported = plan_in_loop(Plan.from_json(plan.to_json()), "trainer").estimate
    assert exported.loop == RUN
    assert exported.recipe == plan.recipe
    assert exported.reserved_bytes != plan.estimate.reserved_bytes
    # The engine of DeepSpeed does not drop a backward.
    zero = plan_of_config(config, engine="zero2", lengths=lengths, **given)
    assert zero.varying_lengths is not None
    assert zero.varying_lengths.measure == "expandable segments"
    assert not zero.recipe.longest_batch_first


def test_an_engine_that_cannot_train_so_is_left_out_and_told() -> None:
    """Adafactor of transformers mixes the DTensors of fully_shard with tensors."""
    plan = planned(gpus=2, optimizer="adafactor", batch_size=2)
    assert plan.recipe.parallelism is not None
    assert plan.recipe.parallelism.engine == "ddp"
    (note,) = [text for text in plan.warnings if "is left out" in text]
    assert note.startswith("engine fsdp2 is left out: Mebi cannot run")
    with pytest.raises(TraceError, match="got mixed"):
        planned(gpus=2, optimizer="adafactor", batch_size=2, engine="fsdp2")


def test_batch_norms_are_sharded_with_autocast_in_place_of_a_policy() -> None:
    """Their statistics stay in fp32, and torch takes no 16-bit weights beside them."""
    norms = torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.BatchNorm2d(8))
            for _ in range(3)
        )
    )
    given: dict[str, Any] = {"gpu": "rtx-4090", "batch": torch.zeros(2, 8, 32, 32)}
    plan = budgetfit.plan(norms, gpus=2, engine="fsdp2", batch_size=2, **given)
    several = plan.recipe.parallelism
    assert several is not None
    assert (several.param_dtype, several.reduce_dtype) == (None, "fp32")
    assert plan.recipe.precision == "bf16-mixed"
    assert "in place of autocast" not in str(plan)
    policy = replace(several, param_dtype="bf16")
    with pytest.raises(InputError, match="Batch norms cannot train"):
        budgetfit.estimate(norms, replace(plan.recipe, parallelism=policy), **given)
    (other,) = for_batch_norms((several,), norms[0][0])
    assert other is several
    for name, module in norms.named_modules():
        if name.endswith("1"):
            module.eval()  # frozen: their weights may be gathered in bf16
    plan = budgetfit.plan(norms, gpus=2, engine="fsdp2", batch_size=2, **given)
    assert plan.recipe.parallelism is not None
    assert plan.recipe.parallelism.param_dtype == "bf16"
