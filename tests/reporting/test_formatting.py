"""Numbers and recipes in words."""

import pytest

from budgetfit.core.recipe import Segment
from budgetfit.reporting.formatting import (
    blocks_text,
    count_text,
    memory_class_text,
    ops_text,
    percent_text,
    sample_text,
    size_text,
    time_text,
)
from budgetfit.utils.format_rate import rate_text
from tests.reporting.sample_plans import BLOCKS, GIB, sample_recipe, segments, singles


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1 k"),
        (999_999, "1 M"),
        (124_439_808, "124 M"),
        (1_711_376_384, "1.71 B"),
        (2e15, "2e+03 T"),
    ],
)
def test_a_count_has_three_digits_and_a_letter(count: float, text: str) -> None:
    assert count_text(count) == text


def test_a_size_in_gb_is_echoed_in_gib_and_the_other_way_round() -> None:
    assert size_text(24 * 10**9) == "24GB = 22.35 GiB"
    assert size_text(int(22.5 * 10**9)) == "22.5GB = 20.95 GiB"
    assert size_text(24 * GIB) == "24GiB = 25.77 GB"


def test_the_exact_capacity_of_a_card_is_written_once() -> None:
    assert size_text(25_382_879_232) == "23.64 GiB"


@pytest.mark.parametrize("size_bytes", [24 * 10**9, 24 * GIB])
def test_a_card_class_names_the_smallest_and_the_largest_card_of_it(
    size_bytes: int,
) -> None:
    text = memory_class_text(size_bytes)
    assert text is not None
    assert text.startswith("Cards sold as 24 GB have 21.96 GiB (l4) to ")
    assert "23.87 GiB (p40)" in text


@pytest.mark.parametrize("size_bytes", [23 * 10**9, 24 * 10**9 + 1])
def test_a_size_that_no_card_is_sold_by_names_none(size_bytes: int) -> None:
    assert memory_class_text(size_bytes) is None


def test_times_are_in_ms_until_ten_seconds() -> None:
    assert time_text(0.254) == "0.25 ms"
    assert time_text(9_999) == "9,999 ms"
    assert time_text(10_000) == "10.0 s"


def test_rates_and_differences_have_about_three_digits() -> None:
    assert rate_text(14.62) == "14.6"
    assert rate_text(1234.5) == "1,234"
    assert percent_text(0.18) == "+18 %"
    assert percent_text(-0.0042) == "-0.42 %"


def test_many_sets_of_saved_ops_are_told_together() -> None:
    ops = [f"aten.mm.default:{number}" for number in range(3)]
    for count, text in (
        (2, "but save the outputs of 1 matrix product; recompute block 1"),
        (3, "recompute blocks 0-2 (3 of 24) but save selected ops; keep"),
    ):
        recipe = sample_recipe(
            segments=tuple(
                Segment((BLOCKS[at],), "selective", tuple(ops[: at + 1]))
                for at in range(count)
            )
        )
        assert text in blocks_text(recipe, BLOCKS)


def test_one_sample_is_told_without_the_batch_dimension() -> None:
    batch = {"pixel_values": ((2, 3, 224, 224), "float32"), "labels": ((2,), "int64")}
    assert sample_text(batch) == "pixel_values 3x224x224 float32, labels int64"


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (
            singles(range(16)),
            "recompute blocks 0-15 (16 of 24); keep all activations of blocks 16-23",
        ),
        (singles(range(24)), "recompute all 24 blocks"),
        ((), "keep all activations; nothing is recomputed"),
        (
            segments(*(range(i, i + 4) for i in range(0, 24, 4))),
            "recompute all 24 blocks in segments of 4 blocks",
        ),
        (
            segments(range(2), range(2, 5), range(7, 8)),
            (
                "recompute blocks 0-4, 7 (6 of 24) in 3 segments of 1 to 3 blocks; "
                "keep all activations of blocks 5-6, 8-23"
            ),
        ),
        (
            singles(range(1)),
            "recompute block 0 (1 of 24); keep all activations of blocks 1-23",
        ),
        (
            (*singles(range(2)), Segment((BLOCKS[2],), mode="offload")),
            (
                "recompute blocks 0-1 (2 of 24); "
                "offload activations of block 2 (1 of 24); "
                "keep all activations of blocks 3-23"
            ),
        ),
    ],
)
def test_segments_become_a_sentence(chosen: tuple[Segment, ...], text: str) -> None:
    assert blocks_text(sample_recipe(segments=chosen), BLOCKS) == text


def test_every_treatment_has_words_of_its_own() -> None:
    product, attention = (
        "aten.mm.default:0",
        "aten._scaled_dot_product_flash_attention.default:0",
    )
    recipe = sample_recipe(
        segments=(
            Segment(BLOCKS[:4], nested=True),
            Segment(BLOCKS[4:5], input_on_host=True),
            Segment(BLOCKS[5:6], "selective", (product, attention)),
            Segment(BLOCKS[6:7], "selective", (product,)),
            Segment(BLOCKS[7:8], "offload"),
        )
    )
    assert blocks_text(recipe, BLOCKS) == (
        "recompute blocks 0-3 (4 of 24) in segments of 4 blocks, in two levels; "
        "recompute block 4 (1 of 24), inputs wait on the host; "
        "recompute block 5 (1 of 24) but save the outputs of attention, "
        "1 matrix product; "
        "recompute block 6 (1 of 24) but save the outputs of 1 matrix product; "
        "offload activations of block 7 (1 of 24); "
        "keep all activations of blocks 8-23"
    )


@pytest.mark.parametrize(
    ("ops", "text"),
    [
        (["aten._scaled_dot_product_flash_attention.default:0"], "attention"),
        (["aten.add.Tensor:0"], "1 op"),
        (["aten.add.Tensor:0", "aten.mul.Tensor:1"], "2 ops"),
        (["aten.addmm.default:0", "aten.bmm.default:0"], "2 matrix products"),
    ],
)
def test_saved_ops_are_counted_by_kind(ops: list[str], text: str) -> None:
    assert ops_text(ops) == text


def test_several_chains_of_blocks_are_told_apart() -> None:
    blocks = ("encoder.block.0", "encoder.block.1", "decoder.block.0", "bridge")
    recipe = sample_recipe(segments=(Segment((blocks[0],)), Segment((blocks[2],))))
    assert blocks_text(recipe, blocks) == (
        "recompute encoder.block 0, decoder.block 0 (2 of 4); "
        "keep all activations of encoder.block 1, bridge"
    )


def test_a_model_without_blocks_has_nothing_to_checkpoint() -> None:
    assert "no repeated blocks" in blocks_text(sample_recipe(segments=()), ())


def test_a_long_list_of_blocks_is_cut() -> None:
    blocks = tuple(f"h.{number}" for number in range(60))
    odd = tuple(Segment((name,)) for name in blocks[1::2])
    text = blocks_text(sample_recipe(segments=odd), blocks)
    assert "1, 3, 5" in text
    assert "... (30 of 60)" in text
    assert len(text) < 200
