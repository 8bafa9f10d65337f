"""Parallelism: its checks, and as a field of a recipe."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from budgetfit.core.parallelism import Parallelism
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError

FSDP2 = Parallelism(engine="fsdp2", gpus=8)
ZERO = Parallelism(engine="deepspeed", gpus=8, zero_stage=2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"engine": "tp"}, 'Use engine="fsdp2"'),
        ({"engine": "zero3"}, '"deepspeed", with zero_stage=1, 2 or 3'),
        ({"engine": "ZeRO-3"}, 'Plan ZeRO with engine="zero1", "zero2" or "zero3"'),
        ({"engine": "deepspeed"}, "given with zero_stage=1, 2 or 3; got None"),
        ({"engine": "deepspeed", "zero_stage": 4}, "zero_stage=1, 2 or 3; got 4"),
        ({"zero_stage": 2}, "no setting of fsdp2"),
        ({"engine": "ddp", "bucket_elements": 9}, "no setting of ddp"),
        (
            {"engine": "deepspeed", "zero_stage": 2, "sync_each_batch": True},
            "no setting of deepspeed",
        ),
        ({"engine": "magic"}, "is no engine"),
        ({"gpus": 1}, "parallelism=None"),
        ({"gpus": 0}, "at least 1"),
        ({"gpus_per_node": 3}, "does not divide 8 ranks"),
        ({"shard": 5}, "does not divide 8 ranks"),
        ({"reshard_after_forward": 3}, "does not divide 8 ranks"),
        ({"reshard_after_forward": 8}, "write that, or a divisor"),
        ({"shard": 4, "reshard_after_forward": 4}, "write that, or a divisor"),
        ({"param_dtype": "int8"}, "param_dtype must be one of"),
        ({"gradient_as_bucket_view": True}, "no setting of fsdp2"),
        ({"engine": "ddp", "param_dtype": "bf16"}, "no setting of ddp"),
        ({"engine": "ddp", "cpu_offload": True}, "no setting of ddp"),
        (
            {"engine": "deepspeed", "zero_stage": 2, "cpu_offload": True},
            "no setting of deepspeed",
        ),
    ],
)
def test_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        replace(FSDP2, **change)
    assert "\n" not in str(error.value)


def test_copies_of_the_weights_and_nodes() -> None:
    assert FSDP2.replicate == 1
    assert replace(FSDP2, shard=2).replicate == 4
    assert replace(FSDP2, engine="ddp").replicate == 8
    assert (FSDP2.nodes, replace(FSDP2, gpus_per_node=2).nodes) == (1, 4)


def test_effective_batch_counts_all_ranks() -> None:
    recipe = Recipe(batch_size=2, gradient_accumulation_steps=3, parallelism=FSDP2)
    assert recipe.effective_batch_size == 48
    assert recipe.samples_per_rank == 6
    assert replace(recipe, parallelism=None).effective_batch_size == 6


def test_deepspeeds_own_buckets_can_be_written() -> None:
    own = 500_000_000
    asked = Parallelism(engine="deepspeed", gpus=2, zero_stage=2, bucket_elements=own)
    assert asked.bucket_elements == own


def test_deepspeed_trains_in_its_own_half_precision() -> None:
    zero = ZERO
    in_bf16 = zero.in_precision(find_precision("bf16-mixed"))
    assert in_bf16 == replace(zero, param_dtype="bf16")
    assert zero.in_precision(find_precision("fp32")) is zero
    as_they_are = replace(FSDP2, reduce_dtype="fp32")  # what batch norms need
    assert as_they_are.in_precision(find_precision("bf16-mixed")) is as_they_are
    assert as_they_are.in_precision(find_precision("bf16")) == FSDP2
    Recipe(batch_size=1, precision="bf16-mixed", parallelism=in_bf16)
    Recipe(batch_size=1, parallelism=zero)
    for precision, given in (("bf16-mixed", zero), ("fp32", in_bf16)):
        with pytest.raises(InputError, match="use param_dtype="):
            Recipe(batch_size=1, precision=precision, parallelism=given)
    offloaded = (Segment(("0",), mode="offload"),)
    Recipe(batch_size=1, parallelism=zero, segments=offloaded)
    with pytest.raises(InputError, match="ZeRO-3 with activations offloaded"):
        Recipe(
            batch_size=1, parallelism=replace(zero, zero_stage=3), segments=offloaded
        )
    with pytest.raises(InputError, match="DeepSpeed is planned in fp32, tf32, bf16-"):
        Recipe(batch_size=1, precision="bf16", parallelism=in_bf16)


@pytest.mark.parametrize("reshard", [True, False, 4])
def test_a_recipe_is_read_as_it_was_written(reshard: bool | int) -> None:
    parallelism = replace(FSDP2, reshard_after_forward=reshard)
    recipe = Recipe(batch_size=2, parallelism=parallelism)
    adapter = TypeAdapter(Recipe)
    text = adapter.dump_json(recipe)
    assert adapter.validate_json(text, strict=True, extra="forbid") == recipe


def test_a_recipe_takes_no_other_object() -> None:
    with pytest.raises(InputError, match="must be a Parallelism"):
        Recipe(batch_size=1, parallelism="fsdp2")  # type: ignore[arg-type]
    assert Recipe(batch_size=1, compile="blocks", parallelism=FSDP2).compile == "blocks"
    for compiled, engine in (("model", FSDP2), ("blocks", ZERO)):
        with pytest.raises(InputError, match=f"compile='{compiled}' is not planned"):
            Recipe(batch_size=1, compile=compiled, parallelism=engine)
    with pytest.raises(InputError, match="loss_chunks is planned for DDP and FSDP2"):
        Recipe(batch_size=1, loss_chunks=2, parallelism=ZERO)
    with pytest.raises(InputError, match="engine keeps them"):
        Recipe(batch_size=1, longest_batch_first=True, parallelism=ZERO)


def test_no_scaler_unscales_gradients_in_host_memory() -> None:
    offloaded = replace(FSDP2, cpu_offload=True)
    assert "offloaded to the CPU" in offloaded.describe()
    assert Recipe(batch_size=1, parallelism=offloaded).cpu_offload
    assert not Recipe(batch_size=1, parallelism=FSDP2).cpu_offload
    with pytest.raises(InputError, match="or cpu_offload=False"):
        Recipe(batch_size=1, precision="fp16-mixed", parallelism=offloaded)
