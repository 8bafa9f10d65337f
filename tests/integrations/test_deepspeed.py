"""DeepSpeed's own config class accepts what is exported."""

import importlib.util
import json
import socket
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from budgetfit.integrations.exports import deepspeed as deepspeed_module
from tests.integrations.tiny_training import (
    ACCUMULATION,
    BATCH_SIZE,
    plan_for,
    tiny_model,
)
from tests.processes import python

PRECISIONS = ("fp32", "tf32", "bf16", "as-is", "bf16-mixed", "fp16-mixed")


def read_by_deepspeed(config: dict[str, Any] | str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own imports
        pytest.importorskip("deepspeed")
        from deepspeed.runtime.config import DeepSpeedConfig  # noqa: PLC0415

    return DeepSpeedConfig(config)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_deepspeed_reads_the_config(precision: str) -> None:
    plan = plan_for(tiny_model("gpt2"), precision=precision)
    config = read_by_deepspeed(plan.to_deepspeed_config())
    assert config.train_micro_batch_size_per_gpu == BATCH_SIZE
    assert config.gradient_accumulation_steps == ACCUMULATION
    assert config.train_batch_size == BATCH_SIZE * ACCUMULATION
    assert config.zero_optimization_stage == 0
    assert config.gradient_clipping == 1.0
    assert config.torch_autocast_enabled == precision.endswith("mixed")
    # Its older blocks would keep every weight twice.
    assert not config.bfloat16_config.enabled
    assert not config.float16_config.enabled


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", "bfloat16"), ("fp16-mixed", "float16")]
)
def test_mixed_precision_is_deepspeeds_autocast(precision: str, dtype: str) -> None:
    plan = plan_for(tiny_model("gpt2"), precision=precision)
    config = read_by_deepspeed(plan.to_deepspeed_config())
    assert str(config.torch_autocast_dtype) == f"torch.{dtype}"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # DeepSpeed leaves it open
def test_the_exported_file_is_read_too(tmp_path: Path) -> None:
    plan = plan_for(tiny_model("gpt2"))
    text = deepspeed_module.export_text(plan, "plan.json")
    path = tmp_path / "deepspeed.json"
    path.write_text(text)
    config = read_by_deepspeed(str(path))
    assert config.train_batch_size == BATCH_SIZE * ACCUMULATION
    comment = json.loads(text)["_comment"]
    assert any("Not predicted" in line for line in comment)
    assert {"import budgetfit", "import deepspeed"} <= set(comment)


def test_a_deepspeed_without_autocast_gets_its_older_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepspeed_module, "find_spec", lambda _: object())
    old = types.SimpleNamespace()
    monkeypatch.setattr(deepspeed_module, "import_attribute", lambda *_: old)
    plan = plan_for(tiny_model("gpt2"), precision="bf16-mixed")
    config = plan.to_deepspeed_config()
    assert config["bf16"] == {"enabled": True}
    assert "torch_autocast" not in config


PROGRAM = """
import json, warnings
import deepspeed.ops
import torch
from tests.integrations.page import SECTIONS
from tests.integrations.tiny_training import *

def train(planned):
    model = tiny_model("llama")
    plan = plan_for(model, mixed_segments(model), precision="bf16-mixed")
    counts = count_block_runs(model)
    code = SECTIONS["DeepSpeed"]
    if not planned:
        assert code.count("plan.prepare(model)") == 1
        code = code.replace("plan.prepare(model)", "")
    names = {"model": model.train(), "plan": plan}
    exec(code, names)
    engine, losses = names["engine"], []
    for batch in torch.utils.data.DataLoader(Samples(), batch_size=BATCH_SIZE):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return runs(counts), losses

deepspeed.ops.__compatible_ops__.clear()  # it would compile for half a minute
print("TRAINED", json.dumps([train(False), train(True)]))
"""


def test_the_engine_of_the_page_recomputes_exactly_the_planned_blocks() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    alone |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}

    result = python("-W", "ignore", "-c", PROGRAM, **alone)

    assert result.returncode == 0, result.stderr[-3000:]
    line = next(row for row in result.stdout.splitlines() if "TRAINED" in row)
    plain, planned = json.loads(line.partition("TRAINED")[2])
    assert plain[0] == [1, 1, 1, 1]
    assert planned[0] == [2, 2, 2, 1]
    assert planned[1] == pytest.approx(plain[1], rel=1e-6)
