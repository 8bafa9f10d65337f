"""A case's training program in plain PyTorch, as a user would write it by hand.

Nothing of budgetfit is imported here: this is what its predictions are compared with.
"""

import gc
import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from tests.accuracy.case import Case, Input, Model

AUTOCAST: Final = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
ATTENTION: Final = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}


def _adafactor(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """What transformers' Trainer builds for ``optim="adafactor"``."""
    optimization = importlib.import_module("transformers.optimization")
    made: torch.optim.Optimizer = optimization.Adafactor(
        parameters, lr=1e-4, scale_parameter=False, relative_step=False
    )
    return made


OPTIMIZERS: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "adamw_torch_fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "adamw_torch": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=1e-3, foreach=True),
    "sgd_momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=True),
    "adafactor": _adafactor,
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
    if wanted.config:
        model.tie_weights()  # also where the initialisation was left out
    return model


def build_batch(case: Case, batch_size: int) -> dict[str, torch.Tensor]:
    """A batch in host memory, each input a tensor of its own."""
    return {
        wanted.name: _build_input(case, wanted, batch_size)
        for wanted in case.model.inputs
    }


def _build_input(case: Case, wanted: Input, batch_size: int) -> torch.Tensor:
    shape = (batch_size, *wanted.shape)
    if wanted.padding:
        mask = torch.ones(shape, dtype=torch.int64)
        mask[::2, -wanted.padding :] = 0
        return mask
    if wanted.dtype == "int64":
        return torch.randint(wanted.high, shape)
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    return torch.randn(shape, dtype=dtype)


class Together(nn.Module):
    """Neighbouring blocks that are recomputed as one."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run them one after the other under one checkpoint."""

        def run(hidden: object) -> Any:
            for block in self.blocks:
                hidden = block(hidden, *args, **kwargs)
            return hidden

        return checkpoint(run, hidden, use_reentrant=False)

    def __getattr__(self, name: str) -> Any:
        """What a model asks of a block, such as its attention type, the first has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("blocks")[0], name)


def recompute_some_blocks(model: nn.Module, chain: str) -> None:
    """A mixed plan: two blocks as one, then single ones up to the middle."""
    path, _, name = chain.rpartition(".")
    blocks = list(model.get_submodule(chain))
    middle = len(blocks) // 2
    for block in blocks[2:middle]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    wrapped = [Together(blocks[:2]), *blocks[2:]]
    parent = model.get_submodule(path)
    setattr(parent, name, type(getattr(parent, name))(*_members(parent, name, wrapped)))


def _members(parent: nn.Module, name: str, wrapped: list[nn.Module]) -> tuple[Any, ...]:
    is_list = isinstance(getattr(parent, name), nn.ModuleList)
    return (wrapped,) if is_list else tuple(wrapped)


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


def compile_every_block(
    model: nn.Module, blocks: tuple[str, ...], *, recompute: bool
) -> None:
    """``torch.compile`` for the forward of each block, inside its checkpoint.

    transformers' own checkpointing is inside the forward. ``shape_padding`` is off:
    whether it pays, only a GPU can tell.
    """
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.config.recompile_limit = 64  # blocks share their code
    for block in blocks_of(model, blocks):
        forward = torch.compile(
            block.forward, dynamic=False, options={"shape_padding": False}
        )
        if recompute:
            forward = partial(checkpoint, forward, use_reentrant=False)
        block.forward = forward


def compile_whole(
    model: nn.Module, blocks: tuple[str, ...], *, recompute: bool
) -> None:
    """``torch.compile`` for the forward of the model, the checkpoints inside.

    transformers' own checkpointing breaks the graph of some models.
    """
    for block in blocks_of(model, blocks) if recompute else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    model.forward = torch.compile(
        model.forward, dynamic=False, options={"shape_padding": False}
    )


def blocks_of(model: nn.Module, paths: tuple[str, ...]) -> list[nn.Module]:
    """The children of the modules at the paths; without any, transformers' layers."""
    if paths:
        return [b for path in paths for b in model.get_submodule(path).children()]
    layers = importlib.import_module("transformers.modeling_layers")
    layer = layers.GradientCheckpointingLayer
    return [module for module in model.modules() if isinstance(module, layer)]


def allowed_attention(case: Case) -> AbstractContextManager[Any]:
    """Only the attention kernels that the case allows."""
    if not case.attention:
        return nullcontext()
    return sdpa_kernel(ATTENTION[case.attention])


class Training:
    """Model, optimizer, scaler and batch of a case on the CUDA device."""

    def __init__(self, case: Case, *, built_on: str = "cpu") -> None:
        self.case = case
        # Built on the host and moved, as a loaded model is: initialising on the card
        # would leave cached blocks behind that training then uses.
        self.model = build_model(case.model, built_on).to("cuda")
        if case.precision == "bf16":
            self.model.to(torch.bfloat16)
        self.model.train()
        recompute = case.checkpointing == "recompute"
        if case.compile == "blocks":
            compile_every_block(self.model, case.model.blocks, recompute=recompute)
        elif case.compile == "model":
            compile_whole(self.model, case.model.blocks, recompute=recompute)
        elif recompute:
            recompute_every_block(self.model, case.model.blocks)
        if case.checkpointing == "mixed":
            recompute_some_blocks(self.model, case.model.chain)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[case.optimizer](parameters)
        self.scaler = torch.amp.GradScaler(
            "cuda", enabled=case.precision == "fp16-mixed"
        )
        self._batches: dict[int, dict[str, torch.Tensor]] = {}

    def compile(self) -> None:
        """Compile in a forward and backward, and drop what they leave behind.

        Kernels are timed in buffers that would stay in the allocator's cache. A model
        may be compiled again in its second step: the first one sets attributes.
        """
        for _ in range(2 if self.case.compile == "model" else 1):
            batch = self._batch_on_card(self.case.batch_size)
            self.scaler.scale(self._loss(batch)).backward()
            del batch
            self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def step(self, phase: Phase, batch_size: int) -> None:
        """One optimizer step in the order of applying rule P4.

        Each micro-batch is moved to the device when its turn comes, and dropped when it
        has had it.
        """
        accumulation = self.case.gradient_accumulation_steps
        for micro_step in range(accumulation):
            is_last = micro_step == accumulation - 1
            with phase("forward", micro_step):
                batch = self._batch_on_card(batch_size)
                loss = self._loss(batch) / accumulation
            with phase("backward", micro_step):
                self.scaler.scale(loss).backward()
                del loss
                if not is_last:
                    del batch
        with phase("optimizer", accumulation - 1):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            del batch

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss; kept logits would live through the backward."""
        dtype = AUTOCAST.get(self.case.precision)
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss: torch.Tensor = self.model(**batch).loss
        return loss

    def _batch_on_card(self, batch_size: int) -> dict[str, torch.Tensor]:
        batch = self._batch_on_host(batch_size)
        return {name: tensor.to("cuda") for name, tensor in batch.items()}

    def _batch_on_host(self, batch_size: int) -> dict[str, torch.Tensor]:
        """A batch of that size; always the same one."""
        if batch_size not in self._batches:
            self._batches[batch_size] = build_batch(self.case, batch_size)
        return self._batches[batch_size]


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    """Return the model with peft's adapters on all linear layers."""
    import peft

    config = peft.LoraConfig(
        target_modules="all-linear", task_type="CAUSAL_LM", **options
    )
    return peft.get_peft_model(model, config)


class Samples(Dataset[dict[str, torch.Tensor]]):
    """The rows of a batch, again and again."""

    def __init__(self, batch: dict[str, torch.Tensor], count: int) -> None:
        self._batch = batch
        self._rows = len(next(iter(batch.values())))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: rows[index % self._rows] for name, rows in self._batch.items()}
