"""What users compute: transforms, loops, inner gradients, experts, other machinery."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.networks.user_outputs import WIDTH, Block, Trunk


class Attention(Trunk):
    """Everything by einsum."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (
                nn.Parameter(0.1 * torch.randn(2, WIDTH, 4)) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (torch.einsum("bld,hde->bhle", x, w) for w in self.parts())
            scores = torch.einsum("bhie,bhje->bhij", q, k).softmax(-1)
            mixed = torch.einsum("bhij,bhje->bhie", scores, v)
            return x + torch.einsum("bhie,hde->bid", mixed, self.o)

        def parts(self) -> tuple[Tensor, Tensor, Tensor]:
            return self.q, self.k, self.v

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(self.embed(tokens))


class FourierBlock(nn.Module):
    """FNO: a transform, complex weights, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(WIDTH, WIDTH, 6, dtype=torch.cfloat))
        self.skip = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x.float())  # bf16 has none
        out = torch.zeros_like(modes)
        out[..., :6] = torch.einsum("bix,iox->box", modes[..., :6], self.weights)
        return F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.skip(x))


class Fourier(Trunk):
    Block = FourierBlock

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.lift(x))


class ComplexNet(nn.Module):
    """Complex parameters and outputs; the loss is real."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, torch.zeros_like(x))
        for layer in self.layers:
            z = layer(z)
            z = z / (1 + z.abs())
        return torch.view_as_real(z)


class SparseEmbedding(nn.Module):
    """Gradients of the table are sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=True)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks(self.table(tokens))


class StochasticDepth(Trunk):
    """Whole blocks are skipped by a random number."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and torch.rand(1).item() < 0.05:
                continue
            x = block(x)
        return x


class ShapeControl(Trunk):
    """Control flow on shapes: short inputs are padded, long ones cut in pieces."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 2:
            x = F.pad(x, (0, 0, 0, 1))
        pieces = []
        for piece in x.split(50, dim=1):
            for block in self.blocks:
                piece = block(piece)  # noqa: PLW2901
            pieces.append(piece)
        return torch.cat(pieces, 1)


class Scan(nn.Module):
    """A state-space model as a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], WIDTH)
        decay, inputs, outputs = torch.sigmoid(self.decay), self.inward(x), []
        for step in inputs.unbind(1):
            state = decay * state + step
            outputs.append(self.outward(state))
        return torch.stack(outputs, 1)


class CellLoop(nn.Module):
    """An LSTM cell by hand, with its own hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state[0])


class PackedLstm(nn.Module):
    """Lengths of the samples in the batch, packed and padded again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True
        )
        return self.head(out.sum(1))


class FunctionalCall(Trunk):
    """torch.func inside forward: the block with other weights (MAML's inner step)."""

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.blocks[0].named_parameters())
        inner = (
            torch.func.functional_call(self.blocks[0], weights, (x,)).square().mean()
        )
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {
            name: weight - 0.1 * grad
            for (name, weight), grad in zip(weights.items(), grads, strict=True)
        }
        x = torch.func.functional_call(self.blocks[0], moved, (x,))
        return self.blocks[2](self.blocks[1](x))


class GradientPenalty(Trunk):
    """WGAN-GP, force fields and PINNs: a gradient by the input inside forward."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.detach().requires_grad_()
        energy = super().forward(x).sum(-1)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return {"loss": energy.mean() + (force.norm(dim=-1) - 1).square().mean()}


class Vmapped(nn.Module):
    """An ensemble in one parameter, mapped by torch.vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        each = torch.vmap(lambda w, x: torch.tanh(x @ w), in_dims=(0, None))
        return self.blocks(each(self.weights, x).mean(0))


class NeuralOde(nn.Module):
    """Steps of Runge-Kutta with one network in each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            k1 = self.net(x)
            k2 = self.net(x + 0.05 * k1)
            k3 = self.net(x + 0.05 * k2)
            k4 = self.net(x + 0.1 * k3)
            x = x + 0.1 * (k1 + 2 * k2 + 2 * k3 + k4) / 6
        return x


class NestedAutocast(Trunk):
    """A part that insists on fp32."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        with torch.autocast(x.device.type, enabled=False):
            return self.blocks[2](x.float())


class ParameterInOptimisedPath(Trunk):
    """Gates, masks by where, gather, scatter, sort, cumsum, topk with gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        best, index = x.topk(3, dim=-1)
        x = x.scatter_add(-1, index, best)
        x = torch.where(x > 0, x, 0.1 * x).cumsum(-1)
        order = x.sort(-1).indices
        return x.gather(-1, order).flip(-1).logsumexp(-1)


class SoftExperts(nn.Module):
    """A mixture of experts, all of them run and weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        answers = torch.stack([expert(x) for expert in self.experts], -1)
        return (answers * weights.unsqueeze(-2)).sum(-1)


class HardExperts(nn.Module):
    """A mixture of experts, each on the samples that are its own, found by nonzero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number).squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class BooleanMask(Trunk):
    """The loss of those positions that a mask in the batch names."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x)[mask].square().mean()


class Scripted(nn.Module):
    """A part that is TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.scripted(self.first(x)))


class CompiledPart(Trunk):
    """A block under torch.compile; the eager backend needs no compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            torch.compile(Block(), backend="eager") for _ in range(2)
        )
