"""CUDA's autocast on CPU tensors: its op lists at the dispatcher, and its weight cache.

CPU autocast casts other ops than CUDA's (softmax, layer norm, losses, exp, pow and sums
run in fp32 under CUDA). A Python-level mode would miss calls from C++ and torch's own
modules, so the policies are registered at the dispatcher, under the autocast key of CPU
tensors, for the thread that traces alone. See
``docs/decisions/0008-cuda-semantics-live-at-the-dispatcher.md``.

Source: ``ATen/autocast_mode.h`` (installed with torch), the ``AT_FORALL_*`` lists and
``cached_cast``.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload
from torch.amp import autocast_mode
from torch.utils._pytree import tree_map

from budgetfit.tracing.call_cache import Args, Kwargs
from budgetfit.tracing.cuda.dispatch.thread_kernels import kernels_in_this_thread

# The lists hold the ops of all supported torch versions; those that the installed one
# does not have are skipped. CUDA has rms_norm from 2.12 on, overloads with named
# dimensions up to 2.12 and linalg_matrix_sqrth from 2.14 on.

# The inputs are cast to fp32.
FP32 = frozenset(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
    rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth
    """.split()  # noqa: SIM905 - a list this long reads better as words
)
# The inputs are not cast; the kernel computes and returns fp32 (its dtype argument).
FP32_OUTPUT = frozenset(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
    prod.dim_Dimname softmax.Dimname log_softmax.Dimname cumprod.dimname cumsum.dimname
    sum.dim_DimnameList
    """.split()  # noqa: SIM905
)
# The same, in an overload with a dtype argument of its own.
FP32_OVERLOAD = {
    "norm.Scalar": "ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",
}
# All inputs are cast to the widest dtype among them.
PROMOTE = frozenset(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot
    scatter_add
    """.split()  # noqa: SIM905
)
# Raise an error under autocast, as on CUDA.
BANNED = frozenset({"binary_cross_entropy"})

_OTHER = {"cuda": "cpu", "cpu": "cuda"}
_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def ops_with_kernel(dispatch_key: str) -> frozenset[str]:
    """Return the aten ops (``name.overload``) with a kernel for a dispatch key."""
    prefix = "aten::"
    names = torch._C._dispatch_get_registrations_for_dispatch_key(dispatch_key)
    return frozenset(
        name.removeprefix(prefix) for name in names if name.startswith(prefix)
    )


# All other ops of CUDA's autocast run in the lower precision: matrix products,
# convolutions, recurrent cells and attention. Read from the installed torch, so that a
# new op is not missed.
_CUDA_OPS = ops_with_kernel("AutocastCUDA")
_CPU_ONLY_OPS = ops_with_kernel("AutocastCPU") - _CUDA_OPS
LOWER_PRECISION = (
    _CUDA_OPS - FP32 - FP32_OUTPUT - frozenset(FP32_OVERLOAD) - PROMOTE - BANNED
)


class CastCache:
    """Autocast's weight cache: each fp32 leaf is cast once per outermost region."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cast(self, value: object, dtype: torch.dtype) -> Any:
        """Return ``value`` in ``dtype`` if it is a tensor that autocast casts."""
        if (
            not isinstance(value, torch.Tensor)
            or not value.is_floating_point()
            or value.dtype in (dtype, torch.float64)
        ):
            return value
        if not (
            dtype == torch.get_autocast_dtype("cpu")
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()
        ):
            return value.to(dtype)
        known = self._casts.get(id(value))
        if known is None:
            # With a graph under no_grad, too: what comes later may need gradients. The
            # parameter is kept too, as in CUDA's cache: its id is not reused.
            with torch.enable_grad():
                known = self._casts[id(value)] = (value, value.to(dtype))
        return known[1]

    def cast_all(
        self, args: Args, kwargs: Kwargs, dtype: torch.dtype
    ) -> tuple[Args, Kwargs]:
        """Cast an op's arguments, the last one first."""
        # The compiled kernel evaluates them in this order: a Linear's bias is cast
        # before its weight and its input. Reserved memory depends on it.

        def cast(value: object) -> Any:
            if not isinstance(value, (list, tuple, dict)):
                return self.cast(value, dtype)
            return tree_map(lambda x: self.cast(x, dtype), value)

        named = {name: cast(value) for name, value in reversed(kwargs.items())}
        positional = [cast(value) for value in reversed(args)]
        return tuple(reversed(positional)), named

    def clear(self) -> None:
        """Drop all casts, when the outermost autocast region ends."""
        self._casts.clear()


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Give ``torch.autocast`` CUDA's policies on CPU tensors, in this thread."""
    # In the context it has one state for both devices: a program may name either.
    cache = CastCache()
    thread = threading.get_ident()
    clear_autocast_cache = torch.clear_autocast_cache

    def clear_both() -> None:
        if threading.get_ident() == thread:
            cache.clear()
        clear_autocast_cache()

    kernels = {name: _kernel(name, cache) for name in _CUDA_OPS}
    with (
        kernels_in_this_thread(
            "AutocastCPU", {**kernels, **dict.fromkeys(_CPU_ONLY_OPS)}
        ),
        # autocast.__exit__ calls this by name when the outermost region ends.
        mock.patch.object(torch, "clear_autocast_cache", clear_both),
        _one_state_of_both_devices(),
    ):
        try:
            yield
        finally:
            cache.clear()


@contextlib.contextmanager
def _one_state_of_both_devices() -> Iterator[None]:
    """Let autocast of CUDA act on the CPU, which plays its part, and the reverse."""
    # CUDA's state is set as well, for code that asks for it: adapters, which convert
    # their inputs themselves where there is no autocast, or libraries of kernels.
    autocast, thread = torch.autocast, threading.get_ident()
    initialize, enter, leave = autocast.__init__, autocast.__enter__, autocast.__exit__
    cast = autocast_mode._cast
    before = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _OTHER
    ]

    def initialize_both(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        here = threading.get_ident() == thread and device_type in _OTHER
        initialize(self, device_type, dtype, enabled and not here, cache_enabled)
        if here:  # a CPU would disable it: for want of a card, or for the dtype
            self._enabled = enabled

    def enter_both(self: torch.autocast) -> object:
        entered = enter(self)
        follow(self.device)
        return entered

    def leave_both(self: torch.autocast, *error: object) -> object:
        left = leave(self, *error)
        follow(self.device)
        return left

    def follow(device: str) -> None:
        if threading.get_ident() == thread and device in _OTHER:
            other = _OTHER[device]
            torch.set_autocast_enabled(other, torch.is_autocast_enabled(device))
            torch.set_autocast_dtype(other, torch.get_autocast_dtype(device))

    def cast_on_cpu(value: object, device_type: str, dtype: torch.dtype) -> object:
        if threading.get_ident() == thread and device_type == "cuda":
            device_type = "cpu"
        return cast(value, device_type, dtype)

    with (
        mock.patch.object(autocast, "__init__", initialize_both),
        mock.patch.object(autocast, "__enter__", enter_both),
        mock.patch.object(autocast, "__exit__", leave_both),
        # What torch.amp.custom_fwd(cast_inputs=) casts with.
        mock.patch.object(autocast_mode, "_cast", cast_on_cpu),
    ):
        follow("cuda")  # a region that names no dtype has CUDA's, fp16
        try:
            yield
        finally:
            for device, enabled, dtype in before:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)


def _kernel(name: str, cache: CastCache) -> Callable[..., object]:
    """Return the autocast kernel of an op: cast by its policy, then run the op."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    if name in FP32:
        return _casting(op, cache, lambda: torch.float32)
    if name in FP32_OUTPUT:
        return _fp32_output(op)
    if name in FP32_OVERLOAD:
        wide = getattr(getattr(torch.ops.aten, packet), FP32_OVERLOAD[name])
        return _fp32_overload(op, wide)
    if name in PROMOTE:
        return _promoting(op, cache)
    if name in BANNED:
        return _refusing(name)
    return _casting(op, cache, lambda: torch.get_autocast_dtype("cpu"))


def _casting(
    op: Callable[..., object], cache: CastCache, dtype: Callable[[], torch.dtype]
) -> Callable[..., object]:
    def kernel(*args: object, **kwargs: object) -> object:
        wanted = dtype()
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            args, kwargs = cache.cast_all(args, kwargs, wanted)
            return op(*args, **kwargs)

    return kernel


def _eligible(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _fp32_output(op: OpOverload) -> Callable[..., object]:
    names = [argument.name for argument in op._schema.arguments]

    def kernel(*args: object, **kwargs: object) -> object:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            if _eligible(args[0]):
                position = names.index("dtype")
                if position < len(args):
                    if args[position] is None:
                        args = (*args[:position], torch.float32, *args[position + 1 :])
                elif kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float32
            return op(*args, **kwargs)

    return kernel


def _fp32_overload(op: OpOverload, wide: OpOverload) -> Callable[..., object]:
    names = [argument.name for argument in wide._schema.arguments]

    def kernel(
        x: torch.Tensor, p: object = 2, *rest: object, **kwargs: object
    ) -> object:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            if _eligible(x):
                # A default of the op, and none of the overload.
                if "keepdim" in names[2 + len(rest) :]:
                    kwargs.setdefault("keepdim", False)
                return wide(x, p, *rest, dtype=torch.float32, **kwargs)
            return op(x, p, *rest, **kwargs)

    return kernel


def _promoting(op: Callable[..., object], cache: CastCache) -> Callable[..., object]:
    def kernel(*args: object, **kwargs: object) -> object:
        widest = torch.get_autocast_dtype("cpu")
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if _eligible(value) and value.dtype == torch.float32:
                widest = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            args, kwargs = cache.cast_all(args, kwargs, widest)
            return op(*args, **kwargs)

    return kernel


def _refusing(name: str) -> Callable[..., object]:
    def kernel(*_args: object, **_kwargs: object) -> object:
        raise RuntimeError(
            f"{name} is unsafe to autocast on CUDA. Use the loss that takes logits, "
            "for example torch.nn.BCEWithLogitsLoss, or leave autocast around it."
        )

    return kernel
