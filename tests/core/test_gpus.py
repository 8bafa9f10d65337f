"""The card table: every row sound, every way to write a card understood."""

import contextlib
import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetfit.errors import InputError
from budgetfit.gpus.table import (
    Gpu,
    all_gpus,
    builds_note,
    find_gpu,
    generic_gpu,
    gpu_from_properties,
    gpus_of_class,
)
from budgetfit.gpus.unsupported import unsupported_reason

GIB = 2**30

# The cards that the project promises (issue text and interface section 2.1).
PROMISED = (
    *("t4", "v100-16gb", "v100-32gb", "p100-16gb", "rtx-2080-ti", "rtx-3060"),
    *("rtx-3060-ti", "rtx-3070", "rtx-3080-10gb", "rtx-3080-ti", "rtx-3090"),
    *("rtx-3090-ti", "rtx-4060-ti-16gb", "rtx-4070", "rtx-4070-ti-super", "rtx-4080"),
    *("rtx-4080-super", "rtx-4090", "rtx-5070-ti", "rtx-5080", "rtx-5090", "a10g"),
    *("a10", "a40", "a100-40gb", "a100-80gb", "rtx-a6000", "rtx-a5000"),
    *("rtx-6000-ada", "l4", "l40s", "h100-pcie", "h100-80gb", "h200", "b200", "gh200"),
    *("rtx-pro-6000-blackwell", "rtx-pro-5000-blackwell", "rtx-pro-4500-blackwell"),
    *("rtx-pro-4000-blackwell", "gtx-1080-ti", "rtx-4060", "rtx-4060-ti-8gb"),
    *("rtx-4070-super", "rtx-4070-ti", "rtx-5060-ti-8gb", "rtx-5060-ti-16gb"),
    *("rtx-5070", "rtx-2000-ada", "rtx-4000-ada", "rtx-4500-ada", "rtx-5000-ada"),
    *("rtx-a4000", "rtx-a4500", "rtx-3060-laptop", "rtx-3070-laptop"),
    *("rtx-3080-laptop-16gb", "rtx-4060-laptop", "rtx-4070-laptop", "rtx-4080-laptop"),
    *("rtx-4090-laptop", "rtx-5070-laptop", "rtx-5080-laptop", "rtx-5090-laptop"),
)

every_card = pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
THREADS_PER_SM = {
    (6, 0): 2048,
    (6, 1): 2048,
    (7, 0): 2048,
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 1536,
    (8, 9): 1536,
    (9, 0): 2048,
    (10, 0): 2048,
    (12, 0): 1536,
}


def test_the_table_has_every_promised_card() -> None:
    assert set(PROMISED) <= {gpu.name for gpu in all_gpus()}
    assert len(all_gpus()) >= 30


def test_names_are_unique_and_canonical() -> None:
    names = [gpu.name for gpu in all_gpus()]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)


@every_card
def test_capacity_is_between_90_and_100_percent_of_the_class_it_is_sold_by(
    gpu: Gpu,
) -> None:
    # The driver keeps a part, and ECC on GDDR takes 1/16: 22 of 24 GiB on an A10G.
    # H200 is sold by decimal gigabytes.
    class_bytes = gpu.memory_class_gb * GIB
    assert 0.90 * class_bytes < gpu.total_bytes <= 1.01 * class_bytes


@every_card
def test_threads_per_multiprocessor_follow_from_the_capability(gpu: Gpu) -> None:
    assert gpu.threads_per_sm == THREADS_PER_SM[gpu.compute_capability]


@every_card
def test_tf32_and_bf16_rates_exist_exactly_from_ampere_on(gpu: Gpu) -> None:
    from_ampere = gpu.compute_capability >= (8, 0)
    assert (gpu.tf32_tflops is not None) == from_ampere
    assert (gpu.bf16_tflops is not None) == from_ampere


@every_card
def test_rates_are_ordered_as_hardware_is(gpu: Gpu) -> None:
    assert 5 < gpu.fp32_tflops < 200
    assert 100 < gpu.memory_gb_per_s < 10_000
    assert gpu.link_gb_per_s is not None
    assert gpu.link_gb_per_s < gpu.memory_gb_per_s
    if gpu.bf16_tflops is not None:
        assert gpu.fp16_tflops == gpu.bf16_tflops
        assert gpu.tf32_tflops is not None
        # Data sheets round: 183 and 362 on an L40S.
        assert gpu.fp32_tflops <= gpu.tf32_tflops <= gpu.bf16_tflops / 2 * 1.02


@every_card
def test_plain_fp32_rate_fits_the_multiprocessors_at_a_plausible_clock(
    gpu: Gpu,
) -> None:
    # Lanes per multiprocessor: 64 on 6.0, 7.x and 8.0, 128 on the rest; two operations
    # per lane and cycle. GPUs boost to between 1.2 and 2.8 GHz.
    lanes = 64 if gpu.compute_capability in {(6, 0), (7, 0), (7, 5), (8, 0)} else 128
    clock_ghz = gpu.fp32_tflops * 1000 / (gpu.sm_count * lanes * 2)
    assert 1.2 < clock_ghz < 2.8


@every_card
def test_every_row_names_its_sources(gpu: Gpu) -> None:
    assert gpu.source
    assert gpu.total_source
    assert not gpu.rates_assumed


@every_card
def test_a_card_is_found_by_its_name_however_it_is_written(gpu: Gpu) -> None:
    for text in (
        gpu.name,
        gpu.name.upper(),
        gpu.name.replace("-", " "),
        gpu.name.replace("-", ""),
        f"NVIDIA {gpu.name}",
        f" nvidia_{gpu.name} gpu",
    ):
        assert find_gpu(text) is gpu


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("RTX 4090 24GB", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("NVIDIA T4", "t4"),
        ("h100", "h100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("A100 80GB", "a100-80gb"),
        ("A100 40", "a100-40gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("Tesla V100-PCIE-32GB", "v100-32gb"),
        ("RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("RTX PRO 6000", "rtx-pro-6000-blackwell"),
        ("RTX 3080 10GB", "rtx-3080-10gb"),
        ("GH200", "gh200"),
        ("RTX 4060 Laptop", "rtx-4060-laptop"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "rtx-4060-laptop"),
        ("rtx 4060 mobile", "rtx-4060-laptop"),
        ("4060", "rtx-4060"),
        ("5060 Ti 16GB", "rtx-5060-ti-16gb"),
        ("RTX 2000 Ada", "rtx-2000-ada"),
        ("NVIDIA RTX PRO 4500 Blackwell", "rtx-pro-4500-blackwell"),
        ("Quadro RTX 8000", "quadro-rtx-8000"),
    ],
)
def test_what_torch_and_people_call_a_card_is_understood(text: str, name: str) -> None:
    assert find_gpu(text).name == name


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a100", "a100-40gb, a100-80gb"),
        ("A100 PCIe", "a100-pcie-40gb, a100-pcie-80gb"),
        ("V100", "v100-16gb, v100-32gb"),
        ("rtx 4060 ti", "rtx-4060-ti-8gb, rtx-4060-ti-16gb"),
        ("rtx 5060 ti", "rtx-5060-ti-8gb, rtx-5060-ti-16gb"),
        ("rtx 3080 laptop", "rtx-3080-laptop-8gb, rtx-3080-laptop-16gb"),
    ],
)
def test_a_name_of_several_cards_is_refused_and_lists_them(
    text: str, names: str
) -> None:
    with pytest.raises(InputError, match=f"is the name of 2 cards: {names}"):
        find_gpu(text)


def test_an_unknown_name_is_refused_with_the_three_nearest() -> None:
    with pytest.raises(InputError) as caught:
        find_gpu("rtx 4095")
    assert str(caught.value) == (
        "'rtx 4095' is not in the card table. Nearest: rtx-4090, rtx-3050, rtx-3090. "
        "`budgetfit gpus` lists all cards; vram= takes a size instead."
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("MI300X", "is a card of AMD. What ROCm's libraries take"),
        ("AMD Instinct MI250", "is a card of AMD"),
        ("RX 7900 XTX", "is a card of AMD"),
        ("M3 Max", "is a chip of Apple"),
        ("apple-m4", "is a chip of Apple"),
        ("Arc A770", "is not a card of NVIDIA"),
        ("NVIDIA DGX Spark", "shares the computer's memory"),
        ("jetson-agx-orin", "shares the computer's memory"),
    ],
)
def test_what_cannot_be_planned_for_is_refused_with_the_reason(
    text: str, reason: str
) -> None:
    with pytest.raises(InputError) as caught:
        find_gpu(text)
    assert str(caught.value).startswith(f"{text!r} {reason}")
    assert "Nearest" not in str(caught.value)


@every_card
def test_no_card_of_the_table_is_taken_for_one_that_cannot_be_planned_for(
    gpu: Gpu,
) -> None:
    for text in (gpu.name, gpu.title):
        assert unsupported_reason(re.sub(r"[^a-z0-9]", "", text.lower())) is None


@given(st.text(max_size=40))
def test_any_text_finds_a_card_or_is_refused(text: str) -> None:
    found = None
    with contextlib.suppress(InputError):
        found = find_gpu(text)
    assert found is None or found in all_gpus()


def test_cards_of_a_class_are_those_sold_with_that_number() -> None:
    names = {gpu.name for gpu in gpus_of_class(24)}
    assert {"rtx-3090", "rtx-4090", "a10g", "l4", "rtx-a5000"} <= names
    assert "rtx-5090" not in names
    assert gpus_of_class(7) == ()


def test_a_real_device_keeps_its_own_memory_and_gets_its_rows_rates() -> None:
    gpu = gpu_from_properties(
        "NVIDIA GeForce RTX 4090", 25_250_627_584, (8, 9), 128, 1536
    )
    row = find_gpu("rtx-4090")
    assert gpu == dataclasses.replace(
        row, total_bytes=25_250_627_584, total_source="this device"
    )


def test_a_real_device_of_an_ambiguous_name_is_told_apart_by_its_properties() -> None:
    ti_8gb = gpu_from_properties(
        "NVIDIA GeForce RTX 4060 Ti", 8_200_000_000, (8, 9), 34, 1536
    )
    assert ti_8gb.name == "rtx-4060-ti-8gb"
    with_70_multiprocessors = gpu_from_properties(
        "NVIDIA GeForce RTX 3080", 12_600_000_000, (8, 6), 70, 1536
    )
    assert with_70_multiprocessors.name == "rtx-3080-12gb"


@every_card
def test_cards_before_turing_are_told_the_builds_that_have_kernels_for_them(
    gpu: Gpu,
) -> None:
    note = builds_note(gpu)
    if gpu.compute_capability >= (7, 5):
        assert note is None
    else:
        assert note is not None
        assert note.startswith(f"{gpu.title} (capability ")
        assert "/cu126" in note


def test_a_device_with_other_memory_than_its_row_gets_its_own_class() -> None:
    gpu = gpu_from_properties("NVIDIA GeForce RTX 4090", 48 * GIB, (8, 9), 128, 1536)
    assert (gpu.name, gpu.memory_class_gb) == ("rtx-4090", 48)


def test_an_unknown_device_gets_scaled_rates_and_says_that_they_are_assumed() -> None:
    # Half the multiprocessors of an RTX 4090 (128), of the same capability; the
    # nearest row by count is the RTX 4070 Ti SUPER (66): 64 / 66 of its rates.
    gpu = gpu_from_properties("NVIDIA RTX 4500 X", 20 * GIB, (8, 9), 64, 1536)
    assert gpu.name == "nvidia-rtx-4500-x"
    assert gpu.title == "NVIDIA RTX 4500 X"
    assert gpu.rates_assumed
    assert gpu.source.startswith("rates assumed: rtx-4070-ti-super by multiproc")
    assert gpu.fp32_tflops == pytest.approx(44.1 * 64 / 66)
    assert gpu.memory_gb_per_s == pytest.approx(672 * 64 / 66)
    assert (gpu.total_bytes, gpu.sm_count, gpu.memory_class_gb) == (20 * GIB, 64, 20)


def test_a_slice_of_a_card_is_not_taken_for_the_card() -> None:
    gpu = gpu_from_properties("NVIDIA A100-SXM4-80GB", 40 * GIB, (8, 0), 42, 2048)
    assert gpu.rates_assumed
    assert gpu.bf16_tflops == pytest.approx(312 * 42 / 108)


@pytest.mark.parametrize("capability", [(5, 2), (6, 1), (7, 0), (7, 2), (7, 5)])
def test_an_unknown_device_before_ampere_has_no_tf32_and_no_bf16(
    capability: tuple[int, int],
) -> None:
    gpu = gpu_from_properties("NVIDIA TITAN X", 24 * GIB, capability, 72, 1024)
    assert (gpu.tf32_tflops, gpu.bf16_tflops) == (None, None)


def test_an_unknown_turing_device_gets_turing_rates() -> None:
    gpu = gpu_from_properties("NVIDIA GeForce 66", 11 * GIB, (7, 5), 66, 1024)
    assert gpu.fp16_tflops == pytest.approx(53.8 * 66 / 68)


@pytest.mark.parametrize(
    ("total_gb", "capability", "sm_count"),
    [
        (8, (8, 9), 128),
        (24, (8, 9), 128),
        (32, (12, 0), 170),
        (48, (8, 9), 142),
        (80, (9, 0), 132),
        (141, (9, 0), 132),
        (180, (10, 0), 148),
        (288, (10, 0), 148),
    ],
)
def test_a_bare_size_is_taken_for_the_reference_card_of_that_size(
    total_gb: int, capability: tuple[int, int], sm_count: int
) -> None:
    gpu = generic_gpu(total_gb * 10**9)
    assert (gpu.compute_capability, gpu.sm_count) == (capability, sm_count)
    assert gpu.total_bytes == total_gb * 10**9
    assert gpu.rates_assumed


def test_the_assumed_card_says_what_it_assumes() -> None:
    gpu = generic_gpu(24 * 10**9)
    assert gpu.name == "assumed"
    assert gpu.title == ("a 22.35 GiB card, assumed to be like NVIDIA GeForce RTX 4090")
    assert gpu.source.startswith("assumed: rtx-4090")
