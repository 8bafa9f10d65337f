"""Where a recording comes from: the device, the versions, the switches.

The origin is found out from the device itself and never passed in, so that a recording
made without a GPU cannot be called a GPU measurement.
"""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from tests.accuracy.case import CARDS, Case
from tests.accuracy.nvml import Nvml
from tests.accuracy.well_formed import GPU, NULL_DRIVER, origin_of

_IMITATED: Final = "NULLCUDA_GPU"  # set by the null driver's launcher


def origin() -> str:
    """What stands behind the CUDA device of this process."""
    found = origin_of(torch.cuda.get_device_properties(0).name)
    if found == GPU and os.environ.get(_IMITATED):
        msg = "the null driver's settings are there, but the device is another one"
        raise RuntimeError(msg)
    return found


def describe_card(nvml: Nvml | None) -> dict[str, Any]:
    """The card as torch sees it, and which one it imitates, if any."""
    properties = torch.cuda.get_device_properties(0)
    imitated = os.environ.get(_IMITATED)
    return {
        "name": properties.name,
        "imitates": imitated,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "threads_per_sm": properties.max_threads_per_multi_processor,
        "total_bytes": properties.total_memory,
        "driver": None if nvml is None else nvml.driver_version,
    }


def describe_software() -> dict[str, Any]:
    """Versions, and the switches that decide which kernels run."""
    transformers = sys.modules.get("transformers")
    attention = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
    }
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn_enabled": torch.backends.cudnn.enabled,
        "cudnn_version": torch.backends.cudnn.version(),
        "transformers": None if transformers is None else transformers.__version__,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "sdpa": [name for name, enabled in attention.items() if enabled],
    }


def refuse_a_wrong_card(case: Case) -> None:
    """Raise unless this process has the case's card, real or imitated."""
    card = CARDS[case.gpu]
    if origin() == NULL_DRIVER:
        wanted, found = card.gpu, os.environ.get(_IMITATED)
    else:
        wanted, found = card.title, torch.cuda.get_device_properties(0).name
    if found != wanted:
        msg = f"{case.name} is for the card {wanted!r}; this process has {found!r}"
        raise RuntimeError(msg)


def choose_cudnn(*, enabled: bool) -> None:
    """Switch cuDNN on or off everywhere, attention included."""
    if enabled and origin() == NULL_DRIVER:
        msg = "cuDNN does not run on the null driver: its workspaces are a GPU's"
        raise RuntimeError(msg)
    torch.backends.cudnn.enabled = enabled
    torch.backends.cuda.enable_cudnn_sdp(enabled)


@contextmanager
def weights_as_they_are() -> Iterator[None]:
    """Leave out the initialisation of weights on the null driver: nobody reads them.

    Large models are then built in no time and take no host memory.
    """
    if origin() == GPU:
        yield
        return
    from transformers import initialization  # few cases need it

    with initialization.no_init_weights():
        yield


def answer_for_the_device() -> str:
    """Answer one question of transformers that the null driver cannot; say so.

    Without an attention mask, transformers reads from the position ids, on the device,
    whether several sequences are packed into one row. They are not, and a GPU answers
    None; the null driver's zeros would be read as "packed" and cost a large mask.
    """
    from transformers import masking_utils  # few cases need it

    masking_utils.find_packed_sequence_indices = lambda _: None
    return (
        "transformers' question whether sequences are packed was answered with no, "
        "as a GPU does: the null driver holds no position ids to read"
    )
