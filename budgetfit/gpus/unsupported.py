"""Devices that are not supported (AMD, Apple, TPU, ...), and why.

Predictions model PyTorch's CUDA allocator and the workspaces of NVIDIA's libraries, and
are not validated on other devices.
"""

import re
from typing import Final

# Prefixes of normalized names: lower-case letters and digits only.
_REASONS: Final = (
    (
        re.compile(r"amd|radeon|instinct|mi[0-9]{2,3}[ax]?$|rx[0-9]|gfx[0-9]"),
        (
            "is a card of AMD. What ROCm's libraries take beside tensors has not been "
            "measured; budgetfit models PyTorch's CUDA allocator and NVIDIA's libraries"
        ),
    ),
    (
        re.compile(r"apple|mps$|m[1-9](pro|max|ultra)?$"),
        (
            "is a chip of Apple. Its memory is the computer's own and PyTorch's "
            "allocator for it is another one; budgetfit models the CUDA allocator"
        ),
    ),
    (
        re.compile(r"intel|arc[ab][0-9]|xpu|gaudi|hpu|tpu|ascend|npu|trainium"),
        (
            "is not a card of NVIDIA. budgetfit models PyTorch's CUDA allocator and "
            "NVIDIA's libraries"
        ),
    ),
    (
        re.compile(r"dgxspark|gb10$|jetson|orin|agx|thor$"),
        (
            "shares the computer's memory, and how much of it is free differs from one "
            'to the next. Name a limit instead, vram="64GiB"'
        ),
    ),
)


def unsupported_reason(letters_and_digits: str) -> str | None:
    """Return why a device is not supported, to follow its name; None if unknown."""
    text = letters_and_digits.removeprefix("nvidia")
    return next((why for pattern, why in _REASONS if pattern.match(text)), None)
