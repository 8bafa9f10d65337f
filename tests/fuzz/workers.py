"""Cases run in processes of their own, so that none can hang or end the whole run."""

# ruff: noqa: T201 - a program: printing is its output

import contextlib
import multiprocessing
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

LIMIT_S = 60
_MEMORY_BYTES = 16 * 2**30  # of addresses; what asks for more has no bounds


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one case ended.

    Attributes:
        case: What was run, as a person would type or tell it.
        ended: What it ended with, for counting: an exit code, ``refused``, ``used``.
        fault: What is wrong with that; empty if nothing.
        text: What it printed, or the traceback.
    """

    case: str
    ended: str
    fault: str = ""
    text: str = ""


@dataclass(slots=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    case: Any = None
    started_s: float = 0.0


def run_all(
    cases: Sequence[Any], run: Callable[[Any], Outcome], *, jobs: int
) -> Iterator[Outcome]:
    """Run ``run(case)`` for each in forked processes; yield outcomes as they come.

    A case that takes longer than ``LIMIT_S`` is killed, and a fault; so is one that
    ends its process.
    """
    todo = list(reversed(cases))
    workers = [_start(run) for _ in range(min(jobs, len(cases)))]
    try:
        while workers:
            for worker in list(workers):
                if worker.case is None:
                    if not todo:
                        _stop(worker)
                        workers.remove(worker)
                        continue
                    worker.case, worker.started_s = todo.pop(), time.monotonic()
                    worker.pipe.send(worker.case)
            busy = {worker.pipe: worker for worker in workers}
            ready = wait(list(busy), timeout=1.0) if busy else []
            for pipe, worker in busy.items():
                outcome = _outcome(worker, ready=pipe in ready)
                if outcome is None:
                    continue
                yield outcome
                worker.case = None
                if not worker.process.is_alive():
                    workers[workers.index(worker)] = _start(run)
    finally:
        for worker in workers:
            _stop(worker)


def _outcome(worker: _Worker, *, ready: bool) -> Outcome | None:
    if ready:
        try:
            found: Outcome = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            died = f"the process died, exit code {worker.process.exitcode}"
            return Outcome(str(worker.case), "died", died)
        return found
    if time.monotonic() - worker.started_s > LIMIT_S:
        _stop(worker)
        return Outcome(str(worker.case), "hang", f"hung for more than {LIMIT_S} s")
    return None


def _start(run: Callable[[Any], Outcome]) -> _Worker:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, run), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here)


def _work(pipe: Connection, run: Callable[[Any], Outcome]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells when to stop
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(run(pipe.recv()))


def _stop(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.kill()
    worker.process.join()


def report(outcomes: Iterator[Outcome], number: int) -> int:
    """Print how the cases ended, and each fault; return how many faults there are."""
    ended: Counter[str] = Counter()
    faults: list[Outcome] = []
    for done, outcome in enumerate(outcomes, 1):
        ended[outcome.ended] += 1
        if outcome.fault:
            faults.append(outcome)
            print(f"FAULT {outcome.fault}: {outcome.case}\n{outcome.text}", flush=True)
        if done % 100 == 0:
            print(f"{done} of {number}", flush=True)
    print("ended with", dict(sorted(ended.items())))
    for fault, times in Counter(outcome.fault for outcome in faults).items():
        print(f"{times} x {fault}")
    print(f"{len(faults)} faults in {sum(ended.values())}")
    return len(faults)


def default_jobs() -> int:
    """Return a process per core that this process may use."""
    return len(os.sched_getaffinity(0))
