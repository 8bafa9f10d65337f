"""Count the blocks that really run again in the backward pass."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from budgetfit.core.recipe import Recipe


def blocks_run_again(recipe: Recipe) -> int:
    """Return how many blocks run again in backward by this recipe.

    Also those that run again twice, and those that save some of what they compute; not
    those whose saved tensors wait in host memory.
    """
    return sum(
        len(segment.blocks) for segment in recipe.segments if segment.mode != "offload"
    )


class RecomputedBlocks:
    """Notes which blocks run while a backward pass is on.

    Hand ``on_phase`` to the run, and train inside ``watching``. A forward that starts
    in the backward pass is a recomputation, whoever asked for it.

    Attributes:
        seen: Names of the blocks that ran again.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._in_backward = False

    def on_phase(self, phase: str) -> None:
        """Take note of the phase."""
        self._in_backward = phase == "backward"

    @contextmanager
    def watching(self, model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
        """Watch blocks of a model whose plan is applied already.

        A block's own hooks lie outside its checkpoint, so its inside is watched; one
        without an inside is watched where its replaced forward calls the plain one.
        """
        modules = {name: model.get_submodule(name) for name in blocks}
        uses = Counter(item for block in modules.values() for item in block.modules())
        with ExitStack() as stack:
            for name, block in modules.items():
                insides = [item for item in block.modules() if item is not block]
                for inside in insides:
                    if uses[inside] == 1:  # else it says nothing about one block
                        handle = inside.register_forward_pre_hook(self._hook(name))
                        stack.callback(handle.remove)
                if not insides and "forward" in block.__dict__:
                    stack.enter_context(self._inside_forward(block.forward, name))
            yield

    def _hook(self, name: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            if self._in_backward:
                self.seen.add(name)

        return note

    @contextmanager
    def _inside_forward(self, forward: Any, name: str) -> Iterator[None]:  # noqa: ANN401
        """Watch the plain forward under a replaced one (``functools.wraps``)."""
        plain = forward.__wrapped__
        note = self._hook(name)

        def noting(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            note()
            return plain(*args, **kwargs)

        forward.__wrapped__ = noting
        try:
            yield
        finally:
            forward.__wrapped__ = plain
