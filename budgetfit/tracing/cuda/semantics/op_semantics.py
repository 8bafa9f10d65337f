"""What CUDA does differently inside single ops: in place, scratch, workspaces."""

from __future__ import annotations

import functools
from collections import defaultdict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    disable_fake_tensor_cache,
)
from torch.utils._pytree import tree_map_only

from budgetfit.tracing.cuda.dispatch.meta_kernels import STAND_INS
from budgetfit.tracing.cuda.kernel_memory import (
    output_bytes_of,
    steps_of,
    temporaries_of,
)
from budgetfit.tracing.cuda.kernel_memory.cublas_workspaces import CublasWorkspaces
from budgetfit.tracing.cuda.kernel_memory.inner_steps import log_steps, rows_of
from budgetfit.tracing.cuda.kernel_memory.registry import Product
from budgetfit.tracing.cuda.kernel_memory.verified_ops import is_verified
from budgetfit.tracing.op_signature import Calls
from budgetfit.tracing.records import NO_SCRATCH, OpScratch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from budgetfit.tracing.cuda.kernel_memory.registry import InnerStep
    from budgetfit.tracing.cuda.target import CudaTarget
    from budgetfit.tracing.op_signature import Key
    from budgetfit.tracing.records import RunOp, ScratchRow

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
# Mean and inverse deviation are fp32 whatever the input is; a CPU keeps the input's.
FP32_STATISTICS = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_batch_norm.default,
        aten._weight_norm_interface.default,
    }
)
# A bias gets a gradient whose rows are padded.
PADDED_OUTPUTS = {aten._scaled_dot_product_efficient_attention_backward.default}
HALF = (torch.float16, torch.bfloat16)
# Their kernels make outputs in one piece, whatever the inputs' strides are; so do
# convolutions without cuDNN. A CPU follows the inputs.
CONTIGUOUS_OUTPUTS = frozenset(
    {aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default}
)
# Positions of outputs without device memory: the dropout seed and offset, outside CUDA
# graphs, and a buffer that CPUs fill. Without dropout torch 2.14 makes seed and offset
# on the card.
EFFICIENT_ATTENTION = aten._scaled_dot_product_efficient_attention.default
SEED_ON_CARD_VERSION = (2, 14)
HOST_OUTPUTS = {
    EFFICIENT_ATTENTION: (2, 3),
    aten.log_sigmoid_forward.default: (1,),
}


class Nature(NamedTuple):
    """What is special about an op here, looked up once."""

    makes: Callable[..., Any] | None
    padded: bool
    fp32_statistics: bool
    convolution: bool
    contiguous: bool


@functools.cache
def _nature(func: torch._ops.OpOverload) -> Nature:
    return Nature(
        STAND_INS.get(func),
        func in PADDED_OUTPUTS,
        func in FP32_STATISTICS,
        func in CONVOLUTIONS,
        func in CONTIGUOUS_OUTPUTS,
    )


class Inside(NamedTuple):
    """The memory inside a call, but for the workspaces that depend on calls before."""

    note: str
    steps: tuple[InnerStep, ...]
    multiplies: bool
    alone: OpScratch


_INSIDE: dict[CudaTarget, Calls[Inside]] = defaultdict(Calls)


class CudaOps:
    """Op semantics of a CUDA card, for ``StorageLog``.

    ``in_backward`` is set by the trace: the autograd engine has a thread, and so a
    cuBLAS handle and workspace, of its own.
    """

    def __init__(self, target: CudaTarget) -> None:
        self.target = target
        self.in_backward = False
        self.in_optimizer = False
        self.notes: set[str] = set()
        self._workspaces = CublasWorkspaces(target)
        self._inside = _INSIDE[target]

    def run(
        self,
        run: RunOp,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run an op as CUDA would."""
        if self.in_backward:
            replaced = _by_autograd(run, func, args, kwargs)
            if replaced is not None:
                return replaced
        if self.in_optimizer and func is aten._local_scalar_dense.default:
            try:
                return run(func, args, kwargs)
            except DataDependentOutputException:
                # A GradScaler asks whether it found an infinity; a step that is
                # skipped would show less memory than one that is taken.
                return 0.0
        nature = _nature(func)
        out = None if nature.makes is None else nature.makes(*args, **kwargs)
        if out is not None:
            return out
        if nature.padded:
            with _whole_storages(args):
                return run(func, args, kwargs)
        return self._as_made_by_cuda(nature, run(func, args, kwargs))

    def _as_made_by_cuda(self, nature: Nature, out: Any) -> Any:  # noqa: ANN401
        """Return outputs with the dtypes and strides that CUDA's kernels give them."""
        if nature.fp32_statistics and out[0].dtype in HALF:
            return (out[0], *(statistic.float() for statistic in out[1:]))
        if nature.contiguous or (nature.convolution and not self.target.cudnn):
            return tree_map_only(torch.Tensor, torch.Tensor.contiguous, out)
        return out

    def scratch(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,  # noqa: ANN401
        call: Key | None = None,
    ) -> OpScratch:
        """Return the op's scratch and, at a thread's first product, the workspace."""
        known = None if call is None else self._inside.get(call)
        if known is None:
            known = self._look_inside(func, args, kwargs, out)
            if call is not None:
                self._inside.keep(call, known)
        if known.note:
            self.notes.add(known.note)
        lasting: list[ScratchRow] = []
        passing: list[ScratchRow] = []
        if known.multiplies or not known.steps:  # a depthwise one multiplies by itself
            thread = "autograd" if self.in_backward else "main"
            lasting, passing = self._workspaces.of(func, args, kwargs, out, thread)
        if not known.steps and not lasting and not passing:
            return known.alone
        alone = known.alone._replace(steps=log_steps(known.steps, passing, lasting))
        if known.multiplies:  # the steps say themselves when they do
            return alone
        return alone._replace(lasting=lasting, after=[*alone.after, *passing])

    def _look_inside(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,  # noqa: ANN401
    ) -> Inside:
        attention = func in CUDNN_ATTENTION
        unknown = attention or (func in CUDNN_OPS and self.target.cudnn)
        note = CUDNN_ATTENTION_NOTE if attention else CUDNN_NOTE
        cudnn = func in CONVOLUTIONS and self.target.cudnn
        steps = () if cudnn else steps_of(func, args, kwargs, out)
        before: list[ScratchRow] = []
        after: list[ScratchRow] = []
        for scratch in temporaries_of(func, args, kwargs, out):
            (before if scratch.when == "before" else after).extend(rows_of(scratch))
        alone = OpScratch(
            before=before,
            after=after,
            output_bytes=output_bytes_of(func, args, kwargs, out),
            host_outputs=self._host_outputs(func, args),
            unverified=str(func) if unknown or not is_verified(func, args) else "",
        )
        multiplies = any(isinstance(step, Product) for step in steps)
        return Inside(
            note if unknown else "",
            steps,
            multiplies,
            NO_SCRATCH if alone == NO_SCRATCH else alone,
        )

    def _host_outputs(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...]
    ) -> tuple[int, ...]:
        if func is EFFICIENT_ATTENTION:
            dropout = args[5] if len(args) > 5 else 0.0  # noqa: PLR2004 - its position
            version = self.target.torch_version
            if not dropout and version >= SEED_ON_CARD_VERSION:
                return ()
        return HOST_OUTPUTS.get(func, ())


def _by_autograd(
    run: RunOp,
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401
    """Return what autograd does in place for plain tensors; None for all other ops.

    For subclasses, as fakes are, it does the same out of place.
    """
    if func is ADD and not kwargs:
        return _accumulated_in_place(run, *args)
    if func is INDEX_PUT:
        node = torch._C._current_autograd_node()
        if node is not None and node.name() == "IndexBackward0":
            return run(aten._index_put_impl_.default, (*args, True), kwargs)
    return None


def _whole_storages(args: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Return a context in which outputs own all that was made for them.

    The fakes' cache makes outputs of padded rows anew, and without the last padding.
    """
    mode = detect_fake_mode(args)
    return nullcontext() if mode is None else disable_fake_tensor_cache(mode)


def _accumulated_in_place(run: RunOp, old: Any, new: Any) -> torch.Tensor | None:  # noqa: ANN401
    """Add where gradients meet, in place when CUDA would (cuda-memory M49).

    The autograd engine adds in place unless the tensor is a subclass or a mode is
    active, both of which are true here. Outside the engine (grad mode on: a
    recomputation) the model's own additions stay as they are.

    Source: torch/csrc/autograd/input_buffer.cpp, ``can_accumulate_inplace``.
    """
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
        return None
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return None
    if old.shape != new.shape or old.dtype != new.dtype:
        return None
    return run(aten.add_.Tensor, (old, new), {}) if _owned(old) else None


def _owned(tensor: torch.Tensor) -> bool:
    """Whether only the engine's buffer holds this tensor and its storage."""
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return (
        torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
        and uses <= OWNED_TENSOR
        and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
        <= OWNED_STORAGE
    )


# Use counts of a tensor that only the engine holds, as seen from inside a dispatch
# mode: the buffer and the Python objects of this call.
OWNED_TENSOR = 4
OWNED_STORAGE = 2
