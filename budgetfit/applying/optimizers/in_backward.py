"""Optimizer-in-backward: step each parameter inside the backward pass.

Each gradient is consumed and freed as soon as it is accumulated, so that gradients of
all parameters never exist together. What needs them all is impossible: accumulation
over micro-batches, clipping by the total norm, and a GradScaler (which may skip a step
after it has seen all gradients).

Updating weights in place is safe: a parameter's gradient is complete only after every
op that used the parameter has run backward, recomputation included. The states are
those of one optimizer over all parameters, except what a library allocates once per
optimizer (bitsandbytes' code tables).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Parameter

from budgetfit.errors import InputError


class OptimizerInBackward(torch.optim.Optimizer):
    """One optimizer per parameter, stepped as soon as its gradient is complete.

    ``param_groups`` are those of the single optimizers, so learning-rate schedulers
    work. ``step`` does nothing.

    Attributes:
        has_stepped: Whether any was updated in the current step.
        takes_gradients: False while other backward passes may run through the
            parameters (a generator's, through the discriminator): theirs are dropped.

    Raises:
        InputError: If no parameter is trainable.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        make: Callable[[list[Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.trained = [each for each in parameters if each.requires_grad]
        if not self.trained:
            raise InputError(
                "The model has no trainable parameter: requires_grad is False "
                "everywhere. Unfreeze what is to be trained: "
                "parameter.requires_grad_(True)."
            )
        self._single = {each: make([each]) for each in self.trained}
        first = self._single[self.trained[0]]
        super().__init__(self.trained, dict(first.defaults))
        self._take_groups()
        self.has_stepped = False
        self.takes_gradients = True
        self._handles = [
            each.register_post_accumulate_grad_hook(self._step_one)
            for each in self.trained
        ]

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Do nothing: the backward pass has updated the parameters."""
        assert closure is None  # noqa: S101 - a closure would need its own backward

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, after a complete or a failed step."""
        super().zero_grad(set_to_none=set_to_none)
        self.has_stepped = False

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the single optimizers, in the order of parameters."""
        # Each optimizer loads its own: ``torch.optim.Optimizer`` would cast some
        # states.
        states = [each.state_dict() for each in self._single.values()]
        groups = [{"params": [index]} for index in range(len(states))]
        return {"single": states, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, unless it is of another optimizer."""
        states = state_dict.get("single")
        if states is None or len(states) != len(self._single):
            raise InputError(
                "This is no state of this optimizer: it has "
                f"{'none' if states is None else len(states)} of the "
                f"{len(self._single)} states that optimizer_in_backward keeps, one for "
                "each parameter. Load what run.state_dict() of the same plan returned."
            )
        for (parameter, optimizer), state in zip(
            self._single.items(), states, strict=True
        ):
            optimizer.load_state_dict(state)
            self._publish(parameter, optimizer)
        self._take_groups()

    @contextmanager
    def only_inside(self) -> Iterator[None]:
        """Take gradients inside of the context, and none after it."""
        self.takes_gradients = True
        try:
            yield
        finally:
            self.takes_gradients = False

    def remove_hooks(self) -> None:
        """Remove the hooks on parameters, which ends their training."""
        for handle in self._handles:
            handle.remove()

    def _take_groups(self) -> None:
        # Of the groups that a function makes, all but one are empty.
        self.param_groups = [
            group
            for each in self._single.values()
            for group in each.param_groups
            if group["params"]
        ]

    def _step_one(self, parameter: torch.nn.Parameter) -> None:
        if not self.takes_gradients:
            parameter.grad = None
            return
        optimizer = self._single[parameter]
        is_first = parameter not in self.state
        self.has_stepped = True
        try:
            optimizer.step()
        except BaseException:
            if is_first:  # an incomplete state would break the next step
                optimizer.state.clear()
            raise
        parameter.grad = None
        self._publish(parameter, optimizer)

    def _publish(
        self, parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer
    ) -> None:
        if parameter in optimizer.state:
            self.state[parameter] = optimizer.state[parameter]
