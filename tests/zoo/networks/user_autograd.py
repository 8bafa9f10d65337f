"""What users do inside forward: autograd, in-place ops, hooks, loops and more."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.zoo.networks.user_outputs import WIDTH, Block, Trunk


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class StraightThrough(torch.autograd.Function):
    """setup_context, two outputs, one of them without a gradient."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.round(), x.round().to(torch.int64)

    @staticmethod
    def setup_context(ctx: Any, _: object, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(_: object, grad: Tensor, __: Tensor) -> Tensor:
        return grad


class CustomFunctions(Trunk):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Square.apply(block(x)) + StraightThrough.apply(x)[0]
        return x


class InPlace(Trunk):
    """Additions, activations and slices that write to what is there."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y[:, 0] = 0.0
            y[:, 1:3].mul_(0.5)
            y += x
            return y.relu_()


class WritesItsInput(Trunk):
    """Blocks that add to their own input in place, and return it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x += torch.tanh(self.linear(x.clone()))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.embed(x))


class OwnCheckpoint(Trunk):
    """torch.utils.checkpoint around every block already, of either kind."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(dropout=0.1)
        self.embed, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointInside(Trunk):
    """Blocks that checkpoint their own inside."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(dropout=0.1), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=False))


class CheckpointSequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)


class UpdatedBuffers(Trunk):
    """Running statistics and a counter that branches on its own value."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            if self.training:
                self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
                self.calls += 1
            return x + torch.tanh(y - self.mean)


class ReplacedBuffer(nn.Module):
    """The buffer is not written to but replaced, as exponential averages often are."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Block(), Block()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return self.other(y - self.average)


class MemoryQueue(nn.Module):
    """MoCo's queue: the pointer is a tensor, read as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.register_buffer("queue", torch.randn(WIDTH, 32))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        keys = F.normalize(self.blocks(x), dim=1)
        logits = keys @ self.queue.clone().detach()
        place = int(self.pointer)
        rows = min(keys.shape[0], self.queue.shape[1] - place)
        self.queue[:, place : place + rows] = keys[:rows].detach().T
        self.pointer[0] = (place + rows) % self.queue.shape[1]
        return logits


class WithHooks(Trunk):
    """Forward, pre-forward and full backward hooks, some that change what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.blocks[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        self.blocks[1].register_forward_hook(lambda _, __, out: out + 1)
        self.blocks[1].register_forward_hook(self.note)
        self.blocks[2].register_full_backward_hook(lambda _, into, __: (into[0] * 2,))
        self.blocks[2].register_full_backward_pre_hook(lambda _, out: (out[0] * 0.5,))

    def note(self, _: nn.Module, __: object, output: Tensor) -> None:
        self.seen = [output.shape]


class TensorHooks(Trunk):
    """Hooks on tensors and on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].inner.weight.register_hook(lambda grad: grad.clamp(-1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x.register_hook(lambda grad: grad * 0.5)
        x.retain_grad()
        return self.blocks[2](self.blocks[1](x))


class Reversible(nn.Module):
    """RevNet: the input of each block is computed from its output in backward."""

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
            ctx.parts = f, g
            one, two = x.chunk(2, -1)
            one = one + f(two)
            two = two + g(one)
            out = torch.cat([one, two], -1)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
            f, g = ctx.parts
            one, two = (part.detach() for part in ctx.saved_tensors[0].chunk(2, -1))
            grad1, grad2 = grad.chunk(2, -1)
            with torch.enable_grad():
                one.requires_grad_()
                inner = g(one)
                inner.backward(grad2)
            grad1 = grad1 + one.grad
            two = two - inner.detach()
            with torch.enable_grad():
                two.requires_grad_()
                f(two).backward(grad1)
            return torch.cat([grad1, grad2 + two.grad], -1), None, None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.pairs = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH // 2, WIDTH // 2) for _ in range(2)])
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for f, g in self.pairs:
            x = self.Step.apply(x, f, g)
        return x
