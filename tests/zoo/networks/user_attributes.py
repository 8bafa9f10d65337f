"""What users keep in attributes: locks, generators, tensors, slots, late buffers."""

import threading

import torch
from torch import Tensor, nn

from tests.zoo.networks.user_outputs import WIDTH, Block, Trunk


class WithLock(Trunk):
    """Cannot be deep-copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


class WithGenerator(Trunk):
    """A random generator of its own; deepcopy refuses one in older torch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator, device="cpu")
        return super().forward(x + noise.to(x))


class WithPythonGenerator(Trunk):
    """A running generator: no copy of it can be made."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = (1.0 + 0.0 * k for k in range(10**9))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.scales)


class NonLeafAttribute(Trunk):
    """Keeps its last output: a tensor with a graph, which deepcopy refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


def used_once() -> nn.Module:
    model = NonLeafAttribute()
    model(torch.ones(2, WIDTH))
    return model


class Slots(nn.Module):
    """__slots__ beside nn.Module's dictionary, and a parameter behind a property."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.scale = 0.5
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    @property
    def weight(self) -> Tensor:
        return torch.tanh(self.raw) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        for block in self.blocks:
            x = block(x)
        return x


class LazyBuffer(Trunk):
    """Positions are made when the first batch comes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[-1], device=x.device)
        return super().forward(x + self.table)


class OtherTensors(Trunk):
    """Tensors in plain attributes, in lists and in dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((WIDTH,), 2.0)
        self.anchors = [torch.zeros(WIDTH), torch.ones(WIDTH)]
        self.tables = {"shift": torch.zeros(WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale.to(x) + self.anchors[1].to(x) + self.tables["shift"].to(x)
        return super().forward(x)
