"""Which loops are compared: ways to train, families, and what is done in the loop."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from budgetfit.core.plan import Plan
from tests.training_loops import library_loops, parallel_loops, trainers
from tests.training_loops.own_loops import (
    PlainLoop,
    PreparedLoop,
    RunLoop,
    Trained,
    train,
)
from tests.training_loops.settings import Settings
from tests.training_loops.treatments import TREATMENTS

Way = Callable[[Settings, Plan | None, Path], Trained]


def with_run(settings: Settings, plan: Plan | None, _: Path) -> Trained:
    return train(settings, plan, PlainLoop, RunLoop)


def with_prepared(settings: Settings, plan: Plan | None, _: Path) -> Trained:
    return train(settings, plan, PlainLoop, PreparedLoop)


WAYS: dict[str, Way] = {
    "Run": with_run,
    "own loop": with_prepared,
    "Trainer": trainers.with_trainer,
    "SFT": trainers.with_sft,
    "DPO": trainers.with_dpo,
    "accelerate": library_loops.with_accelerate,
    "Lightning": library_loops.with_lightning,
    "DDP": parallel_loops.run_under_ddp,
    "DDP own loop": parallel_loops.prepared_under_ddp,
    "DDP 2 processes": parallel_loops.run_in_two_processes,
    # Last: its process group stays until the process ends.
    "DeepSpeed": library_loops.with_deepspeed,
}

# Each is trained with every treatment. SFT and DPO are for models of text alone.
TRAINED: tuple[tuple[str, str, str], ...] = (
    ("Run", "gpt2", "accumulate clip schedule evaluate"),
    ("Run", "gpt2-cache", "clip"),
    ("Run", "llama", "bf16 resume"),
    ("Run", "t5", "evaluate"),
    ("Run", "vit", "bf16 schedule clip evaluate"),
    ("Run", "bert", "freeze clip resume"),
    ("Run", "own", "accumulate bf16 schedule resume evaluate"),
    ("Run", "lora", "clip evaluate resume"),
    ("own loop", "gpt2", "freeze bf16 evaluate"),
    ("own loop", "llama", "accumulate clip evaluate resume"),
    ("own loop", "t5", "bf16 schedule"),
    ("own loop", "vit", "freeze clip"),
    ("own loop", "own", "accumulate clip resume evaluate"),
    ("own loop", "lora", "bf16 schedule"),
    ("Trainer", "gpt2", "accumulate clip schedule evaluate resume"),
    ("Trainer", "gpt2-cache", "bf16"),
    ("Trainer", "t5-cache", "clip"),
    ("Trainer", "vit", "bf16 evaluate"),
    ("Trainer", "bert", "freeze schedule resume"),
    ("Trainer", "own", "accumulate clip evaluate resume"),
    ("Trainer", "lora", "bf16 resume"),
    ("SFT", "gpt2", "bf16 schedule evaluate"),
    ("SFT", "llama", "accumulate clip resume"),
    ("SFT", "lora", "clip"),
    ("DPO", "gpt2", "clip schedule evaluate"),
    ("DPO", "llama", "accumulate bf16 resume"),
    ("DPO", "lora", "clip"),
    ("accelerate", "gpt2", "bf16 clip schedule"),
    ("accelerate", "own", "accumulate clip evaluate resume"),
    ("accelerate", "bert", "freeze resume"),
    ("Lightning", "gpt2", "accumulate clip evaluate resume"),
    ("Lightning", "vit", "bf16 schedule"),
    ("Lightning", "own", "clip evaluate resume"),
    ("DDP", "gpt2", "clip schedule evaluate"),
    ("DDP", "own", "accumulate bf16 evaluate"),
    ("DDP own loop", "gpt2", "accumulate clip resume"),
    ("DDP own loop", "bert", "freeze bf16"),
    ("DDP 2 processes", "gpt2", "accumulate clip evaluate"),
    ("DDP 2 processes", "own", "bf16 resume"),
    ("DeepSpeed", "gpt2", "accumulate clip schedule evaluate"),
    ("DeepSpeed", "llama", "bf16 resume"),
    ("DeepSpeed", "own", "clip evaluate"),
)


class Loop(NamedTuple):
    """One loop: a way, its settings, and a treatment of the blocks."""

    way: str
    settings: Settings
    treatment: str

    def __str__(self) -> str:
        words = " ".join(sorted(self.settings.habits))
        return f"{self.way}, {self.settings.name}, {self.treatment} ({words})"


def loops(patterns: tuple[str, ...] = (), updates: int = 30) -> Iterator[Loop]:
    """Yield all loops whose text has every pattern in it."""
    for way, family, habits in sorted(TRAINED, key=lambda row: [*WAYS].index(row[0])):
        settings = Settings(family, frozenset(habits.split()), updates)
        for treatment in TREATMENTS:
            loop = Loop(way, settings, treatment)
            if all(pattern in str(loop) for pattern in patterns):
                yield loop
