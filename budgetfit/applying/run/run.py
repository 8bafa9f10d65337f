"""``Run``: train a model by a recipe, one micro-batch per ``step``."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import nn
from torch._subclasses import FakeTensor

from budgetfit.applying.allocator_settings import (
    use_planned_settings,
    warn_of_other_settings,
)
from budgetfit.applying.applied_models import claim
from budgetfit.applying.attention_implementation import (
    check_attention,
    describe_attention,
)
from budgetfit.applying.checkpointing.recipe_application import RecipeApplication
from budgetfit.applying.data_parallel import (
    OwnDataParallel,
    find_own_data_parallel,
    refuse_replaced_parameters,
    warn_if_not_synchronized,
)
from budgetfit.applying.loss.call_model import Loss, compute_loss
from budgetfit.applying.optimizers.factory import DEFAULT_LEARNING_RATE
from budgetfit.applying.optimizers.for_recipe import (
    ParameterChangeCheck,
    make_recipe_optimizer,
    refuse_clipping,
    trained_parameters,
)
from budgetfit.applying.optimizers.in_backward import OptimizerInBackward
from budgetfit.applying.out_of_memory.error import FailedStep, free_memory
from budgetfit.applying.out_of_memory.expected_batch import split_batch
from budgetfit.applying.precision import (
    apply_precision,
    autocast_context,
    cast_batch,
    fresh_scaler,
    make_scaler,
    warn_if_emulated,
)
from budgetfit.applying.quantized_layers.stored_weights import refuse_sharding
from budgetfit.applying.ranks import GroupRanks, Ranks
from budgetfit.applying.reduction import (
    drop_accumulated,
    reduce_accumulated,
    sum_over_ranks,
    to_shards,
    warn_if_stays_sharded,
)
from budgetfit.applying.run.accumulation import (
    AccumulatedGradients,
    AccumulationGroup,
    check_weight,
)
from budgetfit.applying.run.num_items_in_batch import describe_weight, pass_num_items
from budgetfit.applying.run.optimizer_update import OptimizerUpdate
from budgetfit.applying.run.setup import check_adoptable, move_model, resolve_optimizer
from budgetfit.applying.run.state import load_state, save_state
from budgetfit.applying.run.step_conditions import (
    StepLock,
    check_batch_not_empty,
    check_grad_and_autocast,
)
from budgetfit.applying.run.step_monitor import StepMonitor
from budgetfit.applying.run.unused_parameters import (
    check_all_reduced,
    check_all_used,
    check_same_on_ranks,
)
from budgetfit.applying.sharding import gradient_sync, refuse_hooks, wrap
from budgetfit.applying.torch_compile import compiled_modules, warn_compiled_after_apply
from budgetfit.applying.training_modes import TrainingModes
from budgetfit.applying.undo import Undo
from budgetfit.applying.zero import initialize, input_precision
from budgetfit.batches.sample_count import count_samples
from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.core.samples.sample_dims import FIRST_DIM, SampleDims
from budgetfit.errors import InputError
from budgetfit.measuring.preserve_model import preserved_model

_Result = TypeVar("_Result")


class Run:
    """A model that trains by a recipe, until undone.

    The same ``step`` is traced for the prediction, trains, and is measured by
    ``verify``. As a context manager, a run is undone at the end.

    Args:
        model: Modified in place, and put into training mode (``TrainingModes``).
        recipe: The settings to apply.
        loss: ``callable(outputs, batch) -> scalar``; None for the model's own
            (``call_model.compute_loss``).
        optimizer: The callable that ``recipe.optimizer`` names, if it names one.
        device: Where to train; the model is moved there. None for its device.
        random_blocks: Names of blocks that draw random numbers; None if unknown.
        on_phase: Called with ``"forward"``, ``"backward"`` or ``"optimizer"`` as each
            begins.
        learning_rate: For an optimizer given by name.
        determinism_check: See ``apply_segments``.
        keep_own_checkpointing: See ``apply_segments``.
        plan: The plan of the recipe, for warnings and errors.
        dims: The sample dimension of a batch's tensors.
        on_missing_loss: For tracing without a loss (``call_model.compute_loss``).
        simulated_device_type: Device type that a trace's fake tensors represent.
        blocks: Names of the blocks that ``compile="blocks"`` compiles; None for those
            of the plan.
        compile_forward: See ``torch_compile.compile_blocks``.

    Attributes:
        optimizer: The optimizer over the trainable parameters.
        scaler: The GradScaler, or None.
        updated: Whether the last ``step`` or ``flush`` updated the weights; if so, call
            ``scheduler.step()``.
        steps_done: Updates so far.
        skipped_steps: Updates that the scaler skipped because gradients overflowed.
        trained: The parameters of the optimizer.
        group: The micro-batches since the last update.
        accumulated: Detects changes of their gradients.
        ranks: The ranks of ``recipe.parallelism``; None without one.

    Raises:
        InputError: If model and recipe are incompatible; the model is then unchanged.
    """

    def __init__(  # noqa: PLR0913 - a recipe and what it cannot hold
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        loss: Loss | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        device: torch.device | str | None = None,
        random_blocks: Collection[str] | None = None,
        on_phase: Callable[[str], object] | None = None,
        learning_rate: float = DEFAULT_LEARNING_RATE,
        determinism_check: str = "values",
        keep_own_checkpointing: bool = False,
        plan: Plan | None = None,
        dims: SampleDims = FIRST_DIM,
        on_missing_loss: Callable[[], object] | None = None,
        simulated_device_type: str = "cuda",
        blocks: Sequence[str] | None = None,
        compile_forward: Callable[[nn.Module], Callable[..., object]] | None = None,
    ) -> None:
        self.model = model
        self._precision = find_precision(recipe.precision)
        self._of_inputs = input_precision(recipe)
        self._loss, self._no_loss = loss, on_missing_loss
        self._on_phase = on_phase or (lambda _: None)
        self._phase = "forward"
        self._dims = dims
        self.updated = False
        self.steps_done = self.skipped_steps = 0
        self._step_lock = StepLock()
        self._is_trace = any(isinstance(p, FakeTensor) for p in model.parameters())
        if blocks is None:
            blocks = () if plan is None else plan.model.blocks
        with Undo() as self._undo:
            if not self._is_trace:  # a private copy
                claim(model, self, self._undo)
            self.ranks = None
            if recipe.parallelism is not None and not self._is_trace:
                self.ranks = Ranks(recipe.parallelism, device)
                device = self.ranks.device
            refuse_sharding(model, recipe.parallelism)
            # These move the model, and change its parameters for good.
            shards = recipe.parallelism is not None and (
                recipe.parallelism.engine != "ddp"
            )
            self.device = move_model(model, device, self._undo, by_wrapper=shards)
            kind = self.device.type
            steps_on = simulated_device_type if self._is_trace else kind
            use_planned_settings(plan, self.device, self._undo)
            warn_if_emulated(self._precision, self.device)
            warn_of_other_settings(plan, self.device)
            put_back = apply_precision(model, self._precision, kind, for_good=shards)
            self._undo.add(put_back)
            self._modes = TrainingModes(model)
            self._undo.add(self._modes.undo)
            self._blocks = RecipeApplication(
                model,
                loss=loss,
                random_blocks=random_blocks,
                determinism_check=determinism_check,
                keep_own_checkpointing=keep_own_checkpointing,
                blocks=blocks,
                compile_forward=compile_forward,
            )
            self._undo.add(self._blocks.undo)
            self._monitor = StepMonitor(
                model, self.device, plan, dims, own_loss=loss is None
            )
            self._apply_recipe(recipe)
            self._wrapped = None
            self._own_data_parallel: OwnDataParallel | None = None
            if self.ranks is not None and recipe.parallelism is not None:
                self.ranks.check_same_weights(model, recipe.parallelism.engine)
            # DeepSpeed takes the optimizer with the model.
            if recipe.parallelism is not None and recipe.zero_stage is None:
                self._wrapped = wrap(model, blocks, recipe.parallelism, self.device)
                self._undo.add(self._unwrap)
            self.scaler = make_scaler(self._precision, kind)
            self._make_optimizer(optimizer, learning_rate, steps_on)
            if not self._is_trace:
                self._parameters = ParameterChangeCheck(model, self.optimizer)
                self._compiled = len(compiled_modules(model))
                self._attention = model, describe_attention(model)
        self.optimizer.zero_grad(set_to_none=True)

    def step(
        self,
        batch: object,
        max_grad_norm: float | None = None,
        *,
        weight: float | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Train on one micro-batch of ``recipe.batch_size`` samples.

        Every ``gradient_accumulation_steps``-th call updates the weights, with the
        gradient of the mean over all samples since the last update. An error drops the
        micro-batches since then, and restores the random generators.

        Args:
            batch: Moved to the device; floats get the dtype of the weights.
            max_grad_norm: Clip to this total norm, if this call updates the weights.
            weight: Of this micro-batch in the mean, by default its number of samples;
                for example the number of tokens that its loss is the mean of.
            num_items_in_batch: Instead of a weight, the number of tokens in all
                micro-batches of this update, for transformers' models and losses. Of
                several ranks each gives its own.

        Returns:
            The micro-batch's mean loss, detached, on the device; with
            ``num_items_in_batch`` its share of the mean. Of several ranks that of all.

        Raises:
            InputError: If the step is not the planned one: an empty batch, other
                parameters, gradients that other code changed. Under DDP also if a
                parameter gets no gradient.
            TrainingOutOfMemoryError: With predicted and measured memory, and a recipe
                that should fit. It is a ``torch.OutOfMemoryError`` and a
                ``BudgetfitError``.
        """
        refuse_clipping(self.recipe, max_grad_norm)
        weighting = weight, num_items_in_batch
        with self._step_lock.acquired():
            if not self._is_trace:
                check_grad_and_autocast()
                check_batch_not_empty(batch)
                if self.group.count == 0:
                    self._begin_group()
                self._monitor.before_micro_batch(
                    batch,
                    is_first=self.group.count == 0,
                    ranks=self._exchanging[1],
                    by_samples=weighting == (None, None),
                )
            return self._run_or_drop_group(
                lambda: self._train(batch, max_grad_norm, *weighting), batch
            )

    def flush(self, max_grad_norm: float | None = None) -> bool:
        """Update the weights with the micro-batches since the last update.

        For a last group shorter than ``gradient_accumulation_steps``: the gradient is
        that of the mean over the micro-batches there were.

        Returns:
            Whether there were any.

        Raises:
            InputError, TrainingOutOfMemoryError: As ``step``; with DeepSpeed for any.
        """
        refuse_clipping(self.recipe, max_grad_norm)

        def update() -> None:
            self.accumulated.check(self.group.count)
            parallelism = self.recipe.parallelism
            if parallelism is not None and not parallelism.sync_each_batch:
                if self.ranks is not None:
                    check_same_on_ranks(self._called, self.ranks)
                reduce_accumulated(self._called, self.trained)
            self._update(max_grad_norm)

        with self._step_lock.acquired():
            self.updated = False
            waiting = self.group.count > 0
            if waiting and self.recipe.zero_stage is not None:
                raise InputError(
                    "DeepSpeed reduces gradients as the last micro-batch of an update "
                    f"runs, and {self.group.count} of {self.group.planned} have run. "
                    "Run the others, or plan with gradient_accumulation_steps=1."
                )
            if waiting:
                self._run_or_drop_group(update, None)
            return waiting

    def parts(self, batch: object) -> Iterator[Any]:
        """Split a batch of any size into micro-batches; the last may be shorter."""
        return split_batch(batch, self.recipe.batch_size, self._dims)

    def adopt(self, recipe: Recipe) -> None:
        """Continue with another recipe: weights, optimizer, scaler and counts stay.

        Raises:
            InputError: If precision or optimizer differ, blocks are unknown, or micro-
                batches wait for an update. Nothing is changed then.
        """
        self._step_lock.check()
        check_adoptable(self.recipe, recipe, waiting=self.group.count)
        self._modes.resume()
        try:
            self._apply_recipe(recipe)
        except InputError:
            self._apply_recipe(self.recipe)
            raise

    def autocast(self) -> AbstractContextManager[object]:
        """Return the recipe's autocast, for evaluation."""
        parallelism = self.recipe.parallelism
        if parallelism is not None and parallelism.param_dtype is not None:
            return nullcontext()  # MixedPrecisionPolicy takes its place
        return autocast_context(self._precision, self.device.type)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on, except data and LR scheduler.

        The states of model, optimizer, GradScaler (None without one) and random
        generators, the counts of steps and, between micro-batches, the gradients so
        far. ``torch.load(path, map_location="cpu", weights_only=True)`` reads it.

        On several ranks each calls it, when no micro-batches wait for an update, and
        gets its shards: ``torch.distributed.checkpoint`` saves and loads
        ``{"run": run}``, on any number of ranks.
        """
        return save_state(self)

    def load_state_dict(self, state: dict[str, Any], *, random: bool = True) -> None:
        """Continue from what ``state_dict`` returned, bit for bit.

        Args:
            state: Of this version, or an older one with fewer entries.
            random: Whether to restore the global random generators too.

        Raises:
            InputError: If it is no state of this run; nothing is loaded then.
        """
        self._step_lock.check()
        load_state(self, state, random=random)
        self._monitor.save_rng_states()  # an error would restore those before loading

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine: ``save_checkpoint``, ``load_checkpoint``; else None."""
        return None if self.recipe.zero_stage is None else self._wrapped

    def drop_group(self) -> None:
        """Drop the micro-batches since the last update."""
        self.accumulated.clear()
        drop_accumulated(self._called)
        self.optimizer.zero_grad(set_to_none=True)
        self.group = AccumulationGroup(self.recipe.gradient_accumulation_steps)
        if self.scaler is not None:
            # A scaler refuses to unscale twice before an update.
            self.scaler = fresh_scaler(self.scaler, self.device.type)

    def undo(self) -> None:
        """Restore the plain model: the same objects with the trained values.

        Accumulated gradients are dropped: a following loop would add to them. A model
        that ``fully_shard`` has sharded stays sharded, with a warning.
        """
        if not self._step_lock.ended and self.group.count:
            self.drop_group()
        if self.ranks is not None and not self._step_lock.ended:
            warn_if_stays_sharded(self._called)
        self._step_lock.ended = True
        self._undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __reduce__(self) -> NoReturn:
        # A copy's undo() would change the original's model.
        raise InputError(
            "A run is neither pickled nor copied: it has changed its model. Save "
            "run.state_dict(), or copy run.model."
        )

    def _make_optimizer(
        self,
        optimizer: Callable[..., torch.optim.Optimizer] | None,
        lr: float,
        device_type: str,
    ) -> None:
        """Build the recipe's optimizer, and what steps it."""
        if self.recipe.cpu_offload:
            device_type = "cpu"
        self.optimizer = make_recipe_optimizer(
            self.recipe,
            resolve_optimizer(self.recipe.optimizer, optimizer),
            self.model.parameters(),
            lr=lr,
            device_type=device_type,
            scaler=self.scaler,
            undo=self._undo,
        )
        if self.recipe.zero_stage is not None:
            self._wrapped, self.optimizer = initialize(
                self.model, self.optimizer, self.recipe
            )
            self._undo.add(self._unwrap)
        if isinstance(self.optimizer, OptimizerInBackward):
            self.optimizer.takes_gradients = False
        self.trained = trained_parameters(self.optimizer)
        # DeepSpeed moves gradients into its buckets, and weights in and out.
        own = self.trained if self.recipe.zero_stage is None else []
        self.accumulated = AccumulatedGradients(own)
        self._update_weights = OptimizerUpdate(
            self.optimizer, self.trained, device_type
        )

    def _apply_recipe(self, recipe: Recipe) -> None:
        """Apply the part of a recipe that can change while training."""
        self._blocks.apply(recipe)
        self.recipe = recipe
        self.group = AccumulationGroup(recipe.gradient_accumulation_steps)
        self._monitor.expect_recipe(recipe)
        self._longest_is_due = recipe.longest_batch_first and not self._is_trace
        # A backward that updates the weights cannot be dropped.
        dropped = not self._is_trace and not recipe.optimizer_in_backward
        self._compile_is_due = dropped and recipe.compile != "none"

    def _begin_group(self) -> None:
        """Drop foreign gradients; check that parameters and settings are unchanged."""
        if not self.recipe.optimizer_in_backward:
            self.optimizer.zero_grad(set_to_none=True)
        to_shards(self._called)
        if self.recipe.parallelism is None and self.steps_done == 0:
            refuse_replaced_parameters(self.model)
        self._parameters.check(self.model, self.optimizer)
        check_attention(*self._attention)  # not of what wraps it, as DDP
        if self.recipe.engine == "fsdp2":
            refuse_hooks(self.model)
        self._blocks.reapply_if_changed()
        if self.recipe.parallelism is None:
            self._own_data_parallel = find_own_data_parallel(
                self.model, self._own_data_parallel
            )
        if self.steps_done + self.skipped_steps == 0:
            warn_compiled_after_apply(self.model, self._compiled)
            if self.recipe.parallelism is None:
                warn_if_not_synchronized(self.model)

    def _unwrap(self) -> None:
        """Drop what is around the model: hooks of DDP go with it."""
        self._wrapped = None

    @property
    def _called(self) -> nn.Module:
        """What the forward runs through: the model, or the engine around it."""
        return self.model if self._wrapped is None else self._wrapped

    def _enter_phase(self, phase: str) -> None:
        self._phase = phase
        self._on_phase(phase)

    def _train(
        self,
        batch: object,
        max_grad_norm: float | None,
        weight: float | None,
        num_items_in_batch: int | torch.Tensor | None,
    ) -> torch.Tensor:
        if not self._is_trace:
            self.accumulated.check(self.group.count)
        self._modes.resume()
        self._enter_phase("forward")
        if self._compile_is_due:
            self._compile_is_due = False
            # A model sets attributes in its first step, and is compiled once more.
            calls = 1 + (self.recipe.compile == "model")
            self._run_and_drop([batch] * calls, reduce=self.recipe.engine != "ddp")
            free_memory(self.device)
        if self._longest_is_due:
            self._longest_is_due = False
            self._run_longest(batch)
        share = num_items_in_batch is not None
        counted = describe_weight(weight, num_items_in_batch)
        if weight is None:
            weight = count_samples(batch, self._dims) or 1
        weight = check_weight(weight)
        weight, factor, num_items_in_batch = self._over_ranks(
            weight, num_items_in_batch
        )
        divisor = self.group.divisor(weight, share=share, counted=counted)
        # Kept until the step is over, as by a loop that moves its batches itself:
        # memory is then the same, and as predicted.
        moved = cast_batch(batch, self._of_inputs, self.device)
        moved, function = pass_num_items(
            self.model, moved, self._loss, num_items_in_batch
        )
        with gradient_sync(
            self._called, self.recipe.parallelism, is_last=self.group.is_complete
        ):
            loss = self._forward_backward(moved, function, divisor, factor)
        self._check_reduced(is_last=self.group.is_complete)
        if self._own_data_parallel is not None and factor != 1.0:
            loss /= factor  # this rank's own, as of a loop with such a wrapper
        if self._wrapped is not None:
            loss = sum_over_ranks(loss.div_(self.recipe.ranks), self._wrapped)
        if self.group.is_complete:
            self._update(max_grad_norm)
        elif not self._is_trace:
            self.accumulated.record()
        return loss

    def _check_reduced(self, *, is_last: bool) -> None:
        """Check that ``fully_shard`` has reduced the same parameters on all ranks."""
        parallelism = self.recipe.parallelism
        if self.ranks is None or parallelism is None or parallelism.engine != "fsdp2":
            return
        if is_last or parallelism.sync_each_batch:
            check_same_on_ranks(self._called, self.ranks)

    def _over_ranks(
        self, weight: float, count: int | torch.Tensor | None
    ) -> tuple[float, float, int | torch.Tensor | None]:
        """Return a micro-batch's mean weight and number of items over all ranks.

        Between them the factor of this rank's loss with which the mean over ranks, of
        gradients and losses, is that of all samples.
        """
        wrapper, ranks = self._exchanging
        if ranks is None or wrapper is None:
            return weight, 1.0, count
        place = (
            self.steps_done + self.skipped_steps,
            self.group.count,
            self.group.planned,
        )
        if isinstance(count, torch.Tensor):  # its value may be on its way
            ranks.total_at(place, 0.0)
            items = sum_over_ranks(count.to(self.device, copy=True), wrapper)
            return weight, ranks.size, items
        if count is not None:
            return weight, ranks.size, round(ranks.total_at(place, count))
        mean = ranks.total_at(place, weight) / ranks.size
        return mean, weight / mean, None

    @property
    def _exchanging(self) -> tuple[nn.Module | None, GroupRanks | None]:
        """What reduces gradients, the run's or a user's own DDP, and its ranks."""
        own = self._own_data_parallel
        return (self._wrapped, self.ranks) if own is None else own

    def _run_longest(self, batch: object) -> None:
        """Run forward and backward of the longest batch, and drop their results."""
        # Twice where gradients are accumulated: the second finds those of the first.
        # The allocator then keeps memory in which shorter batches find room. All ranks
        # do so where one of them has to: they exchange weights and gradients.
        longest = self._monitor.longest_batch(batch)
        is_shorter = longest is not None
        _, ranks = self._exchanging
        if ranks is not None:
            is_shorter = ranks.total(is_shorter) > 0
        if not is_shorter:
            return
        longest = batch if longest is None else longest
        steps = min(self.recipe.gradient_accumulation_steps, 2)
        self._run_and_drop([longest] * steps)

    def _run_and_drop(self, batches: Sequence[object], *, reduce: bool = True) -> None:
        """Run forward and backward of batches, and drop their results.

        Where blocks are compiled that is when it happens: kernels are timed in buffers
        of their own, which would stay in the allocator's cache. ``reduce``: whether
        ranks reduce the gradients of the last; after that DDP makes its buckets anew.
        """
        parallelism = self.recipe.parallelism
        with preserved_model(self.model, self.device, weights=False, loss=self._loss):
            for number, batch in enumerate(batches, 1):
                moved = cast_batch(batch, self._of_inputs, self.device)
                is_last = reduce and number == len(batches)
                with gradient_sync(self._called, parallelism, is_last=is_last):
                    self._forward_backward(moved, self._loss, divisor=1.0)
                self._enter_phase("forward")

    def _forward_backward(
        self, batch: object, loss: Loss | None, divisor: float, factor: float = 1.0
    ) -> torch.Tensor:
        """Accumulate the gradients of a micro-batch's loss * factor / ``divisor``.

        Returns:
            The loss as the model computed it, times the factor, detached.
        """
        if not self._is_trace:
            check_all_reduced(self._wrapped)  # of a step whose error was caught
        with (
            self.autocast(),
            self._blocks.training_forward(),
            self._monitor.recording_run_blocks(),
        ):
            value = compute_loss(
                self._called, batch, loss, on_missing_loss=self._no_loss
            )
        self._monitor.after_forward(value)
        # On CUDA some losses have a storage of the size of their input (mse_loss): copy
        # and division, also by 1, release it.
        reported = value.detach().clone()
        if factor != 1.0:
            reported *= factor
        value = value / (divisor / factor)
        if self.scaler is not None:
            value = self.scaler.scale(value)
        self._enter_phase("backward")
        if isinstance(self.optimizer, OptimizerInBackward):
            with self.optimizer.only_inside():
                value.backward()
        elif self.recipe.zero_stage is None:
            value.backward()
        else:
            engine: Any = self._wrapped
            engine.backward(value, scale_wrt_gas=False)
        (check_all_used if self._is_trace else check_all_reduced)(self._wrapped)
        return reported

    def _update(self, max_grad_norm: float | None) -> None:
        self._enter_phase("optimizer")
        if self.steps_done + self.skipped_steps == 0:
            self._monitor.before_first_update(self.trained)
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
        self.group = AccumulationGroup(self.recipe.gradient_accumulation_steps)

    def _run_or_drop_group(self, work: Callable[[], _Result], batch: object) -> _Result:
        """Call ``work``; on an error drop the group, and explain out of memory."""
        self.updated = False
        try:
            return work()
        except BaseException as error:
            if self._is_trace:  # of a private copy, without values to restore
                raise
            step = FailedStep(
                phase=self._phase,
                micro_batch=max(1, self.group.count),
                recipe=self.recipe,
                weights_intact=self._update_weights.weights_intact(),
                ranks=1 if self._exchanging[1] is None else self._exchanging[1].size,
            )
            report = self._monitor.report(error, batch, step)
            self.drop_group()
            self._monitor.restore_rng_states()
            if report is None:
                raise
        # The error is gone here, and with its frames the tensors of the failed step.
        free_memory(self.device)
        raise report
