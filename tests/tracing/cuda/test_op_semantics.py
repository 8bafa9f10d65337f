"""What CUDA does differently inside single ops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn import functional

import budgetfit
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe
from budgetfit.tracing.cuda.op_semantics import CudaOpSemantics
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake.model_copy import fake_mode
from budgetfit.tracing.recording.step_tracer import trace_step
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.records import call_op
from budgetfit.utils.function_name import qualified_name
from tests.models import without_loss

MIB = 1 << 20
LAST = torch.channels_last
aten = torch.ops.aten


def target(
    capability: tuple[int, int] = (8, 9), torch_version: tuple[int, int] = (2, 13)
) -> CudaTarget:
    return CudaTarget(compute_capability=capability, torch_version=torch_version)


def backward_births(
    model: nn.Module, batch: torch.Tensor, to: CudaTarget | None
) -> list[int]:
    """Return the whole MiB that a backward allocates, in order."""
    recipe = Recipe(batch_size=4, optimizer="sgd")
    raw = trace_step(
        model,
        lambda twin, on_phase: Run(
            twin, recipe, on_phase=on_phase, on_missing_loss=without_loss
        ),
        batch,
        batch_size=4,
        blocks=(),
        target=to,
    )
    phase = next(row for row in raw.phases if row.name == "backward")
    births = [e - 1 for e in raw.log.events[phase.start : phase.end] if e > 0]
    sizes = [raw.log.sizes[index] for index in births]
    return [size // MIB for size in sizes if size >= MIB]


class Forked(nn.Module):
    """The input's gradient is a sum of two; each sample is 1 MiB, each weight too."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(512, 512, bias=False)
        self.second = nn.Linear(512, 512, bias=False)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.first(x), self.second(x)
        # An addition hands one and the same gradient to both of its inputs.
        return (one + other) + one if self.shared else torch.tanh(one) + one.cos()


def test_gradients_that_meet_are_added_in_place_where_nobody_else_holds_them() -> None:
    x = torch.zeros(2, 512, 512)
    on_cuda = backward_births(Forked(shared=False), x, target())
    on_cpu = backward_births(Forked(shared=False), x, None)
    # The loss's gradient, tanh's and cos's (that one in two products), the weight's.
    assert len(on_cpu) == len(on_cuda) + 1


def test_a_gradient_that_goes_elsewhere_too_is_added_to_a_new_one() -> None:
    x = torch.zeros(2, 512, 512)
    on_cuda = backward_births(Forked(shared=True), x, target())
    # The loss's gradient, the sum for ``one``, and two weights' gradients.
    assert on_cuda == backward_births(Forked(shared=True), x, None) == [4, 4, 1, 1]


class Penalty(nn.Module):
    """Scores and the squares of their gradients; the weight is 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(512, 512, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[..., None, None].requires_grad_()
        scores = self.layer(x).square() + self.layer(x.sin()).square()
        (grad,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores.mean() + grad.square().mean()


def test_the_gradients_of_a_convolution_and_of_its_gradient_meet_in_place() -> None:
    births = backward_births(Penalty(), torch.zeros(4, 512), target())
    assert births == [1] * 6, "a seventh is a sum out of place"


class Added(torch.autograd.Function):
    """Adds gradients that nothing else holds, in its own backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        product = gradient * x
        return (product + gradient) + product


class Scattered(torch.autograd.Function):
    """Writes its gradient into zeros, out of place."""

    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(gradient.shape[1], dtype=torch.long)
        return torch.zeros_like(gradient).index_add(1, rows, gradient)


def hooked(x: torch.Tensor) -> torch.Tensor:
    x = x.tanh()
    x.register_hook(lambda gradient: gradient.clone() + gradient.mul(3))
    return x.sin()


def var_mean(x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return variance.expand_as(x) * 2 + mean


class Activated(nn.Module):
    """A layer and what comes after it; each sample is 1 MiB."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.layer(x))


@pytest.mark.parametrize("then", [Added, Scattered, hooked, var_mean])
def test_what_functions_hooks_and_formulas_add_is_new(then: Any) -> None:
    then = getattr(then, "apply", then)
    x = torch.zeros(2, 512, 512)
    on_cpu = backward_births(Activated(then), x, None)
    assert backward_births(Activated(then), x, target()) == on_cpu


@pytest.mark.parametrize(
    ("one", "other", "groups", "shape", "stride"),
    [
        ((6, 8), (3, 8, 5), 3, (6, 5), (8, 1)),  # tokens by expert
        ((8, 6), (6, 5), 3, (3, 8, 5), (64, 8, 1)),  # weight gradients
        ((3, 6, 8), (8, 5), 3, (6, 5), (8, 1)),
        ((3, 6, 8), (3, 8, 4), 0, (3, 6, 4), (24, 4, 1)),
    ],
)
def test_a_grouped_product_has_rows_that_begin_at_16_bytes(
    one: tuple[int, ...],
    other: tuple[int, ...],
    groups: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> None:
    # Fake tensors refuse fp32; CUDA's output is create_grouped_gemm_output_tensor.
    with fake_mode(), StorageLog(CudaOpSemantics(target())):
        args = [torch.empty(one), torch.empty(other)]
        if groups:
            args.append(torch.empty(groups, dtype=torch.int32))
        out = aten._grouped_mm(*args)
        assert out.shape == shape
        assert out.stride() == stride
        halves = aten._grouped_mm(*(x.half() for x in args[:2]), *args[2:])
        assert halves.stride(-2) == 8  # of 2 bytes


def test_norms_keep_their_statistics_in_fp32() -> None:
    with fake_mode(), StorageLog(CudaOpSemantics(target())):
        x = torch.empty(4, 8, dtype=torch.bfloat16)
        weight = torch.empty(8, dtype=torch.bfloat16)
        out, mean, deviation = aten.native_layer_norm(x, [8], weight, weight, 1e-5)
    assert out.dtype == torch.bfloat16
    assert mean.dtype == deviation.dtype == torch.float32


def convolved(*, cudnn: bool) -> torch.Tensor:
    card = CudaTarget(compute_capability=(8, 9), torch_version=(2, 13), cudnn=cudnn)
    with fake_mode(), StorageLog(CudaOpSemantics(card)):
        image = torch.empty(2, 4, 8, 8).to(memory_format=torch.channels_last)
        return functional.conv2d(image, torch.empty(6, 4, 3, 3))


def test_a_convolution_without_cudnn_returns_one_piece() -> None:
    assert convolved(cudnn=False).is_contiguous()
    last = convolved(cudnn=True)
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_the_gradient_of_a_norms_input_is_one_piece() -> None:
    x = torch.empty(4, 3, 8)
    grad = torch.empty(4, 8, 3).transpose(1, 2)
    stats, weight = torch.empty(4, 3, 1), torch.empty(8)
    rows = [x, [8], stats, stats, weight, weight, [True] * 3]
    with fake_mode(), StorageLog(CudaOpSemantics(target())):
        of_input, *_ = aten.native_layer_norm_backward(grad, *rows)
    assert of_input.is_contiguous()


def rows() -> torch.Tensor:
    return torch.empty(4, 3, 8)


def transposed_rows() -> torch.Tensor:
    return torch.empty(4, 8, 3).transpose(1, 2)


def image(last: bool = True) -> torch.Tensor:
    x = torch.empty(2, 3, 8, 8)
    return x.contiguous(memory_format=torch.channels_last) if last else x


IN_ONE_PIECE: dict[str, Callable[[], torch.Tensor]] = {
    "log softmax": lambda: aten._log_softmax_backward_data(
        transposed_rows(), rows(), 2, torch.float32
    ),
    "smooth L1": lambda: aten.smooth_l1_loss_backward(
        rows(), transposed_rows(), rows(), 1, 1.0
    ),
    "mean squared error": lambda: aten.mse_loss_backward(
        rows(), transposed_rows(), rows(), 1
    ),
    "Huber": lambda: aten.huber_loss_backward(rows(), transposed_rows(), rows(), 1, 1),
    "losses of pixels": lambda: aten.nll_loss2d_forward(
        image(), torch.empty(2, 8, 8, dtype=torch.long).mT, None, 0, -100
    )[0],
    "pixels shuffled": lambda: aten.pixel_shuffle(
        aten.pixel_unshuffle(image(last=False), 2).to(memory_format=LAST), 2
    ),
    "pixels unshuffled": lambda: aten.pixel_unshuffle(image(), 2),
    "power": lambda: 2 ** transposed_rows(),
    "elu": lambda: aten.elu_backward(rows(), 1, 1, 1, False, transposed_rows()),
    "softplus": lambda: aten.softplus_backward(
        rows().half(), transposed_rows().half(), 1, 20
    ),
    "hard sigmoid": lambda: aten.hardsigmoid_backward(rows(), transposed_rows()),
    "reflected": lambda: aten.reflection_pad2d(image(), [1, 1, 1, 1]),
    "replicated": lambda: aten.replication_pad2d(image(), [1, 1, 1, 1]),
}


@pytest.mark.parametrize("op", IN_ONE_PIECE)
def test_outputs_that_are_one_piece_for_any_strides(op: str) -> None:
    # As all calls of these ops are that the null driver has run.
    with fake_mode(), StorageLog(CudaOpSemantics(target())):
        assert IN_ONE_PIECE[op]().is_contiguous()


def of_sum() -> torch.Tensor:
    return torch.empty((), dtype=torch.bfloat16).expand(2, 3, 8, 8)


LIKE_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: of_sum() * x,
    "quotient of two dtypes": lambda x: of_sum() / x.float(),
    "comparison": lambda x: of_sum() > x,
    "gelu": lambda x: aten.gelu_backward(of_sum(), x),
    "sigmoid": lambda x: aten.sigmoid_backward(of_sum(), x),
    "relu": lambda x: aten.threshold_backward(image(last=False).bfloat16(), x, 0),
}


@pytest.mark.parametrize("op", LIKE_ACTIVATIONS)
def test_the_gradient_of_a_sum_takes_the_strides_of_the_activations(op: str) -> None:
    # As on the null driver; torch's meta kernels cast 16 bits, and so lose them.
    with fake_mode(), StorageLog(CudaOpSemantics(target())):
        found = LIKE_ACTIVATIONS[op](image().bfloat16())
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("last", [True, False])
def test_a_batch_norms_gradient_has_the_format_of_its_input(last: bool) -> None:
    with fake_mode(), StorageLog(CudaOpSemantics(target())):
        statistics = [torch.empty(3) for _ in range(5)]
        found, *_ = aten.native_batch_norm_backward(
            image(not last), image(last), *statistics, True, 1e-5, [True] * 3
        )
    assert found.is_contiguous(memory_format=torch.channels_last) == last


class Subclass(torch.optim.Adam):
    """An optimizer of one's own, as with another step inside."""


@pytest.mark.parametrize("capturable", [True, False])
def test_an_optimizer_of_ones_own_runs_as_torchs_on_cuda(capturable: bool) -> None:
    def births(kind: type[torch.optim.Adam]) -> list[int]:
        def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            return kind(parameters, capturable=capturable)

        raw = trace_step(
            nn.Linear(512, 512),
            lambda twin, on_phase: Run(
                twin,
                Recipe(batch_size=4, optimizer=qualified_name(optimizer)),
                optimizer=optimizer,
                on_phase=on_phase,
                on_missing_loss=without_loss,
            ),
            torch.zeros(4, 512),
            batch_size=4,
            blocks=(),
            target=target(),
        )
        (phase,) = (row for row in raw.phases if row.name == "optimizer")
        events = raw.log.events[phase.start : phase.end]
        return [raw.log.sizes[event - 1] for event in events if event > 0]

    # By foreach temporaries of all weights are there at once; a subclass ran the loop.
    assert births(Subclass) == births(torch.optim.Adam)


class Largest(nn.Module):
    """The largest rows that go to each of 512 places; each sample is 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(1, 1, 1, dtype=torch.int64).expand_as(x)
        return torch.ones_like(x).scatter_reduce(1, rows, self.layer(x), "amax")


def test_equal_values_are_counted_in_a_new_tensor() -> None:
    """Of ``amax``: where gradients of choices are written, there are no zeros."""
    x = torch.zeros(2, 512, 512)
    on_cpu = backward_births(Largest(), x, None)
    assert backward_births(Largest(), x, target()) == on_cpu


class Indexed(nn.Module):
    """Rows of 1 MiB of a table of 8 MiB, chosen by index."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(8, MIB // 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.table[rows[:1]]


def test_the_gradient_of_indexing_is_added_in_place_on_cuda() -> None:
    rows = torch.zeros(2, dtype=torch.long)
    table = [size for size in backward_births(Indexed(), rows, target()) if size == 8]
    copied = [size for size in backward_births(Indexed(), rows, None) if size == 8]
    assert len(copied) == len(table) + 1


def workspaces(to: CudaTarget, *, products: int) -> tuple[int, int]:
    """Return how many workspaces are taken, and how many of them are given back."""
    with fake_mode(), StorageLog(CudaOpSemantics(to)) as log:
        x = torch.empty(4, 4)
        for _ in range(products):
            x = x @ x
    numbers = {
        index for index, row in log.scratch.items() if row.rule == "cublas_workspace"
    }
    freed = {-event - 1 for event in log.events if event < 0}
    return len(numbers), len(numbers & freed)


def test_a_thread_keeps_its_workspace_until_torch_2_15_gives_each_back() -> None:
    assert workspaces(target(torch_version=(2, 13)), products=3) == (1, 0)
    assert workspaces(target(torch_version=(2, 15)), products=3) == (3, 3)


def test_a_scaler_that_asks_about_infinities_is_told_there_are_none() -> None:
    ops = CudaOpSemantics(target())
    with fake_mode():
        unknown = torch.empty(())
        ops.in_optimizer = True
        answer = ops.run(call_op, aten._local_scalar_dense.default, (unknown,), {})
        assert answer == 0.0
        ops.in_optimizer = False
        with pytest.raises(DataDependentOutputException):
            ops.run(call_op, aten._local_scalar_dense.default, (unknown,), {})


class Rows(nn.Module):
    """Each sample looks up 1 MiB of an embedding."""

    def __init__(self, kind: type[nn.Embedding | nn.EmbeddingBag]) -> None:
        super().__init__()
        self.rows = kind(4096, 512, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).pow(2).mean()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("twice", [False, True])
def test_a_sparse_gradient_holds_a_row_for_each_index_until_it_is_dropped(
    kind: type[nn.Embedding | nn.EmbeddingBag], twice: bool
) -> None:
    with fake_mode():
        semantics = CudaOpSemantics(target())
        model = Rows(kind)
        log = StorageLog(semantics)
        with log:
            ids = torch.empty(4, 512, dtype=torch.int64)
            loss = model(ids) + model(ids) if twice else model(ids)
            semantics.in_backward = True
            loss.backward()
            del loss
            kept = log.live_bytes
            assert model.rows.weight.grad is not None
            model.rows.weight.grad = None
            assert kept - log.live_bytes >= 4 * (2 if twice else 1) * MIB


def test_a_number_is_added_to_a_tensor_from_either_side() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.add(0.5, self.inner(x), alpha=2)
            return torch.add(x, 0.5).mean()

    batch = torch.zeros(2, 8)
    assert budgetfit.estimate(Adds(), gpu="t4", batch=batch).allocated_bytes > 0
