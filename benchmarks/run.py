"""What a user waits for: printed in one run, on this machine.

    make bench

Times are wall-clock seconds after imports unless said otherwise; no test asserts them.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
HELP_RUNS = 5
PLANS = (
    ("SmolLM2-1.7B, 24 blocks", "SmolLM2-1.7B", "rtx-4090", "bf16"),
    ("Llama-3.1-8B, 32 blocks", "Llama-3.1-8B", "h100-80gb", "bf16"),
    ("GPT-2 124M, 12 blocks", "gpt2", "t4", "auto"),
)


def help_seconds() -> list[float]:
    """Whole-process times of ``budgetfit --help``."""
    times = []
    for _ in range(HELP_RUNS):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "budgetfit", "--help"],
            check=True,
            capture_output=True,
        )
        times.append(time.perf_counter() - started)
    return times


def plan_seconds(config: str, gpu: str, precision: str) -> tuple[float, str]:
    """The time of one plan, and what it decided."""
    from budgetfit import plan  # noqa: PLC0415 - imports are not what is timed

    started = time.perf_counter()
    made = plan(str(CONFIGS / config), gpu=gpu, precision=precision)
    seconds = time.perf_counter() - started
    recipe = made.recipe
    return seconds, (
        f"batch {recipe.batch_size}, {len(recipe.wrapped_blocks)} blocks recomputed, "
        f"{len(made.provenance['traces'])} traces"
    )


def main() -> None:
    """Print everything."""
    times = help_seconds()
    print(
        f"budgetfit --help: median {statistics.median(times):.2f} s of {HELP_RUNS}, "
        f"{min(times):.2f} to {max(times):.2f}"
    )
    import transformers.models.llama.modeling_llama  # noqa: F401, PLC0415

    plan_seconds("gpt2", "t4", "auto")  # warms torch's lazy imports
    print(f"plans on {len(os.sched_getaffinity(0))} cores:")
    for title, config, gpu, precision in PLANS:
        seconds, decision = plan_seconds(config, gpu, precision)
        print(f"  {title} on {gpu}, {precision}: {seconds:.1f} s ({decision})")
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"resident memory at most {peak_kb / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
