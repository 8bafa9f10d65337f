"""Matrix products: copies for cuBLAS, and the workspaces of cuBLAS and cuBLASLt.

cuBLAS gets a copy of a matrix with stride 1 in neither dimension. The workspaces come
from the caching allocator; the arguments of ``addmm`` decide which library runs it.
Sources: ``prepare_matrix_for_cublas``, ``prepare_batch_matrix_for_cublas`` and
``isInputCompliesAddmmCudaLt`` in ``aten/src/ATen/native/cuda/Blas.cpp``, and
``aten/src/ATen/cuda/CublasHandlePool.cpp``. Every kind of summand was tried on torch
2.11, 2.13 and 2.15.
"""

from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch import Tensor

from budgetfit.core.step_trace import KernelScratch
from budgetfit.memory.scratch_sizes.matmul import (
    cublas_workspace_is_persistent,
    cublaslt_workspace_is_separate,
)
from budgetfit.tracing.cuda.kernel_memory.registry import (
    HALVES,
    Call,
    Gemm,
    KernelStep,
    Steps,
    Unverified,
    buffer,
    copy_of,
    freed_at_once,
    kernel_memory,
    scratch,
)
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.records import Free, OpStep, Workspace

aten = torch.ops.aten
# From this version on cuBLASLt also adds a whole matrix, in half precision.
LT_MATRIX_VERSION = (2, 15)


def _copies(*matrices: Tensor) -> tuple[KernelScratch[int], ...]:
    return tuple(copy_of(matrix) for matrix in matrices if not readable(matrix))


def readable(matrix: Tensor) -> bool:
    """Return whether cuBLAS reads a matrix, or a batch of them, without a copy."""
    rows, columns = matrix.shape[-2:]
    row_step, column_step = matrix.stride()[-2:]
    if row_step == 1 and column_step >= max(1, rows):
        return True
    if column_step == 1 and row_step >= max(1, columns):
        return True
    return bool(matrix.is_contiguous())


@kernel_memory("mm", "bmm")
def product(call: Call) -> Steps:
    """A batch of outer products is not copied, and not cuBLAS's from 2.15 on."""
    if not call.out.numel():
        return
    if call.out.dim() == 2 or call.args[0].shape[-1] != 1:  # noqa: PLR2004 - a matrix
        yield Gemm(_copies(*call.args[:2]))
    elif cublas_workspace_is_persistent(call.target.torch_version):
        yield Gemm()


@kernel_memory("addmm", "baddbmm", "_addmm_activation")
def product_and_sum(call: Call) -> Steps:
    """The summand is copied into the output."""
    if call.out.numel():
        yield Gemm(_copies(*call.args[1:3]), in_cublaslt(call))


@kernel_memory("addbmm")
def sum_of_products(call: Call) -> Steps:
    """Copies for cuBLAS."""
    yield from _copies(*call.args[1:3])


@kernel_memory("mv", "addmv")
def product_with_vector(call: Call) -> Steps:
    """A vector is copied where it is one number, expanded."""
    matrix, vector = call.args[-2:]
    copies = _copies(matrix)
    if vector.numel() > 1 and not vector.stride(0):
        copies += (copy_of(vector),)
    yield Gemm(copies)


@kernel_memory("addmm_", "baddbmm_", "dot", "vdot")
def other_products(_call: Call) -> Steps:
    """Without copies."""
    yield Gemm()


@kernel_memory("_trilinear")
def trilinear(call: Call) -> Steps:
    """Two products one after the other, for each slice of one dimension."""
    # A product that sums over no dimension is elementwise, and its result as large as
    # both. Expanded and empty tensors are not represented. Source: ``_trilinear`` in
    # ``aten/src/ATen/native/Linear.cpp``.
    tensors, expanded, summed = call.args[:3], call.args[3:6], set(call.args[6])
    slices: int = call.get(7, 1)
    if any(0 in (*tensor.shape, *tensor.stride()) for tensor in tensors):
        yield Unverified()
    shapes = []
    for tensor, dims in zip(tensors, expanded, strict=True):
        sizes = list(tensor.shape)
        for dim in sorted(dims):
            sizes.insert(dim, 1)
        sizes[slices] = 1
        shapes.append(sizes)
    found, left = shapes[0], None
    for right, dims in (
        (shapes[1], summed.intersection(expanded[2])),
        (shapes[2], summed.difference(expanded[2])),
    ):
        dims.discard(slices)
        found = [
            1 if dim in dims else max(pair)
            for dim, pair in enumerate(zip(found, right, strict=True))
        ]
        if dims:
            yield Gemm()
        result = buffer(prod(found) * call.out.element_size())
        yield result
        if left is not None:
            yield Free(left)
        left = result


def in_cublaslt(call: Call) -> bool:
    """Return whether cuBLASLt runs this product, with the bias in its epilogue."""
    # The summand must be contiguous and a row for all rows of the output; an inner or
    # output dimension of 1 is left to cuBLAS.
    if call.func is aten.addmm.default:
        half = call.out.dtype in HALVES
        with_matrix = half and call.target.torch_version >= LT_MATRIX_VERSION
    elif call.func.overloadpacket is aten._addmm_activation:
        with_matrix = True
    else:
        return False
    summand: Tensor = call.args[0]
    inner, columns = call.args[2].shape
    if inner <= 1 or columns <= 1 or not summand.is_contiguous():
        return False
    beta = call.kwargs.get("beta", 1)
    if beta == 1 and summand.shape in ((columns,), (1, columns)):
        return True
    return with_matrix and summand.shape == call.out.shape and beta != 0


@kernel_memory("_grouped_mm")
def grouped_product(call: Call) -> Steps:
    """Workspace of the bf16 kernels of Hopper and Blackwell."""
    offsets, out = call.get(2), call.out
    if offsets is not None and not offsets.is_contiguous():
        yield Unverified()
    if out.dtype == torch.bfloat16:
        groups = out.shape[0] if offsets is None else offsets.numel()
        left, right = call.args[0].dim(), call.args[1].dim()
        rows, columns = (groups if right > left else 1), (groups if left > right else 1)
        yield from scratch(
            "grouped_matmul", groups, out.shape[-2], rows, out.shape[-1], columns
        )


class CublasWorkspaces:
    """cuBLAS workspaces of one trace.

    Each thread has its own cuBLAS handle, and so its own workspaces.
    """

    def __init__(self, target: CudaTarget) -> None:
        self._persistent = cublas_workspace_is_persistent(target.torch_version)
        self._lt_is_separate = cublaslt_workspace_is_separate(target.torch_version)
        self._plain = scratch("cublas_workspace", *target.torch_version)
        self._lt = scratch("cublaslt_workspace")
        self._kept: set[tuple[str, str]] = set()

    def steps(self, steps: Iterable[KernelStep], thread: str) -> Iterator[OpStep]:
        """Yield an op's steps with the workspaces that its products allocate."""
        for step in steps:
            if isinstance(step, Gemm):
                yield from self._of(step, thread)
            elif not isinstance(step, Unverified):
                yield step

    def _of(self, product: Gemm, thread: str) -> Iterator[OpStep]:
        in_lt = product.lt and self._lt_is_separate
        if not self._persistent:
            yield from product.copies
            yield from freed_at_once(*(self._lt if in_lt else self._plain))
            return
        for row in (*self._plain, *(self._lt if in_lt else ())):  # the handle's first
            if (thread, row.rule) not in self._kept:
                self._kept.add((thread, row.rule))
                yield Workspace(row)
        yield from product.copies
