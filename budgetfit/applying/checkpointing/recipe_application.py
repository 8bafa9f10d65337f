"""How a recipe treats the blocks of a model, changeable while it trains."""

from __future__ import annotations

import functools
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch._subclasses import FakeTensor

from budgetfit.applying.checkpointing.checkpoint import apply_segments
from budgetfit.applying.loss.chunked_loss import ChunkedLoss, chunk_loss
from budgetfit.applying.torch_compile import say_unverified, switch_off_compile
from budgetfit.applying.undo import Undo

if TYPE_CHECKING:
    from collections.abc import Collection
    from contextlib import AbstractContextManager

    from torch import nn

    from budgetfit.applying.loss.call_model import Loss
    from budgetfit.core.recipe import Recipe


# What transformers' ``gradient_checkpointing_enable`` and ``_disable`` set.
_OWN_FLAGS = ("gradient_checkpointing", "_gradient_checkpointing_func")


class BlockTreatment:
    """Segments, the chunked loss and torch.compile of one model, as a recipe says.

    Args:
        model: In training mode whenever ``treat`` is called.
        loss: The user's own loss, or None.
        random_blocks: See ``checkpoint.apply_segments``.
        determinism_check: See ``checkpoint.apply_segments``.
        keep_own_checkpointing: See ``checkpoint.apply_segments``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss | None,
        random_blocks: Collection[str] | None,
        determinism_check: str,
        keep_own_checkpointing: bool,
    ) -> None:
        self._model, self._loss, self._check = model, loss, determinism_check
        self._apply = functools.partial(
            apply_segments,
            random_blocks=random_blocks,
            determinism_check=determinism_check,
            keep_own_checkpointing=keep_own_checkpointing,
        )
        self._undo = Undo()
        self._chunked_loss: ChunkedLoss | None = None
        self._recipe: Recipe | None = None
        self._flags: dict[nn.Module, tuple[object, ...]] = {}

    def treat(self, recipe: Recipe) -> None:
        """Treat the model by ``recipe`` from now on, and no more by the one before.

        Raises:
            InputError: If model and recipe do not go together; nothing of a recipe is
                carried out then.
        """
        self.undo()
        with Undo() as undo:
            self._choose_compile(recipe, undo)
            undo.add(self._apply(self._model, recipe.segments))
            if recipe.loss_chunks > 1:
                self._chunked_loss = chunk_loss(
                    self._model,
                    recipe.loss_chunks,
                    undo,
                    loss=self._loss,
                    determinism_check=self._check,
                )
        self._undo, self._recipe = undo, recipe
        self._flags = flags_of(self._model, _OWN_FLAGS)

    def restore(self) -> None:
        """Treat blocks as before where checkpointing was switched on or off since."""
        if self._recipe is None or flags_of(self._model, _OWN_FLAGS) == self._flags:
            return
        warnings.warn(
            "Something switched checkpointing on or off since the plan was applied; "
            "the planned blocks are recomputed again.",
            stacklevel=4,
        )
        self.treat(self._recipe)

    def training_call(self) -> AbstractContextManager[None]:
        """Return what belongs around a forward that is trained on."""
        chunked = self._chunked_loss
        return nullcontext() if chunked is None else chunked.training_call()

    def undo(self) -> None:
        """Give back the model as it was before the first ``treat``."""
        self._undo()
        self._chunked_loss = None

    def _choose_compile(self, recipe: Recipe, undo: Undo) -> None:
        """Leave compiled code on where the plan changes nothing inside the model."""
        is_trace = any(
            isinstance(item, FakeTensor) for item in self._model.parameters()
        )
        if is_trace or recipe.segments or recipe.loss_chunks > 1:
            switch_off_compile(self._model, undo, say=not is_trace)
        else:
            say_unverified(self._model)


def flags_of(
    model: nn.Module, names: Collection[str]
) -> dict[nn.Module, tuple[object, ...]]:
    """Return how blocks are called, by attributes that other code might set as well."""
    return {
        module: tuple(vars(module).get(name) for name in names)
        for module in model.modules()
        if module is not model and not vars(module).keys().isdisjoint(names)
    }
