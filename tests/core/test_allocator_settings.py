"""Allocator settings: read as PyTorch's CUDA build reads them, and written again."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetfit.core.allocator.settings import AllocatorSettings, variable_in
from budgetfit.errors import InputError
from tests.core.record_allocator_settings import FILE, TEXTS

MIB = 1 << 20
RECORDED: dict[str, Any] = json.loads(FILE.read_text())
NO_LIMIT = -1  # as PyTorch says it


@pytest.mark.parametrize("text", RECORDED)
def test_settings_are_those_that_pytorch_reads(text: str) -> None:
    recorded = RECORDED[text]
    if recorded is None:
        with pytest.raises(InputError):
            AllocatorSettings.parse(text)
        return
    read = AllocatorSettings.parse(text)
    expandable, threshold, split_bytes, divisions = recorded
    assert read.expandable_segments == expandable
    assert read.garbage_collection_threshold == threshold
    assert list(read.roundup_power2_divisions or [0] * 16) == divisions
    if split_bytes == NO_LIMIT:
        assert read.max_split_bytes is None
    else:  # PyTorch says it with a sign
        assert read.max_split_bytes == split_bytes % (1 << 64)


def test_the_recording_has_every_text() -> None:
    assert list(RECORDED) == list(dict.fromkeys(TEXTS))
    refused = sum(each is None for each in RECORDED.values())
    assert len(RECORDED) > 250
    assert 100 < refused < len(RECORDED) - 100


sizes = st.integers(20, 1 << 20).map(lambda mib: mib * MIB)
powers = st.sampled_from([0, 1, 2, 4, 8, 1024])
some_settings = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_bytes=st.none() | sizes,
    max_non_split_rounding_bytes=st.none() | sizes,
    roundup_power2_divisions=st.just(())
    | st.lists(powers, min_size=16, max_size=16).filter(any).map(tuple),
    garbage_collection_threshold=st.just(0.0) | st.floats(0.01, 0.99),
    per_process_memory_fraction=st.floats(0, 1),
    throw_on_cudamalloc_oom=st.booleans(),
)


@settings(deadline=None)
@given(some_settings)
def test_what_is_written_is_read_again(chosen: AllocatorSettings) -> None:
    assert AllocatorSettings.parse(chosen.text) == chosen


def test_defaults_need_no_variable() -> None:
    assert AllocatorSettings().text == ""
    assert AllocatorSettings.parse("backend:native").is_default
    assert not AllocatorSettings(expandable_segments=True).is_default


def test_settings_of_host_memory_stay_in_the_text_and_change_nothing() -> None:
    text = "pinned_use_background_threads:True"
    read = AllocatorSettings.parse(text)
    assert read.text == text
    assert read == AllocatorSettings()


def test_the_shell_gets_lists_in_quotes() -> None:
    listed = AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,>:4]")
    assert listed.shell_text == "'roundup_power2_divisions:[256:1,512:2,>:4]'"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("expandable_segment:True", "no setting (near: expandable_segments)"),
        ("max_split_size_mb=128", "has no colon: write max_split_size_mb:128"),
        ("expandable_segments", "has no value: write expandable_segments:VALUE"),
        ("expandable_segments:true", "must be True or False, so written"),
        ("max_split_size_mb:19", "max_split_size_mb:19 must be at least 20 (MiB)"),
        ("large_segment_size_mb:10", "large_segment_size_mb:10 must be above 10"),
        ("max_split_size_mb:1e", "max_split_size_mb:1 must be at least 20"),
        ("max_split_size_mb:x", "max_split_size_mb:x is no number"),
        ("roundup_power2_divisions:3", "must be a power of two"),
        ("roundup_power2_divisions:[256:1", "has no closing bracket"),
        ("garbage_collection_threshold:80", "must be between 0 and 1"),
        ("per_process_memory_fraction:2", "must be from 0 to 1"),
        ("backend:malloc", "must be native or cudaMallocAsync"),
        ("backend:cudaMallocAsync", "is not modelled"),
        (3, "allocator must be text"),
    ],
)
def test_bad_settings_get_one_clear_line(text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        AllocatorSettings.parse(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_shares_are_of_the_card() -> None:
    both = AllocatorSettings(
        garbage_collection_threshold=0.5, per_process_memory_fraction=0.8
    )
    assert both.allowed_bytes(1000) == 800
    assert both.collect_above_bytes(1000) == 400
    alone = AllocatorSettings(garbage_collection_threshold=0.5)
    assert alone.collect_above_bytes(1000) is None


def test_the_old_name_is_read_first() -> None:
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    assert variable_in({new: "x", old: ""}) == old
    assert variable_in({new: "x"}) == new
    assert variable_in({"PATH": ""}) is None
