"""The models whose steps were published, built from a row's ``spec``.

timm's models need timm, which imports torchvision; only its names are needed, and they
are stood in for where it cannot be loaded.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch.nn import functional

Case = tuple[nn.Module, Any, Any]


def build(spec: dict[str, Any]) -> Case:
    """Return a model, a batch of two samples, and a loss (None for the model's own)."""
    return _BUILDERS[spec["kind"]](spec)


# --- GPT-2 as written by hand in nanoGPT, llm-foundry and LLMs-from-scratch ---


class LayerNorm(nn.Module):
    """Layer norm with an optional bias; ``by_hand`` as LLMs-from-scratch writes it."""

    def __init__(self, width: int, *, bias: bool, by_hand: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias or by_hand else None
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        if not self.by_hand:
            return functional.layer_norm(
                x, self.weight.shape, self.weight, self.bias, 1e-5
            )
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.weight * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.bias


class HandWrittenGelu(nn.Module):
    """GELU by its tanh approximation, op by op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return GELU of each element."""
        scale = torch.sqrt(torch.tensor(2.0 / torch.pi, dtype=x.dtype))
        return 0.5 * x * (1 + torch.tanh(scale * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    """Causal attention, by SDPA (``flash``) or op by op (``eager``)."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        width = spec["d"]
        self.heads, self.dropout = spec["h"], spec.get("drop", 0.0)
        self.flash = spec.get("attn", "flash") == "flash"
        separate, bias = spec.get("sep", False), spec.get("bias", True)
        self.projections = nn.ModuleList(
            [nn.Linear(width, width, bias=False) for _ in range(3)]
            if separate
            else [nn.Linear(width, 3 * width, bias=spec.get("qkv_bias", bias))]
        )
        self.out = nn.Linear(width, width, bias=bias)
        if not self.flash:
            mask = torch.tril(torch.ones(spec["T"], spec["T"]))
            self.register_buffer("mask", mask[None, None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend; (batch, length, width) in and out."""
        batch, length, width = x.shape
        found = [each(x) for each in self.projections]
        parts = found if len(found) > 1 else found[0].split(width, dim=2)
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        dropout = self.dropout if self.training else 0.0
        if self.flash:
            y = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True
            )
        else:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(
                self.mask[:, :, :length, :length] == 0, -torch.inf
            )
            shares = functional.softmax(scores, dim=-1)
            y = (functional.dropout(shares, dropout) if dropout else shares) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        width, by_hand = spec["d"], spec.get("naive", False)
        bias = spec.get("bias", True)
        self.ln1 = LayerNorm(width, bias=bias, by_hand=by_hand)
        self.attention = Attention(spec)
        self.ln2 = LayerNorm(width, bias=bias, by_hand=by_hand)
        bias = bias or spec.get("sep", False)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.act = HandWrittenGelu() if by_hand else nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * width, width, bias=bias)
        self.dropout = spec.get("drop", 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream behind this block."""
        x = x + self._dropped(self.attention(self.ln1(x)))
        return x + self._dropped(self.down(self.act(self.up(self.ln2(x)))))

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training) if self.dropout else x


class Gpt(nn.Module):
    """GPT-2 with learned positions; returns logits."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        width = spec["d"]
        self.tokens = nn.Embedding(spec["V"], width)
        self.positions = nn.Embedding(spec["T"], width)
        self.blocks = nn.ModuleList([Block(spec) for _ in range(spec["L"])])
        self.ln = LayerNorm(
            width, bias=spec.get("bias", True), by_hand=spec.get("naive", False)
        )
        self.head = nn.Linear(width, spec["V"], bias=False)
        if spec.get("tie", True):
            self.head.weight = self.tokens.weight
        self.dropout = spec.get("drop", 0.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits: (batch, length, vocabulary)."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(at)
        x = functional.dropout(x, self.dropout, self.training) if self.dropout else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def _token_loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), batch[1].view(-1))


def _gpt(spec: dict[str, Any]) -> Case:
    with torch.device("meta"):
        model = _in_half(Gpt(spec), spec)
    tokens = torch.zeros(2, spec["T"], dtype=torch.long)
    return model, (tokens, tokens.clone()), _token_loss


# --- transformers ---


def _transformers(spec: dict[str, Any]) -> Case:
    config = transformers.AutoConfig.for_model(**spec["config"])
    config._attn_implementation = spec.get("attn", "eager")
    config.use_cache = False
    with torch.device("meta"):
        model = getattr(transformers, spec["cls"])._from_config(config)
    model = _in_half(model.train(), spec)
    tokens = torch.zeros(2, spec["T"], dtype=torch.long)
    if spec.get("sumlogits"):
        return model, {"input_ids": tokens}, lambda out, _: out.logits.sum()
    if spec["cls"].endswith("QuestionAnswering"):
        place = torch.zeros(2, dtype=torch.long)
        positions = {"start_positions": place, "end_positions": place.clone()}
        return model, {"input_ids": tokens, **positions}, None
    return model, {"input_ids": tokens, "labels": tokens.clone()}, None


class OneLayer(nn.Module):
    """One layer of a transformer, by itself."""

    def __init__(self, layer: nn.Module, *, cross: bool) -> None:
        super().__init__()
        self.layer, self.cross = layer, cross

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's first output; (batch, length, 1024) in and out."""
        out = self.layer(x, encoder_hidden_states=x) if self.cross else self.layer(x)
        return out[0] if isinstance(out, tuple) else out


def _one_layer(spec: dict[str, Any]) -> Case:
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.t5.modeling_t5 import T5Block

    name = spec["layer"]
    config: Any
    if name == "bert-large":
        config = transformers.BertConfig(
            hidden_size=1024, num_attention_heads=16, intermediate_size=4096
        )
        make = BertLayer
    elif name == "gpt2-medium":
        config = transformers.GPT2Config(n_embd=1024, n_head=16)
        make = GPT2Block
    else:
        config = transformers.T5Config(
            d_model=1024, d_ff=4096, d_kv=64, num_heads=16, use_cache=False
        )
        config.is_encoder_decoder, config.is_decoder = False, name == "t5-dec"
        make = T5Block
    config._attn_implementation = "eager"
    layer = make(config) if make is BertLayer else make(config, layer_idx=0)
    model = OneLayer(layer, cross=name == "t5-dec").half().train()
    x = torch.randn(2, spec["T"], 1024, dtype=torch.half)
    return model, (x,), lambda out, _: out.sum()


def _in_half(model: nn.Module, spec: dict[str, Any]) -> nn.Module:
    return model.to(getattr(torch, spec["half"])) if spec.get("half") else model


# --- timm ---


class _AnyAttribute(type):
    """Classes with every attribute: its name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _NamesOnly(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes ``torchvision`` importable: any name is an empty class."""

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        def any_name(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return _AnyAttribute(name, (), {})

        module = ModuleType(spec.name)
        module.__version__ = "0"  # type: ignore[attr-defined]
        module.__getattr__ = any_name  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _timm(spec: dict[str, Any]) -> Case:
    try:
        import timm
    except (ImportError, RuntimeError):
        for name in [n for n in sys.modules if n.partition(".")[0] in _VISION]:
            del sys.modules[name]
        sys.meta_path.insert(0, _NamesOnly())
        import timm
    timm.layers.set_fused_attn(False)  # the tables are of torch 1.12: before fused ones
    model = timm.create_model(spec["model"], num_classes=1000)
    size = spec["img"]
    images = torch.randn(2, 3, size, size)
    if spec.get("layout") == "nhwc":
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    return model, (images, torch.zeros(2, dtype=torch.long)), _class_loss


def _class_loss(out: Any, batch: Any) -> torch.Tensor:
    logits = out[0] if isinstance(out, (tuple, list)) else out
    return functional.cross_entropy(logits, batch[1])


_VISION: Final = ("timm", "torchvision")
_BUILDERS: Final = {
    "gpt": _gpt,
    "hf": _transformers,
    "layer": _one_layer,
    "timm": _timm,
}
