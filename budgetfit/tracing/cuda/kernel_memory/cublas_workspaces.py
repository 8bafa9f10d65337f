"""The workspaces of cuBLAS and cuBLASLt: which product takes which, and for how long.

Both come from the caching allocator. Which of the two libraries multiplies is decided
by ``addmm``'s arguments alone. Sources: ``aten/src/ATen/native/cuda/Blas.cpp``
(``isInputCompliesAddmmCudaLt``) and ``aten/src/ATen/cuda/CublasHandlePool.cpp``;
cuda-memory M15 to M18. Every kind of summand was tried on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from budgetfit.memory.kernel_rules.workspaces import (
    cublas_workspace_stays,
    cublaslt_workspace_is_separate,
)
from budgetfit.tracing.records import ScratchRow

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
# Without cuDNN a convolution is a product of unfolded patches.
CONVOLUTIONS = frozenset({aten.convolution, aten.convolution_backward})
HALF = (torch.float16, torch.bfloat16)
# From this version on cuBLASLt also adds a whole matrix, in half precision.
LT_MATRIX_VERSION = (2, 15)


class CublasWorkspaces:
    """The workspaces of one trace: which thread has which already."""

    def __init__(self, target: CudaTarget) -> None:
        version = "{}.{}".format(*target.torch_version)
        self._target = target
        self._stays = cublas_workspace_stays(version)
        self._separate = cublaslt_workspace_is_separate(version)
        self._kept: set[tuple[str, str]] = set()

    def of(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,  # noqa: ANN401 - whatever the op returns
        thread: str,
    ) -> tuple[list[ScratchRow], list[ScratchRow]]:
        """Return the workspaces that stay from now on, and those of this op alone.

        Each thread has cuBLAS handles, and so workspaces, of its own.
        """
        packet = func.overloadpacket
        if packet not in CUBLAS_OPS and (
            packet not in CONVOLUTIONS or self._target.cudnn
        ):
            return [], []
        plain = ScratchRow("cublas_workspace", self._target.torch_version, 0)
        lt = ScratchRow("cublaslt_workspace", (), 0)
        version = self._target.torch_version
        in_lt = self._separate and in_cublaslt(func, args, kwargs, out, version)
        if not self._stays:
            outer = packet is aten.bmm and args[0].shape[-1] == 1  # multiplied singly
            return [], [] if outer else [lt if in_lt else plain]
        wanted = [plain, lt] if in_lt else [plain]  # the handle brings the first
        new = [row for row in wanted if (thread, row.rule) not in self._kept]
        self._kept |= {(thread, row.rule) for row in new}
        return new, []


def in_cublaslt(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,  # noqa: ANN401 - whatever the op returns
    torch_version: tuple[int, int],
) -> bool:
    """Say whether cuBLASLt runs this product, which then adds the bias as it goes.

    The summand has to lie in one piece, as a row for all rows of the output; a column
    alone or a sum over one number only is left to cuBLAS.
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
