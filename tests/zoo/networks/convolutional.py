"""Convolutional image networks in plain torch, as in torchvision and timm, tiny."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 5


def conv_bn(
    inside: int, outside: int, size: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    padding = size // 2
    return nn.Sequential(
        nn.Conv2d(inside, outside, size, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = conv_bn(inside, outside, stride=stride)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.conv1(x)))
        out += identity
        return F.relu(out, inplace=True)


class Bottleneck(nn.Module):
    """ResNet's, ResNeXt's and RegNet's: groups, and squeeze-and-excitation if asked."""

    def __init__(
        self, inside: int, outside: int, stride: int = 1, *, groups: int, se: bool
    ) -> None:
        super().__init__()
        self.conv1 = conv_bn(inside, outside, 1)
        self.conv2 = conv_bn(outside, outside, stride=stride, groups=groups)
        self.se = SqueezeExcite(outside) if se else nn.Identity()
        self.conv3 = nn.Conv2d(outside, outside, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outside)
        self.downsample = nn.Identity()
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False),
                nn.BatchNorm2d(outside),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn3(self.conv3(self.se(self.conv2(self.conv1(x)))))
        return F.relu(out + self.downsample(x))


class PreActivation(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inside), nn.BatchNorm2d(outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        return self.conv2(F.relu(self.norm2(self.conv1(active)))) + self.shortcut(
            active
        )


class StagedNet(nn.Module):
    """Stem, stages of one kind of block, pooling, a classifier: torchvision's way."""

    def __init__(self, block: partial[nn.Module] | type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, stride=4, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(block(8, 8), block(8, 8))
        self.layer2 = nn.Sequential(block(8, 16, 2), block(16, 16))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(width, 2, 1)
        self.expand = nn.Conv2d(2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.expand(F.silu(self.reduce(pooled))))


class DropPath(nn.Module):
    """Stochastic depth by sample, as in timm."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 1 - self.probability
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask.div_(keep)


class MBConv(nn.Module):
    def __init__(
        self, inside: int, outside: int, stride: int, activation: type[nn.Module]
    ) -> None:
        super().__init__()
        wide = 2 * inside
        self.residual = stride == 1 and inside == outside
        self.body = nn.Sequential(
            nn.Conv2d(inside, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            activation(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            activation(),
            SqueezeExcite(wide),
            nn.Conv2d(wide, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.drop_path = DropPath(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return x + self.drop_path(out) if self.residual else out


class MobileNet(nn.Module):
    """EfficientNet with SiLU, MobileNetV2 with ReLU6, MobileNetV3 with Hardswish."""

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        block = partial(MBConv, activation=activation)
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.BatchNorm2d(8), activation()),
            block(8, 8, 1),
            block(8, 16, 2),
            block(16, 16, 1),
            block(16, 16, 1),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), 1)
        return self.classifier(x.flatten(1))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.act = nn.Linear(width, 4 * width), nn.GELU()
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(1e-6 * torch.ones(width))
        self.drop_path = DropPath(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.dwconv(x).permute(0, 2, 3, 1)
        out = self.gamma * self.pwconv2(self.act(self.pwconv1(self.norm(out))))
        return x + self.drop_path(out.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downsample_layers = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), LayerNorm2d(8)),
                nn.Sequential(LayerNorm2d(8), nn.Conv2d(8, 16, 2, stride=2)),
            ]
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvNeXtBlock(width) for _ in range(2)))
            for width in (8, 16)
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for downsample, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(downsample(x))
        return self.head(self.norm(x.mean([-2, -1])))


class DenseLayer(nn.Module):
    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(inside), nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(inside, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(self.relu(self.norm(torch.cat(features, 1))))


class DenseBlock(nn.ModuleDict):
    def __init__(self, inside: int, growth: int, layers: int) -> None:
        super().__init__()
        for index in range(layers):
            layer = DenseLayer(inside + index * growth, growth)
            self.add_module(f"denselayer{index + 1}", layer)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, 8, 7, 4, 3))
        self.features.add_module("denseblock1", DenseBlock(8, 4, 3))
        self.features.add_module("transition1", nn.Conv2d(20, 8, 2, 2))
        self.features.add_module("denseblock2", DenseBlock(8, 4, 3))
        self.classifier = nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.features(x), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(x, (1, 1)).flatten(1))
