"""Training loops, traced: what each of them holds, and that nothing is left behind."""

# ruff: noqa: PLC0415 - libraries that few tests need

import importlib.util
import inspect
import logging
import os
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import budgetfit
from budgetfit.core.loop import KINDS, Loop, LoopKind
from budgetfit.traces.loops import trl_kernels
from budgetfit.traces.loops.collators import collator
from budgetfit.traces.loops.library_state import modules_restored

MIB = 1 << 20
WIDTH, CLASSES, SAMPLES = 512, 4096, 64
LOGITS = SAMPLES * CLASSES * 4
INPUTS = SAMPLES * WIDTH * 4
WEIGHTS = WIDTH * WIDTH * 4 + WIDTH * CLASSES * 4
LIBRARIES: tuple[LoopKind, ...] = ("trainer", "accelerate", "lightning")


class Classifier(nn.Module):
    """Returns loss and logits, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x).relu())
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def estimate(
    kind: LoopKind, accumulation: int = 1, precision: str = "fp32", **settings: Any
) -> budgetfit.Estimate:
    with torch.device("meta"):
        model = Classifier()
    return budgetfit.estimate(
        model,
        budgetfit.Recipe(
            batch_size=SAMPLES,
            gradient_accumulation_steps=accumulation,
            precision=precision,
            optimizer="sgd",
        ),
        gpu="rtx-4090",
        batch={"x": torch.zeros(2, WIDTH), "labels": torch.zeros(2, dtype=torch.int64)},
        loop=Loop(kind=kind, **settings),
    )


def peaks(found: budgetfit.Estimate, phase: str) -> list[int]:
    """Of each step."""
    steps: dict[int, int] = {}
    for row in found.timeline.points:
        if row.phase == phase:
            steps[row.step] = max(steps.get(row.step, 0), row.allocated_bytes)
    return list(steps.values())


@pytest.fixture(autouse=True)
def no_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)


def test_a_plain_loop_holds_the_outputs_through_the_backward() -> None:
    run, plain = estimate("run"), estimate("plain")
    # After the first step the old logits are there too, until the new ones are.
    assert peaks(plain, "optimizer")[-1] >= peaks(run, "optimizer")[-1] + LOGITS
    assert plain.allocated_bytes > run.allocated_bytes


def test_outputs_that_live_into_the_next_step_do_not_add_up() -> None:
    forwards = peaks(estimate("plain"), "forward")
    assert forwards[0] + LOGITS <= forwards[1]
    assert forwards[1:] == forwards[1:2] * len(forwards[1:])


@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_libraries_loops_are_traced(kind: LoopKind, precision: str) -> None:
    found = estimate(kind, precision=precision)
    assert len(peaks(found, "optimizer")) > 2  # the traced steps, and repeated ones
    assert found.allocated_bytes > 2 * WEIGHTS
    assert found.loop.kind == kind


def test_trainers_drop_the_outputs_and_accelerate_does_not() -> None:
    kinds: tuple[LoopKind, ...] = ("plain", *LIBRARIES)
    ends = {kind: peaks(estimate(kind), "optimizer")[-1] for kind in kinds}
    assert ends["accelerate"] - ends["trainer"] >= LOGITS - MIB
    assert abs(ends["accelerate"] - ends["plain"]) <= MIB


def test_lightning_has_the_gradients_until_the_next_backward() -> None:
    lightning, run = estimate("lightning"), estimate("run")
    assert peaks(lightning, "forward")[-1] >= peaks(run, "forward")[-1] + WEIGHTS


@pytest.mark.parametrize("accumulation", [2, 3, 6])
def test_the_trainer_holds_the_inputs_of_all_micro_batches(accumulation: int) -> None:
    one, several = estimate("trainer", 2), estimate("trainer", 2 + accumulation)
    batch = [each.at_peak_bytes["batch"] for each in (one, several)]
    assert batch[1] - batch[0] >= accumulation * INPUTS


def test_an_average_is_a_second_copy_of_the_weights() -> None:
    for kind in ("plain", *LIBRARIES):
        without, found = estimate(kind), estimate(kind, ema=True)
        more = found.at_peak_bytes["parameters"] - without.at_peak_bytes["parameters"]
        assert WEIGHTS <= more <= WEIGHTS + 4096, kind


def test_zeroed_gradients_stay() -> None:
    without, found = (estimate("plain", set_to_none=each) for each in (True, False))
    assert peaks(found, "forward")[-1] >= peaks(without, "forward")[-1] + WEIGHTS


def test_clipping_takes_little() -> None:
    without, found = estimate("plain"), estimate("plain", max_grad_norm=1.0)
    difference = found.allocated_bytes - without.allocated_bytes
    assert 0 <= difference < MIB


def test_an_evaluation_leaves_blocks_that_training_does_not_use() -> None:
    without = estimate("plain")
    found = estimate("plain", evaluation_batch_size=16 * SAMPLES)
    assert found.allocated_bytes >= 2 * 16 * LOGITS
    assert found.reserved_bytes > without.reserved_bytes
    assert found.step_ms == without.step_ms


def test_an_estimate_without_a_recipe_is_for_a_plain_loop_and_says_so() -> None:
    model = Classifier()
    batch = {"x": torch.zeros(2, WIDTH), "labels": torch.zeros(2, dtype=torch.int64)}
    found = budgetfit.estimate(model, gpu="t4", batch=batch)
    assert found.loop == Loop(kind="plain")
    assert "a plain loop, which holds outputs" in str(found)
    recipe = budgetfit.Recipe(batch_size=2)
    assert budgetfit.estimate(model, recipe, gpu="t4", batch=batch).loop.kind == "run"


@pytest.mark.parametrize("kind", [*LIBRARIES, "plain"])
def test_nothing_is_left_behind(kind: LoopKind) -> None:
    import accelerate

    mine = accelerate.Accelerator(cpu=True)
    shared = dict(accelerate.state.AcceleratorState._shared_state)
    environment, disabled = dict(os.environ), logging.root.manager.disable
    random = torch.get_rng_state()
    stop = threading.Event()
    threading.Thread(target=stop.wait).start()  # the states are not put back for it
    estimate(kind, ema=True)
    stop.set()
    assert accelerate.state.AcceleratorState._shared_state == shared
    assert mine.device.type == "cpu"
    assert dict(os.environ) == environment
    assert logging.root.manager.disable == disabled
    assert "__deepcopy__" not in vars(FakeTensor)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("kind", KINDS[2:])
def test_a_library_that_is_not_installed_is_named(
    kind: LoopKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(budgetfit.InputError, match=r"pip install .*loop='plain'"):
        estimate(kind)


def test_what_a_run_alone_does_is_refused() -> None:
    recipe = budgetfit.Recipe(batch_size=2, optimizer="sgd", optimizer_in_backward=True)
    batch = {"x": torch.zeros(2, WIDTH), "labels": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(budgetfit.InputError, match="done by budgetfit"):
        budgetfit.estimate(Classifier(), recipe, batch=batch, gpu="t4", loop="plain")


def test_settings_of_other_loops_and_missing_kernels_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(budgetfit.InputError, match="Use it with sft"):
        Loop(kind="trainer", packing=True)
    with pytest.raises(budgetfit.InputError, match="trainer or sft"):
        Loop(use_liger_kernel=True)
    with pytest.raises(budgetfit.InputError, match="evaluation_batch_size out"):
        Loop(kind="sft", packing=True, evaluation_batch_size=2)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(budgetfit.InputError, match="pip install liger-kernel"):
        estimate("trainer", use_liger_kernel=True)
    with pytest.raises(budgetfit.InputError, match="samples x tokens"):
        estimate("sft", packing=True)


def test_packed_rows_are_those_of_trls_collator() -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    samples, length = 3, 7
    ids = torch.arange(samples * length).view(samples, length)
    labels = ids.clone()
    labels[:, ::4] = -100  # TRL leaves out the first token of each text
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    wanted = collate(
        [{"input_ids": row, "seq_lengths": [4, 3]} for row in ids.tolist()]
    )
    found = collator(Loop(kind="sft", packing=True))(
        {"input_ids": ids, "labels": labels}
    )
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value)
        else:
            assert found[name] == value


def test_what_kernels_replace_is_put_back() -> None:
    import transformers

    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    model, functional = llama.LlamaForCausalLM, nn.functional
    before = model.forward, llama.LlamaRMSNorm, functional.cross_entropy
    with modules_restored():
        model.forward = llama.LlamaRMSNorm = functional.cross_entropy = print
        llama.added = model.added = 1
    assert before == (model.forward, llama.LlamaRMSNorm, functional.cross_entropy)
    assert not hasattr(llama, "added")
    assert not hasattr(model, "added")
    assert transformers.LlamaForCausalLM is model


# Where a library's code is not run but described: its source is what was read. -------


def test_trls_kernels_are_those_that_a_trace_leaves_out() -> None:
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    source = inspect.getsource(kernels)
    assert all(f"def {name}(" in source for name in trl_kernels._KERNELS)
    assert "torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)" in source
    for name in trl_kernels._KERNELS:
        start = source.index(f"def {name}(")
        body = source[start : source.index("\ndef ", start + 1)]
        assert "torch.empty" not in body
        assert "tl.store" in body


def test_evaluations_of_libraries_are_as_described() -> None:
    import accelerate
    import lightning
    import transformers

    step = inspect.getsource(transformers.Trainer.prediction_step)
    assert "return (loss, None, None)" in step
    assert "convert_outputs_to_fp32" in inspect.getsource(accelerate.Accelerator)
    hook = lightning.LightningModule.on_validation_model_zero_grad
    assert "self.zero_grad" in inspect.getsource(hook)
