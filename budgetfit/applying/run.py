"""Run: a model that trains by a recipe, one micro-batch per call."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch

from budgetfit.applying.call_model import loss_of
from budgetfit.applying.checkpoint import apply_segments
from budgetfit.applying.chunked_loss import ChunkedLoss, chunk_loss
from budgetfit.applying.optimizer import (
    LEARNING_RATE,
    make_optimizer,
    qualified_name,
    runs_as_on_cuda,
)
from budgetfit.applying.precision import (
    apply_precision,
    autocast_context,
    cast_batch,
    make_scaler,
)
from budgetfit.applying.undo import Undo
from budgetfit.core.errors import InputError
from budgetfit.core.precision import find_precision

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch import nn

    from budgetfit.applying.call_model import Loss
    from budgetfit.core.recipe import Recipe


class Run:
    """A model that trains the way a recipe says, until undone.

    This step is the program that is traced for the prediction, trained with, and
    measured by ``verify`` (applying P6). As a context manager it undoes at the end.

    Args:
        model: Modified in place. It is switched to training mode if it is in evaluation
            mode; submodules that are in evaluation mode in a training model stay so.
        recipe: What to carry out.
        loss: ``callable(outputs, batch) -> scalar``; None for the model's own
            (``call_model.loss_of``).
        optimizer: The callable that ``recipe.optimizer`` names, if it names one.
        device: Where to train; the model moves there. None: where it is.
        random_blocks: Names of blocks that draw random numbers; None when unknown.
        on_phase: Called with ``"forward"``, ``"backward"`` or ``"optimizer"`` as each
            begins.
        learning_rate: For an optimizer given by name.
        determinism_check: See ``checkpoint.apply_segments``.
        keep_own_checkpointing: See ``checkpoint.apply_segments``.

    Attributes:
        model: The model handed in.
        recipe: The recipe handed in.
        optimizer: The optimizer over the trainable parameters.
        scaler: The GradScaler, or None.
        device: Where it trains.

    Raises:
        InputError: If model and recipe do not go together; the model is then as it was.
    """

    def __init__(  # noqa: PLR0913 - a recipe and what a recipe cannot hold
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        loss: Loss | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        device: torch.device | str | None = None,
        random_blocks: Collection[str] | None = None,
        on_phase: Callable[[str], object] | None = None,
        learning_rate: float = LEARNING_RATE,
        determinism_check: str = "default",
        keep_own_checkpointing: bool = False,
    ) -> None:
        self.model = model
        self.recipe = recipe
        self._precision = find_precision(recipe.precision)
        self._loss = loss
        self._on_phase = on_phase if on_phase is not None else _ignore
        self._micro_steps = 0
        with Undo() as self._undo:
            self.device = _move(model, device, self._undo)
            kind = self.device.type
            self._undo.add(apply_precision(model, self._precision, kind))
            _start_training_mode(model, self._undo)
            self._undo.add(
                apply_segments(
                    model,
                    recipe.segments,
                    random_blocks=random_blocks,
                    determinism_check=determinism_check,
                    keep_own_checkpointing=keep_own_checkpointing,
                )
            )
            self._chunked_loss: ChunkedLoss | None = None
            if recipe.loss_chunks > 1:
                self._chunked_loss = chunk_loss(
                    model,
                    recipe.loss_chunks,
                    self._undo,
                    loss=loss,
                    determinism_check=determinism_check,
                )
            self.optimizer = make_optimizer(
                _same_optimizer(recipe.optimizer, optimizer),
                model.parameters(),
                lr=learning_rate,
                device_type=kind,
            )
            self.scaler = make_scaler(self._precision, kind)
        self._trained = [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        ]
        # On CUDA clipping takes all gradients at once; fake ones must be told (M44).
        self._foreach = True if runs_as_on_cuda(self._trained, kind) else None
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, batch: Any, max_grad_norm: float | None = None) -> torch.Tensor:  # noqa: ANN401
        """Train on one micro-batch of ``recipe.batch_size`` samples.

        Every ``gradient_accumulation_steps``-th call updates the weights. An error, out
        of memory included, drops the gradients gathered since the last update.

        Args:
            batch: Moved to the device; floats get the policy's dtype.
            max_grad_norm: Clip to this total norm, if this call updates the weights.

        Returns:
            The micro-batch's mean loss, detached, on the device.
        """
        try:
            self._on_phase("forward")
            # Kept until the step is over, as by a loop that moves its batches itself:
            # memory is the same either way, and as it was predicted.
            moved = cast_batch(batch, self._precision, self.device)
            loss = self._accumulate(moved)
            self._micro_steps += 1
            if self._micro_steps == self.recipe.gradient_accumulation_steps:
                self._update(max_grad_norm, gradient_scale=1.0)
        except BaseException:
            self._forget()
            raise
        return loss

    def flush(self, max_grad_norm: float | None = None) -> bool:
        """Update the weights with the micro-batches that came since the last update.

        For a last group that is shorter than ``gradient_accumulation_steps``: the
        gradient is the mean over those that really came.

        Returns:
            Whether there were any.
        """
        if self._micro_steps == 0:
            return False
        planned = self.recipe.gradient_accumulation_steps
        try:
            self._update(max_grad_norm, gradient_scale=planned / self._micro_steps)
        except BaseException:
            self._forget()
            raise
        return True

    def autocast(self) -> AbstractContextManager[object]:
        """Return the recipe's autocast, for evaluation."""
        return autocast_context(self._precision, self.device.type)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of model, optimizer and GradScaler (None without one).

        Gradients are in no state: save after an update, not between micro-batches.
        """
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            InputError: If it is no state of a Run; nothing is loaded then.
        """
        missing = {"model", "optimizer", "scaler"} - set(state)
        if missing:
            raise InputError(
                f"This is no state of a Run: {sorted(missing)} is missing. "
                "Use what run.state_dict() returned."
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._forget()

    def undo(self) -> None:
        """Give back the plain model: the same objects, trained values kept."""
        self._undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def _accumulate(self, batch: Any) -> torch.Tensor:  # noqa: ANN401
        """Forward and backward of one micro-batch, in the order of applying P4."""
        if not self.model.training:
            self.model.train()  # evaluated in between: per-layer flags need it
        with self.autocast(), self._training_call():
            loss = loss_of(self.model, batch, self._loss)
        # On CUDA some losses come in a storage of the size of their input (mse_loss
        # does): the copy and the division, by 1 too, leave it behind.
        reported = loss.detach().clone()
        loss = loss / self.recipe.gradient_accumulation_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._on_phase("backward")
        loss.backward()
        return reported

    def _training_call(self) -> AbstractContextManager[None]:
        """Return what belongs around a forward that is trained on."""
        chunked = self._chunked_loss
        return nullcontext() if chunked is None else chunked.training_call()

    def _update(self, max_grad_norm: float | None, gradient_scale: float) -> None:
        self._on_phase("optimizer")
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [item.grad for item in self._trained if item.grad is not None]
        if gradient_scale != 1.0:
            torch._foreach_mul_(gradients, gradient_scale)
        del gradients
        is_first = not self.optimizer.state
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(
                self._trained, max_grad_norm, foreach=self._foreach
            )
        try:
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        except BaseException:
            if is_first:  # half of a state would break the next step
                self.optimizer.state.clear()
            raise
        self.optimizer.zero_grad(set_to_none=True)
        self._micro_steps = 0

    def _forget(self) -> None:
        """Drop what an interrupted group of micro-batches has left."""
        self.optimizer.zero_grad(set_to_none=True)
        self._micro_steps = 0
        if self.scaler is not None:
            # A scaler that has unscaled once refuses to again before an update.
            state = self.scaler.state_dict()
            self.scaler = torch.amp.GradScaler(self.device.type)
            self.scaler.load_state_dict(state)


def _ignore(phase: str) -> None:
    """Stand in for a missing ``on_phase``."""


def _move(
    model: nn.Module, device: torch.device | str | None, undo: Undo
) -> torch.device:
    """Bring the model to ``device``; refuse one that has no weights."""
    homes: dict[torch.device, int] = defaultdict(int)
    for parameter in model.parameters():
        homes[parameter.device] += parameter.numel()
    if any(home.type == "meta" for home in homes):
        raise InputError(
            "The model is on the meta device: it has no weights to train. Load them "
            "first, for example with AutoModelForCausalLM.from_pretrained(...)."
        )
    home = max(homes, key=homes.__getitem__, default=torch.device("cpu"))
    if device is None:
        return home
    wanted = torch.device(device)
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", torch.cuda.current_device())
    if home != wanted:
        undo.add(model.to, home)
        model.to(wanted)
    return wanted


def _start_training_mode(model: nn.Module, undo: Undo) -> None:
    modes = [(module, module.training) for module in model.modules()]
    undo.add(_restore_modes, modes)
    if not model.training:
        model.train()


def _restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _same_optimizer(
    name: str, optimizer: Callable[..., torch.optim.Optimizer] | None
) -> str | Callable[..., torch.optim.Optimizer]:
    """Return the callable if it is the recipe's, or the recipe's name."""
    if optimizer is None:
        return name
    if qualified_name(optimizer) != name:
        raise InputError(
            f"The recipe was made for the optimizer {name!r}, but "
            f"{qualified_name(optimizer)!r} was handed in. Hand in the same one."
        )
    return optimizer
