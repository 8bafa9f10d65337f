"""The attention calls that a CUDA build was asked about, in a fixed order."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

BATCH = 2
HEADS = 4
LENGTH = 16
HEAD_DIMS = (4, 8, 20, 36, 40, 64, 80, 128, 136, 192, 200, 224, 232, 256, 264)
DTYPES = ("float32", "float16", "bfloat16", "float64")


class Call(NamedTuple):
    """One call of ``scaled_dot_product_attention``; see ``tensors`` for its layout."""

    dtype: str
    head_dim: int = 64
    value_dim: int = 0  # 0: the same
    key_heads: int = HEADS
    queries: int = LENGTH
    keys: int = LENGTH
    mask: str = ""
    dropout: float = 0.0
    causal: bool = False
    gqa: bool = False
    needs_grad: bool = True
    offset: int = 0  # of all three in their storages, in elements

    def tensors(self, device: str) -> tuple[torch.Tensor | None, ...]:
        """Return query, key, value and mask."""
        value_dim = self.value_dim or self.head_dim
        return (
            self._heads(device, HEADS, self.queries, self.head_dim),
            self._heads(device, self.key_heads, self.keys, self.head_dim),
            self._heads(device, self.key_heads, self.keys, value_dim),
            self._mask(device),
        )

    def _heads(self, device: str, heads: int, length: int, dim: int) -> torch.Tensor:
        """[batch, heads, length, dim], a view of [batch, length, heads, dim]."""
        shape = (BATCH, length, heads, dim)
        count = BATCH * length * heads * dim
        flat = self._empty(device, count + self.offset)
        tensor = flat[self.offset :].view(shape).transpose(1, 2)
        return tensor.detach().requires_grad_(self.needs_grad)

    def _mask(self, device: str) -> torch.Tensor | None:
        if not self.mask:
            return None
        per_sample = (BATCH, 1, self.queries, self.keys)
        if self.mask == "bool":
            return torch.empty(per_sample, device=device, dtype=torch.bool)
        if self.mask == "learned":
            return self._empty(device, *per_sample).requires_grad_()
        if self.mask == "expanded":
            return self._empty(device, BATCH, 1, self.queries, 1).expand(per_sample)
        shapes = {
            "float": per_sample,
            "2d": per_sample[2:],
            "3d": (HEADS, *per_sample[2:]),
        }
        return self._empty(device, *shapes[self.mask])

    def _empty(self, device: str, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=getattr(torch, self.dtype))


def calls() -> Iterator[Call]:
    """Yield the calls: a grid, and what has a rule of its own."""
    modes = ((0.0, False), (0.1, False), (0.5, True))
    for dtype, dim, (dropout, causal) in product(DTYPES, HEAD_DIMS, modes):
        for mask, grad, key_heads in product(("", "bool"), (True, False), (HEADS, 2)):
            if not (mask and causal):
                yield Call(
                    dtype,
                    dim,
                    mask=mask,
                    dropout=dropout,
                    causal=causal,
                    key_heads=key_heads,
                    gqa=key_heads < HEADS,
                    needs_grad=grad,
                )
    for dtype in DTYPES:
        yield from _special(dtype)


def _special(dtype: str) -> Iterator[Call]:
    yield Call(dtype, 192, 128)
    yield Call(dtype, 192, 128, mask="bool")
    yield Call(dtype, 128, 192)
    yield Call(dtype, 256, 128)
    yield Call(dtype, keys=24)
    yield Call(dtype, keys=24, causal=True)
    for dropout in (0.0, 0.1, 0.5):
        for mask in ("2d", "3d", "float", "learned", "expanded"):
            yield Call(dtype, mask=mask, dropout=dropout)
    for mask in ("", "bool"):
        yield Call(dtype, key_heads=2, mask=mask)
        yield Call(dtype, key_heads=3, mask=mask, gqa=True)
        yield Call(dtype, key_heads=1, mask=mask, gqa=True)
        yield Call(dtype, keys=1, mask=mask)
        yield Call(dtype, queries=1, mask=mask)
        yield Call(dtype, queries=1, mask=mask, dropout=0.5)
        yield Call(dtype, queries=1, keys=1, mask=mask)
        for offset in (1, 2, 4, 8):
            yield Call(dtype, mask=mask, offset=offset)
        for dropout in (0.0625, 0.125, 0.2):
            yield Call(dtype, mask=mask, dropout=dropout)
