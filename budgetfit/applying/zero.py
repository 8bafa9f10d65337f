"""Train with DeepSpeed's ZeRO: its configuration, its engine, its optimizer.

A trace runs this on fake tensors, and training on real ones.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from budgetfit.core.precision import Precision, find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError
from budgetfit.utils.lazy_import import lazy_import


def deepspeed_config(recipe: Recipe) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a recipe, without the optimizer."""
    # Micro-batches are counted by the loop: ``set_gradient_accumulation_boundary``.
    parallelism = recipe.parallelism
    if parallelism is None:
        raise ValueError("the recipe is for one GPU")
    zero: dict[str, Any] = {"stage": parallelism.zero_stage}
    if parallelism.bucket_elements is not None:
        zero["reduce_bucket_size"] = parallelism.bucket_elements
        zero["allgather_bucket_size"] = parallelism.bucket_elements
    if parallelism.overlap_comm is not None:
        zero["overlap_comm"] = parallelism.overlap_comm
    return {
        "train_micro_batch_size_per_gpu": recipe.batch_size,
        "bf16": {"enabled": parallelism.param_dtype == "bf16"},
        "zero_optimization": zero,
        # Those of PyTorch are tested by DeepSpeed; the plan has chosen another.
        "zero_allow_untested_optimizer": True,
    }


def check_deepspeed(recipe: Recipe) -> None:
    """Check that DeepSpeed is installed, if the recipe is for it."""
    if recipe.zero_stage is not None and find_spec("deepspeed") is None:
        raise InputError(
            'engine="deepspeed" runs DeepSpeed itself: pip install deepspeed. Or use '
            'engine="fsdp2", which shards what ZeRO-3 shards.'
        )


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe
) -> tuple[nn.Module, ZeroOptimizer]:
    """Return DeepSpeed's engine around a model, and the optimizer that it shards.

    The model may be in host memory: the engine moves it. Its blocks are checkpointed
    already, and there is a process group.

    Raises:
        InputError: If DeepSpeed is not installed.
    """
    check_deepspeed(recipe)
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    engine: nn.Module = lazy_import("deepspeed").initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(recipe)
    )[0]
    return engine, ZeroOptimizer(engine, trained)


def input_precision(recipe: Recipe) -> Precision:
    """Return the policy for a batch's floats: DeepSpeed leaves inputs as they are."""
    given = recipe.parallelism
    in_bf16 = recipe.zero_stage is not None and given and given.param_dtype == "bf16"
    return find_precision("bf16" if in_bf16 else recipe.precision)


class ZeroOptimizer(torch.optim.Optimizer):
    """The engine's optimizer as a loop calls it: its step is that of the engine.

    Attributes:
        trained: The parameters of the model; the groups hold this rank's part of them.
    """

    def __init__(self, engine: Any, trained: list[nn.Parameter]) -> None:
        # Not Optimizer.__init__: groups and state are those of DeepSpeed's optimizer.
        self._engine = engine
        self.trained = trained

    def prepare(self, gradient_scale: float, max_grad_norm: float | None) -> None:
        """Have the next step scale the gradients, then clip them to a total norm."""
        sharded = self._engine.optimizer
        sharded.clip_grad = max_grad_norm or 0.0
        if gradient_scale != 1.0:
            sharded.override_loss_scale(1 / gradient_scale)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the optimizer that DeepSpeed has sharded."""
        return self._engine.optimizer.param_groups

    @property
    def state(self) -> object:  # type: ignore[override]
        """The states of this rank's part."""
        return self._engine.optimizer.state

    @property
    def master_weights(self) -> list[torch.Tensor]:
        """This rank's part of the weights in fp32, flat; the keys of ``state``."""
        of_stage = (
            "fp32_partitioned_groups_flat"
            if self._engine.zero_optimization_partition_weights()
            else "single_partition_of_fp32_groups"
        )
        return getattr(self._engine.optimizer, of_stage)

    def step(self, _: None = None) -> None:  # type: ignore[override]
        """Update the weights, and drop the gradients."""
        self._engine.step()
        self._engine.optimizer.custom_loss_scaler = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine drops gradients in its step."""
