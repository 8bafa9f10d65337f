"""Record cases, each in a process of its own, on this card or on an imitated one.

    python -m tests.accuracy.record NAME...            # on a real card
    python -m tests.accuracy.record --null-driver .nulldriver/torch-2.13.0 NAME...

A name may be a pattern such as ``gpt2-*-t4``. Needs torch (and transformers for its
models) in the measuring process only. ``make accuracy-record`` sets up what the second
form needs. See README.md beside this file.
"""

import argparse
import fnmatch
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.accuracy.case import Case
from tests.accuracy.cases import CASES, RECORDINGS

_ROOT = Path(__file__).parents[2]


def _command(case: Case, options: argparse.Namespace) -> list[str]:
    """The command line that measures one case."""
    if options.null_driver:
        start = [sys.executable, "-m", "tests.accuracy.nulldriver.run"]
        start += ["--environment", str(options.null_driver.resolve())]
        start += ["--gpu", case.gpu, "--", "python"]
    elif options.launcher:
        start = [part.format(gpu=case.gpu) for part in shlex.split(options.launcher)]
        start.append("python")
    else:
        start = [sys.executable]
    command = [*start, "-m", "tests.accuracy.measure", case.name]
    command += ["--cudnn", options.cudnn, "--out", str(options.out.resolve())]
    if options.events:
        command += ["--events", str(options.events.resolve())]
    return command


def _run(case: Case, options: argparse.Namespace) -> bool:
    """Measure one case; whether it worked."""
    environment = dict(os.environ)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment.pop(name, None)
    if case.allocator:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = case.allocator
    if case.imitated_memory_gib:
        environment["NULLCUDA_GB"] = str(case.imitated_memory_gib)
    done = subprocess.run(
        _command(case, options),
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    last = lines[-1] if lines else "no output"
    sys.stdout.write(f"{last if done.returncode == 0 else f'{case.name}: {last}'}\n")
    sys.stdout.flush()
    if done.returncode != 0 and options.verbose:
        sys.stdout.write(done.stderr)
    return done.returncode == 0


def main() -> int:
    """Record every case that a pattern on the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="+", metavar="NAME")
    cards = parser.add_mutually_exclusive_group()
    cards.add_argument("--null-driver", type=Path, help="its environment's folder")
    cards.add_argument("--launcher", help="another command that imitates {gpu}")
    parser.add_argument("--cudnn", choices=("on", "off"), default="off")
    parser.add_argument("--out", type=Path, default=RECORDINGS)
    parser.add_argument("--events", type=Path, help="folder for complete event lists")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--list", action="store_true", help="only print the names")
    parser.add_argument("--verbose", action="store_true", help="tracebacks of failures")
    options = parser.parse_args()
    chosen = [
        case
        for case in CASES.values()
        if any(fnmatch.fnmatchcase(case.name, wanted) for wanted in options.patterns)
    ]
    if not chosen:
        parser.error("no case has such a name")
    if options.list:
        sys.stdout.write("".join(f"{case.name}\n" for case in chosen))
        return 0
    with ThreadPoolExecutor(options.jobs) as pool:
        worked = list(pool.map(lambda case: _run(case, options), chosen))
    sys.stdout.write(f"{sum(worked)} of {len(worked)} recorded\n")
    return 0 if all(worked) else 1


if __name__ == "__main__":
    sys.exit(main())
