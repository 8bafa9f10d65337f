"""Every benchmark, one after the other, and the page that is made of them.

    make bench                                      all, and docs/performance.md
    python -m benchmarks.run six_blocks checkmate   some, printed only
    python -m benchmarks.run six_blocks --write     and their part of the page

Each is a program of its own and can be run alone. Their output is the page: nothing is
copied by hand, and each part says where and with what it ran.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Final, NamedTuple

from benchmarks.shared import ROOT
from docs.answers import write

PAGE: Final = ROOT / "docs" / "performance.md"
WRITE: Final = "--write"


class Benchmark(NamedTuple):
    """A program of this folder, and how its output is shown."""

    name: str
    title: str
    plain: bool = False


# What is timed comes first, while nothing has warmed the machine.
BENCHMARKS: Final = (
    Benchmark("plan_times", "How long planning takes"),
    Benchmark("command_times", "How long commands take"),
    Benchmark("solver_speed", "How long solving takes", plain=True),
    Benchmark("step_times", "Against published step times"),
    Benchmark("compiled_steps", "Speed-ups of torch.compile"),
    Benchmark("linked_objects", "Objects linked in circles"),
    Benchmark("against_full", "Against every block recomputed"),
    Benchmark("six_blocks", "Against all 64 subsets of six blocks"),
    Benchmark("uniform_lengths", "Against Chen's sqrt(n) and every uniform length"),
    Benchmark("checkmate", "Against Checkmate"),
    Benchmark("torch_sac_milp", "Against torch's sac_milp"),
    Benchmark("torch_knapsacks", "Against torch's knapsacks"),
)


def machine() -> str:
    """Describe this machine in general terms, and what ran on it."""
    libraries = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "scipy")
    )
    cores = len(os.sched_getaffinity(0))
    return (
        f"{platform.system()} on {platform.machine()}, {cores} cores, no GPU used; "
        f"Python {platform.python_version()}, {libraries}"
    )


def introduction(benchmark: Benchmark) -> str:
    """Return what a benchmark says of itself: its docstring without the command."""
    source = (ROOT / "benchmarks" / f"{benchmark.name}.py").read_text(encoding="utf-8")
    text = source.split('"""')[1]
    paragraphs = [part.strip() for part in text.split("\n\n")]
    return "\n\n".join(part for part in paragraphs if not part.startswith("python -m"))


def output_of(benchmark: Benchmark, traces: str) -> str:
    """Run a benchmark, show its lines as they come, and return them.

    ``traces`` is a folder for the cache of traces, so that the user's stays as it is.

    Raises:
        CalledProcessError: It failed.
    """
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{benchmark.name}"]
    lines = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "BUDGETFIT_CACHE": traces, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return "".join(lines).strip()


def section(benchmark: Benchmark, output: str) -> str:
    """Return a benchmark's part of the page."""
    if benchmark.plain:
        output = f"```text\n{output}\n```"
    where = f"Machine: {machine()}."
    parts = (f"## {benchmark.title}", introduction(benchmark), where, output)
    return "\n\n".join(parts) + "\n"


def page_of(parts: dict[str, str]) -> str:
    """Return the page of these sections, by their titles.

    Those of no benchmark are left out.
    """
    head = (
        "# Performance\n\n"
        "`make bench` prints this page and writes it. Predicted times are sums "
        "of kernels; no GPU was used. How far they are from measured ones is in "
        "[step times](times.md); of memory: [published](published.md).\n"
    )
    found = [parts[each.title] for each in BENCHMARKS if each.title in parts]
    return "\n".join([head, *found])


def sections_of(page: str) -> dict[str, str]:
    """Return the sections of a page by their titles."""
    _, *parts = re.split(r"^## ", page, flags=re.MULTILINE)
    return {part.split("\n", 1)[0]: f"## {part.rstrip()}\n" for part in parts}


def main(arguments: list[str]) -> int:
    """Run what was named, or everything; write the page, or their part of it."""
    names = [name for name in arguments if name != WRITE]
    known = {each.name: each for each in BENCHMARKS}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"{unknown[0]!r} is no benchmark. They are: {', '.join(known)}.")
        return 2
    parts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as traces:
        for benchmark in [known[name] for name in names] or BENCHMARKS:
            started = time.perf_counter()
            print(f"\n## {benchmark.title}\n", flush=True)
            parts[benchmark.title] = section(benchmark, output_of(benchmark, traces))
            print(f"\n({benchmark.name}: {time.perf_counter() - started:.0f} s)")
            if WRITE in arguments:  # as others may have left the page meanwhile
                before = sections_of(PAGE.read_text(encoding="utf-8"))
                write(PAGE, page_of(before | parts))
    if not names:
        write(PAGE, page_of(parts))
        print(f"\nWritten to {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
