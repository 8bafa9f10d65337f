"""Monitor training steps: warn of unplanned batches, explain out-of-memory errors."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.applying.optimizers.for_recipe import left_out_text
from budgetfit.applying.out_of_memory.error import (
    FailedStep,
    TrainingOutOfMemoryError,
    out_of_memory_error,
    running_module,
)
from budgetfit.applying.out_of_memory.expected_batch import ExpectedBatch
from budgetfit.applying.pytree import named_tensors_in
from budgetfit.applying.run.label_counts import LabelCounts
from budgetfit.applying.run.rng_states import get_rng_states, set_rng_states
from budgetfit.applying.run.summed_loss import is_sum
from budgetfit.batches.batch_tree import describe_batch
from budgetfit.batches.resize_samples import with_shapes
from budgetfit.batches.sample_count import count_samples
from budgetfit.core.allocator.out_of_memory_message import is_out_of_memory
from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Recipe
from budgetfit.core.samples.sample_dims import SampleDims

if TYPE_CHECKING:
    from budgetfit.applying.ranks import GroupRanks


class StepMonitor:
    """Warns of batches larger than planned, and explains out-of-memory errors.

    ``plan``: of the recipe, or None; ``dims``: the sample dimension of a batch's
    tensors; ``own_loss``: whether the model computes the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        plan: Plan | None,
        dims: SampleDims,
        *,
        own_loss: bool = True,
    ) -> None:
        self._model, self._device, self._plan = model, device, plan
        self._dims, self._own_loss = dims, own_loss
        self._samples = 0
        self._batch = ExpectedBatch()
        self._labels = LabelCounts(model)
        self._rng_states: dict[str, Any] | None = None
        self._run_blocks: set[str] = set()
        self._updated_once = self._has_seen_batch = self._has_seen_loss = False
        self._warns_of_sizes = True

    def expect_recipe(self, recipe: Recipe) -> None:
        """Expect the planned batch at the recipe's batch size from now on."""
        example = {} if self._plan is None else self._plan.model.batch
        self._recipe = recipe
        self._batch = ExpectedBatch.of(example, recipe.batch_size, self._dims)

    def before_micro_batch(
        self,
        batch: object,
        *,
        is_first: bool,
        ranks: GroupRanks | None = None,
        by_samples: bool = False,
    ) -> None:
        """Warn of the batch; save RNG states before the first of an update.

        ``ranks``: those that train together, of which all call this. ``by_samples``:
        whether its samples are its weight.
        """
        self._batch.warn_if_unknown(batch)
        self._batch.warn_if_larger(batch)
        if self._warns_of_sizes:
            self._warn_of_sizes(batch)
        if not self._has_seen_batch:
            self._has_seen_batch = True
            self._warn_if_on_all_ranks(batch, ranks)
            self._warn_if_smaller(batch)
        by_samples = by_samples and self._plan is not None  # ``verify`` notes its own
        self._samples = (count_samples(batch, self._dims) or 1) if by_samples else 0
        if by_samples and self._own_loss:
            self._labels.count(batch, self._samples, is_first=is_first)
        if is_first:
            self.save_rng_states()

    def after_forward(self, loss: torch.Tensor) -> None:
        """Warn, once, of a loss that is a sum, where it is taken for a mean."""
        steps = self._recipe.gradient_accumulation_steps * self._recipe.ranks
        if self._has_seen_loss or not self._samples:
            return
        if steps > 1 and is_sum(loss, self._samples):
            warnings.warn(
                "This loss is a sum, and run.step takes it for a mean of samples: the "
                f"update is {steps} times smaller than that of one large batch, and "
                "smaller micro-batches count too little. Return the mean, or pass "
                "weight=1, which makes all micro-batches count the same.",
                stacklevel=6,
            )
        self._has_seen_loss = True

    def longest_batch(self, batch: object) -> Any | None:
        """Return a batch of its values in the planned shapes; None if not larger."""
        shapes = self._batch.shapes
        longest = with_shapes(batch, shapes) if shapes else batch
        same = describe_batch(longest) == describe_batch(batch)
        return None if same else longest

    def _warn_of_sizes(self, batch: object) -> None:
        """Warn, once, of samples of a size that was not planned for."""
        over = None if self._plan is None else self._plan.varying_lengths
        multiple = None if over is None else over.pad_to_multiple_of
        if self._recipe.compile != "none":
            if not self._batch.has_samples_of_other_size(batch):
                return
            text = (
                "This batch has samples of another size than planned, and "
                "torch.compile compiles each size anew. After "
                "torch._dynamo.config.recompile_limit of them all others run eagerly: "
                "slower, and with more memory than planned. Pad all batches to the "
                "planned size, or plan with lengths= (image_sizes=) and "
                'compile="none".'
            )
        elif multiple and not self._batch.is_padded(batch, multiple):
            text = (
                f"This batch is not padded to a multiple of {multiple}, as planned: "
                "memory fragments more with lengths in between, and may run out. "
                f"Collate with pad_to_multiple_of={multiple}."
            )
        else:
            return
        self._warns_of_sizes = False
        warnings.warn(text, stacklevel=5)

    def _warn_if_on_all_ranks(self, batch: object, ranks: GroupRanks | None) -> None:
        """Warn if all ranks have the same first batch: their data is not divided."""
        if (
            self._plan is None
            or ranks is None
            or not ranks.have_same(named_tensors_in(batch))
        ):
            return
        warnings.warn(
            f"All {ranks.size} ranks have the same first micro-batch. With all like it "
            "they train what one of them would alone. Give each rank its own samples: "
            "DataLoader(..., sampler=torch.utils.data.DistributedSampler(dataset)), or "
            f"of an iterable data set one batch in {ranks.size}.",
            stacklevel=5,
        )

    def _warn_if_smaller(self, batch: object) -> None:
        """Warn if the loader's first batch has fewer samples than planned."""
        planned, effective = self._recipe.batch_size, self._recipe.effective_batch_size
        samples = count_samples(batch, self._dims) or planned
        if self._plan is not None and samples < planned:
            whole = samples * effective // planned
            warnings.warn(
                f"The first micro-batch has {_counted(samples)}, the plan's {planned}. "
                f"With all like it an effective batch would have {_counted(whole)}, "
                f"not {effective}. Let the loader yield {planned}, or a multiple that "
                "run.parts cuts.",
                stacklevel=5,
            )

    @contextlib.contextmanager
    def recording_run_blocks(self) -> Iterator[None]:
        """Record which blocks a forward runs, before the first update."""
        with contextlib.ExitStack() as stack:
            for name, block in () if self._updated_once else self._blocks().items():
                note = functools.partial(_record, self._run_blocks, name)
                stack.callback(block.register_forward_pre_hook(note).remove)
            yield

    def before_first_update(self, trained: Iterable[nn.Parameter]) -> None:
        """Warn of parameters without a gradient, and of those not in ``trained``."""
        self._updated_once = True
        # Gradients that are gone by now, into the weights or DeepSpeed's buckets.
        taken = self._recipe.optimizer_in_backward or self._recipe.zero_stage
        if self._plan is not None and not taken:
            # LayerDrop: a skipped block trains in another step.
            skipped = (
                self._blocks().keys() - self._run_blocks if self._run_blocks else set()
            )
            _warn_untrained(self._model, skipped)
        if self._plan is not None and self._recipe.zero_stage is None:
            trainable = {
                each for each in self._model.parameters() if each.requires_grad
            }
            left_out = left_out_text(len(trainable), len(trainable.difference(trained)))
            if left_out:
                warnings.warn(f"{left_out}.", stacklevel=4)

    def _blocks(self) -> dict[str, nn.Module]:
        names = () if self._plan is None else self._plan.model.blocks
        modules = dict(self._model.named_modules())
        return {name: modules[name] for name in names if name in modules}

    def save_rng_states(self) -> None:
        """Save the RNG states, to be restored after an error in this update."""
        self._rng_states = get_rng_states(self._device)

    def restore_rng_states(self) -> None:
        """Restore the RNG states from before this update, or where it was loaded."""
        if self._rng_states is not None:
            set_rng_states(self._rng_states, self._device)

    def report(
        self, error: BaseException, batch: object, step: FailedStep
    ) -> TrainingOutOfMemoryError | None:
        """Return the error that replaces an out-of-memory ``error``, else None."""
        if not is_out_of_memory(error):
            return None
        step = replace(
            step,
            larger=self._batch.larger(batch),
            growth=self._batch.growth(batch),
            module=running_module(error, self._model),
        )
        return out_of_memory_error(error, step, device=self._device, plan=self._plan)


def _counted(samples: int) -> str:
    return "1 sample" if samples == 1 else f"{samples} samples"


def _record(ran: set[str], name: str, *_: object) -> None:
    ran.add(name)


def _warn_untrained(model: nn.Module, skipped: Iterable[str]) -> None:
    """Warn of trainable parameters that have no gradient after the first backward."""
    # With adapters and checkpointing, training can silently do nothing. Parameters of
    # skipped blocks are not counted.
    prefixes = tuple(f"{block}." for block in skipped)
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.grad is None
        # Hooks may have updated the weight, and dropped its gradient.
        and not parameter._post_accumulate_grad_hooks
        and not name.startswith(prefixes)
    ]
    if names:
        shown = ", ".join(names[:3]) + (", ..." if names[3:] else "")
        count = sum(parameter.requires_grad for parameter in model.parameters())
        warnings.warn(
            f"{len(names)} of {count} trainable parameters got no gradient in the "
            f"first step: {shown}. If they are not to train, freeze them with "
            "requires_grad_(False); if other batches train them, they may take more "
            "memory than planned.",
            stacklevel=5,
        )
