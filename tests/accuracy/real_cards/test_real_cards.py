"""Runs on a real T4 against what budgetfit predicts for them."""

from dataclasses import replace

import pytest

from tests.accuracy.real_cards.predict import Compared, compare, reserved_with_threads
from tests.accuracy.real_cards.program import workload_of
from tests.accuracy.real_cards.report import kept_section, section
from tests.accuracy.real_cards.runs import CardRun, runs
from tests.accuracy.real_cards.segments import below_earlier

MOST_ALLOCATED = 0.0025
MOST_UNDER, MOST_OVER = 0.03, 0.06
FEWEST_AND_MOST = (0, 10_000)  # entries that are copied ahead of their turn


def find(*setting: object) -> CardRun:
    """The first run of a model's name, attention, batch, length and quantisation."""
    return next(
        run
        for run in runs()
        if (
            run.model.rpartition("/")[2],
            *(run.attention, run.batch_size, run.length, run.quantization),
        )
        == setting
    )


def test_there_are_57_runs_of_five_models() -> None:
    assert len(runs()) == 57
    assert len({run.model for run in runs()}) == 5
    assert len({run.setting for run in runs()}) == 47
    for run in runs():
        peak = max(run.forward_mib, run.backward_mib, run.optimizer_mib)
        assert run.allocated_mib == pytest.approx(peak, rel=0.001)
        assert run.loaded_mib < run.allocated_mib < run.reserved_mib < run.process_mib


def test_adapters_have_the_size_that_was_measured() -> None:
    for run in {run.model: run for run in runs()}.values():
        parameters = workload_of(run).model.parameters()
        assert sum(p.numel() for p in parameters if p.requires_grad) == run.trained


@pytest.mark.parametrize(
    "setting",
    [
        # eager attention in fp16: free blocks of equal size decide what is reserved
        ("SmolLM2-135M", "eager", 1, 4096, None),
        ("SmolLM2-360M", "eager", 1, 4096, None),
        ("TinyLlama-1.1B-Chat-v1.0", "eager", 2, 1024, None),
        ("SmolLM2-1.7B", "eager", 4, 1024, None),
        ("SmolLM2-1.7B", "eager", 1, 2048, None),
        ("SmolLM2-135M", "sdpa", 1, 4096, None),
        ("Qwen2.5-1.5B-Instruct", "sdpa", 2, 1024, None),
        # in nf4: what loading leaves counts
        ("SmolLM2-1.7B", "sdpa", 4, 1024, "nf4"),
        ("SmolLM2-1.7B", "sdpa", 1, 2048, "nf4"),
        ("TinyLlama-1.1B-Chat-v1.0", "sdpa", 12, 1024, "nf4"),
        ("TinyLlama-1.1B-Chat-v1.0", "sdpa", 2, 2048, "nf4"),
        ("Qwen2.5-1.5B-Instruct", "eager", 1, 2048, "nf4"),
    ],
)
def test_a_run_on_a_card_is_predicted(setting: tuple[object, ...]) -> None:
    found = compare(find(*setting))
    assert abs(found.allocated_error) <= MOST_ALLOCATED
    assert all(abs(error) <= 2 * MOST_ALLOCATED for error in found.phase_errors)
    assert -MOST_UNDER <= found.reserved_error <= MOST_OVER
    if found.run.quantization is None:
        assert abs(found.reserved_error) <= 0.01


@pytest.mark.parametrize(("attention", "length"), [("eager", 4096), ("sdpa", 512)])
def test_threads_and_a_kept_cache_explain_the_smallest_model(
    attention: str, length: int
) -> None:
    # Every weight of it is small: with an emptied cache nothing that threads do counts.
    run = find("SmolLM2-135M", attention, 1024 // length or 1, length, "nf4")
    kept = reserved_with_threads(run, FEWEST_AND_MOST)
    assert min(kept) <= run.reserved_mib <= max(kept)
    emptied = reserved_with_threads(run, FEWEST_AND_MOST, empties=True)
    assert max(emptied) - min(emptied) <= 4
    assert max(emptied) < run.reserved_mib


def test_weights_that_are_not_copied_ahead_are_loaded_as_predicted() -> None:
    run = find("SmolLM2-135M", "sdpa", 2, 512, "nf4")
    expected = (compare(run).reserved_mib,)
    assert reserved_with_threads(run, (0,), empties=True) == expected


def test_drivers_put_a_new_segment_below_the_earlier_ones() -> None:
    found = below_earlier()
    assert len(found) == 4
    assert all(below / pairs > 0.97 for below, pairs in found.values())


def test_the_page_begins_with_the_worst_run() -> None:
    run = runs()[0]
    exact = Compared(
        run,
        run.allocated_mib,
        run.reserved_mib,
        (run.forward_mib, run.backward_mib, run.optimizer_mib),
    )
    bad = replace(
        exact,
        run=runs()[2],
        reserved_mib=0.9 * runs()[2].reserved_mib,
        threads_mib=(7000.0, 8000.0),
    )
    text = section([exact, bad])
    rows = [line for line in text.splitlines() if line.startswith("| Qwen2.5")]
    assert "-10.00 % | 7,000 to 8,000 |" in rows[0]
    assert "1 of 1 rows" in text
    assert "+0.00 %" in rows[1]
    assert "| all: reserved | 2 | 5.000 % | -10.00 % | +0.00 % | 1 |" in text
    assert kept_section(f"# A\n\n{text}\n\n## Next\n") == text
