"""A transformer of videos, and one that learns from masked images."""

import math

import torch
from torch import Tensor, nn

from tests.zoo.networks.convolutional import CLASSES
from tests.zoo.networks.vision_transformers import WIDTH, ViTBlock


class VideoTransformer(nn.Module):
    """Tubes of frames, attention over time and then over space."""

    def __init__(self) -> None:
        super().__init__()
        self.tubes = nn.Conv3d(3, WIDTH, (2, 16, 16), (2, 16, 16))
        self.temporal = nn.ModuleList(ViTBlock() for _ in range(2))
        self.spatial = nn.ModuleList(ViTBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, video: Tensor) -> Tensor:
        x = self.tubes(video)
        batch, _, frames, height, wide = x.shape
        for temporal, spatial in zip(self.temporal, self.spatial, strict=True):
            x = x.permute(0, 3, 4, 2, 1).reshape(-1, frames, WIDTH)
            x = temporal(x).unflatten(0, (batch, height * wide))
            x = x.transpose(1, 2).reshape(-1, height * wide, WIDTH)
            x = spatial(x).reshape(batch, frames, height, wide, WIDTH)
            x = x.permute(0, 4, 1, 2, 3)
        return self.head(x.mean((2, 3, 4)))


class MaskedAutoencoder(nn.Module):
    """MAE: patches are dropped by random numbers, an own loss over the dropped ones."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 16, 16)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.encoder = nn.Sequential(*(ViTBlock() for _ in range(2)))
        self.decoder = nn.Sequential(*(ViTBlock() for _ in range(2)))
        self.head = nn.Linear(WIDTH, 3 * 16 * 16)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.patch(images).flatten(2).mT
        batch, length, width = x.shape
        keep = length // 4
        order = torch.rand(batch, length, device=x.device).argsort(1)
        restore = order.argsort(1)
        index = order[:, :keep, None].expand(-1, -1, width)
        seen = self.encoder(x.gather(1, index))
        hidden = self.mask_token.expand(batch, length - keep, -1)
        full = torch.cat([seen, hidden], 1)
        full = full.gather(1, restore[..., None].expand(-1, -1, width))
        guess = self.head(self.decoder(full))
        mask = (restore >= keep).to(guess.dtype)
        side = math.isqrt(length)
        pixels = images.unfold(2, 16, 16).unfold(3, 16, 16)
        pixels = pixels.permute(0, 2, 3, 4, 5, 1).reshape(batch, side * side, -1)
        loss = (((guess - pixels) ** 2).mean(-1) * mask).sum() / mask.sum()
        return loss, guess, mask
