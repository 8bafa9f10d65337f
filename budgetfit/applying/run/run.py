"""Run: a model that trains by a recipe, one micro-batch per call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from torch._subclasses import FakeTensor

from budgetfit.applying.applied_models import claim
from budgetfit.applying.attention_implementation import SameAttention
from budgetfit.applying.checkpointing.recipe_application import BlockTreatment
from budgetfit.applying.data_parallel import say_if_alone
from budgetfit.applying.optimizers.factory import LEARNING_RATE
from budgetfit.applying.optimizers.for_recipe import (
    SameParameters,
    optimizer_of,
    refuse_clipping,
    trained_parameters,
)
from budgetfit.applying.out_of_memory.error import free_memory
from budgetfit.applying.out_of_memory.expected_batch import parts_of
from budgetfit.applying.precision import (
    apply_precision,
    autocast_context,
    cast_batch,
    make_scaler,
    renewed_scaler,
    say_if_emulated,
)
from budgetfit.applying.run.accumulated_gradients import Gathered
from budgetfit.applying.run.accumulation import Group
from budgetfit.applying.run.micro_step import forward_backward
from budgetfit.applying.run.num_items_in_batch import counted_in, with_num_items
from budgetfit.applying.run.optimizer_update import WeightUpdate
from budgetfit.applying.run.setup import (
    move,
    same_optimizer,
    same_training,
)
from budgetfit.applying.run.state import load_state, save_state
from budgetfit.applying.run.step_conditions import refuse_batch, refuse_surroundings
from budgetfit.applying.run.step_guard import StepGuard
from budgetfit.applying.run.step_lock import Turns
from budgetfit.applying.torch_compile import compiled_modules, say_compiled_since
from budgetfit.applying.training_modes import TrainingModes
from budgetfit.applying.undo import Undo
from budgetfit.batches.sample_count import count_samples
from budgetfit.core.precision import find_precision
from budgetfit.core.sample_dims import FIRST
from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from budgetfit.applying.loss.call_model import Loss
    from budgetfit.core.plan import Plan
    from budgetfit.core.recipe import Recipe
    from budgetfit.core.sample_dims import SampleDims

_Result = TypeVar("_Result")


class Run:
    """A model that trains the way a recipe says, until undone.

    This step is the program that is traced for the prediction, trained with, and
    measured by ``verify`` (applying P6). As a context manager it undoes at the end.

    Args:
        model: Modified in place, and put into training mode (``TrainingModes``).
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
        plan: Where the recipe is from: for warnings and reports.
        dims: The dimension of a batch's tensors that counts samples.
        no_loss: For a trace, which goes on without a loss (``call_model.loss_of``).
        fakes_for: The type of the device that fake tensors of a trace stand for.

    Attributes:
        model: The model handed in.
        recipe: What is carried out.
        optimizer: The optimizer over the trainable parameters.
        scaler: The GradScaler, or None.
        device: Where it trains.
        updated: Whether the last ``step`` or ``flush`` updated the weights: the moment
            for ``scheduler.step()``.
        steps_done: Updates so far.
        skipped_steps: Updates that the scaler left out because gradients overflowed.
        trained: The parameters of the optimizer.
        group: The micro-batches since the last update.
        gathered: Their gradients, which nobody else may change.

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
        determinism_check: str = "values",
        keep_own_checkpointing: bool = False,
        plan: Plan | None = None,
        dims: SampleDims = FIRST,
        no_loss: Callable[[], object] | None = None,
        fakes_for: str = "cuda",
    ) -> None:
        self.model = model
        self._precision = find_precision(recipe.precision)
        self._loss = loss
        self._no_loss = no_loss
        self._on_phase = on_phase or (lambda _: None)
        self._phase = "forward"
        self._dims = dims
        self.updated = False
        self.steps_done = self.skipped_steps = 0
        self._turns = Turns()
        self._is_trace = any(isinstance(p, FakeTensor) for p in model.parameters())
        with Undo() as self._undo:
            if not self._is_trace:  # a copy that nobody else has
                claim(model, self, self._undo)
            self.device = move(model, device, self._undo)
            kind = self.device.type
            steps_on = fakes_for if self._is_trace else kind
            say_if_emulated(self._precision, self.device)
            self._undo.add(apply_precision(model, self._precision, kind))
            self._modes = TrainingModes(model)
            self._undo.add(self._modes.undo)
            self._blocks = BlockTreatment(
                model,
                loss=loss,
                random_blocks=random_blocks,
                determinism_check=determinism_check,
                keep_own_checkpointing=keep_own_checkpointing,
            )
            self._undo.add(self._blocks.undo)
            self._guard = StepGuard(model, self.device, plan, dims)
            self._treat_as(recipe)
            self.scaler = make_scaler(self._precision, kind)
            self.optimizer = optimizer_of(
                recipe,
                same_optimizer(recipe.optimizer, optimizer),
                model.parameters(),
                lr=learning_rate,
                device_type=steps_on,
                scaler=self.scaler,
                undo=self._undo,
            )
            self.trained = trained_parameters(self.optimizer)
            self.gathered = Gathered(self.trained)
            if not self._is_trace:
                self._parameters = SameParameters(model, self.optimizer)
                self._compiled = len(compiled_modules(model))
                self._attention = SameAttention(model)
        self._update_weights = WeightUpdate(self.optimizer, self.trained, steps_on)
        self.optimizer.zero_grad(set_to_none=True)

    def step(
        self,
        batch: Any,  # noqa: ANN401 - any nesting of tensors
        max_grad_norm: float | None = None,
        *,
        weight: float | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Train on one micro-batch of ``recipe.batch_size`` samples.

        Every ``gradient_accumulation_steps``-th call updates the weights, with the
        gradient of the mean over all samples since the last update. An error drops what
        was gathered since then, and random generators go back to where they were.

        Args:
            batch: Moved to the device; floats get the policy's dtype.
            max_grad_norm: Clip to this total norm, if this call updates the weights.
            weight: What this micro-batch counts in the mean, if not its samples: the
                number of tokens that its loss is the mean of.
            num_items_in_batch: Instead of a weight, the tokens of all micro-batches of
                this update together, as transformers' models and losses take it.

        Returns:
            The micro-batch's mean loss, detached, on the device; with
            ``num_items_in_batch`` its share of the mean.

        Raises:
            InputError: If this would train something else than was planned: nothing
                to train on, other parameters, gradients that somebody else changed.
            TrainingOutOfMemoryError: With what was predicted, what was measured and
                what should fit. It is a ``torch.OutOfMemoryError`` and a
                ``BudgetfitError``.
        """
        refuse_clipping(self.recipe, max_grad_norm)
        given = weight, num_items_in_batch
        with self._turns.taken():
            if not self._is_trace:
                refuse_surroundings()
                refuse_batch(batch)
                if self.group.count == 0:
                    self._begin_group()
                self._guard.look_at(batch, is_first=self.group.count == 0)
            return self._guarded(
                lambda: self._train(batch, max_grad_norm, *given), batch
            )

    def flush(self, max_grad_norm: float | None = None) -> bool:
        """Update the weights with the micro-batches that came since the last update.

        For a last group that is shorter than ``gradient_accumulation_steps``: the
        gradient is the mean over those that really came.

        Returns:
            Whether there were any.

        Raises:
            InputError, TrainingOutOfMemoryError: As ``step``.
        """
        refuse_clipping(self.recipe, max_grad_norm)

        def update() -> None:
            self.gathered.check(self.group.count)
            self._update(max_grad_norm)

        with self._turns.taken():
            self.updated = False
            waiting = self.group.count > 0
            if waiting:
                self._guarded(update, None)
            return waiting

    def parts(self, batch: Any) -> Iterator[Any]:  # noqa: ANN401
        """Cut a batch of any size into micro-batches; the last may be shorter."""
        return parts_of(batch, self.recipe.batch_size, self._dims)

    def adopt(self, recipe: Recipe) -> None:
        """Go on with other settings: weights, optimizer, scaler and counts stay.

        Raises:
            InputError: If precision or optimizer differ, blocks are unknown, or micro-
                batches wait for an update. Nothing is changed then.
        """
        self._turns.check()
        same_training(self.recipe, recipe, waiting=self.group.count)
        self._modes.resume()
        try:
            self._treat_as(recipe)
        except InputError:
            self._treat_as(self.recipe)
            raise

    def autocast(self) -> AbstractContextManager[object]:
        """Return the recipe's autocast, for evaluation."""
        return autocast_context(self._precision, self.device.type)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on, but for the data and a scheduler.

        The states of model, optimizer, GradScaler (None without one) and random
        generators, the counts of steps and, between micro-batches, the gradients so
        far. ``torch.load(path, map_location="cpu", weights_only=True)`` reads it.
        """
        return save_state(self)

    def load_state_dict(self, state: dict[str, Any], *, random: bool = True) -> None:
        """Continue from what ``state_dict`` returned, bit for bit.

        Args:
            state: Of this version, or an older one that had less in it.
            random: Whether the global random generators continue too.

        Raises:
            InputError: If it is no state of this run; nothing is loaded then.
        """
        self._turns.check()
        load_state(self, state, random=random)

    def drop_group(self) -> None:
        """Forget the micro-batches that came since the last update."""
        self.gathered.forget()
        self.optimizer.zero_grad(set_to_none=True)
        self.group = Group(self.recipe.gradient_accumulation_steps)
        if self.scaler is not None:
            # A scaler that has unscaled once refuses to again before an update.
            self.scaler = renewed_scaler(self.scaler, self.device.type)

    def undo(self) -> None:
        """Give back the plain model: the same objects, trained values kept.

        Gradients of micro-batches that wait for an update are dropped: a loop that goes
        on would add its own to them.
        """
        if not self._turns.ended and self.group.count:
            self.drop_group()
        self._turns.ended = True
        self._undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __reduce__(self) -> NoReturn:
        # A copy's undo() would change the model of the first.
        raise InputError(
            "A run is neither pickled nor copied: it has changed its model. Save "
            "run.state_dict(), or copy run.model."
        )

    def _treat_as(self, recipe: Recipe) -> None:
        """Carry out the part of a recipe that can change while training."""
        self._blocks.treat(recipe)
        self.recipe = recipe
        self.group = Group(recipe.gradient_accumulation_steps)
        self._guard.expect(recipe)

    def _begin_group(self) -> None:
        """Drop gradients of other backward passes; see that the weights are the same.

        Raises:
            InputError: If the model has other parameters than the optimizer, or other
                dtypes than planned.
        """
        if not self.recipe.optimizer_in_backward:
            self.optimizer.zero_grad(set_to_none=True)
        self._parameters.check(self.model, self.optimizer)
        self._attention.check()
        self._blocks.restore()
        if self.steps_done + self.skipped_steps == 0:
            say_compiled_since(self.model, self._compiled)
            say_if_alone(self.model)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._on_phase(phase)

    def _train(
        self,
        batch: Any,  # noqa: ANN401
        max_grad_norm: float | None,
        weight: float | None,
        num_items_in_batch: int | torch.Tensor | None,
    ) -> torch.Tensor:
        if not self._is_trace:
            self.gathered.check(self.group.count)
        self._modes.resume()
        self._enter("forward")
        share = num_items_in_batch is not None
        counted = counted_in(weight, num_items_in_batch)
        if weight is None:
            weight = count_samples(batch, self._dims) or 1
        divisor = self.group.divisor(weight, share=share, counted=counted)
        # Kept until the step is over, as by a loop that moves its batches itself:
        # memory is the same either way, and as it was predicted.
        moved = cast_batch(batch, self._precision, self.device)
        moved, function = with_num_items(
            self.model, moved, self._loss, num_items_in_batch
        )
        watched = self._guard.watching()
        loss = forward_backward(
            self.model,
            moved,
            loss=function,
            divisor=divisor,
            contexts=(self.autocast(), self._blocks.training_call(), watched),
            scaler=self.scaler,
            before_backward=lambda: self._enter("backward"),
            no_loss=self._no_loss,
        )
        if self.group.is_complete:
            self._update(max_grad_norm)
        elif not self._is_trace:
            self.gathered.note()
        return loss

    def _update(self, max_grad_norm: float | None) -> None:
        self._enter("optimizer")
        if self.steps_done + self.skipped_steps == 0:
            self._guard.look_after(self.recipe)
        self.updated = self._update_weights(
            self.scaler,
            max_grad_norm=max_grad_norm,
            gradient_scale=self.group.gradient_scale,
        )
        if self.updated:
            self.steps_done += 1
        else:
            self.skipped_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.group = Group(self.recipe.gradient_accumulation_steps)

    def _guarded(self, work: Callable[[], _Result], batch: Any) -> _Result:  # noqa: ANN401
        """Do ``work``; if it fails, drop the group and say what is known."""
        self.updated = False
        try:
            return work()
        except BaseException as error:
            report = self._guard.report(
                error,
                batch,
                recipe=self.recipe,
                phase=self._phase,
                micro_batch=max(1, self.group.count),
                weights_intact=self._update_weights.left_intact(),
            )
            self.drop_group()
            self._guard.rewind()
            if report is None:
                raise
        # Here the error is gone, and with its frames the tensors of the failed step.
        free_memory(self.device)
        raise report
