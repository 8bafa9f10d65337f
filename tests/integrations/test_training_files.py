"""Files for LLaMA-Factory and axolotl say what was planned, and what they cannot."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from budgetfit.core.adapter import Adapter
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import Alternative, Plan
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.integrations.exports import axolotl, llamafactory, trl
from budgetfit.utils.format_bytes import format_bytes
from tests.integrations.adapters import adapter
from tests.reporting.sample_plans import (
    BLOCKS,
    GIB,
    sample_estimate,
    sample_gpu,
    sample_lengths,
    sample_model,
    sample_plan,
    sample_recipe,
    singles,
)

yaml = pytest.importorskip("yaml")


PROGRAMS = (llamafactory, axolotl)
EVERY = range(24)
ATTENTION = ("aten._scaled_dot_product_flash_attention.default:0",)


def each(**more: Any) -> tuple[Segment, ...]:
    return tuple(Segment((name,), **more) for name in BLOCKS)


def plan_of(
    segments: tuple[Segment, ...] = (),
    *,
    found: Adapter | None = None,
    rows: tuple[Alternative, ...] = (),
    **recipe: Any,
) -> Plan:
    return sample_plan(
        estimate=sample_estimate(
            sample_recipe(segments=segments, **recipe), eval_batch_size=17
        ),
        adapter=found,
        alternatives=rows,
        provenance={"asked": {"model": "org/name"}},
    )


def row(
    label: str, segments: tuple[Segment, ...], *, fits: bool = True, **more: Any
) -> Alternative:
    recipe = sample_recipe(
        batch_size=3, gradient_accumulation_steps=22, segments=segments
    )
    values: dict[str, Any] = {"reserved_bytes": 12 * GIB, "step_ms": 8250.0} | more
    return Alternative(
        label=label, estimate=sample_estimate(recipe, **values), fits=fits
    )


def read(program: ModuleType, plan: Plan) -> tuple[dict[str, Any], str]:
    """Return a file's values, and its comments."""
    text = program.export_text(plan, "plan.json")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    values = yaml.safe_load(text)
    assert isinstance(values, dict)
    return values, "\n".join(comments)


@pytest.mark.parametrize("program", PROGRAMS)
def test_batch_accumulation_length_and_optimizer_are_the_plans(
    program: ModuleType,
) -> None:
    values, comments = read(program, plan_of(optimizer="adamw_bnb_8bit"))

    found = {
        name: values.get(name, values.get(other))
        for name, other in (
            ("model_name_or_path", "base_model"),
            ("per_device_train_batch_size", "micro_batch_size"),
            ("per_device_eval_batch_size", "eval_batch_size"),
            ("gradient_accumulation_steps", ""),
            ("optim", "optimizer"),
            ("cutoff_len", "sequence_len"),
        )
    }
    assert list(found.values()) == ["org/name", 6, 17, 11, "adamw_bnb_8bit", 2048]
    assert isinstance(values["learning_rate"], float)
    assert "SmolLM2-1.7B, as planned for" in comments


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        ("fp32", {"bf16": False, "fp16": False}),
        ("tf32", {"bf16": False, "fp16": False, "tf32": True}),
        ("fp16-mixed", {"bf16": False, "fp16": True}),
        ("bf16-mixed", {"bf16": True, "fp16": False}),
        ("bf16", {"bf16": False, "fp16": False, "pure_bf16": True}),
    ],
)
def test_llamafactory_is_told_the_precision(
    precision: str, wanted: dict[str, bool]
) -> None:
    values, _ = read(llamafactory, plan_of(precision=precision))
    names = ("bf16", "fp16", "tf32", "pure_bf16")
    assert {name: values[name] for name in names if name in values} == wanted


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        ("fp32", (False, False, False)),
        ("tf32", (False, False, True)),
        ("bf16-mixed", (True, False, False)),
        ("bf16", (True, False, False)),
    ],
)
def test_axolotl_is_told_the_precision(
    precision: str, wanted: tuple[bool, bool, bool]
) -> None:
    values, comments = read(axolotl, plan_of(precision=precision))
    assert (values["bf16"], values["fp16"], values["tf32"]) == wanted
    assert ("half of what was predicted" in comments) == (precision == "bf16-mixed")


def test_adapters_in_bf16_are_kept_so_or_refused() -> None:
    lora = plan_of(precision="bf16", found=adapter("lora"))
    values, comments = read(axolotl, lora)
    assert values["peft_autocast_adapter_dtype"] is False
    assert "in fp32" not in comments
    _, comments = read(axolotl, plan_of(precision="bf16", found=adapter("qlora")))
    assert "adapters of a quantised base in fp32" in comments
    values, _ = read(axolotl, plan_of(found=adapter("lora")))
    assert "peft_autocast_adapter_dtype" not in values
    with pytest.raises(InputError, match=r"makes adapters in fp32.*bf16-mixed"):
        read(llamafactory, lora)
    assert read(llamafactory, plan_of(found=adapter("lora")))[0]["bf16"] is True


def test_axolotl_cannot_train_fp16_weights() -> None:
    with pytest.raises(InputError, match="fp16 weights cannot be trained"):
        read(axolotl, plan_of(precision="fp16-mixed"))
    values, _ = read(axolotl, plan_of(precision="fp16-mixed", found=adapter("lora")))
    assert (values["bf16"], values["fp16"]) == (False, True)
    old = replace(plan_of(precision="as-is"), gpu=sample_gpu(compute_capability=(7, 5)))
    with pytest.raises(InputError, match="export --to llamafactory"):
        read(axolotl, old)


ADAPTERS = [
    adapter("lora", lora_r=4, lora_alpha=9, lora_dropout=0.125),
    adapter("lora", target_modules=["q_proj", "v_proj"], quantization="int8"),
    adapter("qlora", double_quantization=False),
    adapter("qlora", target_modules=["q_proj"], prepare_for_kbit=False),
]


@pytest.mark.parametrize("wanted", ADAPTERS, ids=lambda each: each.describe())
def test_llamafactory_gets_the_adapters_back(wanted: Adapter) -> None:
    values, comments = read(llamafactory, plan_of(found=wanted))

    targets = values["lora_target"]
    bits = {4: "nf4", 8: "int8", None: None}[values.get("quantization_bit")]
    assert values["finetuning_type"] == "lora"
    assert wanted == adapter(
        wanted.method,
        lora_r=values["lora_rank"],
        lora_alpha=values["lora_alpha"],
        lora_dropout=values["lora_dropout"],
        target_modules="all-linear" if targets == "all" else targets.split(","),
        quantization=bits,
        double_quantization=values.get("double_quantization", True),
        prepare_for_kbit=values.get("upcast_layernorm", bits is None),
    )
    assert ("planned in fp32 (prepare_for_kbit)" in comments) == wanted.prepared


@pytest.mark.parametrize("wanted", ADAPTERS, ids=lambda each: each.describe())
def test_axolotl_gets_the_adapters_back(wanted: Adapter) -> None:
    values, comments = read(axolotl, plan_of(found=wanted))

    four, eight = values["load_in_4bit"], values["load_in_8bit"]
    targets = values.get("lora_target_modules", "all-linear")
    assert ("lora_target_modules" in values) != values.get("lora_target_linear", False)
    assert values["adapter"] == ("qlora" if four else "lora")
    assert wanted == adapter(
        wanted.method,
        lora_r=values["lora_r"],
        lora_alpha=values["lora_alpha"],
        lora_dropout=values["lora_dropout"],
        target_modules=targets,
        quantization="nf4" if four else "int8" if eight else None,
        double_quantization=values.get("bnb_config_kwargs", {}).get(
            "bnb_4bit_use_double_quant", True
        ),
        prepare_for_kbit=wanted.prepared or not (four or eight),
    )
    assert ("end in 16 bits here" in comments) == wanted.prepared


def test_a_pattern_of_modules_is_for_axolotl_only() -> None:
    pattern = r".*\.(up|down)_proj"
    plan = plan_of(found=adapter("lora", target_modules=pattern))
    assert read(axolotl, plan)[0]["lora_target_modules"] == pattern
    with pytest.raises(InputError, match="takes names of modules"):
        read(llamafactory, plan)


PLAIN = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}


@pytest.mark.parametrize(
    ("program", "segments", "wanted"),
    [
        (llamafactory, (), {"disable_gradient_checkpointing": True}),
        (
            llamafactory,
            each(),
            {"disable_gradient_checkpointing": False, "use_reentrant_gc": False},
        ),
        (
            llamafactory,
            each(input_on_host=True),
            {"disable_gradient_checkpointing": False, "use_unsloth_gc": True},
        ),
        (axolotl, (), {"gradient_checkpointing": False}),
        (axolotl, each(), {"gradient_checkpointing": True, **PLAIN}),
        (
            axolotl,
            each(input_on_host=True),
            {
                "gradient_checkpointing": True,
                "activation_offloading": "hidden_states",
                **PLAIN,
            },
        ),
        (
            axolotl,
            each(mode="selective", saved_ops=ATTENTION),
            {
                "gradient_checkpointing": True,
                "selective_checkpointing": {"save": ["attention"]},
                **PLAIN,
            },
        ),
    ],
)
def test_what_a_file_can_say_is_said(
    program: ModuleType, segments: tuple[Segment, ...], wanted: dict[str, Any]
) -> None:
    values, comments = read(program, plan_of(segments))
    about = {
        name: value
        for name, value in values.items()
        if "checkpointing" in name or name.endswith("_gc") or "offloading" in name
    }
    assert about == wanted
    assert "cannot be told" not in comments


UNSAYABLE = {
    "some": singles(range(16)),
    "long": tuple(Segment(BLOCKS[k : k + 4]) for k in range(0, 24, 4)),
    "offload": each(mode="offload"),
    "products": each(mode="selective", saved_ops=("aten.mm.default:0",)),
    "mixed": (*singles(range(23)), Segment((BLOCKS[23],), input_on_host=True)),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", UNSAYABLE)
def test_instead_of_what_it_cannot_say_stands_the_best_judged(
    program: ModuleType, kind: str
) -> None:
    rows = (
        row("everything kept", (), fits=False),
        row("every block recomputed", singles(EVERY)),
        row("slower", singles(EVERY), step_ms=9000.0),
        row("Chen's", UNSAYABLE["long"], step_ms=7000.0),
        replace(row("8-bit", (), step_ms=6700.0), changes_training=True),
    )
    values, comments = read(program, plan_of(UNSAYABLE[kind], rows=rows))

    size = values.get("per_device_train_batch_size", values.get("micro_batch_size"))
    assert (size, values["gradient_accumulation_steps"]) == (3, 22)
    assert "# It cannot be told this: " in comments
    found = (
        "every block recomputed, 12.00 GiB reserved and 8 samples/s; the plan: 22.00"
    )
    assert found in comments
    assert "Predicted for the process: 12.50 GiB" in comments


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_does_not_fit_is_said_not_to(program: ModuleType) -> None:
    rows = (row("every block recomputed", singles(EVERY), fits=False),)
    _, comments = read(program, plan_of(UNSAYABLE["offload"], rows=rows))
    assert (
        "It may not fit: every block recomputed needs 12.00 GiB and 23.00" in comments
    )
    values, comments = read(program, plan_of(UNSAYABLE["offload"]))
    assert "It may not fit: no setting that it has was judged" in comments
    assert values.get("micro_batch_size", 6) == 6


@pytest.mark.parametrize("program", PROGRAMS)
def test_other_samples_per_step_are_no_substitute(program: ModuleType) -> None:
    other = row("every block recomputed", singles(EVERY))
    recipe = replace(other.estimate.recipe, gradient_accumulation_steps=21)
    other = replace(other, estimate=replace(other.estimate, recipe=recipe))
    _, comments = read(program, plan_of(UNSAYABLE["some"], rows=(other,)))
    assert "It may not fit" in comments


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_row_judged_while_accumulating_stands_in_for_one_micro_batch(
    program: ModuleType,
) -> None:
    plan = plan_of(
        UNSAYABLE["some"], rows=(row("every block recomputed", singles(EVERY)),)
    )
    once = replace(plan.recipe, gradient_accumulation_steps=1)
    plan = replace(plan, recipe=once, estimate=replace(plan.estimate, recipe=once))
    (full,) = plan.alternatives
    size = once.batch_size
    twice = replace(
        full.estimate.recipe, batch_size=size, gradient_accumulation_steps=2
    )
    full = replace(full, estimate=replace(full.estimate, recipe=twice))

    values, comments = read(program, replace(plan, alternatives=(full,)))

    assert values["gradient_accumulation_steps"] == 1
    assert "Below is the nearest that was judged to fit" in comments


@pytest.mark.parametrize("program", PROGRAMS)
def test_copied_gradients_are_added_to_what_is_written(program: ModuleType) -> None:
    ddp = Parallelism(engine="ddp", gpus=2, gradient_as_bucket_view=True)
    plan = plan_of(UNSAYABLE["some"], parallelism=ddp)
    more, usable = 4 * plan.model.trainable_count, plan.budget.usable_bytes

    def other(label: str, reserved: int, step_ms: float) -> Alternative:
        found = row(label, singles(EVERY), reserved_bytes=reserved, step_ms=step_ms)
        recipe = replace(found.estimate.recipe, parallelism=ddp)
        return replace(found, estimate=replace(found.estimate, recipe=recipe))

    fits = other("fits", usable - more, 8250.0)
    fast = other("faster", usable - more + 1, 8000.0)
    _, comments = read(program, replace(plan, alternatives=(fits, fast)))
    assert "was judged to fit: fits, " in comments
    assert f"take {format_bytes(more)} more than predicted" in comments
    with pytest.raises(InputError, match=f"{format_bytes(usable)} are usable"):
        read(program, replace(plan, alternatives=(fast,)))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_loss_in_parts_is_said_to_be_missing(program: ModuleType) -> None:
    rows = (row("every block recomputed", singles(EVERY)),)
    _, comments = read(program, plan_of(singles(EVERY), loss_chunks=8, rows=rows))
    assert "output head and loss in 8 parts" in comments
    assert "Near to a loss in parts" in comments
    assert ("Nothing was predicted" in comments) != ("--use-liger-kernel" in comments)


def test_batches_are_padded_as_planned_or_the_difference_is_told() -> None:
    plan = plan_of()  # samples of 2048 tokens
    assert read(axolotl, plan)[0]["pad_to_sequence_len"] is False
    assert "multiple of 8" not in read(llamafactory, plan)[1]

    odd = {"input_ids": ((2, 1001), "int64"), "labels": ((2, 1001), "int64")}
    plan = replace(plan, model=replace(plan.model, batch=odd))
    assert "1008 for 1001: it may need more" in read(llamafactory, plan)[1]

    plan = padded_plan()
    values, _ = read(axolotl, plan)
    assert values["pad_to_multiple_of"] == 128
    assert "pad_to_sequence_len" not in values
    assert "were planned with 128" in read(llamafactory, plan)[1]
    eight = replace(plan.varying_lengths, pad_to_multiple_of=8)
    plan = plan.changed(varying_lengths=eight)
    assert "were planned with" not in read(llamafactory, plan)[1]


def padded_plan() -> Plan:
    return plan_of().changed(varying_lengths=sample_lengths(pad_to_multiple_of=128))


def test_trl_pads_as_planned() -> None:
    """Its collators pad to the longest sample unless they are told a multiple."""
    plan = padded_plan()
    for text in (trl.export_text(plan, "plan.json"), trl.dpo_text(plan, "plan.json")):
        assert "pad_to_multiple_of=128," in text
    assert "pad_to_multiple_of" not in trl.export_text(plan_of(), "plan.json")
    pytest.importorskip("trl")
    assert trl.sft_arguments(plan, {})["pad_to_multiple_of"] == 128
    assert (
        trl.sft_arguments(plan, {"pad_to_multiple_of": 64})["pad_to_multiple_of"] == 64
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_has_no_place_in_the_file_is_refused(program: ModuleType) -> None:
    picture = sample_model(batch={"pixel_values": ((2, 3, 224, 224), "float32")})
    with pytest.raises(InputError, match="pixel_values 3x224x224 float32"):
        read(program, replace(plan_of(), model=picture))
    with pytest.raises(InputError, match=r"function mine\.Optimizer"):
        read(program, plan_of(optimizer="mine.Optimizer"))
    stepping = plan_of(optimizer_in_backward=True, gradient_accumulation_steps=1)
    with pytest.raises(InputError, match="optimizer_in_backward=False"):
        read(program, stepping)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", ["nadam", "muon", "adafactor_torch"])
def test_optimizers_that_transformers_does_not_name_are_refused(
    program: ModuleType, name: str
) -> None:
    with pytest.raises(InputError, match=f"made with {name}. Plan with one of those"):
        read(program, plan_of(optimizer=name))


@pytest.mark.parametrize("program", PROGRAMS)
def test_names_end_no_comment(program: ModuleType) -> None:
    plan = plan_of()
    odd = replace(plan.model, name="x\nlearning_rate: 7\n#")
    values, comments = read(program, replace(plan, model=odd))
    assert values["learning_rate"] != 7
    assert "x learning_rate: 7 #" in comments


def test_towers_that_were_planned_are_trained_by_llamafactory() -> None:
    plan = plan_of()
    batch = {**plan.model.batch, "pixel_values": ((2, 3, 8, 8), "float32")}
    values, _ = read(
        llamafactory, replace(plan, model=replace(plan.model, batch=batch))
    )
    assert values["freeze_vision_tower"] is False
