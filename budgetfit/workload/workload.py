"""Subject: everything that is planned for and that no recipe decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.applying.attention_implementation import attention_of
from budgetfit.applying.quantized_layers.nf4_linear import PackedLinear, parameter_count
from budgetfit.batches.batch_tree import describe_batch
from budgetfit.core.plan import ModelSummary
from budgetfit.core.sample_dims import FIRST, SampleDims
from budgetfit.example_batches.make_batch import MadeBatch
from budgetfit.gpus.table import Gpu
from budgetfit.tracing.blocks.find_blocks import find_blocks
from budgetfit.tracing.cuda.target import CudaTarget, installed_torch_version
from budgetfit.workload.model_check import below_wrappers, trainable_count
from budgetfit.workload.settings_check import settings_of

_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_WORTH_NAMING = 0.01  # of the bytes
if TYPE_CHECKING:
    from budgetfit.core.recipe import Recipe

# Of peft: adapters whose trained prefix reaches the blocks as cached keys and values.
_IN_THE_CACHE = frozenset({"PREFIX_TUNING", "CARTRIDGE"})
_PREFIX_NOTE = (
    "nothing is recomputed: prefix tuning hands its tokens to the blocks as cached "
    "keys and values, which transformers drops where a block is recomputed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, what it is trained on and how, and the card it is to train on.

    Attributes:
        model: Never modified; may be on meta.
        batch: An example batch of any size.
        batch_dims: The dimension of its tensors that counts samples.
        loss: ``callable(outputs, batch)``; None for the model's own.
        optimizer: A callable that a recipe's optimizer names; None for names of
            transformers.
        gpu: The card.
        blocks: Module paths of the chain, in the order in which they run.
        name, source: What the model is called and where it came from.
        cudnn: Whether cuDNN may run: torch's switch, as it is when planning.
        notes: What was assumed on the way here.
        remake: ``make_batch`` with all but the model and ``max_length``; None where the
            batch was given.
    """

    model: nn.Module
    batch: Any
    batch_dims: SampleDims = FIRST
    loss: Callable[..., Any] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    gpu: Gpu
    blocks: tuple[str, ...] = ()
    name: str = ""
    source: str = ""
    cudnn: bool = True
    notes: tuple[str, ...] = ()
    remake: Callable[..., MadeBatch] | None = None

    @property
    def target(self) -> CudaTarget:
        """The card and PyTorch that traces stand for."""
        return CudaTarget(
            compute_capability=self.gpu.compute_capability,
            torch_version=installed_torch_version(),
            cudnn=self.cudnn,
        )

    def at_length(self, max_length: int) -> Subject:
        """Return the same with samples of another length; only of a made batch.

        Raises:
            InputError: If the model has no positions for it.
        """
        assert self.remake is not None  # noqa: S101 - who asks has looked
        made = self.remake(self.model, max_length=max_length)
        return replace(self, batch=made.batch)

    def with_found_blocks(self) -> Subject:
        """Look for the repeated blocks of the model, if they may be recomputed."""
        configs = getattr(self.model, "peft_config", None)
        kinds = {
            getattr(config, "peft_type", None)
            for config in (configs.values() if isinstance(configs, dict) else ())
        }
        if not kinds.isdisjoint(_IN_THE_CACHE):
            return replace(self, notes=(*self.notes, _PREFIX_NOTE))
        return replace(self, blocks=find_blocks(self.model))

    def full_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return module paths for names that may be the end of a block's path.

        So are the base model's own names once peft has wrapped it. What is the end of
        no block, or of several, stays as it is.
        """
        modules = dict(self.model.named_modules(remove_duplicate=False))

        def full(name: str) -> str:
            ends = [block for block in self.blocks if block.endswith(f".{name}")]
            return ends[0] if name not in modules and len(ends) == 1 else name

        return tuple(full(each) if isinstance(each, str) else each for each in names)

    def with_full_names(self, recipe: Recipe) -> Recipe:
        """Return a recipe with ``full_names`` in its segments."""
        return replace(
            recipe,
            segments=tuple(
                replace(segment, blocks=self.full_names(segment.blocks))
                for segment in recipe.segments
            ),
        )

    def own_checkpointing(self) -> tuple[str, ...]:
        """Return the blocks that the model itself recomputes as it is now.

        Read from transformers' flag: the block's own, or else the nearest above it.
        """
        modules = dict(self.model.named_modules())

        def is_on(name: str) -> bool:
            path = name.split(".")
            for depth in range(len(path), -1, -1):
                module = modules[".".join(path[:depth])]
                flag = getattr(module, "gradient_checkpointing", None)
                if flag is not None:
                    return flag is True
            return False

        return tuple(filter(is_on, self.blocks))

    def dtypes(self) -> str:
        """Return the dtypes of its weights, largest share first, in a few words.

        For example ``bf16``, or ``4 bits and fp32 frozen, fp32 trained``.
        """
        shares: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                packed = isinstance(module, PackedLinear)
                bits = packed and parameter is module.weight
                name = "4 bits" if bits else _SHORT.get(parameter.dtype)
                name = name or str(parameter.dtype).removeprefix("torch.")
                shares[parameter.requires_grad][name] += parameter.nbytes
        frozen, trained = (
            " and ".join(
                name
                for name, size in shares[key].most_common()
                if size > _WORTH_NAMING * shares[key].total()
            )
            for key in (False, True)
        )
        if not frozen:
            return trained
        return f"{frozen} frozen, {trained} trained"

    def summary(self) -> ModelSummary:
        """Describe the model for people, and to refuse another one later."""
        modules = dict(self.model.named_modules())
        types = Counter(type(modules[name]).__name__ for name in self.blocks)
        return ModelSummary(
            name=self.name or type(self.model).__name__,
            parameter_count=parameter_count(self.model),
            trainable_count=trainable_count(self.model),
            blocks=self.blocks,
            block_type=types.most_common(1)[0][0] if types else "",
            source=self.source,
            batch=describe_batch(self.batch),
            batch_dims=self.batch_dims,
            class_name=_library_class(self.model),
            type_name=type(below_wrappers(self.model)).__name__,
            attention=attention_of(self.model),
            settings=settings_of(self.model),
        )


def _library_class(model: nn.Module) -> str:
    """Return the class of a transformers model, below peft's; else nothing."""
    kind = type(below_wrappers(model))
    return kind.__name__ if kind.__module__.startswith("transformers.models.") else ""
