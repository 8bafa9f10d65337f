"""What the benchmarks share: where shapes are, plain tables, chains of real models.

Tables are Markdown with padded columns, so that what is printed can be read as it is
and is the page in ``docs/`` as well.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

from budgetfit.planning.profiling.block_chain import BlockChain

ROOT: Final = Path(__file__).parents[1]
_FOLDERS: Final = (ROOT / "examples" / "configs", ROOT / "benchmarks" / "configs")
GIB: Final = 2**30
MIB: Final = 2**20


def config(name: str) -> str:
    """Return the folder of a published model's ``config.json``.

    Raises:
        FileNotFoundError: There is none of that name.
    """
    for folder in _FOLDERS:
        if (folder / name / "config.json").is_file():
            return str(folder / name)
    raise FileNotFoundError(f"no {name}/config.json in examples or benchmarks")


def quiet() -> None:
    """Keep what other libraries say out of the tables."""
    import transformers

    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table; all but the first ``left`` columns are numbers."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(3, *(len(row[at]) for row in cells)) for at in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = "|".join(
        "-" * (width + 2) if at < left else "-" * (width + 1) + ":"
        for at, width in enumerate(widths)
    )
    return "\n".join([line(cells[0]), f"|{rule}|", *map(line, cells[1:])])


def side_by_side(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Return ``function`` of each of the arguments, one process per core.

    How far it is goes to stderr, where it is no part of a page.
    """
    workers = min(len(os.sched_getaffinity(0)), len(arguments))
    results = []
    with ProcessPoolExecutor(workers, initializer=one_thread) as pool:
        for result in pool.map(function, *zip(*arguments, strict=True)):
            results.append(result)
            if sys.stderr.isatty():
                print(f"\r{len(results)} of {len(arguments)}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    return results


def one_thread() -> None:
    """Leave the other cores to the other processes."""
    import torch

    torch.set_num_threads(1)
    quiet()


def chains_of(  # noqa: PLR0913 - what a chain belongs to
    model: Any,  # noqa: ANN401 - as budgetfit.plan takes it
    gpu: str,
    precision: str,
    *,
    optimizer: str = "adamw_torch_fused",
    max_length: int | None = None,
    effective_batch_size: int | None = None,
) -> BlockChain:
    """Return the block profiles of a real model, as the planner sees them."""
    from budgetfit.inputs.arguments import Arguments
    from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
    from budgetfit.planning.profiling.first_trace import with_checkpointable_blocks
    from budgetfit.traces.session import TraceSession

    asked = Arguments(model=model, gpu=gpu, optimizer=optimizer, max_length=max_length)
    workload = asked.parsed([precision]).workload
    settings = TrainingSettings(
        precision=precision,
        optimizer=optimizer,
        effective_batch_size=effective_batch_size,
    )
    traces = with_checkpointable_blocks(TraceSession(workload), settings)
    return BlockChain(traces, settings)
