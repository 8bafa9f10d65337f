"""A file that ``accelerate launch`` takes, and a plan inside accelerate's loop."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from budgetfit.core.plan import Plan
from budgetfit.errors import InputError
from budgetfit.integrations.exports import accelerate as accelerate_module
from tests.integrations.tiny_training import (
    ACCUMULATION,
    BATCH_SIZE,
    STEPS,
    Samples,
    count_block_runs,
    mixed_segments,
    plan_for,
    runs,
    tiny_model,
)
from tests.processes import python

accelerate = pytest.importorskip("accelerate")


def trained(model: nn.Module, plan: Plan, mixed_precision: str) -> list[float]:
    """Train three steps in accelerate's own loop."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=ACCUMULATION,
        mixed_precision=mixed_precision,
        cpu=True,
    )
    optimizer = plan.make_optimizer(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=BATCH_SIZE)
    ready: Any = accelerator.prepare(model, optimizer, loader)
    losses = []
    torch.manual_seed(0)
    for batch in ready[2]:
        with accelerator.accumulate(ready[0]):
            loss = ready[0](**batch).loss
            accelerator.backward(loss)
            ready[1].step()
            ready[1].zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("kind", "precision"), [("gpt2", "fp32"), ("llama", "bf16-mixed")]
)
@pytest.mark.parametrize("loss_chunks", [1, 4])
def test_a_prepared_model_trains_as_the_plain_one(
    kind: str, precision: str, loss_chunks: int
) -> None:
    word = {"fp32": "no", "bf16-mixed": "bf16"}[precision]
    model = tiny_model(kind)
    plan = plan_for(
        model, mixed_segments(model), precision=precision, loss_chunks=loss_chunks
    )
    expected = trained(tiny_model(kind).train(), plan, word)
    counts = count_block_runs(model)
    keys = list(model.state_dict())

    with plan.prepare(model) as prepared:
        losses = trained(model, plan, word)

    assert prepared.model is model
    assert runs(counts) == [2, 2, 2, 1]
    assert len(losses) == STEPS * ACCUMULATION
    tolerance = 1e-6 if loss_chunks == 1 else 1e-4
    assert losses == pytest.approx(expected, rel=tolerance)
    assert list(model.state_dict()) == keys


SCRIPT = """
import accelerate, torch
accelerator = accelerate.Accelerator()
model, = accelerator.prepare(torch.nn.Linear(2, 2)),
accelerator.backward(model(torch.ones(2)).sum())
print("precision", accelerator.mixed_precision, accelerator.num_processes)
"""


@pytest.mark.parametrize(
    ("precision", "word"), [("fp32", "no"), ("bf16", "no"), ("bf16-mixed", "bf16")]
)
def test_accelerate_reads_the_file(precision: str, word: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file  # noqa: PLC0415

    plan = plan_for(tiny_model("gpt2"), precision=precision)
    path = tmp_path / "accelerate.yaml"
    path.write_text(accelerate_module.export_text(plan, "plan.json"))
    config = load_config_from_file(str(path))
    assert config.mixed_precision == word
    assert config.num_processes == 1
    assert config.distributed_type.value == "NO"


def test_accelerate_launch_runs_a_script_with_the_file(tmp_path: Path) -> None:
    plan = plan_for(tiny_model("gpt2"), precision="bf16-mixed")
    config = tmp_path / "accelerate.yaml"
    config.write_text(accelerate_module.export_text(plan, "plan.json"))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--cpu"]

    result = python(*launch, str(script))

    assert result.returncode == 0, result.stderr
    assert "precision bf16 1" in result.stdout


def test_the_file_says_what_the_script_needs() -> None:
    text = accelerate_module.export_text(plan_for(tiny_model("gpt2")), "p.json")
    assert '#     plan = budgetfit.Plan.load("p.json")' in text
    assert f"Accelerator(gradient_accumulation_steps={ACCUMULATION})" in text
    assert f"DataLoader(dataset, batch_size={BATCH_SIZE}, shuffle=True)" in text


def test_only_what_the_installed_accelerate_knows_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = dataclasses.make_dataclass("ClusterConfig", ["num_processes", "use_cpu"])
    monkeypatch.setattr(accelerate_module, "import_attribute", lambda *_: old)
    config = plan_for(tiny_model("gpt2")).to_accelerate_config()
    assert config == {"num_processes": 1, "use_cpu": False}


def test_groups_of_parameters_are_refused() -> None:
    model = tiny_model("gpt2")
    plan = plan_for(model)
    for parameters in (
        [{"params": list(model.parameters())}],
        model.named_parameters(),
    ):
        with pytest.raises(InputError, match=r"takes model.parameters\(\).*function"):
            plan.make_optimizer(parameters)
