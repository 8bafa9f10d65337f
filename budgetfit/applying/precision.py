"""Carry out a dtype policy: cast once, autocast around the forward, scale the loss."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from budgetfit.applying.pytree import map_tensors
from budgetfit.applying.undo import Undo
from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from budgetfit.core.precision import Precision

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def apply_precision(model: nn.Module, precision: Precision, device_type: str) -> Undo:
    """Cast parameters and buffers once, and set the tf32 switch on CUDA.

    Parameters and buffers stay the same objects. Only floating-point tensors change;
    complex and integer ones do not. Under autocast frozen parameters keep their dtype:
    fp32 weights are there to be updated, and a base that is only read was loaded as it
    is for its size. Without a policy for weights (``as-is``) nothing is
    cast.

    Returns:
        What gives the dtypes back. Parameters keep their trained values, rounded to the
        policy's dtype; buffers that nothing wrote to get their exact old values.

    Raises:
        InputError: If a trainable fp16 parameter would meet a GradScaler.
    """
    _refuse_fp16_weights(model, precision)
    with Undo() as undo:
        if precision.weights != "as-is":
            dtype = _DTYPES[precision.weights]
            for tensor in children_first(model):
                if not tensor.is_floating_point() or tensor.dtype == dtype:
                    continue
                if precision.autocast is not None and _is_frozen(tensor):
                    continue
                if isinstance(tensor, nn.Parameter):
                    undo.add(_cast, tensor, tensor.dtype)
                else:
                    undo.add(_give_back, tensor, tensor.detach().to("cpu"))
                _cast(tensor, dtype)
        if device_type == "cuda" and precision.autocast is None:
            undo.add(
                torch.set_float32_matmul_precision,
                torch.get_float32_matmul_precision(),
            )
            torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    return undo


def autocast_context(
    precision: Precision, device_type: str
) -> AbstractContextManager[object]:
    """Return what belongs around forward and loss, never around backward."""
    if precision.autocast is None:
        return nullcontext()
    return torch.autocast(device_type, dtype=_DTYPES[precision.autocast])


def make_scaler(precision: Precision, device_type: str) -> torch.amp.GradScaler | None:
    """Return the loss scaler that the policy needs, or None."""
    return torch.amp.GradScaler(device_type) if precision.grad_scaler else None


def renewed_scaler(
    scaler: torch.amp.GradScaler, device_type: str
) -> torch.amp.GradScaler:
    """Return a scaler with the same settings and state that has unscaled nothing."""
    state = scaler.state_dict()
    fresh = torch.amp.GradScaler(device_type, enabled=scaler.is_enabled())
    fresh.load_state_dict(state)
    return fresh


def say_if_emulated(precision: Precision, device: torch.device) -> None:
    """Warn if the card that is really there has no hardware for the policy.

    ``torch.cuda.is_bf16_supported()`` is true on a T4, by emulation (user-needs U17).
    """
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < precision.needs_capability:
        have, need = (
            ".".join(map(str, pair))
            for pair in (capability, precision.needs_capability)
        )
        warnings.warn(
            f"{precision.name} needs compute capability {need}, and this "
            f"{torch.cuda.get_device_name(device)} has {have}: torch emulates it "
            'slowly, or does without. Plan for this card with precision="auto".',
            stacklevel=4,
        )


def cast_batch(batch: Any, precision: Precision, device: torch.device) -> Any:  # noqa: ANN401
    """Return the batch on ``device``, its floats in the policy's dtype.

    Pinned tensors are copied without waiting for the copy.
    """
    dtype = None if precision.weights == "as-is" else _DTYPES[precision.weights]

    def move(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if tensor.is_floating_point() else None
        leaves_cpu = device.type != "cpu" and tensor.device.type == "cpu"
        pinned = leaves_cpu and tensor.is_pinned()
        return tensor.to(device=device, dtype=wanted, non_blocking=pinned)

    return map_tensors(batch, move)


def _refuse_fp16_weights(model: nn.Module, precision: Precision) -> None:
    if not precision.grad_scaler:
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise InputError(
                f"Parameter {name!r} is fp16, and {precision.name} scales the loss: "
                'that ends in "Attempting to unscale FP16 gradients", because fp16 '
                "weights lose small updates. Make the weights fp32 first: "
                "model.float(), or from_pretrained(..., dtype=torch.float32)."
            )


def children_first(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers in the order in which ``Module.to`` casts them."""
    for child in module.children():
        yield from children_first(child)
    for tensors in (module._parameters, module._buffers):  # noqa: SLF001
        yield from (tensor for tensor in tensors.values() if tensor is not None)


def _is_frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Change the dtype of the object itself, and of its gradient."""
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(dtype)
    if gradient is not None:
        tensor.grad = gradient.to(dtype)


def _give_back(buffer: torch.Tensor, before: torch.Tensor) -> None:
    """Return the old values if training left them alone, else the new ones."""
    # Rotary frequencies would not survive rounding to bf16 and back. Compared by value,
    # because batch_norm writes its statistics without raising a version counter.
    same = before.to(buffer)
    if not isinstance(buffer, FakeTensor) and torch.equal(buffer, same):
        buffer.data = before.to(buffer.device)
    else:
        buffer.data = buffer.data.to(before.dtype)
