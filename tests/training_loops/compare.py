"""A loop under a plan against the plain one: the same numbers, or refused."""

import tempfile
import warnings
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointError

from budgetfit.core.plan import Plan
from budgetfit.errors import BudgetfitError
from tests.training_loops.loops import WAYS, Loop
from tests.training_loops.own_loops import Trained
from tests.training_loops.treatments import runs_again, segments_of

# A plan switches a generation cache off. It copies keys, so that the products with them
# round in another order: 2^-24 each, 2^-8 under bf16 autocast. AdamW then enlarges what
# is left of a gradient that is nothing but rounding (that of a key's bias is 0) to a
# step of the learning rate: only losses are compared with a tolerance.
ROUNDING: Final = {False: 1e-5, True: 1e-3}
SAME: Final = "equal to the bit"
CLOSE: Final = "equal but for rounding"
REFUSED: Final = "refused"
SILENT: Final = "SILENT DIFFERENCE"
OTHER_TREATMENT: Final = "NOT TREATED"


class Verdict(NamedTuple):
    """What came out, in one of the words above, and the largest relative differences.

    ``loss`` is of a step's loss, ``weights`` of a tensor's norm after the last step.
    """

    word: str
    loss: float = 0.0
    weights: float = 0.0
    details: str = ""


def trained(loop: Loop, plan: Plan | None) -> Trained:
    """Train a loop, plain or with a plan, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        return WAYS[loop.way](loop.settings, plan, Path(folder))


def judge(loop: Loop, expected: Trained) -> Verdict:
    """Train with the plan, and compare losses, weights and how often blocks ran."""
    segments = segments_of(loop.treatment, loop.settings.family.chains)
    try:
        found = trained(loop, loop.settings.plan(segments))
    except (BudgetfitError, CheckpointError) as error:
        return Verdict(REFUSED, details=str(error))
    again = runs_again(segments) * loop.settings.micro_batches
    return verdict(loop, expected, found, again=again)


def verdict(loop: Loop, expected: Trained, found: Trained, *, again: int) -> Verdict:
    """Compare two trainings; ``again`` is how many more times blocks have to run."""
    if len(found.losses) != len(expected.losses):
        counts = f"{len(found.losses)} losses, not {len(expected.losses)}"
        return Verdict(SILENT, details=counts)
    different = [
        name
        for name, item in expected.final.items()
        if name not in found.final or not torch.equal(item, found.final[name])
    ]
    losses = max(
        (_relative(a, b) for a, b in zip(expected.losses, found.losses, strict=True)),
        default=0.0,
    )
    weights = max(
        (_apart(expected.final[name], found.final.get(name)) for name in different),
        default=0.0,
    )
    runs = found.block_runs - expected.block_runs
    # Below frozen weights there is nothing to recompute for.
    if runs != again and not loop.settings.has("freeze"):
        return Verdict(
            OTHER_TREATMENT,
            losses,
            weights,
            f"blocks ran {runs} times more, not {again}",
        )
    if found.losses == expected.losses and not different:
        return Verdict(SAME)
    if (
        loop.settings.name.endswith("-cache")
        and losses <= ROUNDING[loop.settings.has("bf16")]
        and "random numbers" not in different
    ):
        return Verdict(CLOSE, losses, weights, "without the generation cache")
    pairs = zip(expected.losses, found.losses, strict=True)
    first = next((n for n, (a, b) in enumerate(pairs, 1) if a != b), None)
    where = f"from loss {first} on" if first else "losses are equal"
    return Verdict(
        SILENT,
        losses,
        weights,
        f"{where}; {', '.join(different[:3]) or 'same weights'}",
    )


def _relative(expected: float, found: float) -> float:
    if expected == found:
        return 0.0
    return abs(found - expected) / max(abs(expected), 1e-30)


def _apart(expected: torch.Tensor, found: torch.Tensor | None) -> float:
    """Return the norm of the difference over the norm; infinite for other shapes."""
    if found is None or found.shape != expected.shape:
        return float("inf")
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))
