"""Image networks of attention and of mixers in plain torch, as in timm, tiny."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.networks.convolutional import CLASSES, DropPath

WIDTH, HEADS = 16, 2


class Mlp(nn.Sequential):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.Dropout()
        )


class Attention(nn.Module):
    """One qkv projection; norms of q and k and a bias of positions where asked."""

    def __init__(self, *, qk_norm: bool = False, explicit: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH // HEADS) if qk_norm else nn.Identity()
        self.explicit = explicit

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.norm(q), self.norm(k)
        if self.explicit:
            scores = (q * k.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            if bias is not None:
                scores = scores + bias
            x = F.dropout(scores.softmax(-1), 0.1, self.training) @ v
        else:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))


class ViTBlock(nn.Module):
    def __init__(self, *, qk_norm: bool = False, scale: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(qk_norm=qk_norm), Mlp(WIDTH, 2 * WIDTH)
        self.drop_path = DropPath(0.1)
        self.scale = nn.Parameter(0.1 * torch.ones(WIDTH)) if scale else 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.scale * self.attn(self.norm1(x)))
        return x + self.drop_path(self.scale * self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """timm's: patches, a class token, registers, a table of positions."""

    def __init__(
        self, pixels: int = 32, registers: int = 0, *, dino: bool = False
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.reg_token = nn.Parameter(torch.zeros(1, registers, WIDTH))
        length = (pixels // 8) ** 2 + 1
        self.pos_embed = nn.Parameter(torch.zeros(1, length, WIDTH))
        self.blocks = nn.ModuleList(
            ViTBlock(qk_norm=dino, scale=dino) for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        x = torch.cat([self.reg_token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class SwinBlock(nn.Module):
    """Windows of 4 x 4, shifted by a roll in every second block, relative positions."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.window = shift, 4
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(explicit=True), Mlp(WIDTH, WIDTH)
        self.bias_table = nn.Parameter(torch.zeros(49, HEADS))
        grid = torch.stack(torch.meshgrid(*[torch.arange(4)] * 2, indexing="ij"))
        apart = grid.flatten(1)[:, :, None] - grid.flatten(1)[:, None, :] + 3
        index = apart[0] * 7 + apart[1]
        self.register_buffer("bias_index", index, persistent=False)

    def windows(self, x: Tensor) -> Tensor:
        batch, height, wide, width = x.shape
        x = x.view(batch, height // 4, 4, wide // 4, 4, width)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, width)

    def mask(self, height: int, wide: int, device: torch.device) -> Tensor:
        image = torch.zeros((1, height, wide, 1), device=device)
        count = 0
        for rows in (slice(0, -4), slice(-4, -self.shift), slice(-self.shift, None)):
            for cols in (
                slice(0, -4),
                slice(-4, -self.shift),
                slice(-self.shift, None),
            ):
                image[:, rows, cols, :] = count
                count += 1
        inside = self.windows(image).squeeze(-1)
        apart = inside.unsqueeze(1) - inside.unsqueeze(2)
        return apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, wide, width = x.shape
        bias = self.bias_table[self.bias_index.view(-1)].view(16, 16, HEADS)
        bias = bias.permute(2, 0, 1).unsqueeze(0)
        out = self.norm1(x)
        if self.shift:
            out = torch.roll(out, (-self.shift, -self.shift), (1, 2))
            mask = self.mask(height, wide, x.device)
            bias = bias + mask.repeat(batch, 1, 1).unsqueeze(1)
        out = self.attn(self.windows(out), bias)
        out = out.view(batch, height // 4, wide // 4, 4, 4, width)
        out = out.permute(0, 1, 3, 2, 4, 5).reshape(batch, height, wide, width)
        if self.shift:
            out = torch.roll(out, (self.shift, self.shift), (1, 2))
        x = x + out
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * WIDTH)
        self.reduction = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[:, row::2, col::2] for row in (0, 1) for col in (0, 1)]
        return self.reduction(self.norm(torch.cat(corners, -1)))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 14, stride=14)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(SwinBlock(0), SwinBlock(2)),
                PatchMerging(),
                nn.Sequential(SwinBlock(0), SwinBlock(2)),
            ]
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((1, 2)))


class MixerBlock(nn.Module):
    def __init__(self, patches: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp_tokens, self.mlp_channels = Mlp(patches, 8), Mlp(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class Mixer(nn.Module):
    """The number of patches is fixed by a Linear and by nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 16, stride=16)
        self.blocks = nn.Sequential(*(MixerBlock(196) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(dim=1))


class Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


def conv_mixer() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(
            Residual(
                nn.Sequential(
                    nn.Conv2d(8, 8, 5, groups=8, padding="same"),
                    nn.GELU(),
                    nn.BatchNorm2d(8),
                )
            ),
            nn.Conv2d(8, 8, kernel_size=1),
            nn.GELU(),
            nn.BatchNorm2d(8),
        )

    return nn.Sequential(
        nn.Conv2d(3, 8, kernel_size=14, stride=14),
        nn.GELU(),
        nn.BatchNorm2d(8),
        *(block() for _ in range(3)),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


class PoolFormer(nn.Module):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.pool = nn.GroupNorm(1, 8), nn.AvgPool2d(3, 1, 1)
            self.mlp = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            x = x + self.pool(normed) - normed
            return x + self.mlp(x)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 14, 14)
        self.network = nn.ModuleList(self.Block() for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.network:
            x = block(x)
        return self.head(x.mean((2, 3)))


class SpatialReduction(nn.Module):
    """PVT and SegFormer: keys and values from a coarser grid, whose sides go in."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
            self.sr = nn.Conv2d(WIDTH, WIDTH, 2, 2)
            self.mlp = Mlp(WIDTH, WIDTH)

        def forward(self, x: Tensor, height: int, wide: int) -> Tensor:
            normed = self.norm(x)
            grid = normed.transpose(1, 2).unflatten(2, (height, wide))
            k, v = self.kv(self.sr(grid).flatten(2).transpose(1, 2)).chunk(2, -1)
            x = x + F.scaled_dot_product_attention(self.q(normed), k, v)
            return x + self.mlp(x)

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 16, 16)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        height, wide = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, height, wide)
        return self.head(x).transpose(1, 2).unflatten(2, (height, wide))


class ClassAttention(nn.Module):
    """CaiT: the class token alone asks, in blocks of their own after the others."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, token: Tensor, x: Tensor) -> Tensor:
            joined = self.norm(torch.cat([token, x], 1))
            asked, _ = self.attention(joined[:, :1], joined, joined)
            return token + asked

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.blocks = nn.ModuleList(ViTBlock(scale=True) for _ in range(2))
        self.blocks_token_only = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        token = self.token.repeat(x.shape[0], 1, 1)
        for block in self.blocks_token_only:
            token = block(token, x)
        return self.head(token[:, 0])
