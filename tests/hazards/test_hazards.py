"""No block trains with other gradients in silence, whatever its forward does."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.hazards.kinds import (
    ITERATING,
    KINDS,
    Block,
    EveryFifth,
    EveryThird,
    HiddenGenerator,
)
from tests.hazards.run import TECHNIQUES, judge, plain_losses, planned_losses

STEPS = 9  # more than a slow counter takes to its first change
# Nothing that its code names leads to it; nothing puts an iterator back.
REFUSED = {
    HiddenGenerator: 1,
    EveryThird: 3,
    EveryFifth: 5,
    **dict.fromkeys(ITERATING, 1),
}
EVERY = [kind for kinds in KINDS.values() for kind in kinds]


def test_there_are_fifteen_kinds_and_four_techniques() -> None:
    assert (len(KINDS), len(TECHNIQUES)) == (15, 4)


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_losses_are_the_plain_loops_or_training_is_refused(
    kind: Callable[[], Block],
) -> None:
    expected = plain_losses(kind, STEPS)
    for technique in TECHNIQUES:
        verdict, said = judge(kind, technique, expected)
        if kind in REFUSED and technique != "offload":
            assert verdict == f"refused in step {REFUSED[kind]}", (technique, said)
            assert said.startswith("Block 'blocks."), technique
            assert "checkpointing=[...] with the names of the other blocks" in said
            assert ("its attribute 'held' leads to" in said) == (kind in ITERATING)
        else:
            assert verdict == "equal", (technique, said)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_generators_are_left_where_the_plain_loop_leaves_them(technique: str) -> None:
    for kind in (*KINDS["Python's random"], *KINDS["numpy's random"]):
        plain_losses(kind, 2)
        expected = random.random(), np.random.randn()  # noqa: NPY002
        for segments in TECHNIQUES[technique]:
            planned_losses(kind, segments, 2)
            drawn = random.random(), np.random.randn()  # noqa: NPY002
            assert drawn == expected, kind
