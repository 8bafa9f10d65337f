"""A case's training program in plain PyTorch, as a user would write it by hand.

Nothing of budgetfit is imported here: this is what its predictions are compared with.
"""

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.accuracy.case import Case, Model

AUTOCAST: Final = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
OPTIMIZERS: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "adamw_torch_fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "adamw_torch": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=1e-3, foreach=True),
}

# phase(name, micro_step): what is measured around each part of a step.
Phase = Callable[[str, int], AbstractContextManager[Any]]


def build_model(wanted: Model, device: str) -> nn.Module:
    """The model with random weights in fp32, as its constructor leaves it."""
    if wanted.config:
        transformers = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        config = getattr(transformers, wanted.config)(**wanted.settings)
        build = partial(getattr(transformers, wanted.builder), config)
    else:
        plain_models = importlib.import_module("tests.accuracy.plain_models")
        build = partial(getattr(plain_models, wanted.builder), **wanted.settings)
    with torch.device(device):
        model: nn.Module = build()
    return model


def build_batch(case: Case, device: str) -> dict[str, torch.Tensor]:
    """The batch, made on the device, each input a tensor of its own."""
    batch = {}
    for wanted in case.model.inputs:
        shape = (case.batch_size, *wanted.shape)
        if wanted.dtype == "int64":
            batch[wanted.name] = torch.randint(wanted.high, shape, device=device)
        else:
            dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
            batch[wanted.name] = torch.randn(shape, device=device, dtype=dtype)
    return batch


def recompute_every_block(model: nn.Module, blocks: tuple[str, ...]) -> None:
    """Non-reentrant checkpointing of every block: the model's own, or around it."""
    if not blocks:
        with warnings.catch_warnings():  # transformers 5.23 renamed the method
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        return
    for path in blocks:
        for block in model.get_submodule(path).children():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class Training:
    """Model, optimizer, scaler and batch of a case on the CUDA device."""

    def __init__(self, case: Case) -> None:
        self.case = case
        # Built on the host and moved, as a loaded model is: initialising on the card
        # would leave cached blocks behind that training then uses.
        self.model = build_model(case.model, "cpu").to("cuda")
        if case.precision == "bf16":
            self.model.to(torch.bfloat16)
        self.model.train()
        if case.checkpointing == "recompute":
            recompute_every_block(self.model, case.model.blocks)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[case.optimizer](parameters)
        self.scaler = torch.amp.GradScaler(
            "cuda", enabled=case.precision == "fp16-mixed"
        )
        self.batch = build_batch(case, "cuda")

    def step(self, phase: Phase) -> None:
        """One optimizer step in the order of applying rule P4."""
        dtype = AUTOCAST.get(self.case.precision)
        accumulation = self.case.gradient_accumulation_steps
        for micro_step in range(accumulation):
            with phase("forward", micro_step):
                with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                    # Nothing else of the outputs outlives this line: kept logits
                    # would live through the backward.
                    loss = self.model(**self.batch).loss
                loss = loss / accumulation
            with phase("backward", micro_step):
                self.scaler.scale(loss).backward()
                del loss
        with phase("optimizer", accumulation - 1):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
