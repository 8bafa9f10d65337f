"""What a block's forward is given, for its recomputation: arguments, parameters, hooks.

A recomputation has to find the tensors that the forward has found, and must not put a
hook on them a second time: both belong to the graph of the forward.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from budgetfit.applying.checkpointing.mutated_buffers import version
from budgetfit.applying.pytree import tensors_in
from budgetfit.errors import RecomputationError


class ForwardInputs:
    """The argument tensors and parameters that one forward of a block was given.

    Of arguments only weak references are kept. ``after_forward`` has to follow the
    forward, which may write to its parameters (``Embedding(max_norm=...)``).
    """

    def __init__(self, block: nn.Module, arguments: object) -> None:
        self._arguments = [
            (weakref.ref(tensor), version(tensor)) for tensor in tensors_in(arguments)
        ]
        self._parameters = [*block.parameters()]
        self._before = [*map(version, self._parameters)]
        self._after = self._before

    def after_forward(self) -> None:
        """Note which parameters the forward has written to."""
        self._after = [*map(version, self._parameters)]

    def check(self, block: nn.Module, name: str, arguments: object) -> None:
        """Check that a recomputation is given the same, in the same state.

        Tensors that torch's checkpoint or a segment hands in anew are other objects,
        and are checked by autograd.

        Raises:
            RecomputationError: If it is not.
        """
        now = [*block.parameters()]
        if [*map(id, now)] != [*map(id, self._parameters)]:
            _refuse(
                name,
                "its parameters are others than in the forward, as by "
                "torch.func.functional_call or where the forward makes them",
                "call it outside of the plan (run.undo())",
            )
        if [*map(version, now)] != self._after:
            self._refuse_written(block, name)
        for given, (before, count) in zip(
            tensors_in(arguments), self._arguments, strict=False
        ):
            if before() is given and version(given) != count:
                _refuse(
                    name,
                    f"a tensor among its arguments, of shape {list(given.shape)}, was "
                    "written to in place since its forward began",
                    "write to a copy of that tensor",
                )

    def _refuse_written(self, block: nn.Module, name: str) -> None:
        """Refuse if a parameter was written to since the forward."""
        # Without recomputation autograd would refuse it, where it has saved it. What
        # the forward writes to itself is compared by values.
        for (inner, parameter), before, after in zip(
            block.named_parameters(), self._before, self._after, strict=True
        ):
            if version(parameter) != after == before:
                _refuse(
                    name,
                    f"its parameter {inner!r} was written to in place since its "
                    "forward, as by an optimizer step between them",
                    "run backward before weights are updated",
                )


@contextmanager
def without_new_hooks(block: nn.Module, arguments: object) -> Iterator[None]:
    """Remove the hooks that code inside registers on parameters and arguments."""
    # Those of the forward are there already: gradients would go through them twice.
    tensors: list[Any] = [*block.parameters(), *tensors_in(arguments)]
    before = [set(_hooks(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, known in zip(tensors, before, strict=True):
            hooks = _hooks(tensor)
            for key in [key for key in hooks if key not in known]:
                del hooks[key]


def _hooks(tensor: torch.Tensor) -> dict[Any, Any]:
    """Return the hooks of ``Tensor.register_hook``; autograd looks into this dict."""
    hooks: Any = tensor._backward_hooks
    return {} if hooks is None else hooks


def _refuse(name: str, what: str, instead: str) -> NoReturn:
    raise RecomputationError(
        f"Block {name!r} cannot run again in backward: {what}, so gradients would be "
        "wrong. Leave it out: checkpointing=[...] with the names of the other blocks. "
        f"Or {instead}.",
        block=name,
        difference=math.inf,
    )
