"""Exports that need no budgetfit at run time, where transformers' arguments do."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

pytest.importorskip("accelerate")  # the Trainer needs it

from pathlib import Path

from torch import nn

from budgetfit.core.plan import Alternative, Plan
from budgetfit.core.recipe import Segment
from budgetfit.integrations.exports import every_n_layers as plain_module
from budgetfit.integrations.exports import trainer as trainer_module
from budgetfit.integrations.exports.every_n_layers import trainer_checkpointing
from budgetfit.planning.search.policies import every_nth
from tests.integrations.adapters import QUIET as QUIET_PEFT
from tests.integrations.adapters import adapter
from tests.integrations.tiny_training import (
    KINDS,
    QUIET_ARGUMENTS,
    STEPS,
    Samples,
    blocks_of,
    count_block_runs,
    defined_by,
    losses_of,
    make_quiet,
    plan_for,
    runs,
    tiny_model,
)
from tests.reporting.sample_plans import GIB, sample_estimate


def every(model: nn.Module, n: int, **recipe: Any) -> Plan:
    """A plan of every n-th block, with the model that it was made from."""
    segments = every_nth(blocks_of(model), n) if n else ()
    return replace(
        plan_for(model, segments, **recipe), source=SimpleNamespace(model=model)
    )


def offloading(model: nn.Module, *rows: Alternative) -> Plan:
    """A plan that no argument says, with alternatives."""
    segments = tuple(Segment((name,), mode="offload") for name in blocks_of(model))
    plan = replace(every(model, 0), alternatives=rows)
    recipe = replace(plan.recipe, segments=segments)
    return replace(plan, recipe=recipe, estimate=replace(plan.estimate, recipe=recipe))


def second(model: nn.Module, *, ms: float = 6600.0, **recipe: Any) -> Alternative:
    """Every second block, as a row of a plan's alternatives."""
    mine = replace(every(model, 2).recipe, **recipe)
    estimate = sample_estimate(mine, reserved_bytes=9 * GIB, step_ms=ms)
    return Alternative(label="every 2nd", estimate=estimate, fits=True)


def trained(text: str, model: nn.Module) -> list[float]:
    names = defined_by(text)
    built = names["make_trainer"](model, Samples())
    make_quiet(built, QUIET_ARGUMENTS)
    return losses_of(built)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, [1, 1, 1, 1]),
        (1, [2, 2, 2, 2]),
        (2, [2, 1, 2, 1]),
        (3, [2, 1, 1, 2]),
        (4, [2, 1, 1, 1]),
    ],
)
def test_the_trainer_recomputes_every_nth_block_by_itself(
    kind: str, n: int, expected: list[int]
) -> None:
    model = tiny_model(kind)
    text = trainer_module.export_text(every(model, n), "plan.json")
    counts = count_block_runs(model)
    losses = trained(text, model)
    assert "budgetfit" not in text
    assert "callbacks" not in text
    assert ('"every_n_layers": ' + str(n) in text.replace("'", '"')) == (n > 1)
    assert runs(counts) == expected
    assert len(losses) == STEPS


def test_layers_with_batch_norms_are_left_to_the_callback() -> None:
    """Transformers' own checkpointing would count each batch twice in them."""
    model: Any = tiny_model("llama")
    model.model.layers[2].norm = nn.BatchNorm1d(4)
    assert trainer_checkpointing(every(model, 1)) is None
    assert trainer_checkpointing(every(model, 3)) is not None  # layers 0 and 3
    assert trainer_checkpointing(every(model, 0)) is not None


@pytest.mark.filterwarnings("ignore")  # no card: nothing to pin memory for
@pytest.mark.parametrize("kind", KINDS)
def test_the_printed_program_runs_as_it_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model(kind)
    model.save_pretrained(tmp_path / "model")
    plan = every(model, 2)
    plan = replace(
        plan,
        provenance={"asked": {"model": str(tmp_path / "model")}},
        model=replace(plan.model, class_name=type(model).__name__),
    )
    text = trainer_module.export_text(replace(plan, source=None), "plan.json")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}

    exec(compile(text, "settings.py", "exec"), names)

    assert "budgetfit" not in text.replace(str(tmp_path), "")
    assert len(names["samples"]) == 3 * plan.recipe.effective_batch_size
    assert list((tmp_path / "out").iterdir())  # what it has trained


@QUIET_PEFT
def test_the_blocks_of_a_model_with_adapters_are_counted_below_them() -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model("llama")
    counts = count_block_runs(base)
    names = tuple(f"base_model.model.{name}" for name in blocks_of(base))
    plan = every(base, 2)
    recipe = replace(plan.recipe, segments=every_nth(names, 2))
    plan = replace(
        plan,
        adapter=adapter("lora"),
        recipe=recipe,
        estimate=replace(plan.estimate, recipe=recipe),
        model=replace(plan.model, blocks=names),
    )
    text = trainer_module.export_text(plan, "plan.json")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear"))

    trained(text, model)

    assert "budgetfit" not in text
    assert "get_peft_model(" in text
    assert runs(counts) == [2, 1, 2, 1]


def test_a_plan_that_keeps_everything_promises_no_recomputation() -> None:
    text = trainer_module.export_text(every(tiny_model("llama"), 0), "plan.json")
    assert "nothing is recomputed" in text
    assert "trainer_callback" not in text
    assert "activation_checkpointing=False," in text


def test_a_row_that_is_as_fast_stands_in_for_a_plan_that_cannot_be_said() -> None:
    model = tiny_model("llama")
    row = second(model, ms=6600 * 1.009, batch_size=2, gradient_accumulation_steps=3)
    found = trainer_checkpointing(offloading(model, row))
    assert found is not None
    assert (found.every, found.plan.recipe) == (2, row.estimate.recipe)
    assert "simpler: every 2nd block is recomputed, by transformers" in found.remark
    assert found.remark.endswith("Judged to fit too, and 0.9 % slower.")
    text = trainer_module.export_text(offloading(model, row), "plan.json")
    assert "per_device_train_batch_size=2," in text
    assert "Predicted for the process: 9.50 GiB" in text
    assert found.remark in text


@pytest.mark.parametrize(
    ("ms", "said"), [(6600 / 1.1, "10.0 % faster."), (6600.0, "as fast.")]
)
def test_speed_is_said_in_words(ms: float, said: str) -> None:
    model = tiny_model("llama")
    found = trainer_checkpointing(offloading(model, second(model, ms=ms)))
    assert found is not None
    assert found.remark.endswith(f"Judged to fit too, and {said}")


def test_checkpointing_that_was_asked_for_is_not_replaced() -> None:
    model = tiny_model("llama")
    plan = offloading(model, second(model))
    asked = {**plan.provenance, "asked": {"checkpointing": "full"}}
    assert trainer_checkpointing(replace(plan, provenance=asked)) is None
    same = replace(every(model, 2), provenance=asked)
    assert trainer_checkpointing(same) is not None


def test_the_fastest_of_such_rows_is_taken() -> None:
    model = tiny_model("llama")
    rows = [second(model, ms=6600.0 * more) for more in (1.008, 0.999, 1.004)]
    found = trainer_checkpointing(offloading(model, *rows))
    assert found is not None
    assert found.plan.estimate.step_ms == pytest.approx(6600 * 0.999)


def not_taken(model: nn.Module) -> dict[str, Alternative]:
    row = second(model)
    return {
        "slower": second(model, ms=6600 * 1.02),
        "too much": replace(row, fits=False),
        "changes training": replace(row, changes_training=True),
        "other samples per step": second(model, gradient_accumulation_steps=1),
        "loss in parts": second(model, loss_chunks=4),
        "optimizer in backward": second(
            model,
            batch_size=6,
            gradient_accumulation_steps=1,
            optimizer_in_backward=True,
        ),
        "no number": replace(
            row,
            estimate=replace(
                row.estimate,
                recipe=replace(row.estimate.recipe, segments=odd_blocks(model)),
            ),
        ),
    }


def odd_blocks(model: nn.Module) -> tuple[Segment, ...]:
    return tuple(Segment((name,)) for name in blocks_of(model)[1::2])


@pytest.mark.parametrize("kind", not_taken(tiny_model("llama")))
def test_other_rows_are_not(kind: str) -> None:
    model = tiny_model("llama")
    plan = offloading(model, not_taken(model)[kind])
    assert trainer_checkpointing(plan) is None
    assert "callbacks=[plan.trainer_callback()]" in trainer_module.export_text(
        plan, "plan.json"
    )


def test_a_library_that_cuts_the_loss_itself_takes_plans_in_parts() -> None:
    plan = every(tiny_model("llama"), 2, loss_chunks=4)
    assert trainer_checkpointing(plan) is None
    found = trainer_checkpointing(plan, cuts_loss=True)
    assert found is not None
    assert found.every == 2


def test_another_count_than_transformers_needs_the_callback() -> None:
    """transformers counts all layers, also those that a plan has left alone."""
    model = tiny_model("llama")
    plan = every(model, 2)
    some = tuple(blocks_of(model)[1:])
    recipe = replace(plan.recipe, segments=every_nth(some, 2))
    plan = replace(
        plan,
        recipe=recipe,
        estimate=replace(plan.estimate, recipe=recipe),
        model=replace(plan.model, blocks=some),
    )
    assert trainer_checkpointing(plan) is None


def test_without_the_model_nothing_is_promised() -> None:
    model = tiny_model("llama")
    assert trainer_checkpointing(replace(every(model, 2), source=None)) is None
    assert trainer_checkpointing(replace(every(model, 0), source=None)) is not None


def test_a_transformers_that_cannot_count_gets_the_callback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    kind = transformers.PreTrainedModel

    def old(self: Any, activation_checkpointing_kwargs: object = None) -> None: ...

    monkeypatch.setattr(kind, "activation_checkpointing_enable", old)
    assert trainer_checkpointing(every(model, 2)) is None
    assert trainer_checkpointing(every(model, 1)) is not None


def test_pure_bf16_needs_the_callback_where_loading_is_not_enough() -> None:
    model = tiny_model("llama")
    plan = every(model, 2, precision="bf16")
    assert trainer_checkpointing(plan) is not None
    assert trainer_checkpointing(replace(plan, adapter=adapter("lora"))) is None
    batch = {**plan.model.batch, "pixel_values": ((2, 3, 8, 8), "torch.float32")}
    seen = replace(plan, model=replace(plan.model, batch=batch))
    assert trainer_checkpointing(seen) is None


def test_adapters_that_trl_casts_to_16_bits_need_the_callback() -> None:
    plan = every(tiny_model("llama"), 0)
    quantised = replace(plan, adapter=adapter("qlora"))
    assert trainer_checkpointing(quantised) is not None
    assert trainer_checkpointing(quantised, cuts_loss=True) is None
    lora = replace(plan, adapter=adapter("lora"))
    assert trainer_checkpointing(lora, cuts_loss=True) is not None


def test_an_optimizer_of_the_plans_own_needs_the_plan() -> None:
    model = tiny_model("llama")
    plan = every(model, 0, optimizer_in_backward=True, gradient_accumulation_steps=1)
    text = trainer_module.export_text(plan, "plan.json")
    assert trainer_checkpointing(plan) is None
    assert "optimizers=(plan.make_optimizer(" in text
    assert plain_module.MAX_SLOWDOWN == 0.01
