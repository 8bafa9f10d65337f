"""Apply a recipe's checkpointing, chunked loss and torch.compile setting to a model."""

import functools
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch._subclasses import FakeTensor

from budgetfit.applying.checkpointing.apply_segments import apply_segments
from budgetfit.applying.loss.call_model import Loss
from budgetfit.applying.loss.chunked_loss import ChunkedLoss, chunk_loss
from budgetfit.applying.torch_compile import (
    compile_blocks,
    compile_model,
    compiled_forward,
    disable_compile,
    warn_compiled_unverified,
)
from budgetfit.applying.undo import Undo
from budgetfit.core.recipe import Recipe

# What transformers' ``gradient_checkpointing_enable`` and ``_disable`` set.
_OWN_FLAGS = ("gradient_checkpointing", "_gradient_checkpointing_func")


class RecipeApplication:
    """Applies recipes to one model; a recipe can be replaced while training.

    The model has to be in training mode when ``apply`` is called; ``loss`` is the
    user's own, or None. ``blocks`` are those that ``compile="blocks"`` compiles, by
    ``compile_forward`` (``torch_compile.compile_blocks``), as it does the model. Other
    arguments are those of ``checkpoint.apply_segments``.
    """

    def __init__(  # noqa: PLR0913 - one value each, all needed
        self,
        model: nn.Module,
        *,
        loss: Loss | None,
        random_blocks: Collection[str] | None,
        determinism_check: str,
        keep_own_checkpointing: bool,
        keep_generation_cache: bool = False,
        blocks: Sequence[str] = (),
        compile_forward: Callable[[nn.Module], Callable[..., object]] | None = None,
    ) -> None:
        self._model, self._loss, self._check = model, loss, determinism_check
        self._apply = functools.partial(
            apply_segments,
            random_blocks=random_blocks,
            determinism_check=determinism_check,
            keep_own_checkpointing=keep_own_checkpointing,
            keep_generation_cache=keep_generation_cache,
        )
        compiled = compile_forward or compiled_forward
        self._compile_blocks = functools.partial(
            compile_blocks, blocks=tuple(blocks), compile_forward=compiled
        )
        self._compile_model = functools.partial(compile_model, compile_forward=compiled)
        self._undo = Undo()
        self._chunked_loss: ChunkedLoss | None = None
        self._recipe: Recipe | None = None
        self._flags: dict[nn.Module, tuple[object, ...]] = {}

    def apply(self, recipe: Recipe) -> None:
        """Apply ``recipe`` instead of the one before.

        Raises:
            InputError: If model and recipe are incompatible; no recipe is applied then.
        """
        self.undo()
        with Undo() as undo:
            self._disable_other_compile(recipe, undo)
            self._compile_blocks(self._model, recipe, undo=undo)
            in_graph = recipe.compile == "model"
            undo.add(self._apply(self._model, recipe.segments, in_graph=in_graph))
            self._compile_model(self._model, recipe, undo=undo)
            if recipe.loss_chunks > 1:
                self._chunked_loss = chunk_loss(
                    self._model,
                    recipe.loss_chunks,
                    undo,
                    loss=self._loss,
                    determinism_check=self._check,
                )
        self._undo, self._recipe = undo, recipe
        self._flags = instance_flags(self._model, _OWN_FLAGS)

    def reapply_if_changed(self) -> None:
        """Apply the recipe again if other code switched checkpointing on or off."""
        if (
            self._recipe is None
            or instance_flags(self._model, _OWN_FLAGS) == self._flags
        ):
            return
        warnings.warn(
            "Something switched checkpointing on or off since the plan was applied; "
            "the planned blocks are recomputed again.",
            stacklevel=4,
        )
        self.apply(self._recipe)

    def training_forward(self) -> AbstractContextManager[None]:
        """Return the context of a training forward (chunked loss)."""
        chunked = self._chunked_loss
        return nullcontext() if chunked is None else chunked.training_forward()

    def undo(self) -> None:
        """Restore the model as it was before the first ``apply``."""
        self._undo()
        self._chunked_loss = None

    def _disable_other_compile(self, recipe: Recipe, undo: Undo) -> None:
        """Disable torch.compile, unless the recipe changes nothing inside the model."""
        is_trace = any(
            isinstance(item, FakeTensor) for item in self._model.parameters()
        )
        if (
            is_trace
            or recipe.segments
            or recipe.loss_chunks > 1
            or recipe.compile != "none"
        ):
            disable_compile(self._model, undo, None if is_trace else recipe)
        else:
            warn_compiled_unverified(self._model)


def instance_flags(
    model: nn.Module, names: Collection[str]
) -> dict[nn.Module, tuple[object, ...]]:
    """Return instance attributes of submodules that other code might set, too."""
    return {
        module: tuple(vars(module).get(name) for name in names)
        for module in model.modules()
        if module is not model and not vars(module).keys().isdisjoint(names)
    }
