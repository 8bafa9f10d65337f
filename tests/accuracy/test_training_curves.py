"""Planned training learns what plain training learns; a killed one loses nothing."""

from pathlib import Path

import pytest

from tests.accuracy.kill_and_resume import kill_and_resume
from tests.accuracy.training_curves import curves


@pytest.mark.filterwarnings("ignore:.*loss_type=None.*")
def test_losses_are_the_plain_loops_to_the_bit_or_to_the_order_of_sums() -> None:
    for curve in curves(steps=10):
        assert curve.losses[-1] < curve.losses[0]
        limit = 0.0 if curve.name.startswith("dropout") else 1e-5
        assert curve.largest_difference <= limit, curve.name


def test_every_loss_after_a_kill_is_the_uninterrupted_runs(tmp_path: Path) -> None:
    outcome = kill_and_resume(kills=1, steps=6, folder=tmp_path, seed=3)
    assert outcome.kills == 1
    assert outcome.compared >= 6
    assert outcome.different == []
