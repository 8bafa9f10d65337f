"""A block whose saved bytes can be added up by hand, and what watches it."""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from budgetfit.applying.checkpointing.activation_offload import run_with_offload
from budgetfit.core.step_trace import TO_HOST
from budgetfit.tracing.recording.storage_log import StorageLog
from tests.counted_ops import CountedOps

WIDTH = 16


class Ops(CountedOps):
    """Counts ops by name, and remembers what went to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_bytes: list[int] = []
        self.on_host: list[weakref.ref[Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if str(func) == TO_HOST:
            self.moved_bytes.append(output.nbytes)
            self.on_host.append(weakref.ref(output.untyped_storage()))
        return output

    def alive(self) -> int:
        return sum(storage() is not None for storage in self.on_host)


class Gate(nn.Module):
    """x + w2(tanh(w1 x) * mask): saves x, the mask, the tanh, the product."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)) * mask)


def offload(model: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        block = model.get_submodule(name)
        block.forward = functools.partial(_offloaded, block.forward)


def _offloaded(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run_with_offload(forward, args, kwargs)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch)
    loss = getattr(output, "loss", output)
    assert isinstance(loss, torch.Tensor)
    return loss.float().sum()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert one
    for name, gradient in one.items():
        assert torch.equal(gradient, other[name]), name


def hidden(*shape: int) -> torch.Tensor:
    """A hidden state that some layer before made."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(*shape, generator=generator, requires_grad=True).clone()


def logged(block: nn.Module, *others: torch.Tensor) -> tuple[StorageLog, int]:
    """Return a log that knows these tensors, and their bytes."""
    log = StorageLog()
    for tensor in (*block.parameters(), *others):
        log.log_storage(tensor)
    return log, log.live_bytes


def gate() -> tuple[Gate, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    mask = (torch.rand(3, 2 * WIDTH) < 0.5).float()
    return Gate(), hidden(3, WIDTH), mask
