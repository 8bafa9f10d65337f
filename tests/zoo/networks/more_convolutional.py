"""Branches, shuffles, pyramids and iterations: convolutional networks of odd shapes."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.networks.convolutional import CLASSES, conv_bn


class Inception(nn.Module):
    def __init__(self, inside: int) -> None:
        super().__init__()
        self.branch1 = conv_bn(inside, 4, 1)
        self.branch2 = nn.Sequential(conv_bn(inside, 4, 1), conv_bn(4, 4, 3))
        self.branch3 = nn.Sequential(conv_bn(inside, 4, 1), conv_bn(4, 4, 5))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_bn(inside, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        branches = (self.branch1, self.branch2, self.branch3, self.branch4)
        return torch.cat([branch(x) for branch in branches], 1)


class GoogLeNetOutputs(NamedTuple):
    logits: Tensor
    aux_logits: Tensor | None


class GoogLeNet(nn.Module):
    """A second classifier answers in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = conv_bn(3, 8, 7, 8)
        self.inception3a, self.inception3b = Inception(8), Inception(16)
        self.aux1, self.fc = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> GoogLeNetOutputs | Tensor:
        middle = self.inception3a(self.conv1(x))
        logits = self.fc(self.inception3b(middle).mean((2, 3)))
        if not self.training:
            return logits
        return GoogLeNetOutputs(logits, self.aux1(middle.mean((2, 3))))


class AlexNet(nn.Module):
    """A flatten before a fixed Linear: one image size alone works."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(8, 8, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(8 * 13 * 13, 16), nn.ReLU(), nn.Linear(16, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


class LeNet(nn.Module):
    """Reads 28 pixels in one channel and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * 5 * 5, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


class CifarNet(nn.Module):
    """PyTorch's tutorial: 32 pixels, a view with a fixed second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * 5 * 5, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


class Fire(nn.Module):
    def __init__(self, inside: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inside, 4, 1)
        self.expand1x1, self.expand3x3 = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x), inplace=True)
        return torch.cat([F.relu(self.expand1x1(x)), F.relu(self.expand3x3(x))], 1)


def squeezenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Fire(8),
        Fire(8),
        nn.Dropout(),
        nn.Conv2d(8, CLASSES, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


class ShuffleUnit(nn.Module):
    """ShuffleNetV2: half goes by, then the channels are shuffled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            conv_bn(half, half, 1),
            nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            conv_bn(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        by, through = x.chunk(2, dim=1)
        out = torch.cat((by, self.branch(through)), dim=1)
        batch, width, height, wide = out.shape
        out = out.view(batch, 2, width // 2, height, wide).transpose(1, 2).contiguous()
        return out.view(batch, width, height, wide)


def shufflenet() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 8, 3, 8),
        *(ShuffleUnit(8) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


class StandardizedConv(nn.Conv2d):
    """Weight standardisation, as BiT and NFNet have it."""

    def forward(self, x: Tensor) -> Tensor:
        deviation, mean = torch.std_mean(self.weight, dim=[1, 2, 3], keepdim=True)
        weight = (self.weight - mean) / (deviation + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class BiTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.conv = StandardizedConv(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.relu(self.norm(x)))


def bit() -> nn.Module:
    return nn.Sequential(
        StandardizedConv(3, 8, 7, stride=8),
        *(BiTBlock(8) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


class FeaturePyramid(nn.Module):
    """Outputs of every level, as a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8, 7, 8)
        self.levels = nn.ModuleList(conv_bn(8, 8, 3, 2) for _ in range(3))
        self.lateral = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))
        self.outputs = nn.ModuleDict(
            {f"p{level}": nn.Conv2d(8, 8, 3, padding=1) for level in range(3)}
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, found = self.stem(x), []
        for level in self.levels:
            x = level(x)
            found.append(x)
        above = self.lateral[-1](found[-1])
        results = {"p2": self.outputs["p2"](above)}
        for level in (1, 0):
            size = found[level].shape[-2:]
            above = F.interpolate(above, size=size) + self.lateral[level](found[level])
            results[f"p{level}"] = self.outputs[f"p{level}"](above)
        return results


class UNet(nn.Module):
    """Segmentation: skips cross the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = conv_bn(3, 4), conv_bn(4, 8)
        self.middle = conv_bn(8, 8)
        self.up2 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.merge2 = conv_bn(16, 4)
        self.up1 = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.merge1, self.head = conv_bn(8, 4), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        middle = self.middle(F.max_pool2d(two, 2))
        two = self.merge2(torch.cat([self.up2(middle), two], 1))
        return self.head(self.merge1(torch.cat([self.up1(two), one], 1)))


class AtrousPyramid(nn.Module):
    """DeepLab: dilated branches, and one that pools everything."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv_bn(3, 8, 7, 8), conv_bn(8, 8))
        self.branches = nn.ModuleList(
            nn.Conv2d(8, 4, 3, padding=rate, dilation=rate) for rate in (1, 3, 6)
        )
        self.pooled, self.head = nn.Conv2d(8, 4, 1), nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        size = x.shape[-2:]
        x = self.backbone(x)
        pooled = self.pooled(F.adaptive_avg_pool2d(x, 1)).expand(-1, -1, *x.shape[-2:])
        x = torch.cat([*(branch(x) for branch in self.branches), pooled], 1)
        out = F.interpolate(self.head(x), size, mode="bilinear", align_corners=False)
        return {"out": out}


class HighResolution(nn.Module):
    """HRNet: two resolutions side by side that exchange at every stage."""

    class Exchange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine, self.coarse = conv_bn(4, 4), conv_bn(8, 8)
            self.down, self.up = nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: list[Tensor]) -> list[Tensor]:
            fine, coarse = self.fine(x[0]), self.coarse(x[1])
            raised = F.interpolate(self.up(coarse), scale_factor=2)
            return [F.relu(fine + raised), F.relu(coarse + self.down(fine))]

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.split = conv_bn(3, 4, 7, 8), conv_bn(4, 8, 3, 2)
        self.stages = nn.Sequential(*(self.Exchange() for _ in range(3)))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        fine, coarse = self.stages([x, self.split(x)])
        return self.head(torch.cat([fine.mean((2, 3)), coarse.mean((2, 3))], 1))


class Yolo(nn.Module):
    """C2f blocks, spatial pyramid pooling and a head for each of two scales."""

    class C2f(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cv1, self.cv2 = conv_bn(8, 8, 1), conv_bn(16, 8, 1)
            self.m = nn.ModuleList(conv_bn(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            parts = list(self.cv1(x).split(4, 1))
            parts.extend(m(parts[-1]) for m in self.m)
            return self.cv2(torch.cat(parts, 1))

    def __init__(self) -> None:
        super().__init__()
        layers = [conv_bn(3, 8, 7, 8), self.C2f(), conv_bn(8, 8, 3, 2), self.C2f()]
        self.model = nn.Sequential(*layers)
        self.spp = conv_bn(24, 8, 1)
        self.heads = nn.ModuleList(nn.Conv2d(8, 4 + CLASSES, 1) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        saved = []
        for layer in self.model:
            x = layer(x)
            saved.append(x)
        pools = [x]
        for _ in range(2):
            pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
        x = self.spp(torch.cat(pools, 1))
        return [self.heads[0](saved[1]), self.heads[1](x)]


class Flow(nn.Module):
    """RAFT's way: one update cell runs many times, its guess is detached between."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Conv2d(3, 4, 7, 8)
        self.update = conv_bn(4 + 2, 4)
        self.flow = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, image: Tensor) -> list[Tensor]:
        hidden, guesses = self.encode(image), []
        flow = torch.zeros_like(hidden[:, :2])
        for _ in range(3):
            flow = flow.detach()
            hidden = self.update(torch.cat([hidden, flow], 1))
            flow = flow + self.flow(hidden)
            guesses.append(flow)
        return guesses
