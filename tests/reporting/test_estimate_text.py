"""An estimate as a user reads it."""

from dataclasses import replace

from budgetfit.reporting.render import estimate_text, render
from tests.reporting.sample_plans import (
    GIB,
    sample_estimate,
    sample_model,
    sample_recipe,
    sample_timeline,
    sample_verification,
)


def test_the_limit_is_echoed_in_both_units_with_the_cards_of_its_class() -> None:
    text = render(estimate_text(sample_estimate(), model=sample_model(), vram="24GB"))
    assert "24GB = 22.35 GiB" in text
    assert "Cards sold as 24 GB have 21.96 GiB (l4)" in text


def test_a_card_is_echoed_with_its_real_capacity() -> None:
    text = render(estimate_text(sample_estimate(), gpu="RTX 4090"))
    assert text.startswith("rtx-4090 23.64 GiB\n")


def test_with_a_model_blocks_are_numbered_and_without_one_counted() -> None:
    with_model = render(estimate_text(sample_estimate(), model=sample_model()))
    without = str(sample_estimate())
    assert "recompute blocks 0-15 (16 of 24)" in with_model
    assert "recompute 16 blocks" in without


def test_the_verdict_needs_a_budget() -> None:
    def heading(fits: bool | None) -> str:
        text = str(sample_estimate(fits=fits))
        (line,) = [line for line in text.splitlines() if "ESTIMATE" in line]
        return line

    assert heading(fits=True).endswith("  FITS")
    assert heading(fits=False).endswith("DOES NOT FIT")
    assert heading(fits=None) == "ESTIMATE"


def test_an_allocator_that_cached_nothing_has_no_row() -> None:
    text = render(
        estimate_text(sample_estimate(allocated_bytes=2**30, reserved_bytes=2**30))
    )
    assert "allocator" not in text


def test_what_is_not_modelled_is_told() -> None:
    assert "* cuDNN is not modelled." in str(sample_estimate())


def test_crumbs_share_a_row() -> None:
    parts = {"parameters": 20 * 2**30 - 3072, "buffers": 1024, "batch": 2048}
    text = str(sample_estimate(at_peak_bytes=parts))
    assert "batch, buffers" in text
    assert "3 KiB" in text


def test_printing_in_python_uses_the_same_text() -> None:
    assert str(sample_estimate()).startswith("ESTIMATE")
    assert "VERIFIED" in str(sample_verification())


def test_a_limit_above_the_card_is_the_card() -> None:
    text = render(estimate_text(sample_estimate(), gpu="rtx-4090", vram="48GB"))
    assert text.startswith("rtx-4090 23.64 GiB\n")


def test_as_it_is_says_what_that_is() -> None:
    as_is = sample_recipe(precision="as-is", batch_size=8, segments=())
    text = str(sample_estimate(as_is, as_is="bf16"))
    assert "\n  as-is: weights bf16, no autocast\n" in text
    assert "no autocast" not in str(sample_estimate())


def test_what_does_not_fit_says_of_how_much_and_what_to_type_next() -> None:
    command = "budgetfit plan a/model --gpu rtx-4090 " + "--max-length 2048 " * 5
    found = sample_estimate(fits=False, usable_bytes=21 * GIB)
    text = render(estimate_text(found, then=command.strip()))
    assert "reserved 22.00 GiB of 21.00 GiB usable   DOES NOT FIT" in text
    assert f"    {command.strip()}" in text.splitlines()
    assert "NEXT" not in render(estimate_text(sample_estimate(), then=command))
    assert "budgetfit.plan(model, ...)" in str(found)


def test_pefts_own_names_are_left_out_of_layers() -> None:
    timeline = replace(
        sample_timeline(GIB, GIB),
        at_peak_layers=(("base_model.model.lm_head", GIB), ("logits and loss", 1)),
    )
    text = str(sample_estimate(timeline=timeline))
    assert "largest layers: lm_head 1.00 GiB, logits and loss 1 B" in text
