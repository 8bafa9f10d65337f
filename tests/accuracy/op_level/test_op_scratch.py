"""What is wrong in the rules of kernels shows in the recorded calls."""

from collections import defaultdict
from pathlib import Path

import pytest

from budgetfit.memory.scratch_sizes import indexing, reductions
from budgetfit.tracing.call_cache import CallCache
from budgetfit.tracing.cuda import op_semantics
from budgetfit.tracing.cuda.kernel_memory import attention, images, norms
from budgetfit.tracing.cuda.kernel_memory.registry import OUTPUTS
from tests.accuracy.op_level.compare import recording
from tests.accuracy.op_level.verify_ops import proofs

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.json"))


def counted(family: str) -> tuple[int, int]:
    """Return how many comparisons with a recording fail, and how many there are."""
    found = proofs(family).values()
    return sum(each.wrong for each in found), sum(each.comparisons for each in found)


def test_a_wrong_constant_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reductions._of_loop.cache_clear()
    monkeypatch.setattr(reductions, "MIN_VALUES_PER_THREAD", 17)
    wrong, calls = counted("sums")
    reductions._of_loop.cache_clear()
    assert 0 < wrong < calls


def test_rules_broken_on_purpose_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {
        "wide_attention": (attention, "EFFICIENT_REGISTER_HEAD_DIM", 512),
        "long_rows": (indexing, "SELECTING_BLOCKS", 8),
        "folds": (images, "resized", lambda *_tensors: iter([OUTPUTS])),
        "odd_batch_norms": (norms, "channels_last", lambda _tensor: False),
        "odd_calls": (images, "contiguous_copies", lambda *_tensors: []),
    }
    for name, fault in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(op_semantics, "_CALL_MEMORY", defaultdict(CallCache))
            patch.setattr(*fault)
            wrong, calls = counted(name)
        assert 0 < wrong < calls, name


def test_the_recordings_cover_five_architectures_and_hundreds_of_calls() -> None:
    capabilities = {
        tuple(card["compute_capability"])
        for path in RECORDINGS
        for card in recording(path)["cards"].values()
    }
    assert {(7, 5), (8, 0), (8, 6), (8, 9), (9, 0)} <= capabilities
    assert sum(len(recording(path)["cases"]) for path in RECORDINGS) > 1000


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_each_recording_says_what_it_was_made_on(path: Path) -> None:
    for card in recording(path)["cards"].values():
        assert card["origin"] in ("null driver", "gpu")
        assert (card["origin"] == "null driver") == (card["device"] == "NullCUDA")
        assert card["torch"]
