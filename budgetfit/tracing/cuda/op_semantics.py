"""CUDA op semantics for the storage log: outputs, scratch memory, cuBLAS workspaces."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    disable_fake_tensor_cache,
)
from torch.utils._pytree import tree_map_only

from budgetfit.tracing.call_cache import CallCache
from budgetfit.tracing.cuda.dispatch.autocast import cuda_autocast
from budgetfit.tracing.cuda.dispatch.composite_ops import cuda_composite_ops
from budgetfit.tracing.cuda.dispatch.meta_kernels import META_KERNELS
from budgetfit.tracing.cuda.kernel_memory import (
    kernel_steps,
    output_bytes_of,
    scratch_of,
)
from budgetfit.tracing.cuda.kernel_memory.cublas_workspaces import CublasWorkspaces
from budgetfit.tracing.cuda.kernel_memory.registry import Gemm, log_steps
from budgetfit.tracing.cuda.kernel_memory.verified_ops import is_verified
from budgetfit.tracing.records import NO_SCRATCH, OpScratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from budgetfit.tracing.call_cache import CallKey
    from budgetfit.tracing.cuda.kernel_memory.registry import KernelStep
    from budgetfit.tracing.cuda.target import CudaTarget
    from budgetfit.tracing.records import RunOp, ScratchBuffer

aten = torch.ops.aten

ADD = aten.add.Tensor
INDEX_PUT = aten.index_put.default
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
CUDNN_ATTENTION = {
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}
CUDNN_OPS = {
    *CONVOLUTIONS,
    aten._thnn_fused_lstm_cell.default,
    aten._thnn_fused_gru_cell.default,
}
CUDNN_NOTE = (
    "convolutions or recurrent layers run in cuDNN on this card: its workspaces are "
    "not in the prediction"
)
CUDNN_ATTENTION_NOTE = (
    "attention runs in cuDNN on this card: of its workspace only what cudnn-frontend "
    "asks for is in the prediction"
)
# Mean and rstd are fp32 for any input dtype; on a CPU they have the input's.
FP32_STATISTICS = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_batch_norm.default,
        aten._weight_norm_interface.default,
    }
)
# The bias gets a gradient with padded rows.
PADDED_OUTPUTS = {aten._scaled_dot_product_efficient_attention_backward.default}
HALF = (torch.float16, torch.bfloat16)
# Outputs are contiguous for any input strides, as those of convolutions without cuDNN.
# On a CPU they follow the inputs' strides.
CONTIGUOUS_OUTPUTS = frozenset(
    {aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default}
)
# Positions of outputs without device memory: dropout seed and offset, outside of CUDA
# graphs, and a buffer that only CPUs fill. Without dropout torch 2.14 allocates seed
# and offset on the GPU.
EFFICIENT_ATTENTION = aten._scaled_dot_product_efficient_attention.default
SEED_ON_GPU_VERSION = (2, 14)
HOST_OUTPUTS = {
    EFFICIENT_ATTENTION: (2, 3),
    aten.log_sigmoid_forward.default: (1,),
}


class CudaOpTraits(NamedTuple):
    """CUDA-specific traits of an op, looked up once."""

    meta_kernel: Callable[..., Any] | None
    padded_outputs: bool
    fp32_statistics: bool
    convolution: bool
    contiguous_outputs: bool


@functools.cache
def _traits_of(func: torch._ops.OpOverload) -> CudaOpTraits:
    return CudaOpTraits(
        META_KERNELS.get(func),
        func in PADDED_OUTPUTS,
        func in FP32_STATISTICS,
        func in CONVOLUTIONS,
        func in CONTIGUOUS_OUTPUTS,
    )


class CallMemory(NamedTuple):
    """Memory inside a call, but cuBLAS workspaces, which depend on earlier calls."""

    note: str
    steps: tuple[KernelStep, ...]
    has_gemm: bool
    scratch: OpScratch


_CALL_MEMORY: dict[CudaTarget, CallCache[CallMemory]] = defaultdict(CallCache)


class CudaOpSemantics:
    """Op semantics of a CUDA GPU, for ``StorageLog``.

    The trace sets ``in_backward``: the autograd engine has its own thread, and so its
    own cuBLAS handle and workspace. It sets ``in_optimizer`` too.
    """

    def __init__(self, target: CudaTarget) -> None:
        self.target = target
        self.in_backward = False
        self.in_optimizer = False
        self.notes: set[str] = set()
        self._workspaces = CublasWorkspaces(target)
        self._call_memory = _CALL_MEMORY[target]

    def run(
        self,
        run: RunOp,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an op as on CUDA."""
        if self.in_backward:
            in_place = _in_place_in_autograd(run, func, args, kwargs)
            if in_place is not None:
                return in_place
        if self.in_optimizer and func is aten._local_scalar_dense.default:
            try:
                return run(func, args, kwargs)
            except DataDependentOutputException:
                # GradScaler reads found_inf; a skipped step would take less memory.
                return 0.0
        traits = _traits_of(func)
        out = (
            None if traits.meta_kernel is None else traits.meta_kernel(*args, **kwargs)
        )
        if out is not None:
            return out
        if traits.padded_outputs:
            with _full_storages(args):
                return run(func, args, kwargs)
        return self._with_cuda_layout(traits, run(func, args, kwargs))

    def _with_cuda_layout(self, traits: CudaOpTraits, out: Any) -> Any:
        """Return outputs with the dtypes and strides of CUDA's kernels."""
        if traits.fp32_statistics and out[0].dtype in HALF:
            return (out[0], *(statistic.float() for statistic in out[1:]))
        if traits.contiguous_outputs or (traits.convolution and not self.target.cudnn):
            return tree_map_only(torch.Tensor, torch.Tensor.contiguous, out)
        return out

    def scratch(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        call: CallKey | None = None,
    ) -> OpScratch:
        """Return the op's scratch memory, with the cuBLAS workspaces it allocates."""
        known = None if call is None else self._call_memory.get(call)
        if known is None:
            known = self._memory_of(func, args, kwargs, out)
            if call is not None:
                self._call_memory.store(call, known)
        if known.note:
            self.notes.add(known.note)
        persistent: list[ScratchBuffer] = []
        temporary: list[ScratchBuffer] = []
        if known.has_gemm or not known.steps:  # a depthwise convolution has no GEMM
            thread = "autograd" if self.in_backward else "main"
            persistent, temporary = self._workspaces.of(func, args, kwargs, out, thread)
        if not known.steps and not persistent and not temporary:
            return known.scratch
        steps = log_steps(known.steps, temporary, persistent)
        scratch = known.scratch._replace(steps=steps)
        if known.has_gemm:  # the steps contain the workspaces
            return scratch
        after = [*scratch.after, *temporary]
        return scratch._replace(persistent=persistent, after=after)

    def _memory_of(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> CallMemory:
        attention = func in CUDNN_ATTENTION
        unknown = attention or (func in CUDNN_OPS and self.target.cudnn)
        note = CUDNN_ATTENTION_NOTE if attention else CUDNN_NOTE
        cudnn = func in CONVOLUTIONS and self.target.cudnn
        steps = () if cudnn else kernel_steps(func, args, kwargs, out)
        before: list[ScratchBuffer] = []
        after: list[ScratchBuffer] = []
        for each in scratch_of(func, args, kwargs, out):
            (before if each.when == "before" else after).extend(each.buffers())
        scratch = OpScratch(
            before=before,
            after=after,
            output_bytes=output_bytes_of(func, args, kwargs, out),
            host_outputs=self._host_outputs(func, args),
            unverified=str(func) if unknown or not is_verified(func, args) else "",
        )
        has_gemm = any(isinstance(step, Gemm) for step in steps)
        return CallMemory(
            note if unknown else "",
            steps,
            has_gemm,
            NO_SCRATCH if scratch == NO_SCRATCH else scratch,
        )

    def _host_outputs(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...]
    ) -> tuple[int, ...]:
        if func is EFFICIENT_ATTENTION:
            dropout = args[5] if len(args) > 5 else 0.0  # noqa: PLR2004 - its position
            version = self.target.torch_version
            if not dropout and version >= SEED_ON_GPU_VERSION:
                return ()
        return HOST_OUTPUTS.get(func, ())


def _in_place_in_autograd(
    run: RunOp,
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run in place what autograd runs in place for plain tensors; None for other ops.

    For subclasses, as fake tensors are, autograd runs it out of place.
    """
    if func is ADD and not kwargs:
        return _accumulated_in_place(run, *args)
    if func is INDEX_PUT:
        node = torch._C._current_autograd_node()
        if node is not None and node.name() == "IndexBackward0":
            return run(aten._index_put_impl_.default, (*args, True), kwargs)
    return None


def _full_storages(args: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Return a context in which padded outputs own their full storage.

    FakeTensor's cache rebuilds outputs with padded rows without the last padding.
    """
    mode = detect_fake_mode(args)
    return nullcontext() if mode is None else disable_fake_tensor_cache(mode)


def _accumulated_in_place(run: RunOp, old: Any, new: Any) -> torch.Tensor | None:
    """Accumulate gradients in place where the autograd engine would on CUDA.

    It adds in place unless the tensor is a subclass or a mode is active, and both hold
    in a trace. Outside of the engine (grad mode on: a recomputation) the model's own
    additions are not changed.

    Source: torch/csrc/autograd/input_buffer.cpp, ``can_accumulate_inplace``.
    """
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
        return None
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return None
    if old.shape != new.shape or old.dtype != new.dtype:
        return None
    return run(aten.add_.Tensor, (old, new), {}) if _owned(old) else None


def _owned(tensor: Any) -> bool:
    """Return whether only the engine's buffer holds this tensor and its storage."""
    return (
        torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
        and tensor._use_count() <= OWNED_TENSOR
        and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
        <= OWNED_STORAGE
    )


# Use counts of a tensor that only the engine holds, as seen in a dispatch mode: the
# buffer and the Python objects of this call.
OWNED_TENSOR = 4
OWNED_STORAGE = 2

# Registrations at the dispatcher are process-wide: one trace at a time.
_ONE_AT_A_TIME = threading.RLock()


def imitate_cuda(
    target: CudaTarget | None,
) -> tuple[CudaOpSemantics | None, AbstractContextManager[None]]:
    """Return the op semantics for a storage log, and the context to trace in.

    There fake CPU tensors behave as on CUDA. Without a target both do nothing, and the
    trace is that of a CPU.
    """
    if target is None:
        return None, nullcontext()
    return CudaOpSemantics(target), _imitation(target)


@contextmanager
def _imitation(target: CudaTarget) -> Iterator[None]:
    with _ONE_AT_A_TIME, cuda_autocast(), cuda_composite_ops(target):
        yield
