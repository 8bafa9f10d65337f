"""Exports of a plan to Trainer, TRL, accelerate, Lightning and DeepSpeed, as methods.

Each calls one function of ``integrations/``, imported by name when it is called, so
that ``core`` depends on no library. Return types are the library's own, hence ``Any``.
"""

# ruff: noqa: ANN401

import importlib
from collections.abc import Iterable
from typing import Any


class PlanExports:
    """Export methods of ``Plan`` for training loops of other libraries.

    Settings are plain values, to be passed to the library's own class. What no setting
    can express (per-block checkpointing) is done by ``prepare`` or, inside a trainer,
    by a callback.
    """

    __slots__ = ()

    def prepare(self, model: object) -> Any:
        """Apply a plan to a model, for a training loop of your own or a library's.

        Checkpointing, chunked loss and the dtype of weights; autocast, loss scaling,
        accumulation and optimizer stay with the loop.

        Args:
            model: The planned one, or a module that contains it. Changed in place.

        Returns:
            A context manager (``PreparedModel``) whose ``undo`` restores the model.

        Raises:
            InputError: If it is not the planned model; it is then unchanged.
        """
        return _call("exports.prepared_model", "prepare", self, model)

    def make_optimizer(self, parameters: Iterable[object], lr: float = 5e-5) -> Any:
        """Build the planned ``torch.optim.Optimizer`` for the trainable parameters.

        Args:
            parameters: No groups of them. Those without ``requires_grad`` are left out.
            lr: Learning rate; unused where the plan was made with an optimizer
                function.

        Raises:
            InputError: If these are groups, or the plan was made with a function and
                loaded from disk, which only stores its name.
        """
        return _call(
            "exports.prepared_model", "make_plan_optimizer", self, parameters, lr
        )

    def to_training_arguments(self, **overrides: object) -> dict[str, Any]:
        """Return arguments for the installed ``transformers.TrainingArguments``.

        Use them with ``trainer_callback``: no argument can name blocks.

        Args:
            overrides: Further arguments, which override the plan's.

        Raises:
            InputError: If the Trainer cannot build the plan's optimizer by its name.
        """
        home, function = "exports.trainer_arguments", "training_arguments"
        found: dict[str, Any] = _call(home, function, self, overrides)
        return found

    def trainer_callback(self) -> Any:
        """Return a callback that applies the plan in a transformers ``Trainer``."""
        return _call("exports.trainer", "PlanCallback", self)

    def to_sft_config(self, **overrides: object) -> dict[str, Any]:
        """Return arguments for ``trl.SFTConfig``, as ``to_training_arguments``."""
        found: dict[str, Any] = _call("exports.trl", "sft_arguments", self, overrides)
        return found

    def to_accelerate_config(self) -> dict[str, Any]:
        """Return the content of a file for ``accelerate launch --config_file``.

        Use ``prepare`` in the script that is launched.
        """
        found: dict[str, Any] = _call("exports.accelerate", "launch_config", self)
        return found

    def to_lightning_arguments(self) -> dict[str, Any]:
        """Return arguments for Lightning's ``Trainer``; use ``lightning_callback``."""
        found: dict[str, Any] = _call("exports.lightning", "trainer_arguments", self)
        return found

    def lightning_callback(self) -> Any:
        """Return a callback that applies the plan in Lightning's ``Trainer``."""
        return _call("exports.lightning", "plan_callback", self)

    def to_deepspeed_config(self) -> dict[str, Any]:
        """Return a config for ``deepspeed.initialize``; use ``prepare`` before it."""
        found: dict[str, Any] = _call("exports.deepspeed", "engine_config", self)
        return found

    def to_torch_script(self) -> str:
        """Return a training script that needs only torch and transformers.

        Raises:
            InputError: If the plan offloads or chunks the loss, which takes more than a
                page of code, trains adapters, or has a batch with containers inside.
        """
        text: str = _call("source_code.plain_torch", "torch_script", self)
        return text


def _call(module: str, function: str, *args: object) -> Any:
    home = importlib.import_module(f"budgetfit.integrations.{module}")
    return getattr(home, function)(*args)
