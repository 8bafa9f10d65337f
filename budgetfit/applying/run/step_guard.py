"""What is watched around a training step: its batch before, its failure after."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import TYPE_CHECKING, Any

from budgetfit.applying.out_of_memory.error import (
    FailedStep,
    TrainingOutOfMemoryError,
    is_out_of_memory,
    out_of_memory_error,
    running_module,
)
from budgetfit.applying.out_of_memory.expected_batch import PlannedBatch
from budgetfit.applying.run.random_state import random_state, set_random_state
from budgetfit.batches.sample_count import count_samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch import nn

    from budgetfit.core.plan import Plan
    from budgetfit.core.recipe import Recipe
    from budgetfit.core.sample_dims import SampleDims


class StepGuard:
    """Warns of batches that are larger than planned, and reports on what failed.

    Args:
        model: What trains.
        device: Where.
        plan: Where the recipe is from; None if there is no plan.
        dims: The dimension of a batch's tensors that counts samples.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        plan: Plan | None,
        dims: SampleDims,
    ) -> None:
        self._model, self._device, self._plan = model, device, plan
        self._dims = dims
        self._batch = PlannedBatch()
        self._random: dict[str, Any] | None = None
        self._ran: set[str] = set()
        self._looked = self._began = False

    def expect(self, recipe: Recipe) -> None:
        """Compare batches with the plan's at the recipe's batch size from now on."""
        example = {} if self._plan is None else self._plan.model.batch
        self._recipe = recipe
        self._batch = PlannedBatch.of(example, recipe.batch_size, self._dims)

    def look_at(self, batch: Any, *, is_first: bool) -> None:  # noqa: ANN401
        """Before a micro-batch: warn of its size, remember where generators stand.

        Args:
            batch: About to be trained on.
            is_first: Whether it is the first one since the last update.
        """
        self._batch.warn_if_unknown(batch)
        self._batch.warn_if_larger(batch)
        if not self._began:
            self._began = True
            self._warn_if_smaller(batch)
        if is_first:
            self._random = random_state(self._device)

    def _warn_if_smaller(self, batch: Any) -> None:  # noqa: ANN401
        """Warn of a loader that yields fewer samples: only a last batch may do so."""
        planned, effective = self._recipe.batch_size, self._recipe.effective_batch_size
        samples = count_samples(batch, self._dims) or planned
        if self._plan is not None and samples < planned:
            warnings.warn(
                f"The first micro-batch has {samples} samples, the plan's {planned}. "
                f"With all like it an effective batch would have "
                f"{samples * effective // planned} samples, not {effective}. Let the "
                f"loader yield {planned}, or a multiple that run.parts cuts.",
                stacklevel=5,
            )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note which blocks a forward runs, before the first update of a plan."""
        with contextlib.ExitStack() as stack:
            for name, block in () if self._looked else self._blocks().items():
                note = functools.partial(_note, self._ran, name)
                stack.callback(block.register_forward_pre_hook(note).remove)
            yield

    def look_after(self, recipe: Recipe) -> None:
        """Before the first update of a plan: warn of what does not train."""
        self._looked = True
        if self._plan is not None and not recipe.optimizer_in_backward:
            # Layerdrop: what did not run this time trains another time.
            left_out = self._blocks().keys() - self._ran if self._ran else set()
            _say_untrained(self._model, left_out)

    def _blocks(self) -> dict[str, nn.Module]:
        names = () if self._plan is None else self._plan.model.blocks
        modules = dict(self._model.named_modules())
        return {name: modules[name] for name in names if name in modules}

    def rewind(self) -> None:
        """Put random generators back to where they were before this update."""
        if self._random is not None:
            set_random_state(self._random, self._device)

    def report(  # noqa: PLR0913 - one value each, all needed
        self,
        error: BaseException,
        batch: Any,  # noqa: ANN401
        *,
        recipe: Recipe,
        phase: str,
        micro_batch: int,
        weights_intact: bool,
    ) -> TrainingOutOfMemoryError | None:
        """Return what is to be raised instead of ``error``; None if it is another."""
        if not is_out_of_memory(error):
            return None
        step = FailedStep(
            phase=phase,
            micro_batch=micro_batch,
            recipe=recipe,
            larger=self._batch.larger(batch),
            growth=self._batch.growth(batch),
            module=running_module(error, self._model),
            weights_intact=weights_intact,
        )
        return out_of_memory_error(error, step, device=self._device, plan=self._plan)


def _note(ran: set[str], name: str, *_: object) -> None:
    ran.add(name)


def _say_untrained(model: nn.Module, left_out: Iterable[str]) -> None:
    """Warn of trainable parameters that the first backward left without a gradient.

    With adapters and checkpointing, training can silently do nothing (user-needs U8).
    Blocks that were left out say nothing about that.
    """
    prefixes = tuple(f"{block}." for block in left_out)
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.grad is None
        and not name.startswith(prefixes)
    ]
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")  # noqa: PLR2004
        count = sum(parameter.requires_grad for parameter in model.parameters())
        warnings.warn(
            f"{len(names)} of {count} trainable parameters got no gradient in the "
            f"first step and do not train: {shown}. If that is meant, freeze them with "
            "requires_grad_(False).",
            stacklevel=5,
        )
