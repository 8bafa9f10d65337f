"""Workspaces of cuBLAS and cuBLASLt: which matrix product uses which, and how long.

Both come from the caching allocator. The arguments of ``addmm`` decide which library
runs it. Sources: ``aten/src/ATen/native/cuda/Blas.cpp``
(``isInputCompliesAddmmCudaLt``) and ``aten/src/ATen/cuda/CublasHandlePool.cpp``. Every
kind of summand was tried on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from budgetfit.memory.scratch_sizes.workspaces import (
    cublas_workspace_is_persistent,
    cublaslt_workspace_is_separate,
)
from budgetfit.tracing.records import ScratchBuffer

if TYPE_CHECKING:
    from torch import Tensor

    from budgetfit.tracing.cuda.target import CudaTarget

aten = torch.ops.aten

CUBLAS_OPS = frozenset(
    {
        aten.mm,
        aten.addmm,
        aten.addmm_,
        aten.bmm,
        aten.baddbmm,
        aten.baddbmm_,
        aten.mv,
        aten.addmv,
        aten.dot,
        aten.vdot,
        aten._addmm_activation,
    }
)
# Without cuDNN a convolution is a matrix product of im2col columns.
CONVOLUTIONS = frozenset({aten.convolution, aten.convolution_backward})
HALF = (torch.float16, torch.bfloat16)
# From this version on cuBLASLt also adds a whole matrix, in half precision.
LT_MATRIX_VERSION = (2, 15)


class CublasWorkspaces:
    """cuBLAS workspaces of one trace, by thread."""

    def __init__(self, target: CudaTarget) -> None:
        version = "{}.{}".format(*target.torch_version)
        self._target = target
        self._persistent = cublas_workspace_is_persistent(version)
        self._separate = cublaslt_workspace_is_separate(version)
        self._kept: set[tuple[str, str]] = set()

    def of(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        thread: str,
    ) -> tuple[list[ScratchBuffer], list[ScratchBuffer]]:
        """Return the new persistent workspaces, and those of this op only.

        Each thread has its own cuBLAS handle, and so its own workspaces.
        """
        packet = func.overloadpacket
        if packet not in CUBLAS_OPS and (
            packet not in CONVOLUTIONS or self._target.cudnn
        ):
            return [], []
        plain = ScratchBuffer("cublas_workspace", self._target.torch_version, 0)
        lt = ScratchBuffer("cublaslt_workspace", (), 0)
        version = self._target.torch_version
        in_lt = self._separate and in_cublaslt(func, args, kwargs, out, version)
        if not self._persistent:
            outer = packet is aten.bmm and args[0].shape[-1] == 1  # no cuBLAS product
            return [], [] if outer else [lt if in_lt else plain]
        wanted = [plain, lt] if in_lt else [plain]  # the handle allocates the first
        new = [row for row in wanted if (thread, row.rule) not in self._kept]
        self._kept |= {(thread, row.rule) for row in new}
        return new, []


def in_cublaslt(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    torch_version: tuple[int, int],
) -> bool:
    """Return whether cuBLASLt runs this product, with the bias in its epilogue.

    The summand must be contiguous and a row for all rows of the output; an inner or
    output dimension of 1 is left to cuBLAS.
    """
    if func.overloadpacket is aten._addmm_activation:
        with_matrix = True
    elif func is aten.addmm.default:
        with_matrix = torch_version >= LT_MATRIX_VERSION and out.dtype in HALF
    else:
        return False
    summand: Tensor = args[0]
    inner, columns = args[2].shape
    if inner < 2 or columns < 2 or not summand.is_contiguous():  # noqa: PLR2004
        return False
    beta = kwargs.get("beta", 1)
    if beta == 1 and summand.shape in ((columns,), (1, columns)):
        return True
    return bool(with_matrix and summand.shape == out.shape and beta != 0)
