"""What a user waits for: whole plans on two cores, imports excluded.

    python -m benchmarks.plan_times

Each plan is made in a process of its own on two cores, three times without the cache
of traces (the median counts, the range is printed), then with one that was filled by
the same plan. The answer comes first; the
rows of the table below it are worked out when somebody looks, and that time is in "with
table". Memory is the most that the process ever held, imports included. Targets, for
the answer without a cache: 5 s for 24 and 32 blocks, 15 s for 126, 1.5 GB.
"""

import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Final, NamedTuple

from benchmarks.shared import ROOT, config, quiet, table

CORES: Final = 2
HELP_RUNS: Final = 5
PLAN_RUNS: Final = 3
CACHE: Final = "BUDGETFIT_CACHE"  # a folder, or "off"


class Case(NamedTuple):
    """One plan."""

    title: str
    model: str
    length: int | None
    where: dict[str, str]
    precision: str
    target_s: float


CASES: Final = (
    Case("24 blocks", "SmolLM2-1.7B", 2048, {"gpu": "rtx-4090"}, "bf16", 5),
    Case("24 blocks", "bert-large-uncased", 512, {"gpu": "rtx-4090"}, "bf16-mixed", 5),
    Case("24 blocks", "vit-large-patch16-224", None, {"gpu": "t4"}, "auto", 5),
    Case("32 blocks", "Llama-3.1-8B", 2048, {"gpu": "h100-80gb"}, "bf16", 5),
    # No card holds it; what a plan takes to make does not depend on that.
    Case("126 blocks", "Llama-3.1-405B", 2048, {"vram": "4000GB"}, "bf16", 15),
)


def one_plan(case: Case, *, warm: bool) -> dict[str, object]:
    """Plan in this process and say how long it took and what was decided."""
    quiet()
    for name in ("bert", "llama", "vit"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    from budgetfit import plan  # noqa: PLC0415

    tiny = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan(tiny, gpu="t4", batch=torch.zeros(2, 8))  # warms torch's lazy imports
    for _ in range(1 + warm):
        started = time.perf_counter()
        made = plan(
            config(case.model),
            precision=case.precision,
            max_length=case.length,
            **case.where,
        )
        answer_s = time.perf_counter() - started
        rows = len(made.alternatives)
        table_s = time.perf_counter() - started
    recipe = made.recipe
    return {
        "answer_s": answer_s,
        "table_s": table_s,
        "rows": rows,
        "peak_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "decision": f"batch {recipe.batch_size}, {len(recipe.wrapped_blocks)} of "
        f"{len(made.model.blocks)} blocks wrapped",
    }


def in_own_process(number: int, cache: str) -> dict[str, object]:
    """Make one plan on two cores, in a process of its own."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    done = subprocess.run(  # noqa: S603 - this very program
        [sys.executable, "-W", "ignore", "-m", "benchmarks.plan_times", str(number)],
        cwd=ROOT,
        env={**os.environ, CACHE: cache, "OMP_NUM_THREADS": str(CORES)},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def help_line() -> str:
    """Return how long ``budgetfit --help`` takes as a whole process."""
    times = []
    for _ in range(HELP_RUNS):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "budgetfit", "--help"],
            check=True,
            capture_output=True,
        )
        times.append(time.perf_counter() - started)
    return (
        f"`budgetfit --help`: median {statistics.median(times):.2f} s of {HELP_RUNS}, "
        f"{min(times):.2f} to {max(times):.2f}."
    )


def main() -> int:
    """Print the table, or, given a number, make one plan and print its figures."""
    if len(sys.argv) > 1:
        case = CASES[int(sys.argv[1])]
        warm = os.environ.get(CACHE, "off") != "off"
        print(json.dumps(one_plan(case, warm=warm)))
        return 0
    print(help_line() + "\n")
    rows = []
    for number, case in enumerate(CASES):
        runs = [in_own_process(number, "off") for _ in range(PLAN_RUNS)]
        answers_s = [float(str(run["answer_s"])) for run in runs]
        answer_s = statistics.median(answers_s)
        cold = runs[answers_s.index(answer_s)]
        with tempfile.TemporaryDirectory() as folder:
            warm = in_own_process(number, folder)
        where = " ".join(case.where.values())
        rows.append(
            (
                f"{case.title}: {case.model}",
                f"{where}, {case.precision}",
                str(cold["decision"]),
                f"{answer_s:.1f}",
                f"{min(answers_s):.1f} to {max(answers_s):.1f}",
                f"{case.target_s:.0f}",
                "yes" if answer_s <= case.target_s else "no",
                f"{cold['table_s']:.1f}",
                f"{warm['answer_s']:.1f}",
                f"{warm['table_s']:.1f}",
                f"{int(str(cold['peak_kb'])) * 1024 / 1e9:.2f}",
            )
        )
    headers = (
        "plan",
        "for",
        "decision",
        f"answer, s (median of {PLAN_RUNS})",
        "range",
        "target, s",
        "reached",
        "with table, s",
        "cached answer, s",
        "cached with table, s",
        "memory, GB",
    )
    print(table(headers, rows, left=3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
