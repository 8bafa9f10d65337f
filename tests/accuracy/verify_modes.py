"""Apply every mode of a segment and verify it on this CUDA device.

    python -m tests.accuracy.verify_modes             # on a real card
    python -m tests.accuracy.nulldriver.run --gpu rtx-4090 -- \\
        python -m tests.accuracy.verify_modes --gpu rtx-4090

The measured program is the product's own: ``budgetfit.verify`` runs the recipe that was
estimated. Prints one line per model and recipe, signed errors first, and says whether a
real card or the null driver was measured.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

import budgetfit
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.accuracy.verify_plans import MODELS, measured_card

BATCH_SIZE = 4
Segments = tuple[Segment, ...]


def recipes(chains: BlockChain) -> Iterator[tuple[str, Segments, int]]:
    """Yield what is done to the blocks, by name, and into how many parts the loss."""
    names = chains.traces.workload.blocks
    options = {
        block.name: block.options for block in chains.profile_at(BATCH_SIZE).blocks
    }

    def selective(name: str, which: int) -> Segment:
        found = [row for row in options[name] if row.mode == "selective"]
        if not found:
            return Segment((name,))
        return Segment((name,), "selective", saved_ops=found[which].saved_ops)

    most, least = (tuple(selective(name, which) for name in names) for which in (-1, 0))
    offload = tuple(Segment((name,), "offload") for name in names)
    on_host = tuple(Segment((name,), input_on_host=True) for name in names)
    yield "selective, most", most, 1
    yield "selective, least", least, 1
    yield "offloaded", offload, 1
    yield "inputs on the host", on_host, 1
    yield "nested fours", _together(names, 4, nested=True), 1
    yield "threes", _together(names, 3, nested=False), 1
    yield "a mix", (on_host[0], most[1], offload[2], least[3], on_host[4]), 1
    yield "loss in 8 parts", (most[0],), 8


def _together(names: tuple[str, ...], length: int, *, nested: bool) -> Segments:
    starts = range(0, len(names) - length + 1, length)
    return tuple(Segment(names[at : at + length], nested=nested) for at in starts)


def check(name: str, model: nn.Module, precision: str, gpu: str) -> Iterator[str]:
    """Estimate and verify every recipe of one model; a line each."""
    plan = budgetfit.plan(
        model,
        gpu=gpu,
        precision=precision,
        batch_size=BATCH_SIZE,
        checkpointing="none",
        vram="70GB",
    )
    workload = Workload(
        model=model, batch=plan.source.batch, gpu=find_gpu(gpu)
    ).with_found_blocks()
    setting = TrainingSettings(
        precision=plan.recipe.precision, optimizer=plan.recipe.optimizer
    )
    for title, segments, loss_chunks in recipes(
        BlockChain(TraceSession(workload), setting)
    ):
        recipe = Recipe(
            batch_size=BATCH_SIZE,
            precision=setting.precision,
            optimizer=setting.optimizer,
            segments=segments,
            loss_chunks=loss_chunks,
        )
        try:
            estimate = budgetfit.estimate(model, recipe, gpu=gpu, vram="70GB")
            found = budgetfit.verify(replace(plan, recipe=recipe, estimate=estimate))
        except budgetfit.BudgetfitError as error:
            yield f"not run: {name} {setting.precision}, {title}: {error}"
            continue
        reserved = max(row.measured_reserved_bytes for row in found.phases)
        yield (
            f"allocated {found.allocated_error:+.4%}  "
            f"reserved {estimate.reserved_bytes / reserved - 1:+.4%}  "
            f"{'passed' if found.passed else 'FAILED'}  {name} {setting.precision}, "
            f"{title}: {estimate.allocated_bytes / 2**20:.0f} MiB"
        )


def main() -> int:
    """Print a line for each model, precision and recipe."""
    gpu = measured_card(__doc__)
    for name, make, _ in MODELS:
        for precision in ("fp32", "auto"):
            for line in check(name, make(), precision, gpu):
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
