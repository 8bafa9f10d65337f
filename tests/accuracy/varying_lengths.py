"""Train plans for samples of many lengths in limited memory: does any run out of it?

    python -m tests.accuracy.varying_lengths          # on a real card
    nice python -m tests.accuracy.nulldriver.run --gpu rtx-4090 -- \\
        python -m tests.accuracy.varying_lengths --gpu rtx-4090 --seeds 20

Eight models, three distributions of lengths. Each plan is applied with the memory of
the process limited to what was planned (usable and headroom), and trained on batches
that are padded to the longest of random samples. Each training adds a line to
``varying_lengths.jsonl``; those that are there, of the same plan, are not run again.
``varying_lengths_table.py`` makes the page's table of them.
"""

import argparse
import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn

import budgetfit
from budgetfit.applying.out_of_memory.error import free_memory
from budgetfit.applying.run.run import Run
from tests.accuracy.nulldriver.addresses import null_driver_addresses
from tests.accuracy.provenance import answer_for_the_device, choose_cudnn, origin
from tests.accuracy.varying_lengths_table import ROWS, rows
from tests.accuracy.well_formed import NULL_DRIVER

UPDATES: Final = 200
LIMIT: Final = 0.55  # of what keeping everything at batch 16 would take
VOCABULARY: Final = 8192
SAMPLES: Final = 5000
EFFECTIVE: Final = 16  # samples per update
SEEDS_IN_TURN: Final = 5


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
            decoder_start_token_id=0,
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


class Subject(NamedTuple):
    """A model, a distribution of lengths, and the plan for both."""

    name: str
    kind: str
    samples: np.ndarray
    module: nn.Module
    plan: budgetfit.Plan

    def row(self) -> dict[str, Any]:
        """Describe the plan, as the rows of its trainings do."""
        plan, over = self.plan, self.plan.varying_lengths
        if over is None:
            raise SystemExit(f"{self.name}, {self.kind}: {plan.warnings}")
        return {
            "model": self.name,
            "lengths": self.kind,
            "origin": origin(),
            "gpu": plan.gpu.name,
            "torch": torch.__version__,
            "batch_size": plan.recipe.batch_size,
            "gradient_accumulation_steps": plan.recipe.gradient_accumulation_steps,
            "treated_blocks": len(plan.recipe.segments),
            "measure": over.measure,
            "pad_to_multiple_of": over.pad_to_multiple_of,
            "rate_share": round(over.samples_per_s / over.plain_samples_per_s, 4),
            "predicted_bytes": plan.estimate.reserved_bytes,
            "limit_bytes": plan.budget.usable_bytes,
            "updates": UPDATES,
        }


def asked_for(name: str, kind: str, gpu: str, precision: str) -> dict[str, Any]:
    """Return the arguments of a plan, where keeping everything does not fit."""
    samples = DISTRIBUTIONS[kind](np.random.default_rng(0))
    values, counts = np.unique(samples, return_counts=True)
    module = MODELS[name].make()
    recipe = budgetfit.Recipe(batch_size=EFFECTIVE, precision=precision)
    kept = budgetfit.estimate(module, recipe, gpu=gpu, max_length=int(samples.max()))
    context = kept.process_bytes - kept.reserved_bytes
    return {
        "model": module,
        "vram": int(kept.reserved_bytes * LIMIT) + context,
        "gpu": gpu,
        "lengths": dict(zip(values.tolist(), counts.tolist(), strict=True)),
        "headroom": 0,
        "effective_batch_size": EFFECTIVE,
        "precision": precision,
    }


def planned(name: str, kind: str, gpu: str, precision: str) -> Subject:
    """Plan for one model and distribution."""
    imitated = origin() == NULL_DRIVER
    with null_driver_addresses() if imitated else contextlib.nullcontext():
        asked = asked_for(name, kind, gpu, precision)
        plan = budgetfit.plan(**asked)
    samples = DISTRIBUTIONS[kind](np.random.default_rng(0))
    return Subject(name, kind, samples, asked["model"], plan)


def train(subject: Subject, seed: int) -> bool:
    """Train some updates; return whether memory ran out."""
    plan, samples = subject.plan, subject.samples
    random = np.random.default_rng(1000 + seed)
    torch.manual_seed(seed)
    lengths, recipe = plan.varying_lengths, plan.recipe
    pad_to = lengths.pad_to_multiple_of if lengths else None
    model, longest = MODELS[subject.name], int(samples.max())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Recomputed values are compared where there are values.
        check = "default" if origin() == NULL_DRIVER else "values"
        run = Run(subject.module, recipe, plan=plan, determinism_check=check)
        try:
            for _ in range(UPDATES * recipe.gradient_accumulation_steps):
                drawn = random.choice(samples, recipe.batch_size)
                run.step(batch_of(model, drawn, pad_to, longest))
        except torch.OutOfMemoryError:
            return True
        finally:
            run.undo()
    return False


def trained(subject: Subject, seed: int) -> dict[str, Any]:
    """Train in limited memory; return the row of this training."""
    total = torch.cuda.get_device_properties(0).total_memory
    limit = subject.plan.budget.usable_bytes
    subject.module.to("cpu")  # as in a process of its own
    free_memory(torch.device("cuda"))
    subject.module.to("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    torch.cuda.set_per_process_memory_fraction(limit / total)
    ran_out = train(subject, seed)
    torch.cuda.set_per_process_memory_fraction(1.0)
    return subject.row() | {
        "seed": seed,
        "out_of_memory": ran_out,
        "emptied_cache": torch.cuda.memory_stats()["num_alloc_retries"] - before,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def main() -> int:
    """Train with seeds that have no row yet, a few of each model in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gpu", help="the card's name in the table; this one if absent"
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--precision", default="bf16-mixed")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if origin() == NULL_DRIVER:
        choose_cudnn(enabled=False)  # it cannot run there
        answer_for_the_device()
    gpu = options.gpu or torch.cuda.get_device_name()
    plans: dict[tuple[str, str], Subject] = {}
    ran_out = 0
    for first in range(0, options.seeds, SEEDS_IN_TURN):
        seeds = range(first, min(first + SEEDS_IN_TURN, options.seeds))
        for key in itertools.product(options.models, DISTRIBUTIONS):
            if key not in plans:
                plans[key] = planned(*key, gpu, options.precision)
            ran_out += run_missing(plans[key], seeds)
    return int(ran_out > 0)


def run_missing(subject: Subject, seeds: Iterable[int]) -> int:
    """Append the rows that are missing; return how many ran out of memory."""
    known = [row for row in rows() if row.items() >= subject.row().items()]
    missing = {*seeds} - {row["seed"] for row in known}
    if not missing:
        return 0
    ran_out = 0
    for seed in sorted(missing):
        row = trained(subject, seed)
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
        sys.stdout.write(f"{subject.name}, {subject.kind}: {row}\n")
        sys.stdout.flush()
        ran_out += row["out_of_memory"]
    subject.module.to("cpu")
    return ran_out


if __name__ == "__main__":
    sys.exit(main())
