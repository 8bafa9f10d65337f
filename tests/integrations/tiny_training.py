"""Small models, their plans and their data, trained for real by other libraries."""

from collections import Counter
from typing import Any

import torch
import transformers
from torch import nn

from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Segment
from tests import models
from tests.reporting.sample_plans import (
    sample_estimate,
    sample_model,
    sample_plan,
    sample_recipe,
)

VOCABULARY = 64
LENGTH = 8
BATCH_SIZE = 3
ACCUMULATION = 2
STEPS = 3
MICRO_STEPS = STEPS * ACCUMULATION
KINDS = ("gpt2", "llama")
# Of a ``Trainer``: steps, losses, and nothing printed.
QUIET_ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "max_steps": STEPS,
    "logging_steps": 1,
    "logging_first_step": True,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
WORDS = [f"w{number}" for number in range(VOCABULARY - 2)]
FIRST_PRODUCTS = ("aten.addmm.default:0", "aten.mm.default:0")  # GPT-2's, Llama's
PRODUCTS = tuple(
    f"aten.{op}.default:{call}" for op in ("mm", "addmm", "bmm") for call in range(12)
)


def tiny_model(kind: str, **changes: Any) -> nn.Module:
    """Four blocks, always the same weights; GPT-2 with dropout."""
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "gpt2":
        return models.gpt2(n_layer=4, n_positions=16, **{**special, **changes})
    return models.llama(num_hidden_layers=4, **{**special, **changes})


def blocks_of(model: nn.Module) -> list[str]:
    prefix = "transformer.h" if hasattr(model, "transformer") else "model.layers"
    return [f"{prefix}.{number}" for number in range(4)]


def mixed_segments(model: nn.Module) -> tuple[Segment, ...]:
    """A segment of two blocks, one that saves products, one that waits on the host."""
    first, second, third, fourth = blocks_of(model)
    return (
        Segment((first, second)),
        Segment((third,), mode="selective", saved_ops=FIRST_PRODUCTS),
        Segment((fourth,), mode="offload"),
    )


def plan_for(
    model: nn.Module, segments: tuple[Segment, ...] | None = None, **recipe: Any
) -> Plan:
    """A plan of blocks 0 and 2 recomputed, if nothing else is said."""
    names = blocks_of(model)
    if segments is None:
        segments = (Segment((names[0],)), Segment((names[2],)))
    settings: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "gradient_accumulation_steps": ACCUMULATION,
        "precision": "fp32",
        "optimizer": "adamw_torch",
        "segments": segments,
        **recipe,
    }
    ids = ((BATCH_SIZE, LENGTH), "int64")
    count = sum(parameter.numel() for parameter in model.parameters())
    return sample_plan(
        estimate=sample_estimate(sample_recipe(**settings)),
        model=sample_model(
            name=type(model).__name__,
            parameter_count=count,
            trainable_count=count,
            blocks=tuple(names),
            block_type=type(model.get_submodule(names[0])).__name__,
            batch={"input_ids": ids, "labels": ids},
        ),
        alternatives=(),
    )


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """As many random samples as three optimizer steps take."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (MICRO_STEPS * BATCH_SIZE, LENGTH)
        self.ids = torch.randint(VOCABULARY, shape, generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def sft_texts() -> Any:
    """Samples as text, twice as long as what was planned for."""
    import datasets  # noqa: PLC0415 - not everywhere

    shape = (MICRO_STEPS * BATCH_SIZE, 2 * LENGTH)
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(len(WORDS), shape, generator=generator)
    lines = [" ".join(WORDS[number] for number in row) for row in numbers.tolist()]
    return datasets.Dataset.from_dict({"text": lines})


def word_tokenizer() -> Any:
    """A word for each token, made here: nothing is downloaded."""
    import tokenizers  # noqa: PLC0415
    from tokenizers import models, pre_tokenizers  # noqa: PLC0415

    words = {word: number for number, word in enumerate(["<end>", "<none>", *WORDS])}
    built = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<none>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, eos_token="<end>", pad_token="<end>", unk_token="<none>"
    )


def defined_by(source: str) -> dict[str, Any]:
    """Run an exported program's source as a module; return what it defines."""
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(source, "exported.py", "exec"), names)
    return names


def make_quiet(trainer: transformers.Trainer, settings: dict[str, Any]) -> None:
    """Change arguments of a trainer that was made already, and print nothing."""
    for name, value in settings.items():
        if name != "use_cpu":
            setattr(trainer.args, name, value)
    trainer.remove_callback(transformers.PrinterCallback)


def losses_of(trainer: transformers.Trainer) -> list[float]:
    """Train, and return the logged losses."""
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def count_block_runs(model: nn.Module) -> Counter[str]:
    """Count how often each block's forward runs, recomputation included."""
    counts: Counter[str] = Counter()
    for name in blocks_of(model):
        # A layer inside the block: hooks of the block itself stay outside of
        # transformers' own checkpoint.
        inner = next(iter(model.get_submodule(name).children()))
        inner.register_forward_pre_hook(models.counting_hook(counts, name))
    return counts


def runs(counts: Counter[str]) -> list[float]:
    """How often each block ran in one micro-step."""
    return [count / MICRO_STEPS for _, count in sorted(counts.items())]
