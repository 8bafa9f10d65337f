"""The state of the random generators that training draws from, as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's, Python's and numpy's global generators.

    Tensors, numbers, text and containers of those: ``torch.load(weights_only=True)``
    reads it. On CUDA the device's own generator is in it too; reading that takes no
    device memory and does not wait for the device.
    """
    numpy: Any = np.random.get_state()  # noqa: NPY002 - the global one, which models use
    with _disable_current_modes():  # host memory: no byte of it is the step's
        words = torch.from_numpy(numpy[1].astype("int64"))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (numpy[0], words, *numpy[2:]),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue from what ``random_state`` returned, wherever ``torch.load`` put it."""
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype("uint32"), *rest))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
