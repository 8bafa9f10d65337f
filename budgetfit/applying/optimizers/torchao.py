"""torchao's low-bit AdamW: the library's for training, a fake one for tracing.

The library compiles its step, which fake tensors cannot run, and planning must not
require it. The fake one allocates the same states per tensor in the same order (source:
``torchao/optim/adam.py`` and ``subclass_*.py`` of 0.18.0), and the temporaries of the
compiled step of one tensor (``temporary_sizes``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch.nn import Parameter

from budgetfit.applying.optimizers.library_optimizer import (
    FakeOptimizer,
    are_fake,
    define_step_op,
    import_optimizer,
    local_tensor,
)

BLOCK_ELEMENTS: Final = 256  # transformers' block_size, for 4 bits too
MIN_QUANTIZED_ELEMENTS: Final = 4096

COMPILE_NOTE: Final = (
    "torchao compiles its step at the first one for each shape of tensor (seconds "
    "each) and then tries kernels out, which may take copies of a tensor and of its "
    "states beside; neither is in this estimate"
)
SHARDS_NOTE: Final = (
    "each rank of FSDP2 quantises states of its own shards, and not those under 4096 "
    "elements or of a number that 256 does not divide: ranks then end nearer to "
    "adamw_torch than one process does"
)
NOT_ON_CPU: Final = (
    "torchao compiles its step; on a CPU it ran uncompiled, with other temporaries"
)


class OptimizerSpec(NamedTuple):
    """What determines an optimizer's states.

    Attributes:
        kind: Name of the class in ``torchao.optim``.
        format: ``"8bit"``, ``"4bit"``, ``"fp8"`` or ``"none"``.
        block_elements: Elements per fp32 scale.
        has_maximum: Whether there is a third state (amsgrad, in the library only
            without quantization).
    """

    kind: str
    format: str
    block_elements: int = BLOCK_ELEMENTS
    has_maximum: bool = False

    def quantizes(self, parameter: torch.Tensor) -> bool:
        """Whether states of this tensor are quantized; else they have its dtype."""
        return (
            self.format != "none"
            and parameter.numel() >= MIN_QUANTIZED_ELEMENTS
            and parameter.numel() % self.block_elements == 0
        )


# The first two names are transformers'; it has none for the third.
SPECS: Final = {
    "adamw_torch_8bit": OptimizerSpec("AdamW8bit", "8bit"),
    "adamw_torch_4bit": OptimizerSpec("AdamW4bit", "4bit"),
    "adamw_torch_fp8": OptimizerSpec("AdamWFp8", "fp8"),
}
_OPTIONS: Final[dict[str, Any]] = {
    "block_size": BLOCK_ELEMENTS,
    "bf16_stochastic_round": False,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
}
_FORMATS: Final = {"8bit": "8bit", "4bit": "4bit", "Fp8": "fp8"}

define_step_op(
    "torchao_step_(Tensor(a!) parameter, Tensor gradient, Tensor(b!)[] states, "
    "Tensor(c!)[] temporaries) -> ()"
)


def make(name: str, parameters: list[Parameter], lr: float) -> torch.optim.Optimizer:
    """Build the optimizer as transformers' Trainer does; a fake one for fake tensors.

    Raises:
        InputError: If the tensors are real and torchao is not installed.
    """
    spec = SPECS[name]
    if are_fake(parameters):
        return FakeTorchaoOptimizer(parameters, spec)
    kind = import_optimizer(name, "torchao.optim", spec.kind)
    return kind(parameters, lr=lr, **_OPTIONS)


def to_fake(optimizer: object) -> FakeTorchaoOptimizer | None:
    """Return the fake equivalent of a torchao optimizer; None for any other."""
    families = {kind.__name__: kind.__module__ for kind in type(optimizer).__mro__}
    if families.get("_AdamBase") != "torchao.optim.adam":
        return None
    given: Any = optimizer
    ours = next(
        (kind for kind in families if families[kind] == "torchao.optim.adam"), ""
    )
    form = next((_FORMATS[end] for end in _FORMATS if ours.endswith(end)), "none")
    size = given.block_size if form != "none" else BLOCK_ELEMENTS
    has_maximum = any(group["amsgrad"] for group in given.param_groups)
    return FakeTorchaoOptimizer(
        given.param_groups, OptimizerSpec(ours, form, size, has_maximum)
    )


def temporary_sizes(
    spec: OptimizerSpec, parameter: torch.Tensor
) -> Iterator[tuple[int, torch.dtype]]:
    """Yield (elements, dtype) of the compiled step's temporaries at its peak."""
    # Measured with the null driver: torch 2.13's compiled step of 20 shapes on four
    # GPUs. What Inductor can fuse into one kernel depends on whether scale blocks align
    # with the tensor's dimensions. Partial results of a scale that is reduced in two
    # passes (tensors under 4 M elements) are left out: 1/32 byte per element.
    if not spec.quantizes(parameter):
        return
    sides = [side for side in parameter.shape if side != 1]
    is_flat = len(sides) == 1
    row_is_block = not is_flat and sides[-1] == spec.block_elements
    blocks = (parameter.numel() // spec.block_elements, torch.float32)
    whole = parameter.numel()
    held: dict[str, list[tuple[int, torch.dtype]]] = {
        "8bit": [] if is_flat or row_is_block else [blocks, (whole, torch.float32)],
        "4bit": [blocks, (whole, torch.float32), (whole, torch.int64)],
        "fp8": [] if row_is_block else [blocks],
    }
    if not is_flat and sides[-1] < spec.block_elements:
        held["fp8"].append((whole, torch.float8_e4m3fn))
    for each in held[spec.format]:
        yield from (each, each)


class FakeTorchaoOptimizer(FakeOptimizer):
    """Allocates the states of a torchao optimizer on fake tensors.

    A quantized state is a dictionary of the inner tensors of the library's subclass.
    """

    def __init__(self, parameters: list[Parameter], spec: OptimizerSpec) -> None:
        super().__init__(parameters)
        self._spec = spec

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Call the op that stands for the step of one tensor, with its temporaries."""
        assert parameter.grad is not None  # noqa: S101 - it is being stepped
        gradient = local_tensor(parameter.grad)
        parameter = local_tensor(parameter)
        temporaries = [
            parameter.new_empty(elements, dtype=dtype)
            for elements, dtype in temporary_sizes(self._spec, parameter)
        ]
        torch.ops.budgetfit.torchao_step_(
            parameter, gradient, list(_tensors(state)), temporaries
        )
        while temporaries:
            temporaries.pop()

    def make_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Allocate the states of one tensor, in the library's order."""
        state["step"] = torch.tensor(0.0)  # the library's is in host memory too
        names = ["exp_avg", "exp_avg_sq"]
        if self._spec.has_maximum:
            names.append("max_exp_avg_sq")
        for name in names:
            state[name] = self._buffer(local_tensor(parameter))

    def _buffer(
        self, parameter: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        spec = self._spec
        if not spec.quantizes(parameter):
            return torch.zeros_like(parameter)
        shape: tuple[int, ...] = tuple(parameter.shape)
        code = torch.float8_e4m3fn if spec.format == "fp8" else torch.uint8
        if spec.format == "4bit":
            shape = (parameter.numel() // 2,)
        blocks = parameter.numel() // spec.block_elements
        made = {
            "codes": parameter.new_zeros(shape, dtype=code),
            "scale": parameter.new_zeros(blocks, dtype=torch.float32),
        }
        if spec.format != "fp8":
            values = 2 ** int(spec.format[0])
            made["qmap"] = parameter.new_empty(values, dtype=torch.float32)
        return made


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a state that are on the device."""
    for name, value in state.items():
        if isinstance(value, dict):
            yield from value.values()
        elif name != "step":
            yield value
