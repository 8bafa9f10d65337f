"""Predicted times of published steps: what they are made from, how close they are."""

import functools
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.published_steps import scaling
from benchmarks.published_steps.fit import PRIOR, fit, shares_of
from benchmarks.published_steps.optimizers import OPTIMIZERS
from benchmarks.published_steps.predict import ROWS, Step, recorded_kernels, steps
from benchmarks.published_steps.record import kernels_of
from benchmarks.step_times import Row, batch_growth, hard_pairs, pairs_of_settings
from budgetfit.gpus.table import find_gpu
from budgetfit.timing.kind_shares import KIND_SHARES
from budgetfit.tracing.op_costs import op_cost

LAYER = "bert-large layer"


@functools.cache
def every_step() -> list[Step]:
    return steps()


@functools.cache
def rows() -> list[Row]:
    """Rows of one GPU by the product's own constants, which were fitted on them."""
    found = [step for step in every_step() if step.is_single_gpu]
    return [Row(step, step.predicted_ms()) for step in found]


def errors(some: list[Row]) -> np.ndarray:
    return np.array([row.error for row in some])


def test_every_published_row_has_its_source_gpu_and_kernels() -> None:
    published = json.loads(ROWS.read_text())
    known = {step.row["id"] for step in every_step()}
    for row in published:
        assert row["source"]
        assert row["excluded"] or row["id"] in known
        assert find_gpu(row["gpu"]).name == row["gpu"]


def test_recorded_kernels_are_those_of_todays_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BUDGETFIT_CACHE", "off")
    step = next(s for s in every_step() if s.row["model"] == LAYER)
    found = kernels_of([step.row])[step.row["id"]]
    assert sorted(found) == sorted(recorded_kernels()[step.row["id"]])


def test_the_shares_are_those_that_the_fit_gives() -> None:
    # With the steps of one H100 too, and its shares before its ops were measured.
    constants = fit(every_step())
    for kind, shares in shares_of(constants).items():
        assert shares == pytest.approx(KIND_SHARES[kind], rel=0.1), kind
    assert constants.keys() == PRIOR.keys()


def test_predicted_times_are_as_close_as_they_were() -> None:
    found = errors(rows())
    assert abs(np.median(found)) < 0.02
    assert np.median(abs(found)) < 0.062
    assert np.quantile(abs(found), 0.9) < 0.18
    assert np.mean((found > -0.2) & (found < 0.25)) > 0.92
    assert np.mean([row.is_inside for row in rows()]) > 0.91


def test_models_and_settings_are_in_the_order_of_measured_times() -> None:
    hard, settings = hard_pairs(rows()), pairs_of_settings(rows())
    assert hard.right / hard.pairs > 0.85
    assert settings.right / settings.pairs > 0.89


def test_times_on_a_t4_are_neither_too_fast_nor_too_slow() -> None:
    ratios = 1 + errors([row for row in rows() if row["gpu"] == "t4"])
    assert 0.93 < np.median(ratios) < 1.07
    assert ratios.min() > 0.75
    assert np.quantile(ratios, 0.95) < 1.2
    assert ratios.max() < 1.45  # LoRA on SmolLM2-135M, which waits for Python


def test_small_batches_take_longer_per_sample() -> None:
    for _, measured, predicted in batch_growth(rows()):
        assert max(1, float(measured) - 0.25) < float(predicted)
        assert float(predicted) < float(measured) + 0.1


class MovedBytes(TorchDispatchMode):
    """Adds up the bytes that ops move."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += op_cost(func, args, kwargs or {}, out).moved_bytes
        return out


@pytest.mark.parametrize(
    ("optimizer", "dtype", "expected"),
    [
        # The momentum scaled and added to, Nesterov's sum, the weight.
        ("sgd_nesterov", torch.float, 4 * (2 + 3 + 3 + 3)),
        # Clipped (norm and scale); m, v, m / (v.sqrt() + eps), decay, the weight.
        ("squad_adam", torch.float, 4 * (1 + 2 + 5 + 6 + 7 + 5 + 7)),
        # To fp32, clipped, AdamW's seven, and back to fp16.
        ("squad_adam", torch.half, 6 + 4 * (1 + 2 + 7) + 6),
    ],
)
def test_optimizers_of_the_rows_move_the_bytes_of_their_programs(
    optimizer: str, dtype: torch.dtype, expected: int
) -> None:
    count = 10_000
    weight = torch.nn.Parameter(torch.ones(count, dtype=dtype))
    made = OPTIMIZERS[optimizer]([weight])
    weight.grad = torch.ones_like(weight)
    made.step()  # the first makes what persists
    with MovedBytes() as moved:
        made.step()
    assert moved.total / count == pytest.approx(expected, rel=0.02)
    assert (weight != 1).all()


SCALING = json.loads((scaling.FOLDER / "scaling.json").read_text())["rows"]


def test_every_scaling_row_can_be_rebuilt() -> None:
    shapes = {(row["model"], row["seq"], row["parameters"]) for row in SCALING}
    for name, length, published in shapes:
        width, _, blocks = scaling.SHAPES[name]
        # A block has 12 matrices of width x width; its biases and norms take 13.
        of_block = 12 * width**2 + 13 * width
        outside = (scaling.VOCABULARY + length) * width + 2 * width
        assert blocks * of_block + outside == published, name
    for row in SCALING:
        assert row["gpus"] == 8 or row["gpus"] % 8 == 0
        assert row["sharding"] in scaling.RESHARDS
        assert row["precision"] in scaling.REDUCED_IN


def test_scaling_is_against_the_fewest_gpus_of_a_group() -> None:
    rows = [
        {"model": "m", "gpu": "g", "sharding": "s", "checkpointed": False, **row}
        for row in ({"gpus": 8, "error": 0.25}, {"gpus": 16, "error": 0.5})
    ]
    assert scaling.scaling_error(rows[0], rows) is None
    assert scaling.scaling_error(rows[1], rows) == pytest.approx(0.2)
