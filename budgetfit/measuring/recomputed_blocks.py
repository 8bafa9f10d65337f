"""Count the blocks that really run again in the backward pass."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import nn

    from budgetfit.core.recipe import Recipe


def blocks_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the blocks that run again in backward by this recipe."""
    return tuple(
        name
        for segment in recipe.segments
        if segment.mode != "offload"
        for name in segment.blocks
    )


def blocks_run_again(recipe: Recipe) -> int:
    """Return how many blocks run again in backward by this recipe.

    Also those that run again twice, and those that save some of what they compute; not
    those whose saved tensors wait in host memory.
    """
    return len(blocks_of(recipe))


@contextmanager
def saving_nothing(
    model: nn.Module, blocks: Sequence[str], found: set[str]
) -> Iterator[None]:
    """Collect the blocks of which autograd saves nothing.

    Such is a view, an identity, and a block that this forward leaves out (layerdrop).
    Nothing asks for what they compute, so they never run again, whatever is planned.
    The model must be the unmodified one: a checkpoint hides what it will save.
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
                *_: object,
                name: str = name,
                hooks: list[saved_tensors_hooks] = hooks,
            ) -> None:
                def pack(tensor: torch.Tensor) -> torch.Tensor:
                    saves.add(name)
                    return tensor

                hooks.append(saved_tensors_hooks(pack, _unpack))
                hooks[-1].__enter__()

            def leave(*_: object, hooks: list[saved_tensors_hooks] = hooks) -> None:
                hooks.pop().__exit__(None, None, None)

            stack.callback(block.register_forward_pre_hook(enter).remove)
            handle = block.register_forward_hook(leave, always_call=True)
            stack.callback(handle.remove)
        yield
    if ran:
        found |= set(blocks) - saves


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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

        A block's own hooks lie outside its checkpoint, so its inside is watched, and
        where its replaced forward calls the plain one: it may call none of its inside,
        as ``nn.MultiheadAttention``.
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
