"""torch's own modules, alone and in a row."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry

WIDTH = 16
_SMALL: dict[str, Any] = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 16}
_LAYERS = {"num_encoder_layers": 2, "num_decoder_layers": 2}


def encoder(*, batch_first: bool, layers: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(**_SMALL, batch_first=batch_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def decoder(*, batch_first: bool) -> nn.Module:
    layer = nn.TransformerDecoderLayer(**_SMALL, batch_first=batch_first)
    return nn.TransformerDecoder(layer, 2)


class CausalTransformer(nn.Module):
    """Tokens, positions, torch's encoder with a mask, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, WIDTH), nn.Embedding(32, WIDTH)
        self.encoder = encoder(batch_first=True, layers=3)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length).to(tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, x.device)
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class LastStep(nn.Module):
    """A recurrent layer and a head on its last output."""

    def __init__(self, recurrent: nn.Module, width: int) -> None:
        super().__init__()
        self.embed, self.recurrent = nn.Embedding(50, WIDTH), recurrent
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(tokens))[0][:, -1])


class AdaptiveSoftmax(nn.Module):
    """The loss is part of the layer, and its targets decide which clusters run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 100, [10, 50])

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(tokens).flatten(0, 1)
        return self.softmax(hidden, labels.flatten()).loss


class Ctc(nn.Module):
    """Speech recognition with torch's CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(8, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 6)

    def forward(self, waves: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.net(waves)[0]).log_softmax(-1).transpose(0, 1)
        long = torch.full((waves.shape[0],), scores.shape[0])
        return F.ctc_loss(scores, labels, long, torch.full_like(long, labels.shape[1]))


class Unpooled(nn.Module):
    """Max pooling that remembers where, and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.back = nn.Conv2d(3, 4, 7, 7), nn.Conv2d(4, 3, 3, padding=1)
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        pooled, where = self.pool(self.conv(x))
        return self.back(self.unpool(pooled, where))


class Lazy(nn.Module):
    """Shapes are known after the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LazyLinear(8), nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def lazy_after_a_batch() -> nn.Module:
    model = Lazy()
    model(torch.zeros(2, 6))
    return model


def norms(dimensions: int) -> nn.Module:
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    batch = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dimensions - 1]
    instance = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dimensions - 1]

    def cell(inside: int, norm: nn.Module) -> nn.Module:
        return nn.Sequential(convolution(inside, 8, 3, 4, 1), norm, nn.PReLU(8))

    return nn.Sequential(
        cell(3, batch(8)),
        cell(8, instance(8, affine=True)),
        cell(8, nn.GroupNorm(2, 8)),
    )


def mlp_of(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 2))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(28 * 28, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 10)
    )


def generator() -> nn.Module:
    """DCGAN's: noise of one pixel to begin with."""
    return nn.Sequential(
        nn.ConvTranspose2d(12, 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1),
        nn.Tanh(),
    )


def super_resolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2),
        nn.Tanh(),
        nn.Conv2d(8, 9, 3, padding=1),
        nn.PixelShuffle(3),
    )


def activations() -> nn.Module:
    parts = [
        nn.Sequential(nn.Linear(8, 8), activation)
        for activation in (
            nn.CELU(), nn.ELU(), nn.GELU("tanh"), nn.Hardsigmoid(), nn.Hardswish(),
            nn.Hardtanh(), nn.LeakyReLU(), nn.LogSigmoid(), nn.Mish(), nn.PReLU(),
            nn.ReLU6(), nn.SELU(), nn.SiLU(), nn.Sigmoid(), nn.Softplus(),
            nn.Softshrink(), nn.Softsign(), nn.Tanhshrink(), nn.Threshold(0.1, 0.0),
            nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.LogSoftmax(-1),
        )
    ]  # fmt: skip
    return nn.Sequential(*parts)


def pools_and_pads() -> nn.Module:
    return nn.Sequential(
        nn.ReflectionPad2d(2),
        nn.Conv2d(3, 4, 5, 4),
        nn.LPPool2d(2, 2),
        nn.ReplicationPad2d(1),
        nn.FractionalMaxPool2d(2, output_size=20),
        nn.LocalResponseNorm(2),
        nn.CircularPad2d(1),
        nn.Conv2d(4, 4, 3),
        nn.ChannelShuffle(2),
        nn.PixelUnshuffle(2),
        nn.Dropout2d(),
        nn.Unfold(3),
        nn.Fold((10, 10), 3),
        nn.AdaptiveMaxPool2d(3),
        nn.UpsamplingBilinear2d(scale_factor=2),
        nn.Flatten(),
        nn.Unflatten(1, (16, 36)),
        nn.Linear(36, 2),
    )


def double_precision() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def half_precision() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).bfloat16()


def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 7, 7), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))
    return model.to(memory_format=torch.channels_last)


def _torch(name: str, build: Callable[[], nn.Module], **plan: Any) -> Entry:
    return Entry(f"torch {name}", "torch modules", build, plan)


_part = functools.partial
_SHORT = {"max_length": 16}  # steps are traced one by one
ENTRIES = [
    _torch("Transformer", _part(nn.Transformer, **_SMALL, **_LAYERS)),
    _torch(
        "Transformer, batch first",
        _part(nn.Transformer, **_SMALL, **_LAYERS, batch_first=True),
    ),
    _torch("TransformerEncoder", _part(encoder, batch_first=True)),
    _torch("TransformerEncoder, length first", _part(encoder, batch_first=False)),
    _torch("TransformerDecoder", _part(decoder, batch_first=True)),
    _torch("TransformerDecoder, length first", _part(decoder, batch_first=False)),
    _torch(
        "TransformerEncoderLayer, norm first",
        _part(nn.TransformerEncoderLayer, **_SMALL, batch_first=True, norm_first=True),
    ),
    _torch("TransformerDecoderLayer", _part(nn.TransformerDecoderLayer, **_SMALL)),
    _torch("TransformerEncoder with a causal mask and tokens", CausalTransformer),
    _torch("MultiheadAttention", _part(nn.MultiheadAttention, WIDTH, 2)),
    _torch(
        "MultiheadAttention with kdim and vdim",
        _part(
            nn.MultiheadAttention,
            WIDTH,
            2,
            kdim=4,
            vdim=6,
            batch_first=True,
            add_bias_kv=True,
            add_zero_attn=True,
        ),
    ),
    _torch("LSTM", _part(nn.LSTM, 8, WIDTH, 2, dropout=0.1), **_SHORT),
    _torch("LSTM, batch first", _part(nn.LSTM, 8, WIDTH, batch_first=True), **_SHORT),
    _torch("LSTM with projections", _part(nn.LSTM, 8, WIDTH, proj_size=4), **_SHORT),
    _torch("GRU", _part(nn.GRU, 8, WIDTH, 2, bidirectional=True), **_SHORT),
    _torch(
        "RNN", _part(nn.RNN, 8, WIDTH, nonlinearity="relu", batch_first=True), **_SHORT
    ),
    _torch("LSTMCell", _part(nn.LSTMCell, 8, WIDTH)),
    _torch("GRUCell", _part(nn.GRUCell, 8, WIDTH)),
    _torch("RNNCell", _part(nn.RNNCell, 8, WIDTH)),
    _torch(
        "LSTM classifier of tokens",
        lambda: LastStep(nn.LSTM(WIDTH, 8, batch_first=True, bidirectional=True), 16),
        **_SHORT,
    ),
    _torch(
        "GRU classifier of tokens",
        lambda: LastStep(nn.GRU(WIDTH, 8, 2, batch_first=True, dropout=0.2), 8),
        **_SHORT,
    ),
    _torch("Conv1d, batch, instance and group norm", _part(norms, 1)),
    _torch("Conv2d, batch, instance and group norm", _part(norms, 2)),
    _torch("Conv3d, batch, instance and group norm", _part(norms, 3)),
    _torch("BatchNorm1d first", lambda: nn.Sequential(nn.BatchNorm1d(6), mlp_of(6))),
    _torch(
        "BatchNorm2d first",
        lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 8, 8)),
    ),
    _torch("GroupNorm first", lambda: nn.Sequential(nn.GroupNorm(1, 6), mlp_of(6))),
    _torch("LayerNorm", _part(nn.LayerNorm, (4, 6))),
    _torch("RMSNorm first", lambda: nn.Sequential(nn.RMSNorm(6), mlp_of(6))),
    _torch("SyncBatchNorm", lambda: nn.SyncBatchNorm.convert_sync_batchnorm(norms(2))),
    _torch("ConvTranspose1d", _part(nn.ConvTranspose1d, 4, 6, 3)),
    _torch("ConvTranspose2d generator", generator),
    _torch("ConvTranspose3d", _part(nn.ConvTranspose3d, 2, 2, 2)),
    _torch("PixelShuffle", super_resolution),
    _torch("Linear", _part(nn.Linear, 8, 4)),
    _torch("Linear layers behind a Flatten", mlp),
    _torch("Bilinear", _part(nn.Bilinear, 4, 6, 3)),
    _torch("PReLU first", lambda: nn.Sequential(nn.PReLU(6), nn.Linear(6, 2))),
    _torch("Embedding", _part(nn.Embedding, 50, 8)),
    _torch("EmbeddingBag", _part(nn.EmbeddingBag, 50, 8)),
    _torch(
        "EmbeddingBag, max, and Linear",
        lambda: nn.Sequential(nn.EmbeddingBag(50, 8, mode="max"), nn.Linear(8, 2)),
    ),
    _torch(
        "AdaptiveLogSoftmaxWithLoss",
        AdaptiveSoftmax,
        batch={
            "tokens": torch.arange(40).view(2, 20),
            "labels": torch.arange(0, 80, 2).view(2, 20),
        },
    ),
    _torch(
        "CTCLoss",
        Ctc,
        batch={
            "waves": torch.zeros(2, 30, 8),
            "labels": torch.ones(2, 5, dtype=torch.long),
        },
    ),
    _torch("MaxUnpool2d", Unpooled),
    _torch("activations", activations),
    _torch("pools, pads, folds and shuffles", pools_and_pads),
    _torch("float64", double_precision),
    _torch("bfloat16", half_precision),
    _torch("channels last", channels_last),
    Entry(
        "torch LazyLinear after its first batch",
        "torch modules",
        lazy_after_a_batch,
        on_meta=False,
    ),
]
