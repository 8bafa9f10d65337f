"""Where everything kept cannot be beaten, no other option is traced."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import budgetfit
from budgetfit.core.plan import Plan
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.memory.chain.profile import with_options_of
from budgetfit.memory.replay import UNLIMITED_BYTES
from budgetfit.planning.search import everything_kept, loss_chunking
from budgetfit.timing.kernel_times import host_bytes_per_ns
from tests import models
from tests.models import MIB
from tests.solvers.chains import block, chain_of, equal_blocks, option
from tests.traced import PAIRS, chains

KEEP = option("keep", 20, 22, 4, cached=1)
RECOMPUTE = option("recompute", 2, 20, 23, extra=5)
CHAIN = chain_of(*equal_blocks(6, KEEP, RECOMPUTE), block("head", KEEP), static=100)


@pytest.mark.parametrize(
    ("missing", "longer_ns"), [(0, 0), (1, 2), (60, 120), (126, 252)]
)
def test_missing_bytes_take_time_until_no_block_has_any(
    missing: int, longer_ns: int
) -> None:
    found = everything_kept._with_freed_bytes(CHAIN, missing, 2.0)
    assert chain_peak_bytes(found, ()) <= UNLIMITED_BYTES
    assert chain_time_ns(found, ()) == chain_time_ns(CHAIN, ()) + longer_ns


def test_more_bytes_than_blocks_hold_cannot_be_freed() -> None:
    found = everything_kept._with_freed_bytes(CHAIN, 127, 2.0)  # 126 are
    assert chain_peak_bytes(found, ()) > UNLIMITED_BYTES


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "convolutions"])
@pytest.mark.parametrize("batch_size", [2, 16, 512])
def test_no_option_frees_a_byte_faster_than_the_bound(
    name: str, batch_size: int
) -> None:
    gpu, precision = PAIRS[name]
    chain = chains(name, gpu, precision)
    profile, rate = chain.profile_at(batch_size), host_bytes_per_ns(find_gpu(gpu))
    least = chain.least_ns_per_freed_byte()
    on_host = min(least, everything_kept.least_ns_per_offloaded_byte(profile, rate))
    for each in profile.blocks:
        for other in each.options[1:]:
            freed = each.keep.saved_bytes + each.keep.cached_bytes - other.saved_bytes
            uses_host = other.mode == "offload" or other.input_on_host
            if freed > 0:
                bound = on_host if uses_host else least
                assert other.extra_ns / freed >= bound * (1 - 1e-6)


def test_offloading_is_free_only_behind_kernels_as_long_as_the_copies() -> None:
    # Half of 20 saved bytes are copied.
    bound = everything_kept.least_ns_per_offloaded_byte
    one = replace(CHAIN.blocks[0], forward_ns=4, backward_ns=12)
    chain = replace(CHAIN, blocks=(one, *CHAIN.blocks[-1:]))
    assert bound(chain, 1.0) == pytest.approx(0.5 - 4 / 20)
    assert bound(chain, 10.0) == 0


def test_an_option_changes_a_block_alike_with_and_without_accumulation() -> None:
    one, many = (
        chains("llama", *PAIRS["llama"], accumulation).profile_at(16)
        for accumulation in (1, 2)
    )
    plain = chains("llama", *PAIRS["llama"]).without_options.profile_at(16)
    found = with_options_of(plain, many)
    for mine, traced in zip(found.blocks, one.blocks, strict=True):
        assert len(mine.options) == len(traced.options)
        for made, own in zip(mine.options, traced.options, strict=True):
            assert (made.mode, made.saved_ops) == (own.mode, own.saved_ops)
            assert made.saved_bytes == own.saved_bytes
            assert made.extra_ns == pytest.approx(own.extra_ns, rel=0.05)
            held = own.saved_bytes + own.backward_bytes
            assert made.saved_bytes + made.backward_bytes == pytest.approx(
                held, rel=0.02
            )


ROUNDING = 512  # of the allocator


def test_what_options_change_is_in_proportion_to_the_batch() -> None:
    plain = chains("llama", *PAIRS["llama"]).without_options
    found = with_options_of(
        plain.profile_at(32), chains("llama", *PAIRS["llama"]).profile_at(16)
    )
    traced = chains("llama", *PAIRS["llama"]).profile_at(32)
    for mine, own in zip(found.blocks, traced.blocks, strict=True):
        for made, other in zip(mine.options, own.options, strict=True):
            assert (made.mode, made.saved_ops) == (other.mode, other.saved_ops)
            assert abs(made.saved_bytes - other.saved_bytes) <= ROUNDING
            assert made.host_bytes == pytest.approx(other.host_bytes, rel=0.01)
            assert made.extra_ns == pytest.approx(other.extra_ns, rel=0.05)
            held = other.saved_bytes + other.backward_bytes
            assert made.saved_bytes + made.backward_bytes == pytest.approx(
                held, rel=0.02
            )


def planned(vram: int, **given: Any) -> Plan:
    with torch.device("meta"):
        model = models.llama(num_hidden_layers=6, hidden_size=256)
    return budgetfit.plan(
        model, vram=f"{vram}MiB", headroom=0, max_length=512, precision="bf16", **given
    )


@pytest.mark.parametrize(("vram", "effective"), [(1400, None), (2000, 16)])
def test_the_plan_is_as_fast_as_that_of_the_whole_search(
    monkeypatch: pytest.MonkeyPatch, vram: int, effective: int | None
) -> None:
    monkeypatch.setenv("BUDGETFIT_CACHE", "off")
    given = {"effective_batch_size": effective}
    first = planned(vram, **given)
    monkeypatch.setattr(loss_chunking, "everything_kept", lambda *_: None)
    whole = planned(vram, **given)
    assert first.fits
    # The whole search may use the host where that gains up to two per cent.
    assert first.estimate.samples_per_s >= 0.98 * whole.estimate.samples_per_s
    if first.recipe.segments:
        assert first.recipe == whole.recipe


def test_where_everything_fits_no_option_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BUDGETFIT_CACHE", "off")
    plan = planned(16_000, effective_batch_size=8)
    assert not plan.recipe.segments
    assert {each.mode for row in plan.block_table for each in row.choices} == {
        "keep",
        "recompute",
    }
    assert plan.estimate.reserved_bytes < 16_000 * MIB
