"""CUDA op semantics for the storage log: outputs, scratch memory, cuBLAS workspaces."""

import functools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_strides
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    disable_fake_tensor_cache,
)
from torch.autograd import graph
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from budgetfit.tracing.call_cache import Args, CallCache, CallKey, Kwargs
from budgetfit.tracing.cuda.device_questions import device_questions_noted
from budgetfit.tracing.cuda.dispatch.autocast import cuda_autocast
from budgetfit.tracing.cuda.dispatch.composite_ops import cuda_composite_ops
from budgetfit.tracing.cuda.dispatch.meta_kernels import META_KERNELS
from budgetfit.tracing.cuda.kernel_dtypes import check_dtypes
from budgetfit.tracing.cuda.kernel_memory.matmul import CublasWorkspaces
from budgetfit.tracing.cuda.kernel_memory.norms import CHANNELS_LAST
from budgetfit.tracing.cuda.kernel_memory.registry import (
    HALVES,
    Call,
    Gemm,
    KernelStep,
    Unverified,
    is_verified,
    kernel_steps,
)
from budgetfit.tracing.cuda.node_order import cuda_node_order
from budgetfit.tracing.cuda.optimizer_choices import optimizers_on_cuda
from budgetfit.tracing.cuda.size_limits import size_limits
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.op_costs import op_cost
from budgetfit.tracing.records import OpMemory, RunOp

aten = torch.ops.aten

ADD = aten.add.Tensor
INDEX_PUT = aten.index_put.default
# Gradients of what selects values (sort, topk, max, gather, index_select, take) are
# written into zeros, for tensor subclasses out of place.
WRITES_INTO_ZEROS = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.put.default: aten.put_.default,
}
# The gradients of amax and amin count equal values, which are not zeros.
_COUNTS_EQUALS = frozenset({"ScatterReduceBackward0", "IndexReduceBackward0"})
# Their formulas in C++ add out of place themselves (FunctionsManual.cpp). What the
# engine adds of their results cannot be told from that, and is added so too.
_ADDS_ITSELF = frozenset(
    {
        "Atan2Backward0",
        "BinaryCrossEntropyBackwardBackward0",
        "CholeskyBackward0",
        "CholeskyInverseBackward0",
        "CholeskySolveBackward0",
        "GeluBackwardBackward0",
        "GluBackwardBackward0",
        "GridSampler2DBackwardBackward0",
        "GridSampler3DBackwardBackward0",
        "LinalgCholeskyExBackward0",
        "LinalgDetBackward0",
        "LinalgLuBackward0",
        "LinalgLuFactorExBackward0",
        "LinalgLuSolveBackward0",
        "LinalgPinvBackward0",
        "LinalgQrBackward0",
        "LinalgSvdBackward0",
        "LogcumsumexpBackward0",
        "LuUnpackBackward0",
        "MvlgammaBackward0",
        "NativeBatchNormBackwardBackward0",
        "PreluKernelBackwardBackward0",
        "SigmoidBackwardBackward0",
        "SoftMarginLossBackwardBackward0",
        "SpecialI1EBackward0",
        "StdMeanBackward0",
        "TriangularSolveBackward0",
        "VarMeanBackward0",
    }
)
# Where the wrappers are that switch dynamo off around a mode.
_TORCH = Path(torch.__file__).parent
_DYNAMO = str(_TORCH / "_dynamo"), str(_TORCH / "_compile.py")
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
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
# Outputs are contiguous for any input strides, as those of convolutions without cuDNN.
# Those of fake tensors follow the inputs' strides.
CONTIGUOUS_OUTPUTS = frozenset(
    {
        aten.native_layer_norm_backward.default,
        aten._fused_rms_norm_backward.default,
        aten._log_softmax_backward_data.default,
        aten.huber_loss_backward.default,
        aten.mse_loss_backward.default,
        aten.nll_loss2d_forward.default,
        aten.pixel_shuffle.default,
        aten.pixel_unshuffle.default,
        aten.pow.Scalar,
        aten.reflection_pad2d.default,
        aten.replication_pad2d.default,
        aten.smooth_l1_loss_backward.default,
    }
)
# Torch does not tag these as pointwise.
ELEMENTWISE = frozenset(
    {
        aten.elu_backward.default,
        aten.hardsigmoid_backward.default,
        aten.softplus_backward.default,
    }
)
# Pointwise ops whose CUDA code does not choose strides as ``TensorIterator`` does.
OWN_STRIDES = frozenset(
    {
        aten.ldexp.Tensor,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.native_dropout_backward.default,
    }
)
# The gradient of the input has the input's memory format, whatever the other's is.
LIKE_INPUT = frozenset({aten.native_batch_norm_backward.default})


class CudaOpTraits(NamedTuple):
    """CUDA-specific traits of an op, looked up once."""

    meta_kernel: Callable[..., Any] | None
    padded_outputs: bool
    fp32_statistics: bool
    convolution: bool
    contiguous_outputs: bool
    like_input: bool
    elementwise: bool
    into_zeros: OpOverload | None


def _is_elementwise(func: OpOverload) -> bool:
    if torch.Tag.pointwise not in func.tags or func._schema.is_mutable:
        return func in ELEMENTWISE
    return func not in OWN_STRIDES | CONTIGUOUS_OUTPUTS


@functools.cache
def _traits_of(func: OpOverload) -> CudaOpTraits:
    return CudaOpTraits(
        META_KERNELS.get(func),
        func in PADDED_OUTPUTS,
        func in FP32_STATISTICS,
        func in CONVOLUTIONS,
        func in CONTIGUOUS_OUTPUTS,
        func in LIKE_INPUT,
        _is_elementwise(func),
        WRITES_INTO_ZEROS.get(func),
    )


class CallMemory(NamedTuple):
    """Memory inside a call; cuBLAS workspaces, which depend on earlier calls, are not.

    ``products``: the call's steps, if cuBLAS multiplies in some of them.
    """

    notes: frozenset[str]
    products: tuple[KernelStep, ...]
    memory: OpMemory


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

    def run(self, run: RunOp, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an op as on CUDA."""
        traits = _traits_of(func)
        if self._on_autograds_thread():
            in_place = _in_place_in_autograd(run, func, traits.into_zeros, args, kwargs)
            if in_place is not None:
                return in_place
        if self.in_optimizer and func is aten._local_scalar_dense.default:
            try:
                return run(func, args, kwargs)
            except DataDependentOutputException:
                # GradScaler reads found_inf; a skipped step would take less memory.
                return 0.0
        out = (
            None if traits.meta_kernel is None else traits.meta_kernel(*args, **kwargs)
        )
        if out is not None:
            return out
        if traits.padded_outputs:
            with _full_storages(args):
                return run(func, args, kwargs)
        return self._with_cuda_layout(traits, func, args, run(func, args, kwargs))

    def _with_cuda_layout(
        self, traits: CudaOpTraits, func: OpOverload, args: Args, out: Any
    ) -> object:
        """Return outputs with the dtypes and strides of CUDA's kernels."""
        if traits.elementwise:
            return _with_strides_of_operands(func, args, out)
        if traits.fp32_statistics and out[0].dtype in HALVES:
            return (out[0], *(statistic.float() for statistic in out[1:]))
        if traits.contiguous_outputs or (traits.convolution and not self.target.cudnn):
            return tree_map_only(torch.Tensor, torch.Tensor.contiguous, out)
        if traits.like_input and out[0] is not None:
            last = CHANNELS_LAST.get(args[1].dim(), torch.contiguous_format)
            if not args[1].is_contiguous(memory_format=last):
                last = torch.contiguous_format
            return (out[0].contiguous(memory_format=last), *out[1:])
        return out

    def memory(
        self,
        func: OpOverload,
        args: Args,
        kwargs: Kwargs,
        out: object,
        call: CallKey | None = None,
    ) -> OpMemory:
        """Return what the op allocates, with the cuBLAS workspaces."""
        known = None if call is None else self._call_memory.get(call)
        if known is None:
            known = self._memory_of(Call(func, args, kwargs, out, self.target))
            if call is not None:
                self._call_memory.store(call, known)
        self.notes |= known.notes
        if not known.products:
            return known.memory
        thread = "autograd" if self._on_autograds_thread() else "main"
        steps = self._workspaces.steps(known.products, thread)
        return known.memory._replace(steps=tuple(steps))

    def _on_autograds_thread(self) -> bool:
        """Whether CUDA runs this in autograd's thread: gradients, a forward's too."""
        return self.in_backward or torch._C._current_graph_task_id() != -1

    def _memory_of(self, call: Call) -> CallMemory:
        check_dtypes(call)
        steps = kernel_steps(call)
        unknown = [step for step in steps if isinstance(step, Unverified)]
        verified = is_verified(call.func) and not unknown
        products = any(isinstance(step, Gemm) for step in steps)
        return CallMemory(
            frozenset(step.note for step in unknown if step.note),
            steps if products else (),
            OpMemory(
                tuple(s for s in steps if not isinstance(s, (Gemm, Unverified))),
                unverified="" if verified else str(call.func),
                cost=op_cost(
                    call.func,
                    call.args,
                    call.kwargs,
                    call.out,
                    self.target.compute_capability,
                ),
                limits=size_limits(call),
            ),
        )


def _is_strided(value: object) -> bool:
    """Return whether this is a dense tensor."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _with_strides_of_operands(func: OpOverload, args: Args, out: Any) -> object:
    """Return the output of a pointwise op with the strides that CUDA gives it."""
    # Torch's meta kernels cast operands first, which makes expanded ones contiguous:
    # the gradient of a sum, with activations in channels-last format and 16 bits.
    operands = [each for each in args if isinstance(each, torch.Tensor)]
    if len(operands) <= 1:  # of one, they are right
        return out
    if not all(map(_is_strided, (out, *operands))):
        return out
    shape, stride = out.shape, out.stride()
    if all(x.shape != shape or x.stride() == stride for x in operands):
        return out
    if func is aten.threshold_backward.default:  # reads the activations first
        operands.reverse()
    strides = _output_strides(tuple((x.shape, x.stride()) for x in operands))
    return out if strides == stride else out.new_empty_strided(shape, strides)


@functools.lru_cache(maxsize=1024)
def _output_strides(layouts: tuple[tuple[Any, ...], ...]) -> tuple[int, ...]:
    """Return the strides of a pointwise op's output; ``layouts``: sizes and strides."""
    with _disable_current_modes():
        operands = [torch.empty_strided(*each, device="meta") for each in layouts]
        return compute_elementwise_output_strides(*torch.broadcast_tensors(*operands))


def _in_place_in_autograd(
    run: RunOp,
    func: OpOverload,
    in_place: OpOverload | None,
    args: Args,
    kwargs: Kwargs,
) -> object:
    """Run in place what autograd runs in place for plain tensors; None for other ops.

    For subclasses, as fake tensors are, autograd runs it out of place.
    ``in_place``: that of ``WRITES_INTO_ZEROS``.
    """
    if func is ADD and not kwargs:
        return _accumulated_in_place(run, *args)
    if func is INDEX_PUT and _node_of_autograd() == "IndexBackward0":
        return run(aten._index_put_impl_.default, (*args, True), kwargs)
    if in_place is not None:
        node = _node_of_autograd()
        if node is not None and node not in _COUNTS_EQUALS:
            return run(in_place, args, kwargs)
    return None


def _node_of_autograd() -> str | None:
    """Return the running op's node by name; None if a program runs the op itself."""
    # Those are recomputation (grad mode is on), and backward functions in Python and
    # hooks: these have a frame of their own above that of the call of the engine.
    node = torch._C._current_autograd_node()
    if node is None or torch.is_grad_enabled():
        return None
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    while caller is not None and caller.f_code.co_filename.startswith(_DYNAMO):
        caller = caller.f_back
    # The engine's own threads, of nested backward passes, have no frames below.
    if caller is None or caller.f_code is graph._engine_run_backward.__code__:
        return str(node.name())
    return None


def _full_storages(args: Args) -> AbstractContextManager[None]:
    """Return a context in which padded outputs own their full storage."""
    # FakeTensor's cache rebuilds outputs with padded rows without the last padding.
    mode = detect_fake_mode(args)
    return nullcontext() if mode is None else disable_fake_tensor_cache(mode)


def _accumulated_in_place(run: RunOp, old: object, new: object) -> torch.Tensor | None:
    """Accumulate gradients in place where the autograd engine would on CUDA."""
    # It adds in place unless the tensor is a subclass or a mode is active, and both
    # hold in a trace. Additions of the model, its functions and hooks are not changed.
    # Source: torch/csrc/autograd/input_buffer.cpp, ``can_accumulate_inplace``.
    node = _node_of_autograd()
    if node is None or node in _ADDS_ITSELF:
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
    semantics = CudaOpSemantics(target)
    return semantics, _imitation(semantics)


@contextmanager
def _imitation(semantics: CudaOpSemantics) -> Iterator[None]:
    with (
        _ONE_AT_A_TIME,
        cuda_autocast(),
        cuda_composite_ops(semantics.target, semantics.notes),
        cuda_node_order(),
        device_questions_noted(semantics.notes),
        optimizers_on_cuda(),
    ):
        yield
