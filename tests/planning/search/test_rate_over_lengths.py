"""Rates over batches of many lengths: ranks wait for the longest among them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from budgetfit.core.parallelism import Parallelism
from budgetfit.core.samples.sample_lengths import summarize_lengths
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.search import rate_over_lengths
from budgetfit.planning.search.rate_over_lengths import RateOverLengths
from budgetfit.timing.kernel_times import StepTime
from tests.reporting.sample_plans import sample_estimate, sample_recipe

# Two of ten samples are long; a micro-batch takes a nanosecond per token.
LENGTHS = summarize_lengths({100: 8, 1000: 2})
DDP = Parallelism(engine="ddp", gpus=4)
FSDP2 = Parallelism(engine="fsdp2", gpus=4)
NETWORK_NS = 50.0
OPTIMIZER_NS = 30


def _rates(
    monkeypatch: pytest.MonkeyPatch,
    parallelism: Parallelism | None,
    steps: int,
    **recipe: Any,
) -> RateOverLengths:
    def time_of(length: object, *_: object) -> Any:
        return SimpleNamespace(times_ns=length)

    def network(*_: object) -> SimpleNamespace | None:
        return SimpleNamespace(expected_ns=NETWORK_NS) if parallelism else None

    monkeypatch.setattr(rate_over_lengths, "times_of_ops", time_of)
    monkeypatch.setattr(rate_over_lengths, "network_of", network)
    monkeypatch.setattr(
        rate_over_lengths,
        "step_time_ns",
        lambda length, *_: StepTime(length // 4, length - length // 4, OPTIMIZER_NS),
    )
    of = sample_recipe(
        batch_size=2,
        gradient_accumulation_steps=steps,
        parallelism=parallelism,
        segments=(),
        **recipe,
    )
    estimate = replace(sample_estimate(of), time_factor=1.0)
    traced: Any = {100: 100, 1000: 1000}
    return RateOverLengths(traced, estimate, find_gpu("t4"), LENGTHS, steps)


def _update_ns(rates: RateOverLengths, samples: int) -> float:
    return samples / rates.drawn(range(3), 20_000, lambda n: n) * 1e9


def test_one_gpu_takes_its_own_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = _rates(monkeypatch, None, 3)
    long = 1 - 0.8**2  # of two samples one is long
    expected = 3 * (100 + 900 * long) + OPTIMIZER_NS
    assert _update_ns(rates, 6) == pytest.approx(expected, rel=0.02)
    assert 6 / rates.grouped() * 1e9 == pytest.approx(3 * 280 + OPTIMIZER_NS)


def test_where_each_micro_batch_exchanges_the_longest_of_all_ranks_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = 1 - 0.8**8  # of eight samples one
    expected = 3 * (100 + 900 * long) + OPTIMIZER_NS + NETWORK_NS
    rates = _rates(monkeypatch, FSDP2, 3)
    assert _update_ns(rates, 24) == pytest.approx(expected, rel=0.02)
    each = _rates(monkeypatch, replace(DDP, sync_each_batch=True), 3)
    assert _update_ns(each, 24) == pytest.approx(expected, rel=0.02)
    grouped = 3 * 280 + OPTIMIZER_NS + NETWORK_NS
    assert 24 / rates.grouped() * 1e9 == pytest.approx(grouped)


def test_ddp_waits_once_per_update_for_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = _rates(monkeypatch, DDP, 3)
    long = 1 - 0.8**2
    counts = np.random.default_rng(9).binomial(3, long, (100_000, 4)).max(axis=1)
    expected = 300 + 900 * counts.mean() + OPTIMIZER_NS + NETWORK_NS
    assert _update_ns(rates, 24) == pytest.approx(expected, rel=0.02)


def test_padded_batches_take_as_long_as_the_longer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = _rates(monkeypatch, FSDP2, 1)
    padded = rates.drawn(range(3), 200, lambda _: 1000)
    assert 8 / padded * 1e9 == pytest.approx(1000 + OPTIMIZER_NS + NETWORK_NS)
