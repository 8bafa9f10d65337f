"""Processes with gloo, as torchrun would start them: soon, and never hanging.

A server process imports the libraries once; ranks are forked from it.
"""

import multiprocessing
import os
import pickle
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

SECONDS = 300  # after which ranks that hang are ended
_PRELOADED = ["torch", "torch.distributed.tensor", "transformers", "budgetfit.api.plan"]


class Started:
    """Ranks that run ``function(*arguments)``, each with torchrun's environment."""

    def __init__(
        self, function: Callable[..., Any], ranks: int, *arguments: object
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOADED, function.__module__])
        port = str(_free_port())
        self.processes: list[BaseProcess] = []
        self._answers: list[Connection] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "GROUP_RANK": "0",
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            process = context.Process(
                target=_run, args=(theirs, environment, function, arguments)
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._answers.append(ours)

    def results(self) -> list[Any]:
        """Return what each rank returned; raise what one of them raised."""
        end = time.monotonic() + SECONDS
        found, errors = [], []
        try:
            for rank, answer in enumerate(self._answers):
                if not answer.poll(max(0.0, end - time.monotonic())):
                    errors.append(f"rank {rank} has not answered")
                    break
                # Plain pickle: torch's own would share memory with a gone process.
                result, error = pickle.loads(answer.recv_bytes())
                found.append(result)
                errors += [f"rank {rank}:\n{error}"] if error else []
        finally:
            self.end()
        if errors:
            raise AssertionError("\n".join(errors))
        return found

    def end(self) -> None:
        """End what still runs."""
        for process in self.processes:
            process.join(0.5 if process.exitcode is None else None)
            process.kill()
            process.join()


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: object) -> list[Any]:
    """Run a function of a module on so many ranks; return what each returned."""
    return Started(function, ranks, *arguments).results()


def _run(
    answer: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[object, ...],
) -> None:
    os.environ.update(environment)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        answer.send_bytes(pickle.dumps((function(*arguments), "")))
    except BaseException:  # noqa: BLE001 - told to the test
        answer.send_bytes(pickle.dumps((None, traceback.format_exc())))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
