"""Plans of many kinds of models through the front door, each made once per process."""

import functools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

import budgetfit
import budgetfit.api.plan  # what is imported on first use may draw random numbers
from budgetfit.core.plan import Plan
from budgetfit.gpus.cuda_context import context_bytes
from budgetfit.gpus.table import find_gpu
from tests.models import EXAMPLES, LLAMA, MIB, SAMPLES, Mebi, alone, mean

CARD = "rtx-4090"
SAMPLE_OF_MEBI = torch.zeros(SAMPLES, 512, 512)  # 1 MiB a sample


def vram_bytes(usable_mib: int, gpu: str = CARD) -> int:
    """Return a limit that leaves so much for the allocator, with headroom=0."""
    return context_bytes(find_gpu(gpu)) + usable_mib * MIB


def plan_mebi(usable_mib: int, **options: Any) -> Plan:
    """Plan six blocks of one MiB in a budget, in fp32 on an RTX 4090."""
    settings: dict[str, Any] = {
        "gpu": CARD,
        "vram": vram_bytes(usable_mib),
        "headroom": 0,
        "batch": SAMPLE_OF_MEBI,
        "precision": "fp32",
        **options,
    }
    return budgetfit.plan(Mebi(6), **settings)


def write_config(folder: Path) -> Path:
    """Write the config of a small Llama into a folder; return the folder."""
    LlamaConfig(
        **LLAMA, architectures=["LlamaForCausalLM"], model_type="llama"
    ).save_pretrained(folder)
    return folder


def plan_of_config(folder: Path, **options: Any) -> Plan:
    """Plan a config's model with short samples on an RTX 4090; see ``alone``."""
    settings: dict[str, Any] = {
        "gpu": CARD,
        "max_length": 32,
        "effective_batch_size": 8,
        **options,
    }
    return alone(budgetfit.plan(str(folder), **settings))


def squared_error(outputs: Any, batch: Any) -> Any:
    """Stand in for a user's loss."""
    return (
        nn.functional.mse_loss(outputs, torch.zeros_like(outputs))
        + 0 * batch["src"].mean()
    )


@dataclass(frozen=True)
class Kind:
    """A model to plan end to end, and the options of plan."""

    example: str
    options: dict[str, Any] = field(default_factory=dict)


KINDS = {
    # dropout everywhere, tied embeddings; two micro-batches a step
    "gpt2": Kind("gpt2", {"checkpointing": "full", "effective_batch_size": 4}),
    # keys and values have fewer heads than queries
    "llama": Kind("llama", {"checkpointing": "sqrt"}),
    # fake tensors on a CPU multiply groups in bf16 only
    "mixtral": Kind("mixtral", {"checkpointing": "full", "precision": "bf16"}),
    "bert": Kind("bert", {"checkpointing": ["bert.encoder.layer.1"]}),
    "t5": Kind("t5", {"checkpointing": "full"}),
    "vit": Kind("vit", {"checkpointing": "none", "optimizer": "sgd"}),
    # 8 samples need 114 MiB if all 3 blocks are kept, and 94 if none is
    "module list": Kind(
        "mebi", {"batch_size": 8, "vram": vram_bytes(100), "loss": mean}
    ),
    "sequential": Kind("convolutions", {"checkpointing": "full", "loss": mean}),
    "nn.Transformer": Kind(
        "transformer", {"checkpointing": "full", "loss": squared_error}
    ),
}


@dataclass(frozen=True)
class Planned:
    """A plan, its model, and what the model and the process were before and after."""

    plan: Plan
    model: nn.Module
    before: "Fingerprint"
    after: "Fingerprint"


@functools.cache
def planned(kind: str) -> Planned:
    """Plan one of ``KINDS`` for an RTX 4090 with 2 GiB."""
    example = EXAMPLES[KINDS[kind].example]
    model = example.model()
    before = Fingerprint.of(model)
    options: dict[str, Any] = {
        "gpu": CARD,
        "vram": "2GiB",
        "headroom": 0,
        "batch": example.batch,
        "batch_size": 2,
        "precision": "fp32",
        **KINDS[kind].options,
    }
    plan = budgetfit.plan(model, **options)
    return Planned(plan, model, before, Fingerprint.of(model))


@dataclass(frozen=True)
class Fingerprint:
    """Everything about a model and the process that planning must leave alone."""

    tensors: dict[str, torch.Tensor]
    objects: dict[str, int]
    modules: dict[str, tuple[Any, ...]]
    gradients: list[str]
    random_state: tuple[bytes, Any]
    use_cache: bool | None

    @classmethod
    def of(cls, model: nn.Module) -> "Fingerprint":
        """Take it."""
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        return cls(
            tensors={name: value.detach().clone() for name, value in tensors.items()},
            objects={name: id(value) for name, value in tensors.items()},
            modules={name: _state(module) for name, module in model.named_modules()},
            gradients=[
                name
                for name, value in model.named_parameters()
                if value.grad is not None
            ],
            random_state=(torch.get_rng_state().numpy().tobytes(), random.getstate()),
            use_cache=getattr(getattr(model, "config", None), "use_cache", None),
        )

    def assert_equal(self, other: "Fingerprint", *, weights: bool = True) -> None:
        """Fail where the model or the process differs, and say in what."""
        for name in ("objects", "modules", "gradients", "random_state", "use_cache"):
            assert getattr(self, name) == getattr(other, name), name
        assert self.tensors.keys() == other.tensors.keys()
        for name, value in self.tensors.items():
            assert not weights or other.tensors[name].equal(value), name


def _state(module: nn.Module) -> tuple[Any, ...]:
    """Return flags, own attributes and hooks of one module."""

    def hooks(name: str) -> int:
        return len(vars(module).get(name) or ())

    return (
        module.training,
        tuple(sorted(vars(module))),
        vars(module).get("gradient_checkpointing"),
        tuple(parameter.requires_grad for parameter in module.parameters()),
        *(hooks(name) for name in sorted(vars(module)) if name.endswith("_hooks")),
    )
