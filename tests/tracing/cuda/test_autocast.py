"""CUDA's autocast on CPU tensors. Sources: torch's own dispatcher and its header."""

import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from budgetfit.tracing.cuda.dispatch.autocast import (
    BANNED,
    FP32,
    FP32_OUTPUT,
    FP32_OVERLOAD,
    LOWER_PRECISION,
    PROMOTE,
    cuda_autocast,
    ops_with_kernel,
)
from budgetfit.tracing.fake.model_copy import fake_mode

SINGLE = torch.float32
LOW = (torch.bfloat16, torch.float16)
POLICIES = {
    "lower precision": LOWER_PRECISION,
    "fp32": FP32,
    "fp32 output": FP32_OUTPUT,
    "fp32 overload": frozenset(FP32_OVERLOAD),
    "promote": PROMOTE,
    "banned": BANNED,
}

# What torch has from 2.12 or 2.14 on, or only up to 2.12.
OF_OTHER_RELEASES = {
    "cumprod.dimname",
    "cumsum.dimname",
    "linalg_matrix_sqrth",
    "log_softmax.Dimname",
    "norm.names_ScalarOpt_dim",
    "prod.dim_Dimname",
    "rms_norm",
    "softmax.Dimname",
    "sum.dim_DimnameList",
}
# Registered by a macro of its own. On CUDA it runs in fp32, as a call on 2.15 shows.
OUTSIDE_THE_HEADER = {"linalg_matrix_sqrth"}


def header_ops(macro: str) -> set[str]:
    """Read one of the lists that torch's own backends are built from."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text()
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", text)
    assert body is not None
    pairs = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
    return {f"{op}.{overload}" if overload else op for op, overload in pairs}


def test_every_op_that_cudas_autocast_knows_has_exactly_one_policy() -> None:
    counts = Counter(op for policy in POLICIES.values() for op in policy)
    assert set(counts.values()) == {1}
    assert counts.keys() >= ops_with_kernel("AutocastCUDA")


def test_an_op_that_this_torch_does_not_have_is_another_releases() -> None:
    # A misspelled name would stand in a list and never be found.
    named = {op for policy in POLICIES.values() for op in policy}
    assert named - ops_with_kernel("AutocastCUDA") <= OF_OTHER_RELEASES


@pytest.mark.parametrize(
    ("macro", "policy"),
    [
        ("AT_FORALL_FP32", FP32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", FP32_OUTPUT),
        ("AT_FORALL_PROMOTE", PROMOTE),
    ],
)
def test_the_lists_are_those_of_the_installed_header(
    macro: str, policy: frozenset[str]
) -> None:
    known = policy & ops_with_kernel("AutocastCUDA")
    assert known - OUTSIDE_THE_HEADER == header_ops(macro)


def test_the_header_names_all_lower_precision_ops_but_cudnns_own() -> None:
    missing = LOWER_PRECISION - header_ops("AT_FORALL_LOWER_PRECISION_FP")
    # A build for CUDA has cuDNN's recurrent layers as well.
    own = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}
    assert missing <= own


def test_the_header_redispatches_norms_to_the_overloads_with_a_dtype() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    known = ops_with_kernel("AutocastCUDA")
    named = set(re.findall(r'"(norm\.\w+)"', header.read_text()))
    assert named == known & set(FP32_OVERLOAD)


def floats(*shape: int, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.fixture(params=LOW, ids=str)
def low(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def region(low: torch.dtype) -> Iterator[None]:
    """Fake tensors under an autocast that behaves like CUDA's."""
    with fake_mode(), cuda_autocast(), torch.autocast("cpu", dtype=low):
        yield


def attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.expand(1, 2, 4, 4)
    return functional.scaled_dot_product_attention(heads, heads, heads)


PRODUCTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: functional.linear(x, floats(4, 4), floats(4)),
    "matmul": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "vecdot": lambda x: torch.linalg.vecdot(x, x),
    "conv1d": lambda x: functional.conv1d(x[None], floats(4, 4, 1)),
    "conv2d": lambda x: functional.conv2d(x[None, None], floats(1, 1, 3, 3)),
    "transposed": lambda x: functional.conv_transpose2d(
        x[None, None], floats(1, 1, 3, 3)
    ),
    "prelu": lambda x: functional.prelu(x, floats(1)),
    "gru": lambda x: nn.GRUCell(4, 4)(x, x),
    "attention": attention,
    "multi-head": lambda x: nn.MultiheadAttention(4, 2)(x, x, x)[0],
}


@pytest.mark.usefixtures("region")
@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("given", [*LOW, SINGLE], ids=str)
def test_products_run_in_the_lower_precision(
    op: str, given: torch.dtype, low: torch.dtype
) -> None:
    assert PRODUCTS[op](floats(4, 4, dtype=given)).dtype == low


WIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm": lambda x: functional.layer_norm(x, (4,)),
    "group norm": lambda x: functional.group_norm(x[None], 2),
    "exp": torch.exp,
    "log1p": torch.log1p,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "pow": lambda x: x**3,
    "pow of a number": lambda x: 2**x,
    "pow of tensors": lambda x: x**x,
    "softplus": functional.softplus,
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: x.log_softmax(-1),
    "cross entropy": lambda x: functional.cross_entropy(
        x, torch.zeros(4, dtype=torch.long)
    ),
    "l1": lambda x: functional.l1_loss(x, x),
    "mse": lambda x: functional.mse_loss(x, x),
    "kl": lambda x: functional.kl_div(x, x, reduction="batchmean"),
    "bce with logits": lambda x: functional.binary_cross_entropy_with_logits(x, x),
    "cosine": lambda x: functional.cosine_similarity(x, x),
    "cdist": lambda x: torch.cdist(x, x),
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": torch.sum,
    "sum of rows": lambda x: x.sum(-1),
    "prod": torch.prod,
    "cumsum": lambda x: x.cumsum(0),
    "vector norm": torch.linalg.vector_norm,
    "norm": lambda x: torch.ops.aten.norm.Scalar(x, 2),
    "distances": lambda x: functional.pairwise_distance(x, x),
    "norm of rows": lambda x: torch.ops.aten.norm.ScalarOpt_dim(
        x, 2, [0], keepdim=True
    ),
    "interpolate": lambda x: functional.interpolate(
        x[None, None], scale_factor=2.0, mode="bilinear"
    ),
}


@pytest.mark.usefixtures("region")
@pytest.mark.parametrize("op", WIDE)
@pytest.mark.parametrize("given", [*LOW, SINGLE], ids=str)
def test_what_loses_digits_runs_in_fp32(op: str, given: torch.dtype) -> None:
    assert WIDE[op](floats(4, 4, dtype=given)).dtype == SINGLE


AS_THEY_COME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + x,
    "gelu": functional.gelu,
    "tanh": torch.tanh,
    "mean": torch.mean,
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "max pool": lambda x: functional.max_pool2d(x[None], 2),
    "dropout": functional.dropout,
    "batch norm": lambda x: functional.batch_norm(
        x, floats(4), floats(4), training=True
    ),
    "embedding": lambda x: functional.embedding(torch.zeros(2, dtype=torch.long), x),
    "in place": lambda x: x.mul_(floats(4, 4)),
}
# In torch 2.11 CUDA's autocast does not know it yet.
RMS_NORM = WIDE if "rms_norm" in ops_with_kernel("AutocastCUDA") else AS_THEY_COME
RMS_NORM["rms norm"] = lambda x: functional.rms_norm(x, (4,))


@pytest.mark.usefixtures("region")
@pytest.mark.parametrize("op", AS_THEY_COME)
@pytest.mark.parametrize("given", [*LOW, SINGLE], ids=str)
def test_everything_else_keeps_its_dtype(op: str, given: torch.dtype) -> None:
    # On a CPU, autocast would widen some of these: its lists are other ones.
    assert AS_THEY_COME[op](floats(4, 4, dtype=given)).dtype == given


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "atan2": torch.atan2,
    "tensordot": lambda x, y: torch.tensordot(x, y, dims=1),
    "scatter add": lambda x, y: torch.scatter_add(
        x, 0, torch.zeros(4, 4, dtype=torch.long), y
    ),
    "index put": lambda x, y: torch.index_put(x, [torch.zeros(4, dtype=torch.long)], y),
}


@pytest.mark.usefixtures("region")
@pytest.mark.parametrize("op", MIXED)
def test_ops_of_several_tensors_take_the_widest_dtype(
    op: str, low: torch.dtype
) -> None:
    narrow, wide = floats(4, 4, dtype=low), floats(4, 4)
    assert MIXED[op](narrow, narrow).dtype == low
    assert MIXED[op](narrow, wide).dtype == SINGLE
    assert MIXED[op](wide, narrow).dtype == SINGLE


@pytest.mark.usefixtures("region")
def test_a_dtype_that_the_caller_names_is_respected(low: torch.dtype) -> None:
    x = floats(4, 4)
    assert x.softmax(-1, dtype=low).dtype == low
    assert x.sum(-1, dtype=low).dtype == low
    assert torch.cumsum(x, 0, dtype=torch.float64).dtype == torch.float64


@pytest.mark.usefixtures("region")
def test_whole_numbers_and_doubles_are_left_alone() -> None:
    whole = torch.ones(4, 4, dtype=torch.long)
    double = floats(4, 4, dtype=torch.float64)
    assert whole.sum().dtype == torch.long
    assert (whole**2).dtype == torch.long
    assert (double @ double).dtype == torch.float64
    assert torch.ops.aten.norm.Scalar(double, 2).dtype == torch.float64
    assert double.softmax(-1).dtype == torch.float64


@pytest.mark.usefixtures("region")
def test_a_loss_that_overflows_in_half_precision_is_refused() -> None:
    with pytest.raises(RuntimeError, match="BCEWithLogitsLoss, or leave autocast"):
        functional.binary_cross_entropy(floats(4), floats(4))


class Casts(TorchDispatchMode):
    """Counts the copies to another dtype and watches for their end."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Any]] = []
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.made.append(weakref.ref(out.untyped_storage()))
            self.shapes.append(tuple(out.shape))
        return out

    def alive(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.made)


def casts_of(run: Callable[[nn.Linear, torch.Tensor], Any]) -> Casts:
    layer = nn.Linear(4, 4, bias=False)
    x = floats(2, 4, dtype=torch.bfloat16)
    with cuda_autocast(), Casts() as casts:
        run(layer, x)
    return casts


def lower(*, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def test_the_last_argument_is_cast_first() -> None:
    # As C++ evaluates them: bias, weight, input. Reserved memory depends on the order.
    layer = nn.Linear(4, 3)
    with cuda_autocast(), lower(), Casts() as casts:
        layer(floats(2, 4))
    assert casts.shapes == [(3,), (3, 4), (2, 4)]


def one_region(layer: nn.Linear, x: torch.Tensor) -> None:
    with lower():
        layer(x)
        layer(x)


def two_regions(layer: nn.Linear, x: torch.Tensor) -> None:
    for _ in range(2):
        with lower():
            layer(x)


def nested_regions(layer: nn.Linear, x: torch.Tensor) -> None:
    with lower():
        with lower():
            layer(x)
        layer(x)


def no_cache(layer: nn.Linear, x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        layer(x)
        layer(x)


@pytest.mark.parametrize(
    ("run", "casts"),
    [(one_region, 1), (two_regions, 2), (nested_regions, 1), (no_cache, 2)],
)
def test_a_weight_is_cast_once_in_the_outermost_region(
    run: Callable[[nn.Linear, torch.Tensor], None], casts: int
) -> None:
    assert len(casts_of(run).made) == casts


def test_an_island_without_autocast_runs_wide_and_forgets_no_casts() -> None:
    def island(layer: nn.Linear, x: torch.Tensor) -> None:
        with lower():
            layer(x)
            with lower(enabled=False):
                assert layer(x.float()).dtype == SINGLE
            assert layer(x).dtype == torch.bfloat16

    casts = casts_of(island)
    # Of the weight once, and of x for the island.
    assert len(casts.made) == 2


def test_what_is_no_fp32_leaf_that_needs_a_gradient_is_cast_each_time() -> None:
    def of(weight: torch.Tensor) -> int:
        with cuda_autocast(), lower(), Casts() as casts:
            functional.linear(floats(2, 4, dtype=torch.bfloat16), weight)
            functional.linear(floats(2, 4, dtype=torch.bfloat16), weight)
        return len(casts.made)

    leaf = floats(4, 4).requires_grad_()
    assert of(leaf) == 1
    assert of(floats(4, 4)) == 2  # frozen
    assert of(leaf * 2) == 2  # no leaf
    assert of(floats(4, 4, dtype=torch.float16).requires_grad_()) == 2  # not fp32


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_a_cast_after_a_forward_without_gradients_has_one(
    without_gradients: Callable[[], AbstractContextManager[None]],
) -> None:
    # As PyTorch's: self-conditioning runs a model twice, first under no_grad.
    def twice(layer: nn.Linear, x: torch.Tensor) -> None:
        with lower():
            with without_gradients():
                layer(x)
            layer(x).sum().backward()
        assert layer.weight.grad is not None

    assert casts_of(twice).shapes.count((4, 4)) == 2  # the weight's, the gradient's


def test_casts_live_until_the_outermost_region_ends_and_no_longer() -> None:
    layer = nn.Linear(4, 4, bias=False)
    x = floats(2, 4, dtype=torch.bfloat16)
    with cuda_autocast(), Casts() as casts:
        with torch.no_grad(), lower():
            with lower():
                layer(x)
            assert casts.alive() == 1
        assert casts.alive() == 0


def test_casts_that_autograd_saved_outlive_the_region() -> None:
    layer = nn.Linear(4, 4, bias=False)
    x = floats(2, 4, dtype=torch.bfloat16).requires_grad_()
    with cuda_autocast(), Casts() as casts:
        with lower():
            out = layer(x)
        assert casts.alive() == 1
        del out
        assert casts.alive() == 0


def in_region(region: torch.autocast) -> torch.dtype:
    with region:
        return (floats(4, 4) @ floats(4, 4)).dtype


@pytest.mark.usefixtures("region")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_program_may_name_either_device(device: str, low: torch.dtype) -> None:
    assert in_region(torch.autocast(device, enabled=False)) == SINGLE
    assert in_region(torch.autocast(device)) == low
    assert in_region(torch.autocast(device, dtype=torch.bfloat16)) == torch.bfloat16
    assert in_region(torch.autocast(device, dtype=SINGLE)) == SINGLE
    assert in_region(MADE_BEFORE) == SINGLE
    assert (floats(4, 4) @ floats(4, 4)).dtype == low


MADE_BEFORE = torch.autocast("cuda", enabled=False)  # as a decorator's


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_region_without_a_dtype_has_cudas(device: str) -> None:
    with fake_mode(), cuda_autocast():
        assert in_region(torch.autocast(device)) == torch.float16
        assert (floats(4, 4) @ floats(4, 4)).dtype == SINGLE


def state() -> list[Any]:
    devices = ["cuda", "cpu"]
    of_each = [torch.is_autocast_enabled(device) for device in devices]
    return [*of_each, *[torch.get_autocast_dtype(device) for device in devices]]


@pytest.mark.usefixtures("region")
def test_who_asks_for_autocast_of_cuda_is_told_of_the_region(low: torch.dtype) -> None:
    assert torch.is_autocast_enabled()
    assert state() == [True, True, low, low]
    with torch.autocast("cuda", enabled=False):
        assert state() == [False, False, low, low]


def test_the_state_of_both_devices_is_as_before_after_an_error() -> None:
    def left_open() -> None:
        torch.autocast("cuda", dtype=torch.bfloat16).__enter__()
        raise KeyError

    before = state()
    with pytest.raises(KeyError), cuda_autocast():
        left_open()
    torch.autocast_decrement_nesting()
    assert state() == before


class InFp32(torch.autograd.Function):
    """A function whose forward is written for CUDA's autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=SINGLE)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        assert x.dtype == SINGLE
        return grads[0] @ x


@pytest.mark.usefixtures("region")
def test_a_function_that_casts_its_inputs_on_cuda_does(low: torch.dtype) -> None:
    x = floats(4, 4, dtype=low).requires_grad_()
    out = InFp32.apply(x)
    assert out.dtype == SINGLE
    out.sum().backward()
    assert x.grad is not None


def dispatcher() -> dict[str, str]:
    """Return what is registered for each op that either autocast knows."""
    ops = ops_with_kernel("AutocastCUDA") | ops_with_kernel("AutocastCPU")
    return {op: torch._C._dispatch_dump(f"aten::{op}") for op in sorted(ops)}


def test_the_cpus_own_kernels_are_back_afterwards() -> None:
    def softmax() -> torch.dtype:
        with lower():
            return floats(4, dtype=torch.bfloat16).softmax(-1).dtype

    before = dispatcher()
    assert softmax() == torch.bfloat16
    with cuda_autocast():
        assert softmax() == SINGLE
    assert softmax() == torch.bfloat16
    assert dispatcher() == before


def test_the_cpus_own_kernels_are_back_after_an_error() -> None:
    before = dispatcher(), torch.clear_autocast_cache
    with pytest.raises(KeyError), cuda_autocast():
        raise KeyError
    assert (dispatcher(), torch.clear_autocast_cache) == before
