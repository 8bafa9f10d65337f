"""bitsandbytes' 8-bit AdamW: the library where a model trains, a stand-in in traces.

The library cannot step fake tensors, and planning must not need it. What decides memory
is which states it makes, by tensor, and in what order; that is repeated here. Source:
``bitsandbytes/optim/optimizer.py`` of 0.50.2: ``Optimizer2State.init_state``,
``update_step``, ``get_state_buffer``.

Assumed: a version whose blocks have 256 elements, and no overrides by the library's
``GlobalOptimManager``. transformers' Trainer registers embeddings there, which then
keep 32-bit states.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses import FakeTensor

from budgetfit.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_ELEMENTS: Final = 256  # that share one fp32 scale
LEAST_8BIT_ELEMENTS: Final = 4096  # smaller tensors keep fp32 states
LEAST_PAGED_ELEMENTS: Final = 100_000
CODE_VALUES: Final = 256  # of a quantization table, fp32

PAGED_NOTE: Final = (
    "paged_adamw_8bit: states of tensors with 100,000 or more elements are CUDA "
    "managed memory, outside PyTorch's allocator and this estimate; the driver moves "
    "them to host memory when the card is full, at a time that is not counted"
)

# One kernel for each tensor, in place and without temporaries: an op of our own, so
# that the roofline sees the bytes that it moves. It never runs on real tensors.
# A fragment: several files define ops of this namespace.
_LIBRARY = torch.library.Library("budgetfit", "FRAGMENT")
_LIBRARY.define(
    "adamw_8bit_(Tensor(a!) parameter, Tensor gradient, Tensor(b!)[] states) -> ()"
)
_LIBRARY.impl("adamw_8bit_", lambda *_: None, "Meta")


class StandIn(torch.optim.Optimizer):
    """Makes bitsandbytes' AdamW states on fake tensors, and changes no value.

    Args:
        parameters: Fake tensors.
        lr: Not used, as nothing is trained.
        paged: Whether states of large tensors are managed memory, which is none of
            PyTorch's allocator; they have no bytes here.
    """

    def __init__(
        self, parameters: list[torch.Tensor], lr: float, *, paged: bool = False
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self._paged = paged
        self._tables: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make the states of each tensor in turn, then update it in place."""
        assert closure is None  # noqa: S101 - traced programs have none
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self._make_state(parameter, state)
                parameter.grad = parameter.grad.contiguous()
                # Without the tables, which all tensors share: what an op touches
                # tells whose it is.
                states = [
                    value
                    for name, value in state.items()
                    if isinstance(value, torch.Tensor) and not name.startswith("qmap")
                ]
                torch.ops.budgetfit.adamw_8bit_(parameter, parameter.grad, states)

    def _make_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        state["step"] = 0
        count = parameter.numel()
        if count < LEAST_8BIT_ELEMENTS:
            for name in ("state1", "state2"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            return
        if not self._tables:
            self._tables = [parameter.new_empty(CODE_VALUES, dtype=torch.float32)]
            self._tables.append(torch.empty_like(self._tables[0]))
        for name, table in zip(("1", "2"), self._tables, strict=True):
            state[f"state{name}"] = self._large_state(parameter)
            state[f"qmap{name}"] = table
        for name in ("absmax1", "absmax2"):
            blocks = -(-count // BLOCK_ELEMENTS)
            state[name] = parameter.new_zeros(blocks, dtype=torch.float32)

    def _large_state(self, parameter: torch.Tensor) -> torch.Tensor:
        if self._paged and parameter.numel() >= LEAST_PAGED_ELEMENTS:
            return parameter.new_empty(0, dtype=torch.uint8)
        return torch.zeros_like(parameter, dtype=torch.uint8)


def adamw_8bit(
    parameters: list[Any], lr: float, *, paged: bool = False
) -> torch.optim.Optimizer:
    """Return the library's optimizer, as transformers' Trainer makes it, or a stand-in.

    Raises:
        InputError: If the model is to train and bitsandbytes is not installed.
    """
    if any(isinstance(parameter, FakeTensor) for parameter in parameters):
        return StandIn(parameters, lr, paged=paged)
    try:
        library: Any = importlib.import_module("bitsandbytes.optim")
    except ImportError as error:
        raise InputError(
            "This optimizer is bitsandbytes'. Planning needs no bitsandbytes, training "
            f"does: pip install bitsandbytes ({error})."
        ) from None
    made: torch.optim.Optimizer = library.AdamW(
        parameters, lr, (0.9, 0.999), 1e-8, 0.0, optim_bits=8, is_paged=paged
    )
    return made


paged_adamw_8bit = functools.partial(adamw_8bit, paged=True)
