"""Every way to train, for a few steps; what is wrong is noticed."""

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from budgetfit.applying.checkpointing import recomputation_state
from budgetfit.applying.checkpointing.autocast_and_rng import RngState
from budgetfit.applying.checkpointing.recomputation_check import SavedTensorCheck
from budgetfit.applying.undo import Undo
from budgetfit.integrations.exports import prepared_model
from tests.processes import python
from tests.training_loops.compare import (
    OTHER_TREATMENT,
    REFUSED,
    SAME,
    SILENT,
    Verdict,
    judge,
    trained,
)
from tests.training_loops.loops import TRAINED, WAYS, Loop, loops
from tests.training_loops.run import NEEDED, table
from tests.training_loops.settings import Settings
from tests.training_loops.treatments import TREATMENTS

UPDATES = 2
PROGRAM = ("-W", "ignore", "-m", "tests.training_loops.run")
# Here, not in a process of their own.
IN_PROCESS = {
    "Run": ("own", "accumulate schedule resume evaluate", "segments"),
    "own loop": ("gpt2", "bf16 freeze clip", "offload"),
    "Trainer": ("gpt2", "accumulate clip evaluate", "selective"),
    "SFT": ("llama", "bf16", "recompute"),
    "DPO": ("llama", "clip", "segments"),
    "accelerate": ("gpt2", "accumulate bf16 schedule", "offload"),
    "Lightning": ("vit", "clip evaluate resume", "selective"),
    "DDP": ("own", "accumulate", "recompute"),
    "DDP own loop": ("gpt2", "clip", "segments"),
}


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def loop_of(way: str, family: str, habits: str, treatment: str) -> Loop:
    return Loop(way, Settings(family, frozenset(habits.split()), UPDATES), treatment)


def judged(loop: Loop) -> Verdict:
    return judge(loop, trained(loop, None))


def test_at_least_120_loops_each_way_with_every_treatment() -> None:
    chosen = list(loops())
    assert len({str(loop) for loop in chosen}) == len(chosen) >= 120
    assert {(loop.way, loop.treatment) for loop in chosen} == {
        (way, treatment) for way in WAYS for treatment in TREATMENTS
    }
    assert {loop.settings.updates for loop in chosen} == {30}
    assert {family for _, family, _ in TRAINED} >= {"gpt2", "llama", "t5", "vit"}


@pytest.mark.parametrize("way", IN_PROCESS)
def test_a_loop_under_a_plan_is_the_plain_loop_to_the_bit(way: str) -> None:
    pytest.importorskip(NEEDED.get(way, "torch"))
    assert judged(loop_of(way, *IN_PROCESS[way])) == Verdict(SAME)


@pytest.mark.parametrize("way", sorted(WAYS.keys() - IN_PROCESS.keys()))
def test_the_command_prints_a_row_for_each_loop_and_counts(way: str) -> None:
    if importlib.util.find_spec(NEEDED.get(way, "torch")) is None:
        pytest.skip(f"{NEEDED[way]} is not installed")
    result = python(*PROGRAM, way, "gpt2", "segments", "--updates", str(UPDATES))
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert f"{way}, gpt2, segments" in result.stdout
    assert "1 loops of 2 steps: 1 equal to the bit; 0 silent" in result.stdout


def compare_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off budgetfit's own check of what is recomputed."""
    monkeypatch.setattr(SavedTensorCheck, "compared", lambda _: nullcontext())
    monkeypatch.setattr(SavedTensorCheck, "compare_output", lambda *_: None)


def test_random_numbers_that_are_not_repeated_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RngState, "restore", lambda _: None)
    found = judged(loop_of("own loop", "gpt2", "", "segments"))
    assert found.word == REFUSED
    assert "did something else when it ran again in backward" in found.details


def test_random_numbers_that_nobody_checks_are_a_silent_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RngState, "restore", lambda _: None)
    compare_no_values(monkeypatch)
    loop = loop_of("own loop", "gpt2", "", "segments")

    found = judged(loop)

    assert found.word == SILENT
    assert found.weights > 0
    assert found.details.startswith("from loss 2 on; transformer.wte.weight")
    # Bad rows come first.
    rows = table([(loop, Verdict(SAME)), (loop, found)]).splitlines()
    assert [SILENT in row for row in rows[:-1]] == [False, True, False, False]
    assert rows[-1].endswith(
        "1 SILENT DIFFERENCE, 1 equal to the bit; 1 silent differences"
    )


def test_statistics_that_are_counted_twice_are_a_silent_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses in training are the same all the same."""
    monkeypatch.setattr(
        recomputation_state, "restored_buffers", lambda _: nullcontext()
    )
    compare_no_values(monkeypatch)
    found = judged(loop_of("Run", "own", "", "recompute"))
    assert found.word == SILENT
    assert found.details.startswith("losses are equal; blocks.0.norm.running_mean")


def test_a_plan_that_is_not_carried_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepared_model, "apply_segments", lambda *_, **__: Undo())
    found = judged(loop_of("own loop", "gpt2", "", "recompute"))
    assert found == Verdict(OTHER_TREATMENT, details="blocks ran 0 times more, not 12")
