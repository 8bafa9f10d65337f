"""A plan's way into other libraries, as methods of ``Plan``.

Each is one function of ``integrations/``, found by its name when it is called: these
words know no library, and none is imported before it is asked for. What they return is
a library's own, so its type is only told in words.
"""

# ruff: noqa: ANN401

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class PlanExports:
    """What ``Plan`` can do for a training loop that is not ``budgetfit.apply``'s.

    Settings come as plain values, to be handed to the library's own class. What no
    setting of a library can say (which blocks are recomputed, and how) is done by
    ``prepare`` or, inside a trainer, by a callback.
    """

    __slots__ = ()

    def prepare(self, model: Any) -> Any:
        """Make a model do its part of the plan, for a loop of your own or a library's.

        Segments, losses in chunks and the dtype of weights; autocast, loss scaling,
        accumulation and optimizer stay with the loop.

        Args:
            model: The planned one, or a module that holds it. Changed in place.

        Returns:
            A context manager (``PreparedModel``) whose ``undo`` gives back the plain
            model.

        Raises:
            InputError: If it is not the planned model; it is then as it was.
        """
        return _call("exports.prepared_model", "prepare", self, model)

    def make_optimizer(self, parameters: Iterable[Any], lr: float = 5e-5) -> Any:
        """Build the planned ``torch.optim.Optimizer`` over what is trained.

        Args:
            parameters: Those without ``requires_grad`` are left out.
            lr: Learning rate; a function that the plan was made with brings its own.

        Raises:
            InputError: If the plan was made with a function and loaded: it only names
                it.
        """
        return _call(
            "exports.prepared_model", "make_plan_optimizer", self, parameters, lr
        )

    def to_training_arguments(self, **overrides: Any) -> dict[str, Any]:
        """Return arguments for ``transformers.TrainingArguments``: those it knows.

        Use them with ``trainer_callback``: no argument can name blocks.

        Args:
            overrides: Arguments of yours, added or put in place of the plan's.

        Raises:
            InputError: If the Trainer cannot build the plan's optimizer by its name.
        """
        home, function = "exports.trainer_arguments", "training_arguments"
        found: dict[str, Any] = _call(home, function, self, overrides)
        return found

    def trainer_callback(self) -> Any:
        """Return what makes transformers' (or TRL's) ``Trainer`` train as planned."""
        return _call("exports.trainer", "PlanCallback", self)

    def to_sft_config(self, **overrides: Any) -> dict[str, Any]:
        """Return arguments for ``trl.SFTConfig``, as ``to_training_arguments``."""
        found: dict[str, Any] = _call("exports.trl", "sft_arguments", self, overrides)
        return found

    def to_accelerate_config(self) -> dict[str, Any]:
        """Return what belongs in a file for ``accelerate launch --config_file``.

        Use ``prepare`` in the script that is launched.
        """
        found: dict[str, Any] = _call("exports.accelerate", "launch_config", self)
        return found

    def to_lightning_arguments(self) -> dict[str, Any]:
        """Return arguments for Lightning's ``Trainer``; use ``lightning_callback``."""
        found: dict[str, Any] = _call("exports.lightning", "trainer_arguments", self)
        return found

    def lightning_callback(self) -> Any:
        """Return what makes Lightning's ``Trainer`` train as planned."""
        return _call("exports.lightning", "plan_callback", self)

    def to_deepspeed_config(self) -> dict[str, Any]:
        """Return a config for ``deepspeed.initialize``; use ``prepare`` before it."""
        found: dict[str, Any] = _call("exports.deepspeed", "engine_config", self)
        return found

    def to_torch_script(self) -> str:
        """Return a training script that needs torch and transformers alone.

        Raises:
            InputError: If it takes more than a page: offload, losses in chunks.
        """
        text: str = _call("source_code.plain_torch", "torch_script", self)
        return text


def _call(module: str, function: str, *args: Any) -> Any:
    home = importlib.import_module(f"budgetfit.integrations.{module}")
    return getattr(home, function)(*args)
