"""Plans for images of many sizes: what is traced, replayed and recommended."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import budgetfit
from budgetfit.batches.resize_samples import with_image_size
from budgetfit.core.recipe import Recipe
from budgetfit.core.samples.image_sizes import Size, summarize_image_sizes
from budgetfit.core.step_trace import StepTrace
from budgetfit.inputs.arguments import Arguments
from budgetfit.memory.replay import device_properties, replay, storage_bytes
from budgetfit.memory.replay_sequence import StepSequence
from budgetfit.traces.length_traces import LengthsNotTracedError, LengthTraces
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.models import alone

BATCH = 4
RECIPE = Recipe(batch_size=BATCH, precision="bf16-mixed")
SIZES = summarize_image_sizes("64-256:32,96x160,160x96,77,100x211")
DRAWN = {n for seed in (0, 1) for row in SIZES.draw(BATCH, 1, 100, seed) for n in row}


def _config() -> transformers.PretrainedConfig:
    return transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 128],
        depths=[1, 1, 1, 1],
        num_labels=10,
        architectures=["ResNetForImageClassification"],
    )


@cache
def _workload() -> Workload:
    sizes = dict(SIZES.counts)
    asked = Arguments(model=_config(), gpu="t4", image_sizes=sizes).parsed()
    # The bound of cuDNN's workspaces is larger than what many sizes fragment.
    return replace(asked.workload, cudnn=False)


@cache
def _trace(size: Size) -> StepTrace:
    return TraceSession(_workload().at_length(size)).exact(RECIPE)


def _bytes(trace: StepTrace) -> np.ndarray:
    return storage_bytes(trace, BATCH, device_properties(_workload().gpu))


def test_sizes_are_read_from_lists_counts_and_text() -> None:
    text = summarize_image_sizes("480,480x640,500-570:32")
    assert [size for size, _ in text.counts] == [
        *((480, 480), (500, 500), (532, 532), (480, 640), (564, 564), (570, 570))
    ]
    assert summarize_image_sizes([32, (32, 64), "32"]).counts == (
        ((32, 32), 2),
        ((32, 64), 1),
    )
    assert summarize_image_sizes({32: 9}).counts == (((32, 32), 9),)


@pytest.mark.parametrize(
    "wrong",
    [
        *("", [], 480, "800-480", "a-b", {480: 0}, "480-800:0"),
        # No list of a billion sizes is made first, nor a number of 5,000 digits.
        *("480-999999999:1", "9" * 5000, "480-" + "9" * 5000, "480x" + "9" * 5000),
    ],
)
def test_what_are_no_sizes_is_refused_with_an_example(wrong: Any) -> None:
    with pytest.raises(budgetfit.InputError, match="image"):
        summarize_image_sizes(wrong)


def test_no_advice_to_pad_goes_beyond_the_largest() -> None:
    assert summarize_image_sizes([480, (800, 1333)]).multiples == ()
    assert summarize_image_sizes("480-800:32").multiples == (32,)
    assert summarize_image_sizes([(256, 768), 512]).multiples == (32, 64, 128, 256)


def test_a_batch_of_landscape_and_portrait_is_as_high_and_as_wide_as_both() -> None:
    assert SIZES.planned == (256, 256)
    both = summarize_image_sizes([(480, 640), (640, 480)])
    assert both.planned == (640, 640)
    padded = {n for row in both.draw(2, 2, 50, seed=0) for n in row}
    alike = {n for row in both.draw(2, 2, 50, seed=1) for n in row}
    assert padded == {(640, 640), (480, 640), (640, 480)}
    assert alike == {(480, 640), (640, 480)}


@pytest.mark.parametrize("size", [(128, 128), (192, 192), (160, 96), (160, 160)])
def test_a_size_that_was_not_traced_has_the_bytes_of_its_own_trace(size: Size) -> None:
    traces = LengthTraces(_trace, BATCH, SIZES, {*DRAWN, size})
    assert len(traces.traced) < len(DRAWN)
    actual, told = _trace(size), traces.program_at(size).at(size)
    assert told.events.tolist() == actual.events.tolist()
    beyond = np.abs(_bytes(told) - _bytes(actual))
    assert beyond.sum() <= 0.001 * _bytes(actual).sum()


def test_few_sizes_that_do_not_follow_from_others_are_all_traced() -> None:
    def jumping(size: Size) -> StepTrace:
        trace = _trace(size)
        return replace(trace, fixed_bytes=trace.fixed_bytes * (1 + size[0] % 96))

    few = summarize_image_sizes("64-256:32")
    drawn = {size for size, _ in few.counts}
    traces = LengthTraces(jumping, BATCH, few, drawn)
    assert {*traces.traced} >= drawn
    for size in drawn:
        told = traces.program_at(size).at(size)
        assert _bytes(told).tolist() == _bytes(jumping(size)).tolist()
    many = summarize_image_sizes("64-256:1")
    with pytest.raises(LengthsNotTracedError, match="do not follow from those"):
        LengthTraces(jumping, BATCH, many, {size for size, _ in many.counts})


def test_a_plan_holds_over_its_sizes() -> None:
    settings: dict[str, Any] = {
        "gpu": "t4",
        "batch_size": BATCH,
        "effective_batch_size": BATCH,
        "image_sizes": "64-256:32",
        "precision": "fp16-mixed",
    }
    plan = budgetfit.plan(_config(), **settings)
    over = plan.varying_lengths
    assert over is not None
    assert over.span == "images of 64x64 to 256x256 pixels"
    assert (over.measure, over.fits, over.updates) == ("longest first", True, 600)
    assert over.reserved_bytes == plan.estimate.reserved_bytes
    assert "images of 64x64 to 256x256 pixels" in " ".join(str(plan).split())
    assert plan.provenance["asked"]["image_size"] == "256x256"
    loaded = budgetfit.Plan.from_json(alone(plan).to_json())
    assert loaded.varying_lengths == over


def test_many_sizes_fragment() -> None:
    few = summarize_image_sizes("64-256:32")
    updates = few.draw(1, 1, 100, seed=1)
    drawn = {size for row in updates for size in row}
    traces = LengthTraces(_trace, BATCH, few, drawn)
    sequence = StepSequence(traces.program_at, _workload().gpu)
    alone = replay(_trace(few.planned), BATCH, _workload().gpu).reserved_bytes
    assert sequence.peaks([(few.planned,)] * 3).reserved_bytes == alone
    assert sequence.peaks(updates).reserved_bytes > alone


def test_a_given_batch_is_resized_where_it_has_the_largest_images() -> None:
    batch = {
        "pixel_values": torch.rand(2, 3, 64, 96),
        "pixel_mask": torch.ones(2, 64, 96),
        "labels": torch.zeros(2),
    }
    smaller = with_image_size(batch, (64, 96), (32, 48))
    assert {name: tuple(each.shape) for name, each in smaller.items()} == {
        "pixel_values": (2, 3, 32, 48),
        "pixel_mask": (2, 32, 48),
        "labels": (2,),
    }
    wrong = Arguments(
        model=torch.nn.Conv2d(3, 3, 3),
        gpu="t4",
        batch=batch["pixel_values"],
        image_sizes=[128],
    )
    with pytest.raises(budgetfit.InputError, match="128x128, but the batch has none"):
        wrong.parsed()


@pytest.mark.parametrize("other", [{"lengths": [64]}, {"image_size": 64}])
def test_sizes_go_with_no_other_size(other: dict[str, Any]) -> None:
    with pytest.raises(budgetfit.InputError, match="do not go together"):
        budgetfit.plan(_config(), gpu="t4", image_sizes=[64], **other)
