"""What a trace depends on, as one hash: the name that it is cached under.

The same key means the same trace, on every machine and in every process. Where that
cannot be told (hooks, tensor subclasses, code that is nowhere to be read) there is no
key, and nothing is cached.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.nn.modules import module as module_hooks
from torch.utils import checkpoint

from budgetfit.traces.cache.code_hash import NotCacheableError
from budgetfit.traces.cache.value_hash import Fingerprint
from budgetfit.tracing.values.concrete_execution import is_asked_about
from budgetfit.utils.user_code import is_library

if TYPE_CHECKING:
    from budgetfit.workload.workload import Subject

_STARTED_S: Final = time.time()
# Registries of transformers that models look functions up in by name.
_REGISTRIES: Final = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
)
_GLOBAL_HOOKS: Final = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def cache_key(subject: Subject, program: object) -> str | None:
    """Return the key of a trace of ``subject``; None where it must not be cached.

    Args:
        subject: Model, batch, loss, optimizer, blocks and card.
        program: What else the trace depends on: the recipe's part, whether the model's
            own checkpointing stays, the traced batch sizes. Plain values, tuples and
            dataclasses.
    """
    return program_key(subject_key(subject), program)


def program_key(subject: str | None, program: object) -> str | None:
    """Return ``cache_key``, from what ``subject_key`` returned."""
    if subject is None:
        return None
    found = Fingerprint()
    try:
        found.add(subject, program)
    except NotCacheableError:
        return None
    return found.hexdigest()


def subject_key(subject: Subject) -> str | None:
    """Return the part of the key that all traces of a subject share.

    It looks at every module and parameter, so it is worth keeping while neither model
    nor settings change.
    """
    try:
        return _subject_key(subject)
    except Exception:  # noqa: BLE001 - a model's own __repr__ may fail in any way
        return None


def why_not_cacheable(subject: Subject) -> str:
    """Return what keeps a subject from having a key; empty if it has one."""
    try:
        _subject_key(subject)
    except Exception as error:  # noqa: BLE001 - as subject_key
        return str(error) or type(error).__name__
    return ""


def _subject_key(subject: Subject) -> str:
    if any(getattr(module_hooks, name, None) for name in _GLOBAL_HOOKS):
        raise NotCacheableError("hooks of all modules")
    found = Fingerprint()
    found.add(_versions(), own_sources(), _settings(), _registered())
    found.add(subject.target.compute_capability, subject.target.torch_version)
    found.add(subject.target.cudnn, subject.blocks)
    found.add(subject.batch_dims.default, subject.batch_dims.named)
    # The model becomes fake and loses its values, but for those of small buffers; the
    # batch keeps its whole numbers.
    with found.counting("none"):
        found.add(subject.model)
    with found.counting("whole"):
        found.add([x for x in subject.model.buffers() if is_asked_about(x)])
        found.add(subject.batch)
    found.add(subject.loss, subject.optimizer)
    return found.hexdigest()


def _versions() -> tuple[str, ...]:
    transformers = sys.modules.get("transformers")
    return (
        sys.version,
        str(torch.__version__),
        str(np.__version__),
        str(getattr(transformers, "__version__", "")),
    )


def _settings() -> list[Any]:
    """Return torch's switches that decide which ops run."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return [
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        torch._C._get_sdp_priority_order(),  # noqa: SLF001 - of sdpa_kernel
        torch.get_float32_matmul_precision(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        checkpoint._enable_checkpoint_early_stop,  # noqa: SLF001
    ]


def _registered() -> list[Any]:
    """Return what was added to transformers' registries, or put into torch itself."""
    added: list[Any] = []
    for module, name in _REGISTRIES:
        registry = getattr(sys.modules.get(module), name, None)
        for entry, function in registry.items() if registry is not None else ():
            if not is_library(getattr(function, "__module__", None) or ""):
                added += [name, entry, function]
            else:
                added += [name, entry, getattr(function, "__qualname__", "")]
    for place in (torch, torch.Tensor, torch.nn.functional):
        for name, function in vars(place).items():
            home = getattr(function, "__module__", None)
            if isinstance(function, types.FunctionType) and home is not None:
                if not is_library(home):
                    added += [name, function]
                elif home.partition(".")[0] != "torch":
                    added += [name, home, function.__qualname__]
    return added


def own_sources() -> str:
    """Return a hash of this package's own files.

    Raises:
        NotCacheableError: If they are nowhere to be read, or were edited after this
            process began: it may still run what they were before.
    """
    folder = Path(__file__).parents[2]
    files = sorted((*folder.rglob("*.py"), *folder.rglob("*.toml")))
    stats = [path.stat() for path in files]
    if not files or max(found.st_mtime for found in stats) > _STARTED_S:
        raise NotCacheableError("budgetfit's own files, which have just changed")
    return _digest(tuple(map(str, files)), tuple(found.st_mtime_ns for found in stats))


@functools.cache
def _digest(files: tuple[str, ...], _mtimes_ns: tuple[int, ...]) -> str:
    found = hashlib.sha256()
    for file in files:
        content = Path(file).read_bytes()
        found.update(f"{Path(file).name} {len(content)}:".encode())
        found.update(content)
    return found.hexdigest()
