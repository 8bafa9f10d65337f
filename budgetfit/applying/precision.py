"""Mixed precision: cast parameters, autocast the forward, scale the loss."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses import FakeTensor

from budgetfit.applying.pytree import map_tensors
from budgetfit.applying.undo import Undo
from budgetfit.core.adapter import ComputeDtype
from budgetfit.core.precision import Precision
from budgetfit.errors import InputError

DTYPES: Final[dict[ComputeDtype, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def apply_precision(
    model: nn.Module, precision: Precision, device_type: str, *, for_good: bool = False
) -> Undo:
    """Cast parameters and buffers in place, and set float32 matmul precision on CUDA.

    Only floating-point tensors change; complex and integer ones do not. Under autocast
    frozen parameters keep their dtype: only weights that are updated need fp32. Buffers
    that are not saved, as rotary frequencies, keep theirs in a model that was loaded in
    the dtype of the weights. With ``weights="as-is"`` nothing is cast.

    ``for_good``: parameters are not restored, and so not kept alive: they are about to
    be replaced by their shards.

    Returns:
        Restores the dtypes. Parameters keep their trained values, rounded to the old
        dtype; buffers that were not written to get their exact old values.

    Raises:
        InputError: If a trainable fp16 parameter would meet a GradScaler.
    """
    _refuse_fp16_weights(model, precision)
    with Undo() as undo:
        if precision.weights != "as-is":
            dtype = DTYPES[precision.weights]
            as_loaded = _buffers_as_loaded(model, dtype)
            for tensor in tensors_in_apply_order(model):
                if not tensor.is_floating_point() or tensor.dtype == dtype:
                    continue
                if id(tensor) in as_loaded:
                    continue
                is_parameter = isinstance(tensor, nn.Parameter)
                is_frozen = is_parameter and not tensor.requires_grad
                if precision.autocast is not None and is_frozen:
                    continue
                if is_parameter and not for_good:
                    undo.add(_cast, tensor, tensor.dtype)
                elif not is_parameter:
                    undo.add(_restore_buffer, tensor, tensor.detach().to("cpu"))
                _cast(tensor, dtype)
        if device_type == "cuda" and precision.autocast is None:
            undo.add(
                torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()
            )
            torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    return undo


def _buffers_as_loaded(model: nn.Module, dtype: torch.dtype) -> set[int]:
    """Return the ids of buffers that stay as they are: see ``apply_precision``."""
    # A library that loads weights in 16 bits leaves them in fp32 where they need it:
    # positions above 256 are not told apart by frequencies in bf16.
    weights = (each for each in model.parameters() if each.is_floating_point())
    if any(each.dtype != dtype for each in weights):
        return set()
    return {
        id(module._buffers[name])
        for module in model.modules()
        for name in module._non_persistent_buffers_set
    }


def computes_in(precision: Precision) -> torch.dtype:
    """Return the dtype of matrix products; bf16 where it is that of the weights."""
    name = precision.autocast or precision.weights
    return torch.bfloat16 if name == "as-is" else DTYPES[name]


def autocast_context(
    precision: Precision, device_type: str
) -> AbstractContextManager[object]:
    """Return ``torch.autocast`` for forward and loss; never for backward."""
    if precision.autocast is None:
        return nullcontext()
    return torch.autocast(device_type, dtype=DTYPES[precision.autocast])


def make_scaler(precision: Precision, device_type: str) -> torch.amp.GradScaler | None:
    """Return the GradScaler that the precision needs, or None."""
    return torch.amp.GradScaler(device_type) if precision.grad_scaler else None


def fresh_scaler(
    scaler: torch.amp.GradScaler, device_type: str
) -> torch.amp.GradScaler:
    """Return a GradScaler with the same state on which ``unscale_`` was not called."""
    state = scaler.state_dict()
    fresh = torch.amp.GradScaler(device_type, enabled=scaler.is_enabled())
    fresh.load_state_dict(state)
    return fresh


def warn_if_emulated(precision: Precision, device: torch.device) -> None:
    """Warn if the GPU has no hardware support for the precision."""
    # ``torch.cuda.is_bf16_supported()`` is true on a T4, by emulation.
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


def cast_batch(batch: object, precision: Precision, device: torch.device) -> Any:
    """Return the batch on ``device``, floats in the dtype of the weights."""
    # Pinned tensors are copied with ``non_blocking=True``.
    dtype = None if precision.weights == "as-is" else DTYPES[precision.weights]

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


def tensors_in_apply_order(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers in the order of ``nn.Module._apply``."""
    for child in module.children():
        yield from tensors_in_apply_order(child)
    for tensors in (module._parameters, module._buffers):
        yield from (tensor for tensor in tensors.values() if tensor is not None)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Change the dtype of a tensor in place, and of its gradient."""
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(dtype)
    if gradient is not None:
        tensor.grad = gradient.to(dtype)


def _restore_buffer(buffer: torch.Tensor, before: torch.Tensor) -> None:
    """Restore a buffer's dtype, and its exact old values if it was not written to."""
    # Rotary frequencies would not survive rounding to bf16 and back. Compared by value,
    # because batch_norm does not bump the version counter of its statistics.
    same = before.to(buffer)
    if not isinstance(buffer, FakeTensor) and torch.equal(buffer, same):
        buffer.data = before.to(buffer.device)
    else:
        buffer.data = buffer.data.to(before.dtype)
