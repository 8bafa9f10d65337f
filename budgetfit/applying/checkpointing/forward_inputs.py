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

    Args:
        block: The block.
        arguments: Of its forward. Only weak references are kept.
    """

    def __init__(self, block: nn.Module, arguments: object) -> None:
        self._arguments = [
            (weakref.ref(tensor), version(tensor)) for tensor in tensors_in(arguments)
        ]
        self._parameters = _identities(block)

    def check(self, block: nn.Module, name: str, arguments: object) -> None:
        """Check that a recomputation is given the same, in the same state.

        Tensors that torch's checkpoint or a segment hands in anew are other objects,
        and are checked by autograd.

        Args:
            block: The block.
            name: Its name, for the error.
            arguments: Of its forward.

        Raises:
            RecomputationError: If it is not.
        """
        if _identities(block) != self._parameters:
            _refuse(
                name,
                "its parameters are others than in the forward, as by "
                "torch.func.functional_call",
                "call it outside of the plan (run.undo())",
            )
        for now, (before, count) in zip(
            tensors_in(arguments), self._arguments, strict=False
        ):
            if before() is now and version(now) != count:
                _refuse(
                    name,
                    f"a tensor among its arguments, of shape {list(now.shape)}, was "
                    "written to in place since its forward began",
                    "write to a copy of that tensor",
                )


@contextmanager
def without_new_hooks(block: nn.Module, arguments: object) -> Iterator[None]:
    """Remove the hooks that code inside registers on parameters and arguments.

    Those of the forward are there already: gradients would go through them twice.
    """
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


def _identities(block: nn.Module) -> list[int]:
    return [id(parameter) for parameter in block.parameters()]
