"""Which blocks are equal, and which rows of them repeat."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from budgetfit.core.recipe import Segment
from budgetfit.tracing.blocks.block_signature import block_signatures
from budgetfit.tracing.blocks.repeated_runs import find_runs
from budgetfit.tracing.depth_extrapolation.run_layout import run_layout
from budgetfit.tracing.fake.shortened_model import shortening
from tests.models import Mebi


def names(count: int) -> tuple[str, ...]:
    return tuple(f"blocks.{number}" for number in range(count))


def periods(model: nn.Module, count: int, *segments: Segment) -> list[tuple[int, int]]:
    """Return how many periods of how many blocks each run has, its edges included."""
    kinds = block_signatures(model, names(count))
    runs = find_runs(names(count), kinds, segments)
    return [(len(run.periods), len(run.periods[1])) for run in runs]


def test_equal_blocks_are_one_run() -> None:
    assert periods(Mebi(8), 8) == [(8, 1)]
    assert periods(Mebi(5), 5) == [(5, 1)]
    assert periods(Mebi(4), 4) == []  # as many as a shortened model keeps


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.inner.weight.requires_grad_(requires_grad=False),
        lambda block: setattr(block, "inner", nn.Linear(512, 256)),
        lambda block: setattr(block, "scale", 0.5),
        lambda block: block.eval(),
        lambda block: block.register_buffer("mask", torch.zeros(3)),
        lambda block: block.register_forward_hook(print),
        lambda block: block.inner.weight.register_hook(print),
        lambda block: setattr(block.inner, "weight", nn.Parameter(torch.zeros(512, 9))),
    ],
    ids=["frozen", "narrow", "scaled", "eval", "buffer", "hook", "gradient", "shape"],
)
def test_what_can_be_seen_of_a_block_parts_a_run(
    change: Callable[[Any], object],
) -> None:
    model = Mebi(15)
    change(model.blocks[7])
    assert periods(model, 15) == [(7, 1), (7, 1)]


def test_shared_weights_make_a_block_like_no_other() -> None:
    model = Mebi(15)
    model.blocks[7].inner.weight = model.blocks[0].inner.weight
    assert periods(model, 15) == [(6, 1), (7, 1)]  # neither 0 nor 7


def test_a_block_s_place_in_the_row_is_no_difference() -> None:
    model = Mebi(8)
    for number, block in enumerate(model.blocks):
        block.layer_idx = number
    assert periods(model, 8) == [(8, 1)]
    model.blocks[3].layer_idx = 30
    assert periods(model, 8) == []


def test_what_settings_say_about_each_block_parts_them() -> None:
    model = Mebi(16)
    model.config = SimpleNamespace(layer_types=["near", "far"] * 8)
    assert periods(model, 16) == [(9, 2)]
    runs = find_runs(names(16), block_signatures(model, names(16)), ())
    assert [len(period) for period in runs[0].periods] == [1, *[2] * 7, 1]
    short = shortening(model, names(16), runs, 4)
    assert short.kept_blocks == tuple(f"blocks.{n}" for n in (0, 1, 2, 13, 14, 15))
    assert short.short_blocks == names(6)


def test_a_list_of_some_blocks_numbers_parts_them() -> None:
    model = Mebi(20)
    model.whole_block_indexes = [9, 19]
    assert periods(model, 20) == [(9, 1), (9, 1)]
    model.whole_block_indexes = [9, 20]  # of something else: there is no block 20
    assert periods(model, 20) == [(20, 1)]


@pytest.mark.parametrize(
    ("count", "length", "kept"),
    [
        (26, 6, 14),  # Gemma 3 1B
        (34, 6, 16),  # 4B
        (48, 6, 18),  # 12B
        (62, 6, 14),  # 27B
        (48, 4, 12),  # Qwen3-Next, Llama 4
        (36, 4, 12),  # SmolLM3
        (24, 2, 6),  # GPT-OSS 20B
        (26, 2, 6),  # Gemma 2 2B
    ],
)
def test_the_edges_of_a_pattern_are_a_block_and_what_is_left(
    count: int, length: int, kept: int
) -> None:
    model = Mebi(count)
    kinds = (["sliding"] * (length - 1) + ["full"]) * count
    model.config = SimpleNamespace(layer_types=kinds[:count])
    (run,) = find_runs(names(count), block_signatures(model, names(count)), ())
    first, *between, last = map(len, run.periods)
    assert first == 1
    assert set(between) == {length}
    assert 1 <= last <= length
    assert [name for period in run.periods for name in period] == list(names(count))
    assert count - len(run.left_out(4)) == kept


def test_the_first_edge_is_aligned_with_the_end_of_a_period() -> None:
    model = Mebi(16)
    model.config = SimpleNamespace(layer_types=["near", "far"] * 8)
    (run,) = find_runs(names(16), block_signatures(model, names(16)), ())
    layout = run_layout(run, names(16), names(16))
    column = layout.path_of_layer[:16].tolist()
    assert column[0] == column[2] == column[14]
    assert column[1] == column[3] == column[15]
    assert column[0] != column[1]


def test_units_are_what_the_recipe_makes_of_the_blocks() -> None:
    model, row = Mebi(24), names(24)
    first = tuple(Segment((name,)) for name in row[:8])
    assert periods(model, 24, *first) == [(8, 1), (16, 1)]
    pairs = tuple(Segment(row[n : n + 2]) for n in range(0, 24, 2))
    assert periods(model, 24, *pairs) == [(12, 2)]
    others = tuple(Segment((name,)) for name in row[::2])
    assert periods(model, 24, *others) == [(13, 2)]
    jumping = (Segment((row[0], row[2])),)
    assert periods(model, 24, *jumping) == []


def test_a_segment_moves_with_its_blocks() -> None:
    model, row = Mebi(12), names(12)
    runs = find_runs(row, block_signatures(model, row), ())
    short = shortening(model, row, runs, 4)
    segments = tuple(Segment((name,)) for name in row)
    assert [s.blocks for s in short.segments(segments)] == [(n,) for n in names(4)]
    assert short.paths["blocks.11.inner"] == "blocks.3.inner"
    assert short.paths["blocks.5.inner"] is None
