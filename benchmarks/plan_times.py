"""What a user waits for: whole plans on two cores, imports excluded.

    python -m benchmarks.plan_times
    python -m benchmarks.plan_times --against REVISION   # of this repository

Each plan is made in a process of its own on two cores, three times without the cache
of traces (the median counts, the range is printed), then with one that was filled by
the same plan. The rows of the table below the answer are worked out when somebody
looks: in a run of its own, "with table". Memory is the most that the process ever held,
imports included. Targets, for the answer without a cache: 5 s for 24 and 32 blocks,
15 s for 126, 1.5 GB; for several GPUs, where engines are compared too, 10 s for 32
blocks and 30 s for 80; under torch.compile 15 s for 24 blocks, and 60 s for a model of
24 as a whole.

With another revision the two trees make the same plans in turn, and processor seconds
are compared: those depend least on what else a machine does. What the other one cannot
plan is "none".
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
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
    Case(
        *("32 blocks on 8 GPUs", "Llama-3.1-8B", 1024),
        *({"gpu": "h100-80gb", "gpus": "8"}, "bf16-mixed", 10),
    ),
    Case(
        *("80 blocks on 8 x 8 GPUs", "Llama-3.1-70B", 1024),
        *({"gpu": "h100-80gb", "gpus": "8x8"}, "bf16-mixed", 30),
    ),
    Case(
        *("24 blocks compiled", "SmolLM2-1.7B", 2048),
        *({"gpu": "rtx-4090", "compile": "blocks"}, "bf16", 15),
    ),
    Case(
        *("24 blocks compiled", "bert-large-uncased", 512),
        *({"gpu": "rtx-4090", "compile": "blocks"}, "bf16-mixed", 15),
    ),
    Case(
        *("24 blocks, the model compiled", "bert-large-uncased", 512),
        *({"gpu": "rtx-4090", "compile": "model"}, "bf16-mixed", 60),
    ),
)


def one_plan(case: Case, *, warm: bool, with_table: bool) -> dict[str, object]:
    """Plan in this process and say how long it took and what was decided."""
    quiet()
    for name in ("bert", "llama", "vit"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    importlib.import_module("torch.distributed.fsdp")
    if "compile" in case.where:
        importlib.import_module("torch._inductor.compile_fx")
    import torch
    from torch import nn

    from budgetfit import plan

    tiny = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan(tiny, gpu="t4", batch=torch.zeros(2, 8))  # warms torch's lazy imports
    for _ in range(1 + warm):
        started = time.perf_counter()
        started_cpu = time.process_time()
        made = plan(
            config(case.model),
            precision=case.precision,
            max_length=case.length,
            **case.where,
        )
        answer_s = time.perf_counter() - started
        answer_cpu_s = time.process_time() - started_cpu
        rows = len(made.alternatives) if with_table else 0
        table_s = time.perf_counter() - started
    recipe = made.recipe
    return {
        "answer_s": answer_s,
        "answer_cpu_s": answer_cpu_s,
        "table_s": table_s,
        "rows": rows,
        "peak_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "decision": f"batch {recipe.batch_size}, {len(recipe.wrapped_blocks)} of "
        f"{len(made.model.blocks)} blocks wrapped",
    }


def in_own_process(
    number: int, cache: str, tree: Path = ROOT, *, with_table: bool = True
) -> dict[str, object]:
    """Make one plan on two cores, in a process of its own, by the code in ``tree``."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    words = ["--case", str(number), *(() if with_table else ("--answer-only",))]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__)), *words],
        cwd=tree,
        env={
            **os.environ,
            CACHE: cache,
            "OMP_NUM_THREADS": str(CORES),
            "PYTHONPATH": str(tree),
        },
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        check=True,
        stdout=subprocess.PIPE,
        stderr=None if tree == ROOT else subprocess.DEVNULL,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def answer_cpu_s(number: int, tree: Path) -> float:
    """Return the processor seconds of an answer by the code in ``tree``."""
    made = in_own_process(number, "off", tree, with_table=False)
    return float(str(made["answer_cpu_s"]))


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


def compared(revision: str) -> str:
    """Return a table of processor seconds of answers beside another revision's."""
    rows = []
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "tree"
        subprocess.run([*git, "add", "-q", "--detach", other, revision], check=True)
        try:
            for number, case in enumerate(CASES):
                try:
                    pairs = [
                        [answer_cpu_s(number, tree) for tree in (other, ROOT)]
                        for _ in range(PLAN_RUNS)
                    ]
                except subprocess.CalledProcessError:  # of several GPUs, for example
                    rows.append((f"{case.title}: {case.model}", "none", "", "", ""))
                    continue
                ratios = [new / old for old, new in pairs]
                before_s, now_s = map(statistics.median, zip(*pairs, strict=True))
                rows.append(
                    (
                        f"{case.title}: {case.model}",
                        f"{before_s:.1f}",
                        f"{now_s:.1f}",
                        f"{statistics.median(ratios):.2f}",
                        f"{min(ratios):.2f} to {max(ratios):.2f}",
                    )
                )
                print(*rows[-1], sep="  ", file=sys.stderr)
        finally:
            subprocess.run([*git, "remove", "--force", other], check=True)
    headers = ("plan", f"{revision}, s", "now, s", "median ratio", "range")
    return table(headers, rows)


def main() -> int:
    """Print the table, or, given a number, make one plan and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="REVISION", help="of this repository")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--answer-only", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.case is not None:
        warm = os.environ.get(CACHE, "off") != "off"
        table_too = not wanted.answer_only
        made = one_plan(CASES[wanted.case], warm=warm, with_table=table_too)
        print(json.dumps(made))
        return 0
    if wanted.against:
        print(compared(wanted.against))
        return 0
    print(help_line() + "\n")
    rows = []
    for number, case in enumerate(CASES):
        runs = [
            in_own_process(number, "off", with_table=False) for _ in range(PLAN_RUNS)
        ]
        answers_s = [float(str(run["answer_s"])) for run in runs]
        answer_s = statistics.median(answers_s)
        cold = in_own_process(number, "off")
        with tempfile.TemporaryDirectory() as folder:
            warm = in_own_process(number, folder, with_table=False)
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
        "memory, GB",
    )
    print(table(headers, rows, left=3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
