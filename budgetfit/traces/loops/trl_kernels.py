"""TRL's fused head on CUDA: its kernels allocate nothing, and fakes cannot run them.

TRL 1.16 (trl/kernels/chunked_logprob.py) chooses by the device between Triton kernels
and torch ops, which allocate tiles of the logits. In a trace the fakes stand for CUDA
tensors, so the Triton branch is taken, and its kernels, which work in place, are left
out. A test compares that file with what is assumed here.
"""

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from budgetfit.memory.scratch_sizes.rules import ceil_div
from budgetfit.tracing.cuda.triton.launches import launch

_KERNELS = ("_forward_kernel", "_backward_kernel")


@contextlib.contextmanager
def trl_kernels_on_fakes() -> Iterator[None]:
    """Let TRL's fused head run on fake tensors as on CUDA."""
    kernels: Any = importlib.import_module("trl.kernels.chunked_logprob")
    trainers: Any = importlib.import_module("trl.trainer.utils")
    in_place = _InPlaceKernel()
    with contextlib.ExitStack() as stack:
        for module in (kernels, trainers):
            stack.enter_context(
                mock.patch.object(module, "_use_triton", return_value=True)
            )
        for name in _KERNELS:
            stack.enter_context(mock.patch.object(kernels, name, in_place))
        stack.enter_context(mock.patch.object(kernels, "_addmm_fp32", _add_product))
        stack.enter_context(
            mock.patch.object(
                kernels, "triton", types.SimpleNamespace(cdiv=ceil_div), create=True
            )
        )
        yield


class _InPlaceKernel:
    """A kernel that writes to its arguments; called as ``kernel[grid](...)``."""

    def __getitem__(self, _: object) -> Callable[..., None]:
        return partial(launch, self)


def _add_product(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``acc += a @ b`` without a temporary, as ``torch.addmm(..., out=acc)`` on CUDA.

    Written with a dtype that fakes on the CPU multiply; sizes and time are the same.
    """
    torch.mm(a, b, out=_of_dtype(acc, a.dtype))


def _of_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the beginning of a tensor's storage, seen as another dtype."""
    if tensor.dtype == dtype:
        return tensor
    flat = tensor.view(dtype)
    return flat[..., : tensor.shape[-1]]
