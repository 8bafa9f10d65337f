"""Whether ATen sees a dispatch mode that training would really run under.

ATen's composite functions do out of place for tensor subclasses what they otherwise do
in place, and they take every tensor for one while a dispatch mode is on
(``isTensorSubclassLike`` in ATen/TensorSubclassLikeUtils.h). The modes of a trace are
not there when a model trains; that of selective checkpointing is.
"""

from __future__ import annotations

import torch.utils.checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_REAL_MODES = tuple(
    mode
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if (mode := getattr(torch.utils.checkpoint, name, None)) is not None
)


def runs_under_a_mode() -> bool:
    """Say whether selective checkpointing's mode is on."""
    return any(
        isinstance(mode, _REAL_MODES) for mode in _get_current_dispatch_mode_stack()
    )
