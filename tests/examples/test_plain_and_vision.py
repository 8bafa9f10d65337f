"""The plain loop and the vision example run, learn, and say what they did."""

import re
from pathlib import Path

from tests.processes import python

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *options: str) -> str:
    done = python(str(EXAMPLES / name), *options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", text)]


def test_the_plain_loop_learns_and_its_plan_passes() -> None:
    text = run("plain_loop.py", "--steps", "20")
    assert "peak" in text
    assert losses(text)[-1] < losses(text)[0]
    assert text.splitlines()[-1].startswith("PASSED: ")


def test_the_vision_example_fits_more_pictures_with_checkpointing_and_learns() -> None:
    text = run("vision.py", "--steps", "20", "--vram", "700MiB")
    kept, recomputed = (
        int(found.replace(",", "")) for found in re.findall(r"up to ([\d,]+) pic", text)
    )
    assert recomputed > kept
    assert losses(text)[-1] < losses(text)[0]
