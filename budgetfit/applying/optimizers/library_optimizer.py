"""Optimizers of other libraries: the real one for training, a fake one for tracing.

Libraries are needed for training, not for planning: they cannot step fake tensors.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from budgetfit.errors import InputError

# A fragment, because other files define ops of this namespace too.
_LIBRARY = torch.library.Library("budgetfit", "FRAGMENT")


def define_step_op(schema: str) -> None:
    """Define ``torch.ops.budgetfit.<name>``, which stands for a step on fake tensors.

    Step times count the bytes of its arguments. It never runs on real tensors.
    """
    _LIBRARY.define(schema)
    _LIBRARY.impl(schema.partition("(")[0], lambda *_: None, "Meta")


def are_fake(parameters: list[Parameter]) -> bool:
    """Whether parameters are those of a trace."""
    return any(isinstance(local_tensor(each), FakeTensor) for each in parameters)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a weight of FSDP2; others are returned."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def import_optimizer(name: str, module: str, kind: str) -> Any:
    """Import the class ``kind`` of a library's optimizer, ``name`` in recipes.

    Raises:
        InputError: If it cannot be imported; says what to install.
    """
    library = module.partition(".")[0]
    try:
        return getattr(importlib.import_module(module), kind)
    except ImportError as error:
        raise InputError(
            f"Optimizer {name!r} is {library}'s. Planning needs no {library}, "
            f"training does: pip install {library} ({error})."
        ) from None


class FakeOptimizer(torch.optim.Optimizer):
    """Allocates a library optimizer's states for fake tensors, or groups of them."""

    def __init__(self, parameters: list[Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Create the states of each tensor in turn, then update it in place."""
        assert closure is None  # noqa: S101 - traced programs have none
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self.make_state(parameter, state)
                self.update(parameter, state)

    def make_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Allocate the states of one tensor."""
        raise NotImplementedError

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Call the op that stands for the step of one tensor."""
        raise NotImplementedError
