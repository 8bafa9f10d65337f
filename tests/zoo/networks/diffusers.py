"""Diffusion networks in plain torch, as in diffusers, tiny."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, CONTEXT = 16, 2, 12


@dataclass
class Sampled:
    """diffusers' output: a dataclass of one tensor."""

    sample: Tensor


def time_embedding(timesteps: Tensor, width: int) -> Tensor:
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    angles = timesteps[:, None].float() * torch.exp(-math.log(10000) * steps / half)
    return torch.cat([angles.cos(), angles.sin()], -1)


class ResnetBlock(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inside), nn.GroupNorm(4, outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.time = nn.Linear(WIDTH, outside)
        self.shortcut = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        out = self.conv1(F.silu(self.norm1(x)))
        if time is not None:
            out = out + self.time(F.silu(time))[:, :, None, None]
        out = self.conv2(F.dropout(F.silu(self.norm2(out)), 0.1, self.training))
        return out + self.shortcut(x)


class CrossAttention(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm, self.q = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.k = nn.Linear(context, width, bias=False)
        self.v = nn.Linear(context, width, bias=False)
        self.out = nn.ModuleList([nn.Linear(width, width), nn.Dropout(0.0)])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        context = normed if context is None else context
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.q(normed), self.k(context), self.v(context))
        )
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        for layer in self.out:
            out = layer(out)
        return x + out


class GEGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.back = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        values, gate = self.proj(self.norm(x)).chunk(2, -1)
        return x + self.back(values * F.gelu(gate))


class BasicTransformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn1 = CrossAttention(width, width)
        self.attn2 = CrossAttention(width, CONTEXT)
        self.ff = GEGLU(width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        height = x.shape[2]
        out = x.flatten(2).mT
        out = self.ff(self.attn2(self.attn1(out), context))
        return x + out.mT.unflatten(2, (height, -1))


class DownBlock(nn.Module):
    """Returns its output and everything that an up block will want."""

    def __init__(self, inside: int, outside: int, *, downsample: bool) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            [ResnetBlock(inside, outside), ResnetBlock(outside, outside)]
        )
        self.attentions = nn.ModuleList(BasicTransformer(outside) for _ in range(2))
        self.downsampler = nn.Conv2d(outside, outside, 3, 2, 1) if downsample else None

    def forward(
        self, hidden_states: Tensor, temb: Tensor, encoder_hidden_states: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        outputs: tuple[Tensor, ...] = ()
        for resnet, attention in zip(self.resnets, self.attentions, strict=True):
            hidden_states = attention(
                resnet(hidden_states, temb), encoder_hidden_states
            )
            outputs += (hidden_states,)
        if self.downsampler is not None:
            hidden_states = self.downsampler(hidden_states)
            outputs += (hidden_states,)
        return hidden_states, outputs


class UpBlock(nn.Module):
    def __init__(
        self, inside: int, skips: tuple[int, ...], outside: int, *, upsample: bool
    ) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            ResnetBlock((inside if k == 0 else outside) + skip, outside)
            for k, skip in enumerate(skips)
        )
        self.upsample = upsample

    def forward(self, x: Tensor, skips: tuple[Tensor, ...], temb: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(torch.cat([x, skips[-1]], 1), temb)
            skips = skips[:-1]
        if self.upsample:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return x


def down_blocks() -> nn.ModuleList:
    return nn.ModuleList(
        [DownBlock(8, 8, downsample=True), DownBlock(8, 16, downsample=False)]
    )


class UNet2DCondition(nn.Module):
    """Stable Diffusion's shape: time, cross-attention, skips popped off a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(4, 8, 3, padding=1)
        self.time = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)
        )
        self.down_blocks = down_blocks()
        self.mid_block = ResnetBlock(16, 16)
        self.up_blocks = nn.ModuleList(
            [
                UpBlock(16, (16, 16, 8), 16, upsample=True),
                UpBlock(16, (8, 8, 8), 8, upsample=False),
            ]
        )
        self.conv_out = nn.Conv2d(8, 4, 3, padding=1)

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float,
        encoder_hidden_states: Tensor,
        *,
        return_dict: bool = True,
    ) -> Sampled | tuple[Tensor]:
        if not torch.is_tensor(timestep):
            timestep = torch.tensor([timestep], device=sample.device)
        timestep = timestep.reshape(-1).expand(sample.shape[0])
        temb = self.time(time_embedding(timestep, WIDTH).to(sample.dtype))
        x = self.conv_in(sample)
        skips: tuple[Tensor, ...] = (x,)
        for block in self.down_blocks:
            x, made = block(
                hidden_states=x, temb=temb, encoder_hidden_states=encoder_hidden_states
            )
            skips += made
        x = self.mid_block(x, temb)
        for block in self.up_blocks:
            taken, skips = skips[-3:], skips[:-3]
            x = block(x, taken, temb)
        out = self.conv_out(x)
        return Sampled(out) if return_dict else (out,)


class DiTBlock(nn.Module):
    """adaLN-zero: six modulations from the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU("tanh"), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            part.unsqueeze(1) for part in self.ada(condition).chunk(6, 1)
        )
        out = self.norm(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attn(out, out, out, need_weights=False)[0]
        out = self.norm(x) * (1 + scale2) + shift2
        return x + gate2 * self.mlp(out)


class DiT(nn.Module):
    """Class labels are dropped at random for guidance; positions are a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(4, WIDTH, 2, 2)
        self.labels = nn.Embedding(10 + 1, WIDTH)
        self.register_buffer("pos_embed", torch.randn(1, 64, WIDTH))
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(3))
        self.final = nn.Linear(WIDTH, 4 * 8)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        if self.training:
            drop = torch.rand(y.shape[0], device=y.device) < 0.1
            y = torch.where(drop, 10, y)
        condition = time_embedding(t, WIDTH) + self.labels(y)
        x = self.x_embedder(x).flatten(2).mT + self.pos_embed
        for block in self.blocks:
            x = block(x, condition)
        x = self.final(x).unflatten(1, (8, 8)).unflatten(-1, (2, 2, 8))
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], 8, 16, 16)


class JointBlock(nn.Module):
    """SD3 and Flux: two streams, one attention; returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(
        self, image: Tensor, text: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        cos, sin = rotary
        both = torch.cat([self.text(text), self.image(image)], 1)
        q, k, v = both.chunk(3, -1)
        q, k = (
            part * cos
            + torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2) * sin
            for part in (self.norm(q), self.norm(k))
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return image + out[:, text.shape[1] :], text + out[:, : text.shape[1]]


class MMDiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(16, WIDTH)
        self.context_embedder = nn.Linear(CONTEXT, WIDTH)
        self.transformer_blocks = nn.ModuleList(JointBlock() for _ in range(3))
        self.proj_out = nn.Linear(WIDTH, 16)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, guidance: float = 1
    ) -> Sampled:
        image = self.x_embedder(hidden_states)
        text = self.context_embedder(encoder_hidden_states) * guidance
        length = image.shape[1] + text.shape[1]
        angles = torch.outer(
            torch.arange(length, dtype=torch.float64), torch.ones(WIDTH).double()
        ).to(image)
        rotary = (angles.cos(), angles.sin())
        for block in self.transformer_blocks:
            image, text = block(image, text, rotary)
        return Sampled(self.proj_out(image))
