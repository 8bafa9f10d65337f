"""Predicted against measured, as a user reads it."""

import dataclasses

from budgetfit.core.verification import CategoryCheck
from tests.reporting.sample_plans import GIB, MIB, sample_verification


def row(text: str, name: str) -> list[str]:
    """The cells of the first line that starts with ``name``."""
    found = next(
        line for line in text.splitlines() if line.strip().startswith(name)
    ).strip()
    return found.removeprefix(name).split("  ")


def cells(text: str, name: str) -> list[str]:
    return [cell.strip() for cell in row(text, name) if cell.strip()]


def test_peaks_stand_side_by_side_with_the_signed_error() -> None:
    text = str(sample_verification())
    # 20 predicted, 16 measured: 20 / 16 - 1 = +25 %
    assert cells(text, "peak allocated") == ["20.00 GiB", "16.00 GiB", "+25 %"]
    assert cells(text, "peak reserved") == ["22.00 GiB", "22.00 GiB", "+0.00 %"]
    # 400 ms predicted, 500 ms measured
    assert cells(text, "steady step ") == ["400 ms", "500 ms", "-20 %"]


def test_a_scaled_time_says_by_how_much() -> None:
    text = str(sample_verification(time_factor=1.324))
    # the 400 ms are scaled already
    assert cells(text, "steady step (x 1.32, as measured)") == [
        "400 ms",
        "500 ms",
        "-20 %",
    ]


def test_the_first_step_and_the_steady_ones_are_rows_apart() -> None:
    text = str(sample_verification())
    assert cells(text, "first step forward") == ["14.00 GiB", "16.00 GiB", "-12 %"]
    assert cells(text, "steady backward") == ["20.00 GiB", "16.00 GiB", "+25 %"]


def test_a_first_step_that_makes_states_is_timed_apart() -> None:
    text = str(sample_verification(first_step_ms=900))
    assert cells(text, "first step  ") == ["900 ms"]


def test_categories_are_compared_at_the_peak() -> None:
    check = sample_verification(
        categories=(
            CategoryCheck(
                name="optimizer_state", predicted_bytes=8 * GIB, measured_bytes=8 * GIB
            ),
            CategoryCheck(
                name="activations and the rest",
                predicted_bytes=5 * GIB,
                measured_bytes=4 * GIB,
            ),
        )
    )
    text = str(check)

    assert "AT THE PEAK" in text
    assert cells(text, "optimizer state") == ["8.00 GiB", "8.00 GiB", "+0.00 %"]
    assert cells(text, "activations and the rest")[-1] == "+25 %"


def test_host_memory_is_told() -> None:
    check = sample_verification(
        predicted_pinned_bytes=GIB,
        measured_pinned_bytes=2 * GIB,
        host_growth_bytes=3 * GIB,
    )
    text = str(check)
    assert "pinned host memory: 2.00 GiB, predicted 1.00 GiB" in text
    assert "host memory of the process: 3.00 GiB more" in text
    assert "pinned" not in str(sample_verification())


def test_what_shorter_batches_reserved_after_the_longest_is_told() -> None:
    same = sample_verification(shorter_batches=5, shorter_reserved_bytes=22 * GIB)
    more = sample_verification(shorter_batches=1, shorter_reserved_bytes=23 * GIB)
    text = str(same)
    assert "then 5 shorter batches: nothing more was reserved" in text
    text = str(more)
    assert "then 1 shorter batch: 1.00 GiB more were reserved" in text


def test_equal_gradients_and_planned_recomputation_pass() -> None:
    text = str(sample_verification())
    assert text.startswith("PASSED: peak 22.00 GiB reserved, predicted 22.00 GiB")
    assert "VERIFIED on NVIDIA GeForce RTX 4090, 3 real steps" in text
    assert "as those of the unmodified model (largest relative diff" in text
    assert "3.0e-07" in text
    assert "recomputed blocks: 16, as planned" in text


def test_other_gradients_and_missing_recomputation_fail_loudly() -> None:
    check = sample_verification(
        gradients_match=False, max_gradient_error=0.5, recomputed_blocks=0
    )
    text = str(check)
    assert text.startswith("FAILED: ")
    assert "gradients: DIFFER" in text
    assert "recomputed blocks: 0, but 16 were planned" in text


def test_out_of_memory_is_a_result() -> None:
    check = sample_verification(out_of_memory="CUDA out of memory. Tried 2 GiB")
    text = str(check)
    assert text.startswith("FAILED: ")
    assert "out of memory: CUDA out of memory. Tried 2 GiB" in text


def test_the_cpu_check_says_that_it_did_not_check_vram() -> None:
    check = sample_verification(
        device="cpu",
        device_name="",
        predicted_process_bytes=None,
        measured_process_bytes=None,
        notes=("VRAM was not checked: CPU.", "The process was not measured."),
    )

    text = str(check)

    assert text.splitlines()[1].startswith("CHECKED on the CPU, 3 real steps")
    assert text.splitlines()[0].endswith("; VRAM was not checked")
    assert "peak live bytes" in text
    assert "peak of the process" not in text
    assert "400 ms" not in text
    assert "* The process was not measured." in text


def test_what_was_not_measured_has_a_dash_and_no_error() -> None:
    phases = tuple(
        dataclasses.replace(phase, measured_allocated_bytes=-1)
        for phase in sample_verification().phases
    )
    text = str(sample_verification(phases=phases))
    assert cells(text, "first step forward") == ["14.00 GiB", "-", "-"]
    assert not any(
        line.strip().startswith("peak allocated") for line in text.splitlines()
    )


def test_the_process_and_its_context_are_compared_with_their_ranges() -> None:
    # 23 GiB of process less 22 GiB reserved plan 1 GiB of context
    check = sample_verification(
        predicted_process_range_bytes=(22 * GIB + 512 * MIB, 24 * GIB),
        measured_context_bytes=512 * MIB,
    )
    text = str(check)
    assert row(text, "peak of the process")[1:3] == [
        "23.00 GiB (22.50-24.00 GiB)",
        "23.00 GiB",
    ]
    context = next(line for line in text.splitlines() if "CUDA context" in line)
    expected = "CUDA context in it 1.00 GiB (0.50-2.00 GiB) 512 MiB +100 %"
    assert " ".join(context.split()) == expected
