"""Train plans for samples of many lengths in limited memory: does any run out of it?

    python -m tests.accuracy.varying_lengths          # on a real card
    python -m tests.accuracy.nulldriver.run --gpu rtx-4090 -- \\
        python -m tests.accuracy.varying_lengths --gpu rtx-4090 --seeds 20

Eight models, three distributions of lengths. Each plan is applied with the memory of
the process limited to what was planned (usable and headroom), and trained on batches
that are padded to the longest of random samples. One line for each model and
distribution, those that ran out of memory first; then the totals.
"""

import argparse
import contextlib
import gc
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn

import budgetfit
from budgetfit.applying.run.run import Run
from tests.accuracy.nulldriver.addresses import null_driver_addresses
from tests.accuracy.provenance import answer_for_the_device, choose_cudnn, origin
from tests.accuracy.well_formed import NULL_DRIVER

UPDATES: Final = 200
LIMIT: Final = 0.55  # of what keeping everything at batch 16 would take
VOCABULARY: Final = 8192
SAMPLES: Final = 5000


class Model(NamedTuple):
    """How to make a model, and whether its labels are token ids."""

    make: Callable[[], nn.Module]
    labels: str = "tokens"


def _small(config: type, model: type, **further: Any) -> Callable[[], nn.Module]:
    return lambda: model(config(vocab_size=VOCABULARY, **further))


_LLAMA: Final = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "use_cache": False,
}
_BERT: Final = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
MODELS: Final = {
    "gpt2": Model(
        _small(
            transformers.GPT2Config,
            transformers.GPT2LMHeadModel,
            n_layer=4,
            n_embd=512,
            n_head=8,
            use_cache=False,
        )
    ),
    "llama": Model(
        _small(
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            intermediate_size=1408,
            **_LLAMA,
        )
    ),
    "qwen3": Model(
        _small(
            transformers.Qwen3Config,
            transformers.Qwen3ForCausalLM,
            intermediate_size=1536,
            head_dim=64,
            **_LLAMA,
        )
    ),
    "gemma3": Model(
        _small(
            transformers.Gemma3TextConfig,
            transformers.Gemma3ForCausalLM,
            intermediate_size=1536,
            head_dim=64,
            sliding_window=128,
            **_LLAMA,
        )
    ),
    "bert": Model(
        _small(transformers.BertConfig, transformers.BertForMaskedLM, **_BERT)
    ),
    "bert-eager": Model(
        _small(
            transformers.BertConfig,
            transformers.BertForTokenClassification,
            attn_implementation="eager",
            **_BERT,
        ),
        "classes",
    ),
    "roberta": Model(
        _small(
            transformers.RobertaConfig,
            transformers.RobertaForSequenceClassification,
            max_position_embeddings=600,
            **_BERT,
        ),
        "class",
    ),
    "t5": Model(
        _small(
            transformers.T5Config,
            transformers.T5ForConditionalGeneration,
            d_model=512,
            num_layers=3,
            use_cache=False,
        )
    ),
}


def _uniform(random: np.random.Generator) -> np.ndarray:
    return random.integers(64, 513, SAMPLES)


def _log_normal(random: np.random.Generator) -> np.ndarray:
    return np.clip(random.lognormal(4.8, 0.6, SAMPLES).astype(int), 16, 512)


def _short_and_long(random: np.random.Generator) -> np.ndarray:
    short = random.integers(32, 129, SAMPLES)
    return np.where(
        random.random(SAMPLES) < 0.8, short, random.integers(448, 513, SAMPLES)
    )


DISTRIBUTIONS: Final = {
    "uniform": _uniform,
    "log-normal": _log_normal,
    "short and long": _short_and_long,
}


class Outcome(NamedTuple):
    """What trainings of one plan did, in bytes."""

    name: str
    measure: str
    batch_size: int
    predicted: int
    limit: int
    reserved: list[int]
    retries: list[int]
    ran_out: int
    rate_share: float

    def __str__(self) -> str:
        most = max(self.reserved)
        return (
            f"{self.ran_out:2d} of {len(self.reserved)} out of memory, "
            f"{sum(map(bool, self.retries)):2d} emptied the cache  predicted "
            f"{self.predicted / most - 1:+6.1%} of the most reserved, "
            f"{most / self.limit:6.1%} of the limit  {self.name}, batch "
            f"{self.batch_size}: {self.measure}, rate {self.rate_share:.1%}"
        )


def batch_of(
    model: Model, lengths: np.ndarray, pad_to: int | None, longest: int
) -> dict[str, torch.Tensor]:
    """Return a padded batch of samples of these lengths."""
    length = int(lengths.max())
    if pad_to:
        length = min(-(-length // pad_to) * pad_to, longest)
    rows = len(lengths)
    ids = torch.randint(10, VOCABULARY, (rows, length))
    mask = (torch.arange(length)[None] < torch.from_numpy(lengths)[:, None]).long()
    labels = {
        "tokens": ids.masked_fill(mask == 0, -100),
        "classes": torch.zeros_like(ids),
        "class": torch.zeros(rows, dtype=torch.long),
    }[model.labels]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(
    plan: budgetfit.Plan,
    module: nn.Module,
    model: Model,
    samples: np.ndarray,
    seed: int,
) -> bool:
    """Train some updates; return whether memory ran out."""
    random = np.random.default_rng(1000 + seed)
    torch.manual_seed(seed)
    lengths, recipe = plan.varying_lengths, plan.recipe
    pad_to = lengths.pad_to_multiple_of if lengths else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Recomputed values are compared where there are values.
        check = "default" if origin() == NULL_DRIVER else "values"
        run = Run(module, plan.recipe, plan=plan, determinism_check=check)
        try:
            for _ in range(UPDATES * recipe.gradient_accumulation_steps):
                drawn = random.choice(samples, recipe.batch_size)
                run.step(batch_of(model, drawn, pad_to, int(samples.max())))
        except torch.OutOfMemoryError:
            return True
        finally:
            run.undo()
    return False


def check(name: str, kind: str, seeds: int, gpu: str, precision: str) -> Outcome:
    """Plan for one model and distribution, and train with several orders."""
    model = MODELS[name]
    samples = DISTRIBUTIONS[kind](np.random.default_rng(0))
    values, counts = np.unique(samples, return_counts=True)
    lengths = dict(zip(values.tolist(), counts.tolist(), strict=True))
    settings: dict[str, Any] = {
        "gpu": gpu,
        "lengths": lengths,
        "headroom": 0,
        "effective_batch_size": 16,
        "precision": precision,
    }
    module = model.make()
    kept = budgetfit.estimate(
        module,
        budgetfit.Recipe(batch_size=16, precision=precision),
        gpu=gpu,
        max_length=int(samples.max()),
    )
    context = kept.process_bytes - kept.reserved_bytes
    limit = int(kept.reserved_bytes * LIMIT)
    imitated = origin() == NULL_DRIVER
    with null_driver_addresses() if imitated else contextlib.nullcontext():
        plan = budgetfit.plan(module, vram=limit + context, **settings)
    over = plan.varying_lengths
    if over is None:
        raise SystemExit(f"{name}, {kind}: {plan.warnings}")
    module.to("cuda")
    fraction = (
        plan.budget.usable_bytes / torch.cuda.get_device_properties(0).total_memory
    )
    reserved, retries, ran_out = [], [], 0
    for seed in range(seeds):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        torch.cuda.set_per_process_memory_fraction(fraction)
        ran_out += train(plan, module, model, samples, seed)
        retries.append(torch.cuda.memory_stats()["num_alloc_retries"] - before)
        reserved.append(torch.cuda.max_memory_reserved())
    torch.cuda.set_per_process_memory_fraction(1.0)
    pad = f", pad_to {over.pad_to_multiple_of}" if over.pad_to_multiple_of else ""
    return Outcome(
        name=f"{name}, {kind}",
        measure=over.measure + pad,
        batch_size=plan.recipe.batch_size,
        predicted=plan.estimate.reserved_bytes,
        limit=plan.budget.usable_bytes,
        reserved=reserved,
        retries=retries,
        ran_out=ran_out,
        rate_share=over.samples_per_s / over.plain_samples_per_s,
    )


def main() -> int:
    """Print a line for each model and distribution."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gpu", help="the card's name in the table; this one if absent"
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--write", type=Path, help="also write the outcomes as JSON")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if origin() == NULL_DRIVER:
        choose_cudnn(enabled=False)  # it cannot run there
        answer_for_the_device()
    gpu = options.gpu or torch.cuda.get_device_name()
    sys.stdout.write(f"measured on: {origin()} ({gpu}), torch {torch.__version__}\n")
    rows = []
    for name in options.models:
        for kind in DISTRIBUTIONS:
            rows.append(check(name, kind, options.seeds, gpu, options.precision))
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
    runs = sum(len(row.reserved) for row in rows)
    share = min(row.rate_share for row in rows)
    emptied = sum(sum(map(bool, row.retries)) for row in rows)
    sys.stdout.write(
        f"{sum(row.ran_out for row in rows)} of {runs} runs of {UPDATES} updates ran "
        f"out of memory, {emptied} emptied the cache; rate at least {share:.1%} of "
        "that without measures\n"
    )
    if options.write:
        text = json.dumps([row._asdict() for row in rows], indent=1)
        options.write.write_text(text + "\n", encoding="utf-8")
    return int(any(row.ran_out for row in rows))


if __name__ == "__main__":
    sys.exit(main())
