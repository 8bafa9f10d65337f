"""bitsandbytes optimizers: the library's for training, fake ones for tracing.

The fake ones allocate the same states per tensor, in the same order. Source:
``bitsandbytes/optim/optimizer.py`` and ``ademamix.py`` of 0.50.2: ``init_state``,
``update_step``, ``get_state_buffer``. A step allocates nothing else: one in-place
kernel per tensor.

Assumes a block size of 256 elements and no overrides by ``GlobalOptimManager``
(``TRAINER_NOTE``).
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from budgetfit.applying.optimizers.library_optimizer import (
    FakeOptimizer,
    are_fake,
    define_step_op,
    import_optimizer,
)

BLOCK_ELEMENTS: Final = 256  # per fp32 scale
MIN_8BIT_ELEMENTS: Final = 4096  # smaller tensors keep fp32 states
MIN_PAGED_ELEMENTS: Final = 100_000
CODE_VALUES: Final = 256  # of a quantization table, fp32
BETAS: Final = (0.9, 0.999)  # transformers' adam_beta1 and adam_beta2

PAGED_NOTE: Final = (
    "states of tensors with 100,000 or more elements are CUDA managed memory, outside "
    "PyTorch's allocator and this estimate; the driver moves them to host memory when "
    "the card is full, at a time that is not counted"
)
TRAINER_NOTE: Final = (
    "transformers' Trainer keeps the states of embeddings in 32 bits; this estimate, "
    "like budgetfit.apply, has them in 8"
)


class OptimizerSpec(NamedTuple):
    """What determines an optimizer's states.

    Attributes:
        kind: Name of the class in ``bitsandbytes.optim``.
        states: Number of states per parameter: 1 or 2; AdEMAMix's first holds two.
        bits: 8 or 32.
        is_paged: Whether states of large tensors are in CUDA managed memory.
        min_8bit_elements: Smaller tensors have fp32 states.
        clips_updates: Whether it stores the norm of each update (LAMB, LARS).
    """

    kind: str
    states: int
    bits: int
    is_paged: bool = False
    min_8bit_elements: int = MIN_8BIT_ELEMENTS
    clips_updates: bool = False


# transformers' names, as parsed by Trainer.get_optimizer_cls_and_kwargs.
SPECS: Final = {
    "adamw_bnb_8bit": OptimizerSpec("AdamW", 2, 8),
    "adamw_8bit": OptimizerSpec("AdamW", 2, 8),
    "paged_adamw_8bit": OptimizerSpec("AdamW", 2, 8, is_paged=True),
    "paged_adamw_32bit": OptimizerSpec("AdamW", 2, 32, is_paged=True),
    "ademamix": OptimizerSpec("AdEMAMix", 2, 32),
    "ademamix_8bit": OptimizerSpec("AdEMAMix", 2, 8),
    "paged_ademamix_32bit": OptimizerSpec("AdEMAMix", 2, 32, is_paged=True),
    "paged_ademamix_8bit": OptimizerSpec("AdEMAMix", 2, 8, is_paged=True),
    "lion_32bit": OptimizerSpec("Lion", 1, 32),
    "lion_8bit": OptimizerSpec("Lion", 1, 8),
    "paged_lion_32bit": OptimizerSpec("Lion", 1, 32, is_paged=True),
    "paged_lion_8bit": OptimizerSpec("Lion", 1, 8, is_paged=True),
    "rmsprop_bnb": OptimizerSpec("RMSprop", 1, 32),
    "rmsprop_bnb_8bit": OptimizerSpec("RMSprop", 1, 8),
    "rmsprop_bnb_32bit": OptimizerSpec("RMSprop", 1, 32),
}
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "AdamW": {"betas": BETAS, "eps": 1e-8},
    "AdEMAMix": {"betas": (*BETAS, 0.9999), "alpha": 5.0, "eps": 1e-8},
    "Lion": {"betas": BETAS},
    "RMSprop": {},
}

define_step_op(
    "bitsandbytes_step_(Tensor(a!) parameter, Tensor gradient, Tensor(b!)[] states)"
    " -> ()"
)


def make(name: str, parameters: list[Parameter], lr: float) -> torch.optim.Optimizer:
    """Build the optimizer as transformers' Trainer does; a fake one for fake tensors.

    Raises:
        InputError: If the tensors are real and bitsandbytes is not installed.
    """
    spec = SPECS[name]
    if are_fake(parameters):
        return FakeBnbOptimizer(parameters, spec)
    kind = import_optimizer(name, "bitsandbytes.optim", spec.kind)
    options = {**_OPTIONS[spec.kind], "weight_decay": 0.0, "optim_bits": spec.bits}
    if spec.is_paged:
        options["is_paged"] = True
    return kind(parameters, lr=lr, **options)


def to_fake(optimizer: object) -> FakeBnbOptimizer | None:
    """Return the fake equivalent of a bitsandbytes optimizer; None for any other."""
    families = {kind.__name__: kind.__module__ for kind in type(optimizer).__mro__}
    home = "bitsandbytes.optim.optimizer"
    if families.get("Optimizer8bit") != home:
        return None
    given: Any = optimizer
    spec = OptimizerSpec(
        "AdEMAMix" if given.optimizer_name == "ademamix" else type(given).__name__,
        2 if families.get("Optimizer2State") == home else 1,
        given.args.optim_bits,
        given.is_paged,
        given.args.min_8bit_size,
        given.args.max_unorm > 0,
    )
    return FakeBnbOptimizer(given.param_groups, spec)


class FakeBnbOptimizer(FakeOptimizer):
    """Allocates the states of a bitsandbytes optimizer on fake tensors.

    Attributes:
        managed_bytes: Size of states in CUDA managed memory; no tensors represent them.
    """

    def __init__(self, parameters: list[Parameter], spec: OptimizerSpec) -> None:
        super().__init__(parameters)
        self.managed_bytes = 0
        self._spec = spec
        self._tables: list[torch.Tensor] = []

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Call the op that stands for the step of one tensor."""
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        assert parameter.grad is not None  # noqa: S101 - it is being stepped
        parameter.grad = parameter.grad.contiguous()
        # Without the code tables, which all tensors share: a trace attributes storages
        # to parameters by the tensors of an op.
        states = [
            value
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and not name.startswith("qmap")
        ]
        torch.ops.budgetfit.bitsandbytes_step_(parameter, parameter.grad, states)

    def make_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Allocate the states of one tensor, in the library's order."""
        if isinstance(parameter, DTensor):
            raise TypeError("bitsandbytes steps no DTensor")
        spec = self._spec
        state["step"] = 0
        is_small = parameter.numel() < spec.min_8bit_elements
        in_8bit = spec.bits == 8 and not is_small  # noqa: PLR2004
        dtype = torch.uint8 if in_8bit else torch.float32
        # The first state of AdEMAMix holds two averages.
        averages = (2,) if spec.kind.startswith("AdEMAMix") else ()
        if in_8bit:
            self._hand_out_tables(parameter, state)
        if in_8bit and averages:
            self._make_scales(parameter, state, averages)
        for number in range(1, spec.states + 1):
            stacked = averages if number == 1 else ()
            state[f"state{number}"] = self._buffer(parameter, dtype, stacked)
        if in_8bit and not averages:
            self._make_scales(parameter, state, averages)
        if spec.clips_updates and not averages:
            state["unorm_vec"] = parameter.new_zeros(1, dtype=torch.float32)

    def _hand_out_tables(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Give a state the quantization tables, made for the first and shared."""
        if not self._tables:
            self._tables = [
                parameter.new_empty(CODE_VALUES, dtype=torch.float32)
                for _ in range(self._spec.states)
            ]
        for number, table in enumerate(self._tables, start=1):
            state[f"qmap{number}"] = table

    def _make_scales(
        self, parameter: torch.Tensor, state: dict[str, Any], averages: tuple[int, ...]
    ) -> None:
        blocks = -(-parameter.numel() // BLOCK_ELEMENTS)
        for number in range(1, self._spec.states + 1):
            shape = (*averages, blocks) if number == 1 else (blocks,)
            state[f"absmax{number}"] = parameter.new_zeros(shape, dtype=torch.float32)

    def _buffer(
        self, parameter: torch.Tensor, dtype: torch.dtype, averages: tuple[int, ...]
    ) -> torch.Tensor:
        if self._spec.is_paged and parameter.numel() >= MIN_PAGED_ELEMENTS:
            elements = math.prod(averages) * parameter.numel()
            self.managed_bytes += elements * dtype.itemsize  # not torch's allocator
            return parameter.new_empty(0, dtype=dtype)
        if averages:
            return parameter.new_zeros((*averages, *parameter.shape), dtype=dtype)
        return torch.zeros_like(parameter, dtype=dtype)
