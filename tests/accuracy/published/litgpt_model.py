"""LitGPT's decoder with LoRA on queries and values, in plain torch, as a test needs it.

What its published fine-tuning runs trained: one fused projection for queries, keys and
values with one LoRA pair beside it whose result is padded with zeros, norms in fp32,
and a cross entropy of 128 tokens at a time.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

RANK = 32
DROPOUT = 0.05
CHUNK = 128  # tokens of the loss at a time


@dataclass(frozen=True, kw_only=True)
class GptShape:
    """What decides the memory of one of LitGPT's models."""

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    groups: int | None = None  # of queries; None: as many as heads
    head: int | None = None  # width of one; None: width / heads
    mlp: Literal["llama", "gemma", "neox"] = "llama"
    norm: Literal["rms", "layer"] = "rms"
    bias: bool = False
    parallel: bool = False  # attention and MLP read the same input
    shared_norm: bool = False
    sandwich: bool = False  # norms behind attention and MLP as well (Gemma 2)
    softcapped: bool = False  # scores and logits go through tanh (Gemma 2)
    rotary: float = 1.0


class RmsNorm(nn.Module):
    """In fp32, whatever comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * self.weight


class LoraQkv(nn.Module):
    """The fused projection; queries and values have a low-rank update."""

    def __init__(self, shape: GptShape, queries: int, keys: int) -> None:
        super().__init__()
        self.sizes = (queries, keys)
        self.linear = nn.Linear(shape.width, queries + 2 * keys, bias=shape.bias)
        self.a = nn.Parameter(torch.empty(2 * RANK, shape.width))
        self.b = nn.Parameter(torch.zeros(queries + keys, RANK))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = self.linear(x)
        queries, keys = self.sizes
        low = functional.linear(self.dropout(x), self.a)
        parts = zip(low.split(RANK, -1), self.b.split((queries, keys)), strict=True)
        update = torch.cat([functional.linear(part, b) for part, b in parts], -1) / RANK
        padded = update.new_zeros(*x.shape[:-1], queries + 2 * keys)
        padded[..., :queries] = update[..., :queries]
        padded[..., queries + keys :] = update[..., queries:]
        return plain + padded


class LoraLinear(nn.Module):
    """A frozen layer with a low-rank update, where a recipe asks for it everywhere."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        weight = base.weight
        self.a = nn.Parameter(weight.new_empty(RANK, base.in_features))
        self.b = nn.Parameter(weight.new_empty(base.out_features, RANK))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (self.dropout(x) @ self.a.T @ self.b.T) / RANK


class Attention(nn.Module):
    """Grouped queries, rotary positions, scaled dot products."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.groups = shape.groups or shape.heads
        self.head = shape.head or shape.width // shape.heads
        self.softcapped = shape.softcapped
        self.rotated = int(shape.rotary * self.head)
        queries, keys = self.heads * self.head, self.groups * self.head
        self.qkv = LoraQkv(shape, queries, keys)
        self.proj = nn.Linear(queries, shape.width, bias=shape.bias)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        batch, length, _ = x.shape
        per_group = self.heads // self.groups
        qkv = self.qkv(x).view(batch, length, self.groups, per_group + 2, self.head)
        q, k, v = qkv.permute(0, 2, 3, 1, 4).split((per_group, 1, 1), dim=2)
        if self.groups != self.heads:
            k = k.expand(-1, -1, per_group, -1, -1)
            v = v.expand(-1, -1, per_group, -1, -1)
        q, k, v = (t.reshape(batch, -1, length, self.head) for t in (q, k, v))
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        if self.softcapped:
            y = _softcapped_attention(q, k, v)
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, -1))

    def _rotate(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        turned = x[..., : self.rotated]
        one, two = turned.chunk(2, -1)
        turned = turned * cos + torch.cat((-two, one), -1) * sin
        return torch.cat((turned, x[..., self.rotated :]), -1)


def _softcapped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Step by step: no fused kernel of that time caps scores."""
    length = q.size(2)
    scores = torch.tanh(q @ k.mT * 0.0625 / 50.0) * 50.0
    ones = torch.ones(length, length, dtype=q.dtype, device=q.device)
    mask = ones.triu(diagonal=1)
    mask = mask.masked_fill(mask.bool(), torch.finfo(q.dtype).min)
    weights = functional.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return weights @ v


class Mlp(nn.Module):
    """Two or three projections."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.kind = shape.mlp
        self.fc_1 = nn.Linear(shape.width, shape.inner, bias=shape.bias)
        if shape.mlp != "neox":
            self.fc_2 = nn.Linear(shape.width, shape.inner, bias=shape.bias)
        self.proj = nn.Linear(shape.inner, shape.width, bias=shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "neox":
            return self.proj(functional.gelu(self.fc_1(x)))
        one, two = self.fc_1(x), self.fc_2(x)
        gate = (
            functional.silu(one)
            if self.kind == "llama"
            else functional.gelu(one, approximate="tanh")
        )
        return self.proj(gate * two)


class Block(nn.Module):
    """Attention and MLP, one after the other or side by side."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()

        def norm() -> nn.Module:
            width = shape.width
            return RmsNorm(width) if shape.norm == "rms" else nn.LayerNorm(width)

        self.parallel = shape.parallel
        self.norm_1 = norm()
        self.norm_2 = None if shape.shared_norm else norm()
        self.attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.after_attn = norm() if shape.sandwich else nn.Identity()
        self.after_mlp = norm() if shape.sandwich else nn.Identity()

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        normed = self.norm_1(x)
        attention = self.after_attn(self.attn(normed, cos, sin))
        if self.parallel:
            if self.norm_2 is not None:
                normed = self.norm_2(x)
            return self.mlp(normed) + attention + x
        x = attention + x
        assert self.norm_2 is not None
        return self.after_mlp(self.mlp(self.norm_2(x))) + x


class Gpt(nn.Module):
    """The whole model; only LoRA's pairs are trained unless ``full``."""

    def __init__(self, shape: GptShape, length: int, *, full: bool = False) -> None:
        super().__init__()
        self.softcapped = shape.softcapped
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = (
            RmsNorm(shape.width) if shape.norm == "rms" else nn.LayerNorm(shape.width)
        )
        self.lm_head = nn.Linear(
            shape.width, shape.vocabulary, bias=shape.bias and shape.shared_norm
        )
        head = self.h[0].attn.rotated
        self.register_buffer("cos", torch.empty(length, head))
        self.register_buffer("sin", torch.empty(length, head))
        for name, parameter in self.named_parameters():
            is_lora = name.endswith(("qkv.a", "qkv.b"))
            parameter.requires_grad_(is_lora != full)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x, self.cos, self.sin)
        logits = [self.lm_head(part) for part in self.ln_f(x).split(CHUNK, dim=1)]
        if self.softcapped:
            logits = [torch.tanh(part / 30.0) * 30.0 for part in logits]
        logits[-1] = logits[-1][:, :-1]
        targets = labels[:, 1:].split(CHUNK, dim=1)
        losses = [
            functional.cross_entropy(
                part.reshape(-1, part.size(-1)), target.reshape(-1), reduction="none"
            )
            for part, target in zip(logits, targets, strict=True)
        ]
        return torch.cat(losses).sum() / labels.numel()
