"""Cache key of a trace: a hash of everything that the trace depends on.

Equal keys mean equal traces, on every machine and in every process. If that cannot be
guaranteed (hooks, tensor subclasses, code without source) there is no key, and nothing
is cached.
"""

import functools
import sys
import types
from importlib import metadata
from typing import Any, Final

import numpy as np
import torch
from torch.nn.modules import module as module_hooks
from torch.utils import checkpoint

from budgetfit.traces.cache.code_hash import NotCacheableError
from budgetfit.traces.cache.package_hash import package_hash
from budgetfit.traces.cache.value_hash import ValueHash
from budgetfit.tracing.cuda.triton.launches import kernels_may_allocate
from budgetfit.tracing.values.concrete_execution import is_small_integer_buffer
from budgetfit.utils.user_code import is_library
from budgetfit.workload.workload import Workload

_TRACED_LIBRARIES: Final = ("accelerate", "trl", "lightning", "liger-kernel", "triton")
# Registries of transformers in which models look up functions by name.
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


def trace_key(workload: str | None, settings: object) -> str | None:
    """Return the cache key of a trace; None if the trace must not be cached.

    Args:
        workload: What ``workload_key`` returned.
        settings: What else the trace depends on (``Program``, batch size): plain
            values, tuples and dataclasses.
    """
    if workload is None:
        return None
    hasher = ValueHash()
    try:
        hasher.add(workload, settings)
    except NotCacheableError:
        return None
    return hasher.hexdigest()


def workload_key(workload: Workload) -> str | None:
    """Return the part of the key that all traces of a workload share; None if none.

    It visits every module and parameter, so reuse it while model and settings stay.
    """
    try:
        return _workload_key(workload)
    except Exception:  # noqa: BLE001 - a model's own __repr__ may fail in any way
        return None


def why_not_cacheable(workload: Workload) -> str:
    """Return why a workload has no key; empty if it has one."""
    try:
        _workload_key(workload)
    except Exception as error:  # noqa: BLE001 - as workload_key
        return str(error) or type(error).__name__
    return ""


def _workload_key(workload: Workload) -> str:
    if any(getattr(module_hooks, name, None) for name in _GLOBAL_HOOKS):
        raise NotCacheableError("hooks of all modules")
    hasher = ValueHash()
    hasher.add(_versions(), package_hash(), _settings(), _registered())
    hasher.add(workload.target.compute_capability, workload.target.torch_version)
    hasher.add(workload.target.cudnn, workload.target.sm_count, workload.blocks)
    hasher.add(workload.batch_dims.default, workload.batch_dims.named)
    # The fake model has no values except those of small buffers; the batch keeps its
    # integers.
    with hasher.hashing("none"):
        hasher.add(workload.model)
    with hasher.hashing("integers"):
        hasher.add([x for x in workload.model.buffers() if is_small_integer_buffer(x)])
        hasher.add(workload.batch)
    hasher.add(workload.loss, workload.optimizer)
    return hasher.hexdigest()


def _versions() -> tuple[str, ...]:
    transformers = sys.modules.get("transformers")
    return (
        sys.version,
        str(torch.__version__),
        str(np.__version__),
        str(getattr(transformers, "__version__", "")),
        *_installed_versions(),
    )


@functools.cache
def _installed_versions() -> tuple[str, ...]:
    """Return the versions of libraries that a trace may import: loops and kernels."""
    found = []
    for name in _TRACED_LIBRARIES:
        try:
            found.append(metadata.version(name))
        except metadata.PackageNotFoundError:
            found.append("")
    return tuple(found)


def _settings() -> list[Any]:
    """Return torch's global settings that decide which ops run."""
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
        kernels_may_allocate(),
        torch.is_autocast_cache_enabled(),
        checkpoint._enable_checkpoint_early_stop,  # noqa: SLF001
    ]


def _registered() -> list[Any]:
    """Return functions added to transformers' registries or patched into torch."""
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
