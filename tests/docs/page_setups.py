"""What each page takes for granted before its first block: models, batches, loaders."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import budgetfit
from tests.docs.stand_ins import small_model, tokens

HUB_ID = "HuggingFaceTB/SmolLM2-360M"


def loader(samples: int = 64, length: int = 32) -> list[dict[str, torch.Tensor]]:
    """Return two batches of any model of language here."""
    return [tokens(samples, length) for _ in range(2)]


def readme() -> dict[str, Any]:
    return {"loader": loader()}


def planned(samples: int = 4) -> dict[str, Any]:
    """A model that has been planned, and batches for it."""
    model = small_model(HUB_ID)
    plan = budgetfit.plan(
        model, gpu="rtx-4090", batch_size=2, effective_batch_size=4, max_length=32
    )
    return {
        "budgetfit": budgetfit,
        "torch": torch,
        "model": model,
        "plan": plan,
        "loader": loader(samples),
    }


class Pictures(nn.Module):
    """A network for the batch that the tutorial makes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=8), nn.Flatten())
        self.head = nn.Linear(4 * 32 * 32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(image))


def tutorial() -> dict[str, Any]:
    return {"torch": torch, "net": Pictures(), "loader": loader(1)}


def weighty() -> dict[str, Any]:
    """A model whose gradients take more than what its forward saves."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    batch = torch.zeros(1, 256)
    plan = budgetfit.plan(model, gpu="rtx-4090", batch=batch, batch_size=1)
    return {"budgetfit": budgetfit, "torch": torch, "model": model, "plan": plan}


def adapters() -> dict[str, Any]:
    """A model to adapt, and a teacher with its student."""
    return {
        "budgetfit": budgetfit,
        "torch": torch,
        "model": small_model(HUB_ID),
        "teacher": small_model(HUB_ID).requires_grad_(False),
        "student": small_model(HUB_ID),
        "kl": lambda found, wanted: nn.functional.kl_div(
            found.log_softmax(-1), wanted.softmax(-1), reduction="batchmean"
        ),
    }


def keras_page() -> dict[str, Any]:
    """Two batches of pictures, channels last."""
    return {
        "loader": [(torch.zeros(4, 32, 32, 3), torch.zeros(4, dtype=torch.long))] * 2
    }


SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": readme,
    "docs/tutorial.md": tutorial,
    "docs/training.md": planned,
    "docs/verify.md": functools.partial(planned, samples=2),
    "docs/concepts.md": planned,
    "docs/faq.md": planned,
    "docs/keras.md": keras_page,
    "docs/report.md": planned,
    "docs/optimizers.md": weighty,
    "docs/lora.md": adapters,
}
