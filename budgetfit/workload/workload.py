"""``Workload``: the model, batch, loss, optimizer and GPU that a plan is made for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from budgetfit.applying.attention_implementation import describe_attention
from budgetfit.applying.precision import DTYPE_NAMES
from budgetfit.applying.quantized_layers.nf4_linear import Nf4Linear, parameter_count
from budgetfit.applying.torch_compile import unwrap_compiled
from budgetfit.batches.batch_tree import describe_batch
from budgetfit.batches.resize_samples import with_image_size, with_length
from budgetfit.core.plan import ModelSummary
from budgetfit.core.recipe import Recipe
from budgetfit.core.samples.image_sizes import SampleSizes, Size
from budgetfit.core.samples.sample_dims import FIRST_DIM, SampleDims
from budgetfit.example_batches.make_batch import ExampleBatch
from budgetfit.gpus.table import Gpu
from budgetfit.tracing.blocks.find_blocks import find_blocks
from budgetfit.tracing.cuda.target import CudaTarget, installed_torch_version
from budgetfit.tracing.cuda.triton.launches import triton_is_loaded
from budgetfit.workload.model_check import trainable_count, unwrap_model
from budgetfit.workload.settings_check import model_settings

_MIN_DTYPE_SHARE = 0.01  # of the bytes

# peft methods whose trained prefix reaches the blocks as cached keys and values.
_CACHED_PREFIX_TYPES = frozenset({"PREFIX_TUNING", "CARTRIDGE"})
_PREFIX_NOTE = (
    "nothing is recomputed: prefix tuning hands its tokens to the blocks as cached "
    "keys and values, which transformers drops where a block is recomputed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model with its training data, loss, optimizer and GPU; no recipe changes it.

    Attributes:
        model: Never modified; may be on meta.
        batch: An example batch of any size.
        batch_dims: The dimension of its tensors that counts samples.
        loss: ``callable(outputs, batch)``; None for the model's own.
        optimizer: A callable that a recipe's optimizer names; None for names of
            transformers.
        gpu: The GPU to train on.
        blocks: Module paths of the chain, in the order in which they run.
        name, source: What the model is called and where it came from.
        cudnn: ``torch.backends.cudnn.enabled`` at planning time.
        notes: Assumptions made while building this workload.
        remake: ``make_batch`` with all but the model and ``max_length``; None where the
            batch was given.
        dequantizer: The config class that dequantizes the stored weights; or empty.
        frozen_in_compute_dtype: As of ``ResolvedModel``.
        lengths: Of the samples, or sizes of images; the batch has that of the longest.
            None if unknown.
    """

    model: nn.Module
    batch: Any
    batch_dims: SampleDims = FIRST_DIM
    loss: Callable[..., Any] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    gpu: Gpu
    blocks: tuple[str, ...] = ()
    name: str = ""
    source: str = ""
    dequantizer: str = ""
    frozen_in_compute_dtype: bool = False
    cudnn: bool = True
    notes: tuple[str, ...] = ()
    remake: Callable[..., ExampleBatch] | None = None
    lengths: SampleSizes | None = None

    @property
    def target(self) -> CudaTarget:
        """The GPU and PyTorch version that traces are made for."""
        return CudaTarget(
            compute_capability=self.gpu.compute_capability,
            torch_version=installed_torch_version(),
            cudnn=self.cudnn,
            sm_count=self.gpu.sm_count if triton_is_loaded() else None,
        )

    def at_length(self, max_length: int | Size) -> Workload:
        """Return the workload with ``max_length`` tokens per sample, or image sizes.

        Of batches that are made, or of lengths up to ``lengths.planned``.

        Raises:
            InputError: If the model has no positions for it.
        """
        longest = None if self.lengths is None else self.lengths.planned
        dims = self.batch_dims
        if self.remake is not None:
            name = "max_length" if isinstance(max_length, int) else "image_size"
            batch = self.remake(self.model, **{name: max_length}).batch
        elif isinstance(longest, tuple) and isinstance(max_length, tuple):
            batch = with_image_size(self.batch, longest, max_length, dims)
        elif isinstance(longest, int) and isinstance(max_length, int):
            batch = with_length(self.batch, longest, max_length, dims)
        return replace(self, batch=batch)

    def with_found_blocks(self) -> Workload:
        """Return the workload with the repeated blocks, if they may be recomputed."""
        configs = getattr(self.model, "peft_config", None)
        kinds = {
            getattr(config, "peft_type", None)
            for config in (configs.values() if isinstance(configs, dict) else ())
        }
        if not kinds.isdisjoint(_CACHED_PREFIX_TYPES):
            return replace(self, notes=(*self.notes, _PREFIX_NOTE))
        return replace(self, blocks=find_blocks(self.model))

    def full_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Complete names of blocks that are unique ends of module paths."""
        # The base model's own names are suffixes once peft has wrapped it. Names that
        # match no block, or several, are returned unchanged.
        modules = dict(self.model.named_modules(remove_duplicate=False))

        def full(name: str) -> str:
            ends = [block for block in self.blocks if block.endswith(f".{name}")]
            return ends[0] if name not in modules and len(ends) == 1 else name

        return tuple(full(each) if isinstance(each, str) else each for each in names)

    def with_full_names(self, recipe: Recipe) -> Recipe:
        """Return the recipe with its block names completed by ``full_names``."""
        return replace(
            recipe,
            segments=tuple(
                replace(segment, blocks=self.full_names(segment.blocks))
                for segment in recipe.segments
            ),
        )

    def own_checkpointing(self) -> tuple[str, ...]:
        """Return the blocks for which the model has gradient checkpointing enabled."""
        # Read from transformers' ``gradient_checkpointing`` attribute: the block's own,
        # or else that of its nearest ancestor.
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
        """Return the dtypes of the weights as text, largest share first.

        For example ``bf16``, or ``4 bits and fp32 frozen, fp32 trained``.
        """
        shares: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                packed = isinstance(module, Nf4Linear)
                bits = packed and parameter is module.weight
                plain = str(parameter.dtype).removeprefix("torch.")
                name = "4 bits" if bits else DTYPE_NAMES.get(parameter.dtype, plain)
                shares[parameter.requires_grad][name] += parameter.nbytes
        frozen, trained = (
            " and ".join(
                name
                for name, size in shares[key].most_common()
                if size > _MIN_DTYPE_SHARE * shares[key].total()
            )
            for key in (False, True)
        )
        if not frozen:
            return trained
        return f"{frozen} frozen, {trained} trained"

    def summary(self) -> ModelSummary:
        """Return the model summary that reports show and ``model_check`` compares."""
        modules = dict(self.model.named_modules())
        inner = (unwrap_compiled(modules[name]) for name in self.blocks)
        types = Counter(type(block).__name__ for block in inner)
        return ModelSummary(
            name=self.name or type(self.model).__name__,
            parameter_count=parameter_count(self.model),
            trainable_count=trainable_count(self.model),
            blocks=self.blocks,
            block_type=types.most_common(1)[0][0] if types else "",
            source=self.source,
            dequantizer=self.dequantizer,
            batch=describe_batch(self.batch),
            batch_dims=self.batch_dims,
            block_types=tuple(types),
            class_name=_library_class(self.model),
            type_name=type(unwrap_model(self.model)).__name__,
            attention=describe_attention(self.model),
            settings=model_settings(self.model),
        )


def _library_class(model: nn.Module) -> str:
    """Return the class name of a model of transformers or diffusers, else ""."""
    # That of diffusers with its library.
    kind = type(unwrap_model(model))
    if kind.__module__.startswith("diffusers.models."):
        return f"diffusers.{kind.__name__}"
    return kind.__name__ if kind.__module__.startswith("transformers.models.") else ""
