"""Global RNG states of torch, CUDA, Python and numpy, as plain data."""

import random
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes


def get_rng_states(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's, Python's and numpy's global generators.

    ``torch.load(weights_only=True)`` can read it. With a CUDA device, that generator's
    state is included; reading it takes no device memory and does not synchronize.
    """
    numpy: Any = np.random.get_state()  # noqa: NPY002 - the global one, which models use
    with _disable_current_modes():  # not part of a traced step
        state_words = torch.from_numpy(numpy[1].astype("int64"))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (numpy[0], state_words, *numpy[2:]),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_states(state: dict[str, Any], device: torch.device) -> None:
    """Restore what ``get_rng_states`` returned, from any ``map_location``."""
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype("uint32"), *rest))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
