from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from budgetfit.core.allocator.parse_settings import parse_values
from budgetfit.doctor.check_allocator import mistyped_names, why_refused
from tests.doctor.machines import GOOD, bad, only

# Settings that belong to every kind of device: a CPU build reads them, too.
SHARED = [
    "expandable_segments:True",
    "expandable_segments:true",
    "expandable_segments:1",
    "expandable_segments: True",
    "max_split_size_mb:128",
    "max_split_size_mb:20",
    "max_split_size_mb:19",
    "max_split_size_mb:many",
    "max_split_size_mb=128",
    " max_split_size_mb : 128 ,expandable_segments:False,",
    "garbage_collection_threshold:0.8",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.5",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[256:1,512:2,>:4]",
    "large_segment_size_mb:10",
    "large_segment_size_mb:32",
    "max_non_split_rounding_mb:10",
    "pinned_use_background_threads:True",
]


@pytest.fixture(autouse=True)
def _settings_of_torch_restored() -> Iterator[None]:
    yield
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(
            "expandable_segments:False,large_segment_size_mb:20,"
            "max_split_size_mb:17592186044415,"
            "roundup_power2_divisions:1,pinned_use_background_threads:False"
        )


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"),
    reason="this torch has no settings that can be tried without a card",
)
@pytest.mark.parametrize("text", SHARED)
def test_what_torch_refuses_is_refused_and_nothing_else(text: str) -> None:
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        taken = True
    except (RuntimeError, ValueError):
        taken = False
    assert (why_refused(text) is None) is taken


def test_another_allocator_is_fine_with_pytorch() -> None:
    assert why_refused("backend:cudaMallocAsync") is None
    assert parse_values("backend:cudaMallocAsync") == {"backend": "cudaMallocAsync"}


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("PYTORCH_CUDA_ALOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        ("PYTORCH_ALLOC_CONFIG", "PYTORCH_ALLOC_CONF"),
        ("pytorch_alloc_conf", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_a_mistyped_name_is_seen(name: str, right: str) -> None:
    assert list(mistyped_names({name: "x"})) == [(name, right)]


def test_other_variables_are_not_taken_for_mistyped_ones() -> None:
    others = (
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "MALLOC_ARENA_MAX",
        "PYTORCH_ALLOC_CONF",
    )
    assert list(mistyped_names(dict.fromkeys(others, "1"))) == []


def env(**variables: str) -> dict[str, dict[str, str]]:
    return {"environment": variables}


def test_the_new_name_is_fine_and_the_old_one_is_noted() -> None:
    assert bad(GOOD, **env(PYTORCH_ALLOC_CONF="expandable_segments:True")) == []
    old = only(GOOD, **env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"))
    assert (old.verdict, "old name" in old.meaning) == ("note", True)


def test_of_two_names_that_differ_the_old_one_wins_which_is_a_problem() -> None:
    two = env(
        PYTORCH_ALLOC_CONF="expandable_segments:True",
        PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64",
    )
    found = [f for f in bad(GOOD, **two) if f.verdict == "problem"]
    assert "'expandable_segments:True' has no effect" in found[0].meaning
    assert found[0].commands == ("unset PYTORCH_CUDA_ALLOC_CONF",)


def test_the_amd_name_counts_on_every_card() -> None:
    found = bad(GOOD, **env(PYTORCH_HIP_ALLOC_CONF="nothing"))
    assert any("refuses PYTORCH_HIP_ALLOC_CONF" in f.meaning for f in found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("garbage_collection_threshold:0.8", "does nothing without a memory fraction"),
        ("expandable_segments:True,max_split_size_mb:64", "of little use"),
        ("backend:cudaMallocAsync", "not the allocator that budgetfit predicts"),
        ("per_process_memory_fraction:0.5", "Plans for this card keep within it"),
    ],
)
def test_settings_that_are_not_what_they_seem_are_noted(text: str, words: str) -> None:
    finding = only(GOOD, **env(PYTORCH_ALLOC_CONF=text))
    assert (finding.verdict, words in finding.meaning) == ("note", True)


def test_segments_that_grow_do_not_exist_on_windows() -> None:
    found = bad(
        replace(GOOD, system="Windows"),
        **env(PYTORCH_ALLOC_CONF="expandable_segments:True"),
    )
    assert any("does nothing on Windows" in f.meaning for f in found)
