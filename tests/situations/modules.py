"""Modules that a user wrote: what the questions about own code are asked about.

Read by path (``modules.py:blocks``), so it imports nothing but torch.
"""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and two linear layers, before each a norm; (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Net(nn.Module):
    """Embedding, blocks and a head: token ids to logits."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def blocks() -> nn.Module:
    """24 blocks of width 1024 and 32,000 words: 367,847,424 parameters."""
    return Net(24, 1024, 32_000)


def blocks_of(layers: int) -> nn.Module:
    """A factory that needs an argument, which nobody gives."""
    return Net(layers, 1024, 32_000)


class Residual(nn.Module):
    """Two convolutions and what went in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.body(x))


def cnn() -> nn.Module:
    """Convolutions on images, 100 classes."""
    layers: list[nn.Module] = []
    last = 3
    for channels in (64, 128, 256, 512):
        layers += [nn.Conv2d(last, channels, 3, stride=2, padding=1)]
        layers += [Residual(channels) for _ in range(4)]
        last = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), _classes())


def _classes() -> nn.Module:
    return nn.Linear(512, 100)


class DiTBlock(nn.Module):
    """A block whose norms are scaled and shifted by the time step."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.block = Block(width, heads)
        self.modulation = nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        scale, shift = self.modulation(functional.silu(time)).unsqueeze(1).chunk(2, -1)
        return x + self.block(x * (1 + scale) + shift)


class DiT(nn.Module):
    """Patches of a latent image and a time step to a latent image."""

    def __init__(self, layers: int = 28, width: int = 1152, patch: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, patch, stride=patch)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU())
        self.blocks = nn.ModuleList(DiTBlock(width, 16) for _ in range(layers))
        self.out = nn.ConvTranspose2d(width, 4, patch, stride=patch)

    def forward(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = self.patches(latents)
        batch, width, height, across = x.shape
        x = x.flatten(2).transpose(1, 2)
        condition = self.time(time[:, None])
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x.transpose(1, 2).reshape(batch, width, height, across))


def dit() -> nn.Module:
    """A diffusion transformer of DiT-XL/2's width and depth."""
    return DiT()


def dit_batch() -> dict[str, torch.Tensor]:
    """Latents of 256-pixel images, and their time steps."""
    return {"latents": torch.zeros(2, 4, 32, 32), "time": torch.zeros(2)}


class Stage(nn.Module):
    """A residual of convolutions that the time step shifts, as in a UNet."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1)
        )
        self.time = nn.Linear(time, after)
        self.second = nn.Sequential(
            nn.GroupNorm(32, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1)
        )
        self.past = nn.Conv2d(before, after, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + self.time(time)[:, :, None, None]
        return self.past(x) + self.second(hidden)


class UNet(nn.Module):
    """Down and up again with skips, each level twice: latents to noise."""

    def __init__(self, channels: tuple[int, ...] = (320, 640, 1280, 1280)) -> None:
        super().__init__()
        time = channels[-1]
        self.embed = nn.Sequential(nn.Linear(1, time), nn.SiLU())
        self.into = nn.Conv2d(4, channels[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        last = channels[0]
        for width in channels:
            self.down.append(Stage(last, width, time))
            self.down.append(Stage(width, width, time))
            last = width
        for width in reversed(channels):
            self.up.append(Stage(last + width, width, time))
            last = width
        self.out = nn.Conv2d(last, 4, 3, padding=1)

    def forward(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        condition = self.embed(time[:, None])
        x, skips = self.into(latents), []
        for index in range(0, len(self.down), 2):
            x = self.down[index + 1](self.down[index](x, condition), condition)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        for stage in self.up:
            skip = skips.pop()
            x = functional.interpolate(x, skip.shape[-2:])
            x = stage(torch.cat([x, skip], 1), condition)
        return self.out(x)


def unet() -> nn.Module:
    """A convolutional UNet of Stable Diffusion's widths, without attention."""
    return UNet()


def unet_batch() -> dict[str, torch.Tensor]:
    """Latents of 512-pixel images, and their time steps."""
    return {"latents": torch.zeros(2, 4, 64, 64), "time": torch.zeros(2)}


def noise_loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean squared difference from the noise; the latents stand for it."""
    return functional.mse_loss(outputs.float(), batch["latents"])
