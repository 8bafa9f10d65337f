"""Every code block of docs/integrations.md runs, where its library is installed."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.integrations.page import PAGE, SECTIONS
from tests.integrations.tiny_training import (
    MICRO_STEPS,
    Samples,
    blocks_of,
    count_block_runs,
    plan_for,
    sft_texts,
    tiny_model,
    word_tokenizer,
)

LIBRARIES = {
    "transformers": "accelerate",  # its Trainer needs it
    "TRL": "trl",
    "accelerate": "accelerate",
    "Lightning": "lightning",
    "A loop of your own": "torch",
}


def names_of_the_page(model: nn.Module, title: str) -> dict[str, Any]:
    samples = Samples()
    names: dict[str, Any] = {
        "__name__": "page",
        "model": model,
        "plan": plan_for(model),
        "dataset": samples,
        "batches": [
            {key: value[None] for key, value in samples[row].items()}
            for row in range(MICRO_STEPS)
        ],
    }
    if title == "TRL":
        names |= {"texts": sft_texts(), "tokenizer": word_tokenizer()}
    return names


def test_every_library_has_a_section() -> None:
    # DeepSpeed's is run in test_deepspeed: its engine belongs in a process of its own.
    assert set(SECTIONS) == {*LIBRARIES, "DeepSpeed"}


@pytest.mark.filterwarnings("ignore")  # of the libraries: no GPU, few workers
@pytest.mark.parametrize("title", LIBRARIES)
def test_what_the_page_says_runs(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(LIBRARIES[title])
    monkeypatch.chdir(tmp_path)
    model = tiny_model("llama")
    counts = count_block_runs(model)
    code = compile(SECTIONS[title], str(PAGE), "exec")
    exec(code, names_of_the_page(model, title))
    ran = Counter(counts)
    first, second, third, fourth = blocks_of(model)
    assert ran[first] == ran[third] == 2 * ran[second] == 2 * ran[fourth] > 0
