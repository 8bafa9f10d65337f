"""What a user waits for: forty commands that people type, each a process of its own.

    python -m benchmarks.command_times                  all, cold and warm
    python -m benchmarks.command_times qlora gpt2       those with such a word
    python -m benchmarks.command_times --profile NAME   where the time of one goes

Cold is without a cache of traces and plans, warm the same command once more. Seconds
are of processor time (user and system), imports included; memory is the most that the
process held. Targets: median 6 s and at most 15 s cold, median 3 s and at most 6 s
warm.
"""

import argparse
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.shared import GIB, ROOT, config, table

MODULES: Final = ROOT / "tests" / "situations" / "modules.py"
_LONG: Final = "--max-length 2048 --effective-batch-size 16"
_ADAPTERS: Final = f"--lora-r 64 {_LONG}"
COMMANDS: Final = (
    "plan gpt2 --gpu t4",
    "plan gpt2 --gpu t4 --max-length 512 --effective-batch-size 32",
    "estimate gpt2 --gpu t4 --batch-size 8 --checkpointing full",
    "compare gpt2 --gpus t4,l4,rtx-4090,a100-40gb",
    "layers gpt2",
    "plan SmolLM2-1.7B --gpu rtx-4090 --precision bf16",
    f"plan Qwen3-0.6B --gpu rtx-4090 {_LONG}",
    "plan Llama-3.2-1B --gpu rtx-4090 --max-length 2048 --effective-batch-size 32",
    "plan Llama-3.2-3B --gpu rtx-4090 --max-length 2048 --effective-batch-size 32",
    "plan Llama-3.1-8B --gpu h100-80gb --precision bf16 --max-length 2048",
    "plan gemma-3-1b-it --gpu t4 --max-length 512",
    f"plan Qwen3-8B --gpu rtx-4090 --method qlora {_ADAPTERS}",
    f"plan Qwen3-8B --gpu rtx-4090 --method lora {_ADAPTERS}",
    f"plan Qwen3-14B --gpu rtx-4090 --method qlora {_ADAPTERS}",
    f"plan Qwen3-32B --gpu rtx-4090 --method qlora --no-prepare-for-kbit {_LONG}",
    f"plan Qwen3-32B --gpu rtx-4090 --method qlora {_LONG}",
    f"plan Llama-3.3-70B --gpu a100-80gb --method qlora {_LONG}",
    "plan Qwen3-4B --gpu a100-80gb --method lora --max-length 32768 "
    "--effective-batch-size 4",
    "plan Llama-3.1-8B --gpu a100-80gb --method qlora --max-length 131072 "
    "--effective-batch-size 4",
    "plan gemma-3-4b-it --gpu t4 --method qlora --max-length 1024 "
    "--effective-batch-size 8",
    "plan Mistral-7B-v0.3 --gpu rtx-4090 --method lora --max-length 4096 "
    "--effective-batch-size 8",
    "plan Mistral-7B-v0.3 --gpu t4 --method int8-lora --max-length 512 "
    "--effective-batch-size 8",
    "plan Phi-4-mini --gpu t4 --method lora --max-length 1024 "
    "--effective-batch-size 8",
    f"plan gpt-oss-20b --gpu a100-80gb --method lora {_LONG}",
    f"plan Qwen3-30B-A3B --gpu rtx-4090 --method qlora {_LONG}",
    "plan Mixtral-8x7B --gpu h100-80gb --method qlora --max-length 2048",
    "plan Qwen2.5-VL-7B --gpu rtx-4090 --method qlora",
    "estimate Qwen3-8B --gpu rtx-4090 --method qlora --batch-size 4 --max-length 2048",
    "compare Llama-3.1-8B --gpus rtx-4090,a100-80gb --methods full,lora,qlora "
    "--max-length 2048",
    "plan t5-small --gpu t4",
    "plan flan-t5-xl --gpu a100-80gb --max-length 512 --effective-batch-size 16",
    "plan mamba2-1.3b --gpu a100-80gb --max-length 1024 --effective-batch-size 8",
    "plan vit-base-patch16-224 --gpu t4 --effective-batch-size 256",
    "plan convnext-base-224 --gpu t4 --effective-batch-size 256",
    "plan segformer-b2-ade-512 --gpu t4 --effective-batch-size 16",
    "plan dinov2-base --gpu t4 --effective-batch-size 64",
    "plan whisper-small --gpu t4 --effective-batch-size 16",
    "plan deberta-v3-base --gpu t4 --max-length 256 --effective-batch-size 32",
    "plan ModernBERT-base --gpu t4 --max-length 512 --effective-batch-size 32",
    "plan modules.py:cnn --gpu t4 --effective-batch-size 64",
)


class Taken(NamedTuple):
    """What one process took."""

    cpu_s: float
    first_line_s: float
    memory_gib: float
    code: int
    out: str


def words_of(command: str) -> list[str]:
    """Return the command's words, its model as the folder or file of this checkout."""
    name, model, *options = shlex.split(command)
    path = str(MODULES.parent / model) if ".py:" in model else config(model)
    return [name, path, *options]


def taken(words: Sequence[str], cache: str) -> Taken:
    """Run ``budgetfit`` with these words and measure the process."""
    environment = {
        **os.environ,
        "BUDGETFIT_CACHE": cache,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    started = time.monotonic()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-m", "budgetfit", *words],
            env=environment,
            stdout=out,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None  # noqa: S101
        process.stderr.readline()
        first_line_s = time.monotonic() - started
        process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read().decode()
    return Taken(
        used.ru_utime + used.ru_stime,
        first_line_s,
        used.ru_maxrss * 1024 / GIB,
        process.returncode,
        text,
    )


def profile(command: str) -> None:
    """Print where the processor time of one command goes, without a cache."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "profile")
        code = ["-m", "cProfile", "-o", file, "-m", "budgetfit", *words_of(command)]
        environment = {**os.environ, "BUDGETFIT_CACHE": "off", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *code], env=environment, check=False)  # noqa: S603
        show = "sort cumulative\nstats budgetfit 60\n"
        subprocess.run(  # noqa: S603
            [sys.executable, "-m", "pstats", file], input=show, text=True, check=True
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    chosen = [c for c in COMMANDS if not asked.words or set(asked.words) & set(c.split())]
    if asked.profile:
        profile(chosen[0])
        return
    rows, cold, warm = [], [], []
    for command in chosen:
        with tempfile.TemporaryDirectory() as cache:
            first, again = (taken(words_of(command), cache) for _ in range(2))
        cold.append(first.cpu_s)
        warm.append(again.cpu_s)
        row = [f"{first.cpu_s:.1f}", f"{again.cpu_s:.1f}", f"{first.first_line_s:.1f}",
               f"{first.memory_gib:.2f}", str(first.code)]
        rows.append([command, *row])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: -float(row[1]))
    headers = ["command", "cold, CPU s", "warm", "first line, s", "GiB", "exit"]
    print(table(headers, rows))
    print()
    for name, values in (("cold", cold), ("warm", warm)):
        print(f"{name}: median {statistics.median(values):.1f} s, most {max(values):.1f} s")


if __name__ == "__main__":
    main()
