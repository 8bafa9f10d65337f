"""Models written in plain PyTorch; each returns an object with a ``loss``.

They cover what transformers models do not: attention called directly with a causal
flag, and torch's own ``nn.Transformer`` layers.
"""

from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional

_WIDENING: Final = 4  # a feed-forward layer is this many times as wide as the model


class Output(NamedTuple):
    """What a model returns."""

    loss: torch.Tensor
    prediction: torch.Tensor


class _Block(nn.Module):
    """Pre-norm attention and feed-forward, without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, _WIDENING * width),
            nn.GELU(),
            nn.Linear(_WIDENING * width, width),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        mixed = self.query_key_value(self.attention_norm(hidden))
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in mixed.split(width, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        attended = attended.transpose(1, 2).reshape(batch, length, width)
        hidden = hidden + self.projection(attended)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class PlainGpt(nn.Module):
    """A decoder with learned positions and tied input and output embeddings."""

    def __init__(
        self, *, vocabulary: int, length: int, width: int, heads: int, depth: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden = self.tokens(input_ids) + self.positions[: input_ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits)


class TorchTransformer(nn.Module):
    """torch's encoder and decoder on continuous sequences, with its own dropout."""

    def __init__(self, *, width: int, heads: int, depth: int, target: int) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            d_model=width,
            nhead=heads,
            num_encoder_layers=depth,
            num_decoder_layers=depth,
            dim_feedforward=_WIDENING * width,
            batch_first=True,
        )
        mask = nn.Transformer.generate_square_subsequent_mask(target)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> Output:
        prediction = self.transformer(
            source, target, tgt_mask=self.mask, tgt_is_causal=True
        )
        return Output(functional.mse_loss(prediction, target), prediction)


class _MixerBlock(nn.Module):
    """One feed-forward layer over the patches and one over the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.token_norm = nn.LayerNorm(width)
        self.mix_tokens = nn.Sequential(
            nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches)
        )
        self.channel_norm = nn.LayerNorm(width)
        self.mix_channels = nn.Sequential(
            nn.Linear(width, _WIDENING * width),
            nn.GELU(),
            nn.Linear(_WIDENING * width, width),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens_last = self.token_norm(hidden).transpose(1, 2)
        hidden = hidden + self.mix_tokens(tokens_last).transpose(1, 2)
        return hidden + self.mix_channels(self.channel_norm(hidden))


class MlpMixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al., arXiv 2105.01601): images without attention."""

    def __init__(
        self, *, image: int, patch: int, width: int, depth: int, classes: int
    ) -> None:
        super().__init__()
        self.patch = patch
        self.stem = nn.Linear(3 * patch * patch, width)
        patches = (image // patch) ** 2
        self.blocks = nn.Sequential(
            *(_MixerBlock(patches, width) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Output:
        patches = functional.unfold(pixel_values, self.patch, stride=self.patch)
        hidden = self.blocks(self.stem(patches.transpose(1, 2)))
        logits = self.head(self.norm(hidden).mean(dim=1))
        return Output(functional.cross_entropy(logits, labels), logits)


class LstmLanguageModel(nn.Module):
    """Embedding, torch's own LSTM over the whole sequence, head."""

    def __init__(
        self, *, vocabulary: int, width: int, depth: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden, _ = self.lstm(self.tokens(input_ids))
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits)
