"""FakeTensorFactory: create fake CPU tensors without torch's per-device checks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from budgetfit.tracing.call_cache import CPU


def strides_on_cuda(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that ``tensor.to("cuda")`` has: that copies all elements."""
    # Expanded tensors, whose elements share memory, are contiguous there.
    is_dense = torch._prims_common.is_non_overlapping_and_dense_or_false
    if tensor.is_cuda or is_dense(tensor):
        return tensor.stride()
    return torch._prims_common.make_contiguous_strides_for(tensor.shape)


class FakeTensorFactory:
    """Creates fake tensors of one FakeTensorMode, below the active dispatch modes.

    Attributes:
        fast_path: Whether the factory's fakes equal those of this torch. Otherwise
            torch creates them, at several times the cost.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._attributes: dict[str, Any] = {}
        self.fast_path = self._equals_torch()

    def empty(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a fake with a new storage, like ``torch.empty_strided``."""
        if not self.fast_path:
            with self.mode:
                return torch.empty_strided(shape, stride, dtype=dtype)
        guard = torch._C._DisableTorchDispatch()
        inner = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        del guard
        return self._fake(inner)

    def parameter(self, like: torch.Tensor) -> nn.Parameter:
        """Return a fake parameter with a tensor's shape, strides and dtype."""
        fake: Any = self.empty(like.shape, strides_on_cuda(like), like.dtype)
        if not self.fast_path:
            return nn.Parameter(fake, requires_grad=like.requires_grad)
        vars(fake)["_is_param"] = True
        return fake.requires_grad_(like.requires_grad)

    def view(
        self,
        fake: torch.Tensor,
        shape: Sequence[int],
        stride: Sequence[int],
        offset: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return a view: another fake on the same storage."""
        guard = torch._C._DisableTorchDispatch()
        inner = torch.empty_strided((0,), (1,), dtype=dtype, device="meta")
        inner.set_(fake.untyped_storage(), offset, shape, stride)
        torch._C._autograd._unsafe_set_version_counter((inner,), (0,))  # set_ counts
        del guard
        return self._fake(inner)

    def _fake(self, inner: torch.Tensor) -> torch.Tensor:
        """Return what ``FakeTensor(self.mode, inner, "cpu")`` returns."""
        fake = torch.Tensor._make_subclass(
            FakeTensor, inner, dispatch_device=True, device_for_backend_keys=CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes)
        return fake

    def _equals_torch(self) -> bool:
        """Whether a fake made here has the dispatch keys and attributes of torch's."""
        try:
            guard = torch._C._DisableTorchDispatch()
            inner = torch.empty_strided((0,), (1,), device="meta")
            del guard
            torchs = FakeTensor(self.mode, inner, CPU)
            self._attributes = dict(vars(torchs))
            own = self._fake(inner)
            keys = torch._C._dispatch_key_set
            return keys(own) == keys(torchs) and vars(own) == vars(torchs)
        except (AttributeError, TypeError):  # private names, and other in another torch
            return False
