"""CPU-offloaded AdamW: torchao's ``CPUOffloadOptimizer``, and a fake one for tracing.

Source: ``torchao/optim/cpu_offload.py`` of 0.18.0. Each tensor of 4096 or more elements
has a pinned host copy of itself and of its gradient. A gradient is copied as soon as it
is accumulated, overlapping with backward; the step runs on the CPU and copies the
weights back. Smaller tensors are stepped on the GPU. Gradients on the GPU stay until
they are set to None, so that accumulation works.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import Parameter

from budgetfit.applying.host_copy import to_host
from budgetfit.applying.optimizers.library_optimizer import (
    are_fake,
    define_step_op,
    import_optimizer,
)
from budgetfit.errors import InputError

NAME: Final = "adamw_torch_cpu_offload"
MIN_OFFLOADED_ELEMENTS: Final = 4096
OPTIONS: Final[dict[str, Any]] = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "fused": True,  # torchao's choice for AdamW
}
NOTE: Final = (
    "pinned host memory is of the weights and gradients; the states take as much again "
    "of ordinary host memory. The time of the step on the CPU is not counted"
)

define_step_op("offloaded_step_(Tensor(a!) parameter) -> ()")


def make(parameters: list[Parameter], lr: float) -> torch.optim.Optimizer:
    """Build torchao's ``CPUOffloadOptimizer``; a fake one for fake tensors.

    Raises:
        InputError: If the tensors are real and torchao is not installed, or the
            parameters are not on CUDA.
    """
    if are_fake(parameters):
        return FakeCpuOffloadOptimizer(parameters, lr)
    homes = {parameter.device.type for parameter in parameters}
    if homes != {"cuda"}:
        raise InputError(
            f"Optimizer {NAME!r} moves states from the card to host memory: it needs "
            f"parameters on CUDA, these are on {', '.join(sorted(homes))}. Use "
            "adamw_torch."
        )
    library_kind = import_optimizer(NAME, "torchao.optim", "CPUOffloadOptimizer")
    kind = type("Offloaded", (_ResyncsGradients, library_kind), {})
    return kind(parameters, torch.optim.AdamW, lr=lr, **OPTIONS)


_Library: Any = object  # torchao's class, which comes after this one


class _ResyncsGradients(_Library):  # type: ignore[misc]
    """Mixin for torchao's class: copies clipped or scaled gradients to the host again.

    The library copies gradients in the backward pass and ignores later changes. It also
    lacks a ``state`` and parameter counts in ``state_dict``.
    """

    param_d2h_map: dict[torch.Tensor, torch.Tensor]
    optim_dict: dict[torch.Tensor, torch.optim.Optimizer]
    d_opt: torch.optim.Optimizer | None
    queue: dict[torch.Tensor, torch.cuda.Event]
    param_groups: list[dict[str, Any]]

    def __init__(
        self, parameters: list[Parameter], *args: object, **kwargs: object
    ) -> None:
        before: dict[Any, set[int]] = {each: _hook_ids(each) for each in parameters}
        super().__init__(parameters, *args, **kwargs)
        self.trained = list(parameters)
        self._copied: dict[torch.Tensor, int] = {}
        for parameter in self.param_d2h_map:
            parameter.register_post_accumulate_grad_hook(self._note_copy)
        self._hooks = {
            each: _hook_ids(each) - before[each] for each in self.param_d2h_map
        }

    def _note_copy(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._copied[parameter] = parameter.grad._version

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all tensors, keyed by the parameters on the GPU."""
        host = {
            parameter: optimizer.state[self.param_d2h_map[parameter]]
            for parameter, optimizer in self.optim_dict.items()
            if optimizer.state
        }
        return {**(self.d_opt.state if self.d_opt is not None else {}), **host}

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Copy gradients that changed since backward again, then step."""
        for parameter, copied in self.queue.items():
            gradient, host = parameter.grad, self.param_d2h_map[parameter].grad
            if gradient is None or host is None:
                continue
            if gradient._version != self._copied[parameter]:
                copied.synchronize()
                with torch.no_grad():
                    host.copy_(gradient)
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, and the queue that an interrupted step left."""
        super().zero_grad(set_to_none=set_to_none)
        self.queue.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the library's state, with ``param_groups`` as in torch."""
        groups = [
            {"params": list(range(len(group["params"])))} for group in self.param_groups
        ]
        return {**super().state_dict(), "param_groups": groups}

    def remove_hooks(self) -> None:
        """Remove the hooks on parameters."""
        for parameter, added in self._hooks.items():
            for key in added:
                parameter._post_accumulate_grad_hooks.pop(key, None)


def _hook_ids(parameter: torch.Tensor) -> set[int]:
    return set(parameter._post_accumulate_grad_hooks or {})


class FakeCpuOffloadOptimizer(torch.optim.Optimizer):
    """Allocates the same memory as torchao's optimizer on fake tensors."""

    def __init__(self, parameters: list[Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "fused": True})
        small = [each for each in parameters if each.numel() < MIN_OFFLOADED_ELEMENTS]
        self._large = [
            each for each in parameters if each.numel() >= MIN_OFFLOADED_ELEMENTS
        ]
        self._on_host: list[torch.Tensor] = []
        for parameter in self._large:
            for _ in ("weights", "gradient"):
                self._on_host.append(to_host(parameter.detach()))
        self._handles = [
            each.register_post_accumulate_grad_hook(_copy_gradient)
            for each in self._large
        ]
        self._on_gpu = torch.optim.AdamW(small, lr=lr, **OPTIONS) if small else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the small tensors; copy weights of the large ones from the host."""
        assert closure is None  # noqa: S101 - traced programs have none
        if self._on_gpu is not None:
            self._on_gpu.step()
            self.state.update(self._on_gpu.state)
        for parameter in self._large:
            if parameter.grad is not None:
                torch.ops.budgetfit.offloaded_step_(parameter)

    def remove_hooks(self) -> None:
        """Remove the hooks on parameters."""
        for handle in self._handles:
            handle.remove()


def _copy_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        to_host(parameter.grad)
