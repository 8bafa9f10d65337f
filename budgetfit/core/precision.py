"""Dtype policies (mixed precision): dtypes of weights, compute and gradients.

Names follow Lightning and accelerate (``bf16-mixed``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from budgetfit.errors import InputError
from budgetfit.gpus.table import Gpu

WeightsDtype = Literal["as-is", "fp32", "bf16"]
AutocastDtype = Literal["fp16", "bf16"]

BF16_CAPABILITY = (8, 0)  # first compute capability with bf16 and tf32 tensor cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """One dtype policy.

    Attributes:
        name: As users write it, for example ``"bf16-mixed"``.
        weights: dtype to which parameters, buffers and float inputs are cast once.
        autocast: dtype of ``torch.autocast`` around forward and loss; None for no
            autocast.
        grad_scaler: Whether losses are scaled (fp16 gradients underflow otherwise).
        tf32: Whether fp32 matrix products may use tf32 tensor cores.
        needs_capability: Lowest compute capability with hardware support.
    """

    name: str
    weights: WeightsDtype = "fp32"
    autocast: AutocastDtype | None = None
    grad_scaler: bool = False
    tf32: bool = False
    needs_capability: tuple[int, int] = (0, 0)


PRECISIONS: dict[str, Precision] = {
    policy.name: policy
    for policy in (
        Precision(name="fp32"),
        Precision(name="tf32", tf32=True, needs_capability=BF16_CAPABILITY),
        Precision(name="fp16-mixed", autocast="fp16", grad_scaler=True),
        Precision(name="bf16-mixed", autocast="bf16", needs_capability=BF16_CAPABILITY),
        Precision(name="bf16", weights="bf16", needs_capability=BF16_CAPABILITY),
        Precision(name="as-is", weights="as-is"),
    )
}

# What others call them: Trainer's arguments, Lightning's names and torch's dtypes.
_MEANT = {
    "fp16": "fp16-mixed",
    "16-mixed": "fp16-mixed",
    "float16": "fp16-mixed",
    "half": "fp16-mixed",
    "float32": "fp32",
    "32-true": "fp32",
    "bf16-true": "bf16",
}


def find_precision(name: str) -> Precision:
    """Return the policy called ``name``; refuse unknown ones, listing the known."""
    if not isinstance(name, str) or name not in PRECISIONS:
        meant = _MEANT.get(str(name).lower().removeprefix("torch."), "bf16-mixed")
        raise InputError(
            f"{name!r} is not a precision. Use one of: auto, {', '.join(PRECISIONS)}; "
            f'for example precision="{meant}".'
        )
    return PRECISIONS[name]


def automatic_precision(compute_capability: tuple[int, int]) -> Precision:
    """Resolve ``precision="auto"`` for a GPU."""
    # By the compute capability: ``torch.cuda.is_bf16_supported()`` is true on a T4,
    # which only emulates bf16.
    if compute_capability >= BF16_CAPABILITY:
        return PRECISIONS["bf16-mixed"]
    return PRECISIONS["fp16-mixed"]


def requested_precisions(wanted: str | Sequence[str], gpu: Gpu) -> tuple[str, ...]:
    """Resolve the requested dtype policies to compare, by name.

    Raises:
        InputError: If a policy is unknown or the GPU has no hardware for it.
    """
    several = isinstance(wanted, Sequence) and not isinstance(wanted, str)
    names: Sequence[Any] = wanted if several else [wanted]
    if not names:
        raise InputError(
            'The list of precisions is empty. Use for example precision="bf16-mixed".'
        )
    found = []
    for name in names:
        policy = (
            automatic_precision(gpu.compute_capability)
            if name == "auto"
            else find_precision(name)
        )
        if policy.needs_capability > gpu.compute_capability:
            major, minor = policy.needs_capability
            have = ".".join(map(str, gpu.compute_capability))
            raise InputError(
                f"precision={policy.name!r} needs compute capability {major}.{minor}, "
                f"and {gpu.title} has {have}: it would only be emulated. "
                'Use precision="fp16-mixed".'
            )
        if policy.name not in found:
            found.append(policy.name)
    return tuple(found)


def runs_on(precision: str, gpu: Gpu) -> bool:
    """Return whether a GPU has hardware for a dtype policy."""
    return find_precision(precision).needs_capability <= gpu.compute_capability
