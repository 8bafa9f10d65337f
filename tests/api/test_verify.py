"""budgetfit.verify on the CPU: real steps, gradients, recomputation, live bytes."""

import json
import optparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit import InputError, Plan, TraceError, Verification
from budgetfit.applying.loss import chunked_loss
from budgetfit.verification import verify_plan
from tests.api.planned import CARD, KINDS, Fingerprint, planned
from tests.hazards.kinds import (
    Block,
    Counter,
    CountingHook,
    FilledCache,
    GlobalCount,
    GrowingList,
    HiddenGenerator,
    NumpyGauss,
    OwnTorchGenerator,
    PythonScale,
    RunningMean,
    Tower,
    calls,
    log,
    start,
)
from tests.models import LENGTH, VOCABULARY, Mebi, alone, gpt2_config, llama, mean

without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a CUDA device to verify on"
)


def live_bytes(check: Verification) -> tuple[list[int], list[int]]:
    """Return what was predicted and what was measured, phase by phase."""
    return (
        [row.predicted_allocated_bytes for row in check.phases],
        [row.measured_allocated_bytes for row in check.phases],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_plan_passes_with_live_bytes_as_predicted(kind: str) -> None:
    found = planned(kind)
    before = Fingerprint.of(found.model)
    check = budgetfit.verify(found.plan, device="cpu")
    assert check.passed, str(check)
    assert check.steps == 3
    assert check.gradients_match
    assert check.recomputed_blocks == len(found.plan.recipe.wrapped_blocks)
    predicted, measured = live_bytes(check)
    assert len(measured) == 9
    assert predicted == measured
    assert check.allocated_error == 0
    Fingerprint.of(found.model).assert_equal(before)


def test_too_little_memory_for_a_step_on_the_cpu_is_said_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify_plan, "free_bytes", lambda: 1)
    found = planned(next(iter(KINDS)))
    with pytest.warns(UserWarning, match=r"and 1 B are free: .* a small batch_size="):
        budgetfit.verify(found.plan, device="cpu")


def test_a_teacher_in_the_loss_is_counted_and_left_where_it_was() -> None:
    teacher = Mebi(blocks=4).requires_grad_(requires_grad=False)

    def distilled(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(batch)
        return nn.functional.mse_loss(outputs, wanted)

    plan = budgetfit.plan(
        Mebi(), gpu=CARD, batch=torch.zeros(2, 512), loss=distilled, batch_size=2
    )
    weights = {name: value.clone() for name, value in teacher.state_dict().items()}
    check = budgetfit.verify(plan, device="cpu")

    assert check.passed, str(check)
    predicted, measured = live_bytes(check)
    assert predicted == measured
    assert len(measured) == 9
    assert all(
        torch.equal(teacher.state_dict()[name], weights[name]) for name in weights
    )


def test_weights_and_optimizer_state_are_counted_exactly() -> None:
    check = budgetfit.verify(planned("gpt2").plan, device="cpu")
    rows = {row.name: row for row in check.categories}
    assert {"parameters", "gradients", "optimizer_state"} <= rows.keys()
    for row in rows.values():
        assert row.predicted_bytes == row.measured_bytes, row
    assert check.first_step_ms is not None


@pytest.mark.parametrize(
    "optimizer", ["adamw_torch", "adamw_torch_fused", "sgd", torch.optim.RMSprop]
)
def test_an_optimizer_steps_as_it_does_on_a_cpu(optimizer: Any) -> None:
    plan = budgetfit.plan(
        Mebi(),
        gpu=CARD,
        batch=torch.zeros(2, 512),
        loss=mean,
        batch_size=2,
        optimizer=optimizer,
    )
    predicted, measured = live_bytes(budgetfit.verify(plan, device="cpu"))
    assert predicted == pytest.approx(measured, rel=1e-4)  # the step counts of Adam


def test_a_block_that_saves_nothing_need_not_run_again() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    )
    plan = budgetfit.plan(
        model,
        gpu=CARD,
        batch=torch.ones(2, 3, 8, 8),
        loss=mean,
        batch_size=2,
        precision="fp32",
        checkpointing="full",
    )

    check = budgetfit.verify(plan, device="cpu")

    assert "2" in plan.recipe.wrapped_blocks
    assert check.passed, str(check)


def test_of_several_batches_the_longest_is_measured_and_others_follow() -> None:
    plan = planned("module list").plan
    lengths = (64, 512, 128)
    check = budgetfit.verify(
        plan, batch=[{"x": torch.zeros(2, n, 512)} for n in lengths], device="cpu"
    )
    assert check.passed
    assert check.shorter_batches == 2
    assert check.allocated_error == 0  # the longest is as long as was planned
    assert any("The longest of 3 batches ran first" in note for note in check.notes)


def test_a_batch_longer_than_planned_is_told() -> None:
    check = budgetfit.verify(
        planned("module list").plan, batch=torch.zeros(2, 600, 512), device="cpu"
    )
    assert any("plan for it, with batch=, max_length=" in n for n in check.notes)


def test_a_fresh_process_verifies_what_text_can_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return Net(*(nn.Linear(64, 64) for _ in range(3)))\n"
        "class Net(nn.Sequential):\n"
        "    def forward(self, input):\n"
        "        return super().forward(input).mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    plan = budgetfit.plan("net.py:build", gpu=CARD, batch_size=2, checkpointing="full")

    check = budgetfit.verify(alone(plan), device="cpu", fresh_process=True)

    assert check.passed
    assert check.fresh_process
    assert check.recomputed_blocks == 3


def test_a_fresh_process_refuses_what_cannot_be_written_down() -> None:
    plan = planned("module list").plan
    for options in ({}, {"model": Mebi()}, {"model": "m:f", "batch": torch.ones(1)}):
        with pytest.raises(InputError, match="A fresh process is handed text"):
            budgetfit.verify(plan, device="cpu", fresh_process=True, **options)


def test_it_says_that_vram_was_not_checked() -> None:
    check = budgetfit.verify(planned("sequential").plan, device="cpu", steps=4)
    assert check.steps == 4
    assert check.measured_process_bytes is None
    assert any("VRAM was not checked" in note for note in check.notes)
    assert "PASSED" in str(check)
    assert "VRAM was not checked" in str(check)


def test_gradients_are_told_where_live_bytes_cannot_be_replayed() -> None:
    # fake tensors on a CPU refuse a grouped product in fp32; real ones do it
    example = planned("mixtral")
    plan = budgetfit.plan(
        example.model,
        gpu=CARD,
        batch=example.plan.source.batch,
        batch_size=2,
        precision="fp32",
        checkpointing=["model.layers.0"],
    )

    check = budgetfit.verify(plan, device="cpu")

    assert check.passed
    assert check.recomputed_blocks == 1
    predicted, measured = live_bytes(check)
    assert predicted == measured
    assert check.phases or any("not compared" in note for note in check.notes)


@pytest.mark.parametrize("by_name", [True, False])
def test_an_optimizer_that_compiles_its_step_is_run_without(by_name: bool) -> None:
    optim = pytest.importorskip("torchao", reason="not installed").optim
    plan = budgetfit.plan(
        Mebi(2),
        gpu=CARD,
        batch=torch.zeros(2, 512),
        loss=mean,
        batch_size=2,
        optimizer="adamw_torch_8bit" if by_name else optim.AdamW8bit,
    )
    check = budgetfit.verify(plan, device="cpu")
    assert check.passed
    assert check.gradients_match
    assert not check.phases
    (note,) = [each for each in check.notes if "Live bytes were not compared" in each]
    assert "torchao compiles its step" in note
    assert "live bytes are compared" not in str(check)


def test_parameters_that_the_optimizer_leaves_out_are_counted_and_compared() -> None:
    plan = budgetfit.plan(
        (model := Mebi(3)),
        gpu=CARD,
        batch=(batch := torch.randn(2, 512)),
        loss=mean,
        batch_size=2,
        effective_batch_size=2,
        optimizer=lambda them: torch.optim.SGD(them[:2], lr=0.1),
    )
    text = "1 of 3 trainable parameters are in no optimizer"
    assert any(text in each for each in plan.warnings)
    assert budgetfit.verify(plan, model, device="cpu").gradients_match
    with budgetfit.apply(plan, model) as run:
        with pytest.warns(UserWarning, match=text):
            run.step(batch)
        run.step(batch)  # said once


def plan_of(model: nn.Module, checkpointing: str | list[str] = "full") -> Plan:
    batch = torch.ones(2, 8)
    asked: dict[str, Any] = {"gpu": CARD, "batch_size": 2, "precision": "fp32"}
    return budgetfit.plan(model, batch=batch, checkpointing=checkpointing, **asked)


def checked(kind: type[Block]) -> tuple[Verification, Tower]:
    model = start(kind)
    return budgetfit.verify(plan_of(model), device="cpu"), model


@pytest.mark.parametrize(
    "kind",
    [
        *(PythonScale, NumpyGauss, Counter, RunningMean, OwnTorchGenerator),
        *(GrowingList, CountingHook, GlobalCount),
    ],
)
def test_blocks_whose_state_is_kept_pass_and_are_left_as_they_were(
    kind: type[Block],
) -> None:
    check, model = checked(kind)
    assert not log
    assert calls == {"global": 0, "hook": 0}
    assert check.passed, str(check)
    assert check.max_gradient_error == 0
    assert getattr(model.blocks[0], "count", 0) == 0


class ReplacedBuffer(Tower):
    """An average that the forward does not write to but replaces."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return super().forward(x - self.average)


def test_a_buffer_that_the_forward_replaces_is_as_before_in_each_run() -> None:
    model = ReplacedBuffer()
    check = budgetfit.verify(plan_of(model), device="cpu")
    assert check.passed, str(check)
    assert check.max_gradient_error == 0
    assert not model.average.any()


def test_a_recomputation_that_is_not_a_repetition_fails() -> None:
    check, _ = checked(HiddenGenerator)
    assert not check.passed
    assert check.gradients_match is False
    assert check.max_gradient_error is None  # no gradient was made
    assert "FAILED: gradients differ" in str(check)
    assert "Block 'blocks.3' did something else" in " ".join(check.notes)


class FilledInALibrary(FilledCache):
    """Computes its mask in the first forward alone; a library's object holds it."""

    def prepare(self) -> None:
        self.held = optparse.Values({"cache": {}})

    @property
    def cache(self) -> dict[str, torch.Tensor]:
        return vars(self.held)["cache"]


def test_a_block_that_saves_other_tensors_is_not_planned() -> None:
    with pytest.raises(TraceError, match=r"^Tower cannot be recomputed: a block saves"):
        checked(FilledInALibrary)


def test_what_only_noise_could_excuse_is_not_checked() -> None:
    model = nn.Sequential(HiddenGenerator(), Tower(Block))  # the first one is kept
    plan = plan_of(model, ["1.blocks.0", "1.blocks.1"])

    check = budgetfit.verify(plan, device="cpu")

    assert not check.passed
    assert check.gradients_match is None
    assert check.gradient_noise is not None
    assert check.gradient_noise > 0.01
    assert "NOT CHECKED: gradients of the unmodified model differ" in str(check)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    alone(planned("module list").plan).save(path)
    return path


def test_a_loaded_plan_is_verified_with_its_model_and_batch(saved: Path) -> None:
    plan = Plan.load(saved)
    batch = torch.zeros(2, 512, 512)
    check = budgetfit.verify(plan, Mebi(), batch=batch, loss=mean, device="cpu")
    assert check.passed
    assert check.allocated_error == 0


def test_a_loaded_plan_is_not_verified_with_another_batch(saved: Path) -> None:
    # made from the model: rows of 512, where the plan had 512 rows of 512 a sample
    with pytest.raises(
        InputError, match=r"batch \[2, 512, 512\].*verify\(plan, model, b"
    ):
        budgetfit.verify(Plan.load(saved), Mebi(), loss=mean, device="cpu")


def test_a_loaded_plan_needs_its_model(saved: Path) -> None:
    with pytest.raises(InputError, match=r"Hand it in: verify\(plan, model\)"):
        budgetfit.verify(Plan.load(saved), loss=mean, device="cpu")


def test_a_plan_from_a_config_is_verified_with_random_weights() -> None:
    config = gpt2_config(n_positions=LENGTH, n_layer=2)
    plan = budgetfit.plan(config, gpu="t4", batch_size=2, checkpointing="full")
    check = budgetfit.verify(plan, device="cpu")
    assert plan.recipe.precision == "fp16-mixed"
    assert check.passed
    assert check.recomputed_blocks == 2
    with pytest.raises(InputError, match="no model with weights"):
        budgetfit.apply(plan)


def in_parts(parts: int) -> tuple[Plan, nn.Module, dict[str, torch.Tensor]]:
    """Return a plan with the loss in parts, its model and batch."""
    torch.manual_seed(0)
    model = llama().train()
    tokens = torch.randint(VOCABULARY, (2, 64))
    batch = {"input_ids": tokens, "labels": tokens}
    plan = budgetfit.plan(model, gpu=CARD, batch=batch, batch_size=2, precision="bf16")
    recipe = replace(plan.recipe, loss_chunks=parts)
    return plan.changed(recipe=recipe), model, batch


@pytest.mark.parametrize("parts", [8, 64])
def test_a_loss_in_parts_is_compared_with_the_models_own(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, model, batch = in_parts(parts)
    assert budgetfit.verify(plan, model, batch=batch, device="cpu").gradients_match

    def unshifted(labels: torch.Tensor, *_: object) -> torch.Tensor:
        return labels

    monkeypatch.setattr(chunked_loss, "_shifted", unshifted)
    check = budgetfit.verify(plan, model, batch=batch, device="cpu")
    assert check.gradients_match is False
    assert "With the loss in parts the gradient of" in str(check)


def test_a_plan_file_runs_no_code_that_it_names(saved: Path, tmp_path: Path) -> None:
    harm = tmp_path / "harm.py"
    harm.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef build(): ...\n")
    document = json.loads(saved.read_text())
    document["provenance"]["asked"]["model"] = f"{harm}:build"
    evil = tmp_path / "plan.json"
    evil.write_text(json.dumps(document))
    with pytest.raises(InputError, match="is not run unasked"):
        budgetfit.verify(Plan.load(evil), loss=mean, device="cpu")
    assert not (tmp_path / "ran").exists()


@without_cuda
def test_without_a_cuda_device_it_says_what_to_do() -> None:
    with pytest.raises(InputError, match=r'no CUDA device here.*say device="cpu"'):
        budgetfit.verify(planned("module list").plan)


@pytest.mark.parametrize("device", ["tpu", "meta", "xpu", 3.5])
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(InputError, match="cannot be verified on"):
        budgetfit.verify(planned("module list").plan, device=device)


@pytest.mark.parametrize("steps", [2, 0, "3", 3.0, True])
def test_fewer_than_three_steps_are_refused(steps: Any) -> None:
    with pytest.raises(InputError, match="whole number of at least 3"):
        budgetfit.verify(planned("module list").plan, steps=steps, device="cpu")


def test_another_model_is_refused() -> None:
    plan = planned("module list").plan
    with pytest.raises(InputError, match="Plan again for this model"):
        budgetfit.verify(plan, Mebi(2), device="cpu")
    with pytest.raises(InputError, match="on the meta device"):
        budgetfit.verify(plan, Mebi().to("meta"), device="cpu")


def test_progress_is_told() -> None:
    told: list[str] = []
    budgetfit.verify(planned("sequential").plan, device="cpu", progress=told.append)
    assert any("gradients" in line for line in told)
    assert any("3 real steps of batch 2" in line for line in told)


def test_a_batch_that_is_a_tuple_of_one_mapping_is_one_batch() -> None:
    class ReadsAll(nn.Linear):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(batch["x"])

    batch = ({"x": torch.ones(2, 4)},)
    model = ReadsAll(4, 3)
    plan = budgetfit.plan(model, gpu=CARD, batch=batch, loss=mean, batch_size=2)
    assert budgetfit.verify(plan, device="cpu").passed
    assert budgetfit.verify(plan, batch=batch, device="cpu").passed


def _over_the_batch(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """As Dice, of all samples together."""
    return outputs.sum() / (outputs.square().sum() + batch.sum())


@pytest.mark.parametrize(
    ("loss", "steps", "said"),
    [
        (lambda outputs, _: outputs.square().mean(), 2, False),
        (lambda outputs, _: outputs.square().sum(), 2, True),
        (_over_the_batch, 2, True),
        (_over_the_batch, 1, False),
    ],
    ids=["mean", "sum", "over the batch", "not accumulated"],
)
def test_accumulating_a_loss_that_is_no_mean_over_samples_is_noted(
    loss: Callable[..., torch.Tensor], steps: int, said: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    batch = torch.rand(3, 8)
    options: dict[str, Any] = {"gpu": CARD, "precision": "fp32", "batch_size": 3}
    plan = budgetfit.plan(
        model, batch=batch, loss=loss, effective_batch_size=3 * steps, **options
    )
    check = budgetfit.verify(plan, batch=batch, device="cpu")
    assert check.gradients_match
    text = f"{steps} micro-batches of 3 do not give the gradient of one batch of 6"
    assert any(text in note for note in check.notes) == said
    assert all(module.training for module in model.modules())
