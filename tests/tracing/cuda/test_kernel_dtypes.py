"""Calls that CUDA's kernels refuse for their dtypes are refused in a trace, too."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import budgetfit
from budgetfit.core.recipe import Recipe
from budgetfit.errors import TraceError
from budgetfit.gpus.table import find_gpu
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload

BF16, FP32 = torch.bfloat16, torch.float32
WIDTH = 8


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


# x comes from a layer under the precision; y is another dtype, with a gradient.
MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda x, y: x @ y.t(),
    "addmm": lambda x, y: functional.linear(x, y[:1], y[0, :1]),
    "addmv": lambda x, y: x @ y[0],
    "index_put": lambda x, y: torch.index_put(y, (_rows(x),), x),
    "index_add": lambda x, y: y.index_add(0, _rows(x), x),
    "index_copy": lambda x, y: y.index_copy(0, _rows(x), x),
    "index_reduce": lambda x, y: y.index_reduce(0, _rows(x), x, "mean"),
    "scatter": lambda x, y: y.scatter(0, _rows(x)[:, None].expand_as(x), x),
    "native_layer_norm": lambda x, y: functional.layer_norm(x, (WIDTH,), y[0], y[0]),
    "native_group_norm": lambda x, y: functional.group_norm(x, 2, y[0], y[0]),
    "binary_cross_entropy": lambda x, y: functional.binary_cross_entropy(
        x.sigmoid(), y.sigmoid()
    ),
    "grid_sampler": lambda x, y: functional.grid_sample(
        x[:, None, :, None], y[:, None, :2][:, :, None], align_corners=False
    ),
    "_cdist_forward": torch.cdist,
    "linalg_cross": lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]),
}


class Meets(nn.Module):
    """A layer's output meets another tensor."""

    def __init__(
        self, call: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.call = call
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer(x), x.to(self.dtype)).float().mean()


def trained(call: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    workload = Workload(
        model=Meets(call, dtype), batch=torch.randn(2, WIDTH), gpu=find_gpu("l4")
    )
    TraceSession(workload).exact(Recipe(batch_size=2, precision="bf16"))


@pytest.mark.parametrize("name", MIXED)
def test_two_dtypes_are_refused(name: str) -> None:
    with pytest.raises(TraceError, match=r"dtype.* cast one of them"):
        trained(MIXED[name], FP32)


@pytest.mark.parametrize("name", [each for each in MIXED if each != "_cdist_forward"])
def test_one_dtype_is_taken(name: str) -> None:
    trained(MIXED[name], BF16)


WITHOUT_HALVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cdist": torch.cdist,
    "solve": lambda x, y: torch.linalg.solve(x.t() @ x, y.t()),
    "cholesky": lambda x, _: torch.linalg.cholesky(x.t() @ x),
    "svd": lambda x, _: torch.linalg.svd(x)[1],
}


@pytest.mark.parametrize("name", WITHOUT_HALVES)
def test_kernels_without_halves_are_refused(name: str) -> None:
    with pytest.raises(TraceError, match='no half precision: pass precision="fp32"'):
        trained(WITHOUT_HALVES[name], BF16)


def test_batch_norms_take_fp32_weights_beside_half_inputs_alone() -> None:
    def norm(x: Tensor, y: Tensor) -> Tensor:
        mean = torch.zeros(WIDTH)
        return functional.batch_norm(x, mean, mean + 1, y[0], y[0], training=True)

    trained(norm, FP32)
    with pytest.raises(TraceError, match=r"native_batch_norm.* one dtype"):
        trained(lambda x, y: norm(x.float(), y), BF16)


def test_a_precision_that_fails_so_is_not_chosen() -> None:
    model = Meets(MIXED["index_add"], FP32)
    plan = budgetfit.plan(model, gpu="l4", batch=torch.randn(4, WIDTH), batch_size=4)
    assert plan.recipe.precision in {"fp32", "tf32"}
    assert any("expected tensors of one dtype" in each for each in plan.warnings)


def test_the_cpus_autocast_is_named_where_only_it_fails() -> None:
    """CUDA's casts softmax to fp32, the CPU's does not."""

    def scattered(x: Tensor, y: Tensor) -> Tensor:
        rows = _rows(x)[:, None].expand_as(x)
        return torch.zeros_like(y).scatter_(0, rows, x.softmax(-1))

    model = Meets(scattered, FP32)
    plan = budgetfit.plan(
        *(model,),
        gpu="l4",
        batch=torch.randn(4, WIDTH),
        batch_size=4,
        precision="bf16-mixed",
    )
    with pytest.raises(budgetfit.InputError, match=r"On the CPU .* Autocast leaves"):
        budgetfit.verify(plan, model, device="cpu")
