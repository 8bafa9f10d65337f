"""The Trainer and LoRA examples run, learn, and say what they did."""

import re
from pathlib import Path

import pytest

from tests.processes import python

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *options: str) -> str:
    done = python("-W", "ignore", str(EXAMPLES / name), *options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_trainer_example_recomputes_the_planned_blocks_and_learns() -> None:
    pytest.importorskip("accelerate")
    text = run("trainer_finetuning.py", "--steps", "10")
    first, last = re.search(r"loss (\d+\.\d+) -> (\d+\.\d+)", text).groups()
    assert float(last) < float(first)
    (count, as_planned) = re.search(
        r"blocks that ran twice per step: (\d+), as planned: (\w+)", text
    ).groups()
    assert int(count) > 0
    assert as_planned == "True"


def test_the_lora_example_trains_adapters_and_plans_less_for_four_bits() -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    text = run("lora.py", "--steps", "40")
    lora, qlora = map(float, re.findall(r"sample of \d+: (\d+\.\d+) GiB", text))
    assert qlora < lora
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", text)]
    assert losses[-1] < losses[0]
    assert "69,632 parameters are trained" in text
