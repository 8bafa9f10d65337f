"""Detect selective checkpointing's dispatch mode, the only one in real training.

ATen's composite ops work out of place instead of in place for tensor subclasses, and
for all tensors while a dispatch mode is active (``isTensorSubclassLike`` in
ATen/TensorSubclassLikeUtils.h). The modes of a trace are not active in training; that
of selective checkpointing is.
"""

import torch.utils.checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_REAL_MODES = tuple(
    mode
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if (mode := getattr(torch.utils.checkpoint, name, None)) is not None
)


def in_selective_checkpoint() -> bool:
    """Return whether selective checkpointing's dispatch mode is active."""
    return any(
        isinstance(mode, _REAL_MODES) for mode in _get_current_dispatch_mode_stack()
    )
