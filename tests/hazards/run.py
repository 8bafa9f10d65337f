"""Train blocks that are not their inputs' function alone, by each technique.

``python -m tests.hazards.run`` prints for 15 kinds of such blocks and 4 techniques
whether training is as the plain loop's, or refused and with which words.
"""

import warnings
from collections.abc import Callable, Iterator

import torch
from torch.utils.checkpoint import CheckpointError

from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import BudgetfitError
from tests.hazards.kinds import KINDS, WIDTH, Block, Tower, between_steps, start
from tests.models import seed

STEPS = 30
RATE = 0.1
NAMES = tuple(f"blocks.{number}" for number in range(4))

# Each with the ways to do it.
TECHNIQUES: dict[str, tuple[tuple[Segment, ...], ...]] = {
    "each block": (tuple(Segment((name,)) for name in NAMES),),
    "segments": (
        (Segment(NAMES[:2]), Segment(NAMES[2:])),
        (Segment(NAMES, nested=True),),
    ),
    "selective": (
        tuple(
            Segment((name,), mode="selective", saved_ops=("aten.addmm.default:0",))
            for name in NAMES
        ),
    ),
    "offload": (tuple(Segment((name,), mode="offload") for name in NAMES),),
}


def plain_losses(kind: Callable[[], Block], steps: int = STEPS) -> list[float]:
    """Return the losses of a loop that knows nothing of budgetfit."""
    model = start(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batch in _batches(model, steps):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def planned_losses(
    kind: Callable[[], Block], segments: tuple[Segment, ...], steps: int = STEPS
) -> tuple[list[float], str]:
    """Return the losses up to a refusal, and its words; none if there was none."""
    model = start(kind)
    recipe = Recipe(batch_size=4, precision="fp32", optimizer="sgd", segments=segments)
    losses: list[float] = []
    with Run(model, recipe, learning_rate=RATE) as run:
        for batch in _batches(model, steps):
            try:
                losses.append(run.step(batch).item())
            except (BudgetfitError, CheckpointError) as error:
                return losses, str(error)
    return losses, ""


def judge(
    kind: Callable[[], Block], technique: str, expected: list[float]
) -> tuple[str, str]:
    """Return ``equal``, ``refused`` or ``SILENT``, and words of a refusal."""
    verdict, said = "equal", ""
    for segments in TECHNIQUES[technique]:
        losses, words = planned_losses(kind, segments, len(expected))
        if losses != expected[: len(losses)]:
            first = next(
                step
                for step, pair in enumerate(zip(losses, expected, strict=False))
                if pair[0] != pair[1]
            )
            return "SILENT", f"losses differ from step {first + 1} on"
        if words:
            verdict, said = f"refused in step {len(losses) + 1}", words
    return verdict, said


def main() -> None:
    """Print the table, then each refusal's words."""
    warnings.simplefilter("ignore", FutureWarning)
    words: dict[str, str] = {}
    counts: dict[str, int] = {}
    print(f"{'':45s}" + "".join(f"{name:20s}" for name in TECHNIQUES))
    for name, kinds in KINDS.items():
        for kind in kinds:
            expected = plain_losses(kind)
            row = f"{name + ': ' + kind.__name__:45s}"
            for technique in TECHNIQUES:
                verdict, said = judge(kind, technique, expected)
                row += f"{verdict:20s}"
                counts[verdict.split()[0]] = counts.get(verdict.split()[0], 0) + 1
                if said:
                    words.setdefault(f"{kind.__name__}, {technique}", said)
            print(row, flush=True)
    print("\n" + ", ".join(f"{count} {word}" for word, count in counts.items()))
    for where, said in words.items():
        print(f"\n{where}:\n  {said}")


def _batches(model: Tower, steps: int) -> Iterator[torch.Tensor]:
    seed(1)
    data = torch.Generator().manual_seed(2)
    for _ in range(steps):
        between_steps(model)
        yield torch.randn(4, WIDTH, generator=data)


if __name__ == "__main__":
    main()
