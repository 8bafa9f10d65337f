"""Watch which blocks are recomputed in the backward pass."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from budgetfit.core.recipe import Recipe


def recomputed_blocks(recipe: Recipe) -> tuple[str, ...]:
    """Return the blocks that a recipe recomputes in backward."""
    return tuple(
        name
        for segment in recipe.segments
        if segment.mode != "offload"
        for name in segment.blocks
    )


@contextmanager
def find_blocks_saving_nothing(
    model: nn.Module, blocks: Sequence[str], found: set[str]
) -> Iterator[None]:
    """Collect the blocks of which autograd saves no tensor.

    Such as views, identities, and blocks skipped in this forward (LayerDrop). Backward
    needs nothing of them, so that they are never recomputed. The model must be the
    unmodified one: a checkpoint hides its saved tensors.
    """
    saves: set[str] = set()
    ran: list[bool] = []
    with ExitStack() as stack:
        handle = model.register_forward_pre_hook(lambda *_: ran.append(True))
        stack.callback(handle.remove)
        for name in blocks:
            block = model.get_submodule(name)
            hooks: list[saved_tensors_hooks] = []

            def enter(
                *_: object, name: str = name, hooks: list[saved_tensors_hooks] = hooks
            ) -> None:
                def pack(tensor: torch.Tensor) -> torch.Tensor:
                    saves.add(name)
                    return tensor

                hooks.append(saved_tensors_hooks(pack, lambda tensor: tensor))
                hooks[-1].__enter__()

            def leave(*_: object, hooks: list[saved_tensors_hooks] = hooks) -> None:
                hooks.pop().__exit__(None, None, None)

            stack.callback(block.register_forward_pre_hook(enter).remove)
            handle = block.register_forward_hook(leave, always_call=True)
            stack.callback(handle.remove)
        yield
    if ran:
        found |= set(blocks) - saves


class RecomputationWatcher:
    """Records which blocks run their forward during the backward pass.

    Pass ``on_phase`` to the run, and train inside ``watching``. A forward that starts
    in the backward pass is a recomputation.

    Attributes:
        seen: Names of the recomputed blocks.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._in_backward = False

    def on_phase(self, phase: str) -> None:
        """Record the phase."""
        self._in_backward = phase == "backward"

    @contextmanager
    def watching(self, model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
        """Watch blocks of a model to which the plan is applied."""
        # A block's own hooks are outside its checkpoint. So its submodules are watched,
        # and the original forward under a replaced one: a block may call none of its
        # submodules, as ``nn.MultiheadAttention`` does.
        modules = {name: model.get_submodule(name) for name in blocks}
        uses = Counter(item for block in modules.values() for item in block.modules())
        with ExitStack() as stack:
            for name, block in modules.items():
                insides = [item for item in block.modules() if item is not block]
                for inside in insides:
                    if uses[inside] == 1:  # shared modules identify no block
                        handle = inside.register_forward_pre_hook(self._hook(name))
                        stack.callback(handle.remove)
                forward = block.__dict__.get("forward")
                if hasattr(forward, "__wrapped__"):
                    stack.enter_context(self._inside_forward(forward, name))
            yield

    def _hook(self, name: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            if self._in_backward:
                self.seen.add(name)

        return note

    @contextmanager
    def _inside_forward(self, forward: Any, name: str) -> Iterator[None]:
        """Watch the original forward under a replaced one (``functools.wraps``)."""
        plain = forward.__wrapped__
        note = self._hook(name)

        def noting(*args: object, **kwargs: object) -> object:
            note()
            return plain(*args, **kwargs)

        forward.__wrapped__ = noting
        try:
            yield
        finally:
            forward.__wrapped__ = plain
