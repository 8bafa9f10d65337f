"""Leave a model as it was found, whatever is measured with it."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextmanager
def kept_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give weights, buffers, gradients, modes and random generators back at the end.

    The values wait in CPU memory, so that a card measures the run and not the copy.
    Gradients are set aside: a run would drop them.

    Args:
        model: Whose state is kept.
        device: Where it will run; its generator is kept besides the CPU's.
    """
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    gradients = [tensor.grad for tensor in tensors]
    # bitsandbytes packs 4-bit weights anew where it computes without training on a CPU.
    scales = [
        (scale, dict(vars(scale)))
        for tensor in tensors
        if (scale := getattr(tensor, "quant_state", None)) is not None
    ]
    modes = [(module, module.training) for module in model.modules()]
    # A forward may put others in their place, or make them when the first batch comes.
    buffers = [(module, dict(module._buffers)) for module in model.modules()]  # noqa: SLF001
    cards = [_index(device)] if device.type == "cuda" else []
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global
    for tensor in tensors:
        tensor.grad = None
    try:
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - speech models mask with it
        for module, own in buffers:
            module._buffers.clear()  # noqa: SLF001
            module._buffers.update(own)  # noqa: SLF001
        with torch.no_grad():
            for tensor, value, gradient in zip(tensors, values, gradients, strict=True):
                if tensor.shape == value.shape:
                    tensor.data.copy_(value)
                else:
                    tensor.data = value.to(tensor.device)
                tensor.grad = gradient
        for scale, facts in scales:
            vars(scale).clear()
            vars(scale).update(facts)
        for module, training in modes:
            module.training = training


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
