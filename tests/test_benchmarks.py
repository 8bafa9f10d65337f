import importlib

import pytest

from benchmarks.kernel_times import ratios, times
from benchmarks.recorded_steps import kernels_ms
from benchmarks.run import (
    BENCHMARKS,
    PAGE,
    Benchmark,
    introduction,
    main,
    page_of,
    section,
    sections_of,
)
from benchmarks.shared import ROOT, config, table
from budgetfit.gpus.kernel_shares import find_shares
from budgetfit.gpus.table import find_gpu
from budgetfit.integrations.model_sources.model_source import resolve_model
from budgetfit.timing.kernel_times import (
    ELEMENTS_PER_SM,
    ON_HOPPER,
    PLAIN_BLOCK,
    VECTOR_BLOCK,
)
from budgetfit.timing.kind_shares import KIND_SHARES

# Published counts; tied embeddings are counted once.
PARAMETERS = {
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.1-70B": 70_553_706_496,
    "bert-large-uncased": 335_174_458,
    "t5-large": 737_668_096,
    "vit-large-patch16-224": 304_326_632,
}


@pytest.mark.parametrize("name", [each.name for each in BENCHMARKS])
def test_a_benchmark_is_a_program_that_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{name}").main)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda each: each.name)
def test_the_page_says_what_is_compared_and_no_command(benchmark: Benchmark) -> None:
    text = introduction(benchmark)
    assert len(text) > 100
    assert "\n    python -m" not in text


def test_every_program_of_the_folder_is_run_by_make_bench() -> None:
    programs = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    on_a_card = {
        "fastest_on_card",
        "kernel_times",
        "product_share",
        "recorded_steps",
        "step_predictions",
    }
    assert programs - {"run", "shared"} - on_a_card == {
        each.name for each in BENCHMARKS
    }


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_benchmarked_shape_has_the_published_number_of_parameters(name: str) -> None:
    model = resolve_model(config(name)).model
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_a_table_is_padded_markdown_with_numbers_to_the_right() -> None:
    assert table(("card", "ms"), [("t4", "1,200"), ("rtx-4090", "9")]) == (
        "| card     |    ms |\n"
        "|----------|------:|\n"
        "| t4       | 1,200 |\n"
        "| rtx-4090 |     9 |"
    )


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["everything"]) == 2
    assert "'everything' is no benchmark" in capsys.readouterr().out


def test_a_part_of_the_page_is_replaced_and_the_others_stay() -> None:
    page = PAGE.read_text(encoding="utf-8")
    parts = sections_of(page)
    assert sections_of(page_of(parts)) == parts
    changed = Benchmark("six_blocks", "Against all 64 subsets of six blocks")
    parts[changed.title] = section(changed, "none")
    again = page_of(parts)
    assert again.count(f"## {changed.title}") == 1
    assert again.count("\n## ") == len(parts)
    others = sections_of(page).items() - sections_of(again).items()
    assert [title for title, _ in others] == [changed.title]


def test_the_h100s_shares_are_what_its_recorded_ops_ask_for() -> None:
    found, shares = ratios(times()), find_shares(find_gpu("h100-80gb"))
    for dtype, share in (
        ("bf16", shares.tensor_16bit),
        ("fp16", shares.tensor_16bit),
        ("tf32", shares.tf32),
        ("fp32", shares.fp32),
    ):
        (asked,) = [v for what, v in found.items() if f"products, {dtype}," in what]
        assert asked == pytest.approx(share, abs=0.05)
    plain = found["batch norm in bf16, channels last, of the bandwidth reached"]
    assert plain == pytest.approx(KIND_SHARES["plain_batch_norm"].bandwidth, abs=0.02)
    of_block = found["the same, channels first, bytes per nanosecond and channel"]
    assert of_block == pytest.approx(PLAIN_BLOCK, abs=0.1)
    of_block = found[
        "in fp32 (cuDNN's), bytes per nanosecond and multiprocessor with one"
    ]
    assert of_block == pytest.approx(VECTOR_BLOCK, abs=0.5)
    of_sm = found["elements without vector loads, per nanosecond and multiprocessor"]
    assert of_sm == pytest.approx(ELEMENTS_PER_SM, abs=0.1)
    for library, ratio in ON_HOPPER.items():
        asked = found[f"{library} attention in bf16, of cuDNN's rate"]
        assert asked == pytest.approx(ratio, abs=0.07)


def test_the_kernels_of_a_step_are_counted_once() -> None:
    kernels = {
        "Memcpy HtoD (Pageable -> Device)": [2, 500.0],
        "Optimizer.step#AdamW.step": [1, 1100.0],
        "multi_tensor_apply_kernel": [7, 1000.0],
        "sm90_gemm": [9, 3000.0],
    }
    row = {"kernel_us": 5600.0, "kernels": kernels}
    assert kernels_ms(row) == pytest.approx(4.0)
