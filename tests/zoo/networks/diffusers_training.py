"""Diffusion's other networks: autoencoders, a whole training step, control, video."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.networks.diffusers import (
    WIDTH,
    ResnetBlock,
    UNet2DCondition,
    down_blocks,
    time_embedding,
)


class VAE(nn.Module):
    """Encoder and decoder around a random sample; reconstruction and KL in one loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, 4, 1), ResnetBlock(8, 8), nn.Conv2d(8, 8, 3, 2, 1)
        )
        self.quant_conv = nn.Conv2d(8, 8, 1)
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1),
            ResnetBlock(8, 8),
            nn.Upsample(scale_factor=8),
            nn.Conv2d(8, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, logvar = self.quant_conv(self.encoder(x)).chunk(2, 1)
        logvar = logvar.clamp(-30, 20)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        guess = self.decoder(latent)
        kl = 0.5 * (mean.pow(2) + logvar.exp() - 1 - logvar).mean()
        return {"loss": F.mse_loss(guess, x) + 1e-6 * kl, "sample": guess}


class VQVAE(nn.Module):
    """The nearest code by argmin, straight through, with the codebook's own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, 8, 16, 16)
        self.codebook = nn.Embedding(32, 8)
        self.decoder = nn.ConvTranspose2d(8, 3, 16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1)
        apart = torch.cdist(z.flatten(0, 2)[None], self.codebook.weight[None])[0]
        quantized = self.codebook(apart.argmin(1)).view(z.shape)
        loss = F.mse_loss(quantized, z.detach()) + F.mse_loss(z, quantized.detach())
        quantized = z + (quantized - z).detach()
        return self.decoder(quantized.permute(0, 3, 1, 2)), loss


class DDPM(nn.Module):
    """A whole training step in forward: time and noise are drawn inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(ResnetBlock(4, 4) for _ in range(3)))
        self.stem, self.head = nn.Conv2d(3, 4, 8, 8), nn.Conv2d(4, 3, 1)
        self.register_buffer("alphas", torch.linspace(0.99, 0.01, 100))

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, 8)
        step = torch.randint(0, len(self.alphas), (x.shape[0],), device=x.device)
        kept = self.alphas[step][:, None, None, None]
        noise = torch.randn_like(x)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        hidden = F.interpolate(noisy, scale_factor=8)
        return F.mse_loss(self.head(self.net(self.stem(hidden))), noise)


class ControlNet(nn.Module):
    """A trained copy beside a frozen UNet adds to its skips."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DCondition().requires_grad_(False)
        self.hint = nn.Conv2d(3, 8, 3, padding=1)
        self.down_blocks = down_blocks()
        widths = (8, 8, 8, 8, 16, 16)
        self.zero = nn.ModuleList(nn.Conv2d(width, width, 1) for width in widths)

    def forward(
        self, sample: Tensor, timestep: Tensor, context: Tensor, hint: Tensor
    ) -> Tensor:
        unet = self.unet
        with torch.no_grad():
            temb = unet.time(time_embedding(timestep, WIDTH))
            start = unet.conv_in(sample)
            x, skips = self.through(unet.down_blocks, start, temb, context)
        _, residuals = self.through(
            self.down_blocks, start + self.hint(hint), temb, context
        )
        skips = [
            skip + zero(residual)
            for skip, zero, residual in zip(skips, self.zero, residuals, strict=True)
        ]
        x = unet.mid_block(x, temb)
        for block in unet.up_blocks:
            x, skips = block(x, tuple(skips[-3:]), temb), skips[:-3]
        return unet.conv_out(x)

    @staticmethod
    def through(
        blocks: nn.ModuleList, x: Tensor, temb: Tensor, context: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        skips = [x]
        for block in blocks:
            x, made = block(x, temb, context)
            skips += made
        return x, skips


class VideoUNet(nn.Module):
    """Space and time by turns on [batch, channels, frames, height, width]."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.space = nn.Conv3d(8, 8, (1, 3, 3), padding=(0, 1, 1))
            self.time = nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0))
            self.mix = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            space = F.silu(self.space(x))
            share = torch.sigmoid(self.mix)
            return (1 - share) * space + share * self.time(space)

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv3d(3, 8, (1, 8, 8), (1, 8, 8))
        self.down = nn.ModuleList(self.Block() for _ in range(2))
        self.up = nn.ModuleList(self.Block() for _ in range(2))
        self.conv_out = nn.Conv3d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.conv_in(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = block(x + skips.pop())
        return self.conv_out(x)
