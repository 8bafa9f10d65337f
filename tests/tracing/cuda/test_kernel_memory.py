"""The registry of kernel memory: which ops have rules, and what rules may not do."""

from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # its ops
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from budgetfit.core.step_trace import KernelScratch
from budgetfit.memory.scratch_sizes.rules import PARTS, DeviceProperties, scratch_bytes
from budgetfit.tracing.cuda.kernel_memory.registry import (
    KERNELS,
    OUTPUTS,
    Call,
    Gemm,
    KernelStep,
    Unverified,
    kernel_memory,
    kernel_steps,
)
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.records import Free, Output

TARGET = CudaTarget(compute_capability=(8, 0), torch_version=(2, 13), cudnn=False)
aten = torch.ops.aten


class NoOps(TorchDispatchMode):
    """Fails on any op: what a trace would take for the program's own."""

    def __torch_dispatch__(self, func: object, *_: object) -> None:
        raise AssertionError(f"a rule called {func}")


def calls(batch: int) -> dict[str, tuple[Any, tuple[Any, ...], Any]]:
    """Return op, arguments and output of typical calls at a batch size."""
    x = torch.empty(batch, 64, 48)
    turned = torch.empty(64, batch, 48).transpose(0, 1)
    heads = torch.empty(batch, 64, 4, 32).transpose(1, 2)
    few = torch.empty(batch, 64, 2, 32).transpose(1, 2)
    half = heads.half()
    lse = torch.empty(batch, 4, 64)
    rows, row = torch.empty(batch * 64, 48), torch.empty(48)
    index = torch.empty(batch, 64, dtype=torch.int64)
    stats, mask3 = torch.empty(batch, 64, 1), [True] * 3
    image, kernel = torch.empty(batch, 3, 32, 32), torch.empty(8, 3, 4, 4)
    seed = torch.empty((), dtype=torch.int64)
    flash = (None, None, 64, 64, 0.0, True, seed, seed)
    efficient = (None, heads, lse, seed, seed, 0.1, [True] * 4, False)
    conv = ([4, 4], [0, 0], [1, 1], False, [0, 0], 1)
    return {
        "sum over rows": (aten.sum.dim_IntList, (rows, [0]), row),
        "sum of booleans": (aten.sum.default, (index.bool(),), seed),
        "mean": (aten.mean.default, (x,), x.mean()),
        "largest": (aten.max.default, (turned,), x.max()),
        "norm": (aten.linalg_vector_norm.default, (turned,), x.max()),
        "softmax": (aten._softmax_backward_data.default, (turned, x, 2, x.dtype), x),
        "layer norm": (
            aten.native_layer_norm_backward.default,
            (x, x, [48], stats, stats, row, row, mask3),
            None,
        ),
        "embedding": (
            aten.embedding_dense_backward.default,
            (turned, index, 1000, -1, False),
            None,
        ),
        "flash": (
            aten._scaled_dot_product_flash_attention_backward.default,
            (half, half, few.half(), few.half(), half, lse, *flash),
            None,
        ),
        "efficient": (
            aten._scaled_dot_product_efficient_attention_backward.default,
            (heads, heads, heads, heads, *efficient),
            None,
        ),
        "cudnn": (
            aten._scaled_dot_product_cudnn_attention_backward.default,
            (half, half, few.half(), few.half(), half, lse, seed, seed),
            None,
        ),
        "indexing": (aten.index_put_.default, (rows, [index], x, True), rows),
        "matrix product": (aten.mm.default, (rows[:, ::2], kernel[:, 0, 0]), rows),
        "convolution": (aten.convolution.default, (image, kernel, None, *conv), image),
        "grouped convolution": (
            aten.convolution.default,
            (torch.empty(batch, 6, 32, 32), kernel, None, *conv[:-1], 2),
            torch.empty(batch, 8, 8, 8),
        ),
        "backward of a convolution": (
            aten.convolution_backward.default,
            (torch.empty(batch, 8, 8, 8), image, kernel, [8], *conv, mask3),
            None,
        ),
        "running sum": (aten.cumsum.default, (index.view(-1).int(), 0), index),
        "sort": (aten.sort.default, (index.view(-1),), None),
        "median": (aten.median.default, (turned,), x.max()),
        "distances": (
            aten._cdist_backward.default,
            (torch.empty(batch, 64, 8), x, x[:, :8], 1.0, torch.empty(batch, 64, 8)),
            x,
        ),
    }


def steps_of(
    func: OpOverload, args: tuple[Any, ...], out: object
) -> tuple[KernelStep, ...]:
    return kernel_steps(Call(func, args, {}, out, TARGET))


def allocated(*call: Any) -> list[KernelScratch[int]]:
    steps = steps_of(*call)
    products = [step for step in steps if isinstance(step, Gemm)]
    copies = [copy for product in products for copy in product.copies]
    return [*(step for step in steps if isinstance(step, KernelScratch)), *copies]


@pytest.mark.parametrize("name", calls(2))
def test_arguments_are_affine_in_the_batch_size_and_parts_stay(name: str) -> None:
    with FakeTensorMode():
        steps = {batch: steps_of(*calls(batch)[name]) for batch in (2, 11)}
        at = {batch: allocated(*calls(batch)[name]) for batch in (2, 3, 11)}
    assert at[2], "a typical call that has scratch"
    assert [type(step) for step in steps[2]] == [type(step) for step in steps[11]]
    for two, three, eleven in zip(*at.values(), strict=True):
        assert two.rule == three.rule == eleven.rule
        assert two.part == eleven.part < PARTS[two.rule]
        for a, b, c in zip(
            two.arguments, three.arguments, eleven.arguments, strict=True
        ):
            assert c == a + 9 * (b - a)


@pytest.mark.parametrize("name", calls(2))
def test_a_rule_calls_no_op_of_its_own(name: str) -> None:
    with FakeTensorMode():
        call = calls(2)[name]
        with NoOps():
            steps_of(*call)


def test_an_op_without_a_rule_takes_nothing() -> None:
    x = torch.empty(2, 2)
    assert steps_of(aten.add.Tensor, (x, x), x) == ()


def test_a_softmax_backward_makes_the_product_after_its_output() -> None:
    x = torch.empty(8, 16, dtype=torch.bfloat16)
    args = (x, x, 1, x.dtype)
    steps = steps_of(aten._softmax_backward_data.default, args, x)
    assert steps == (OUTPUTS, KernelScratch("buffer", (8 * 16 * 2,), 0))


def test_the_gradients_of_all_pairs_are_summed_in_a_buffer() -> None:
    one, other, apart = torch.empty(70, 8), torch.empty(60, 8), torch.empty(70, 60)
    op, plain = aten._cdist_backward.default, (apart, one, other, 1.0, apart)
    assert allocated(op, plain, one)[0].arguments == (70 * 60 * 8 * 4,)
    assert allocated(op, plain, one)[1].rule == "reduction"
    assert allocated(op, (apart, one, other, 0.0, apart), one) == [], "all are zeros"
    pairs = torch.empty(70 * 69 // 2)
    (gradients, *_) = allocated(aten._pdist_backward.default, (pairs, one, 2.0), one)
    assert gradients.arguments == (69 * 70 * 8 * 4,)


def test_a_mean_of_scattered_values_counts_them() -> None:
    out, source = torch.empty(8, 16), torch.empty(100, 16)
    index = torch.empty(100, 16, dtype=torch.int64)
    args = (out, 0, index, source)
    taken = allocated(aten.scatter_reduce.two, (*args, "mean"), out)
    assert [row.arguments[0] for row in taken] == [100 * 16 * 4, 8 * 16 * 4, 8 * 16]
    assert allocated(aten.scatter_reduce.two, (*args, "amax"), out) == []


def test_a_median_sorts_all_elements_with_their_places() -> None:
    x = torch.empty(100, 100)
    copied, *_ = allocated(aten.median.default, (x.t(),), torch.empty(()))
    values, places, sort, *_ = allocated(aten.median.default, (x,), torch.empty(()))
    assert copied.arguments == values.arguments == (10_000 * 4,)
    assert places.arguments == (10_000 * 8,)
    assert sort.rule == "sort"
    assert allocated(aten.median.default, (x[:0],), torch.empty(())) == []


def test_the_scalar_of_a_mean_squared_error_keeps_every_elements_loss() -> None:
    x = torch.empty(8, 16)
    out = torch.empty(())
    steps = steps_of(aten.mse_loss.default, (x, x), out)
    assert steps[0] == Output(0, size_bytes=8 * 16 * 4)


def test_an_op_is_registered_once() -> None:
    with pytest.raises(ValueError, match=r"aten\.bmm is registered already"):
        kernel_memory("bmm")(lambda _: iter(()))


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_rule_names_an_op_of_torch(name: str) -> None:
    namespace, _, rest = name.partition(".")
    ops: Any = aten
    if namespace in {"budgetfit", "fsdp"}:
        ops, name = getattr(torch.ops, namespace), rest
    packet, _, overload = name.partition(".")
    assert not overload or overload in getattr(ops, packet).overloads()


def test_a_grouped_convolution_joins_its_groups_in_the_end() -> None:
    # Three groups of one channel on 2 x 8 x 8 images, 4 x 4 patches in steps of 4.
    image, weight = torch.empty(2, 3, 8, 8), torch.empty(6, 1, 4, 4)
    args = (image, weight, None, [4, 4], [0, 0], [1, 1], False, [0, 0], 3)
    depthwise = (image, weight, *args[2:])
    out = torch.empty(2, 6, 2, 2)
    assert allocated(aten.convolution.default, depthwise, out) == []
    image, weight = torch.empty(2, 6, 8, 8), torch.empty(6, 2, 4, 4)
    steps = steps_of(aten.convolution.default, (image, weight, *args[2:]), out)
    taken = [step.arguments[0] for step in steps if isinstance(step, KernelScratch)]
    # A slice of the images, 2 of 6 outputs, one sample's patches: 2 * 16 taps * 2 * 2.
    assert taken == [2 * 2 * 64 * 4, 2 * 2 * 4 * 4, 32 * 4 * 4] * 3
    assert steps[-4] == OUTPUTS
    given = [step.scratch.arguments[0] for step in steps if isinstance(step, Free)]
    assert given[:-3] == [32 * 4 * 4, 2 * 2 * 64 * 4] * 3, "outputs wait to be joined"
    assert given[-3:] == [2 * 2 * 4 * 4] * 3
    grad = (out, image, weight, [6], *args[3:], [True] * 3)
    steps = steps_of(aten.convolution_backward.default, grad, None)
    given = [step.scratch.arguments[0] for step in steps if isinstance(step, Free)]
    # Gradients of the groups' biases, weights and images.
    assert given[-9:] == [2 * 4] * 3 + [2 * 2 * 16 * 4] * 3 + [2 * 2 * 64 * 4] * 3


def test_cudnn_attention_has_one_workspace_by_the_frontends_formula() -> None:
    op = aten._scaled_dot_product_cudnn_attention_backward.default
    query, few = torch.empty(2, 8, 64, 32).half(), torch.empty(2, 2, 64, 32).half()
    row_sums, gradient = 2 * 8 * 64 * 4, 2 * 8 * 64 * 32 * 4
    for key, expanded in ((query, 0), (few, 2 * 2 * 8 * 64 * 32 * 2)):
        args = (query, query, key, key, query)
        (taken,) = allocated(op, args, None)
        assert taken.arguments == (row_sums + gradient + expanded,)


@pytest.mark.parametrize(
    ("capability", "dtype", "layout", "copied"),
    [
        ((9, 0), torch.bfloat16, torch.contiguous_format, True),
        ((9, 0), torch.bfloat16, torch.channels_last, False),
        ((8, 0), torch.float32, torch.contiguous_format, True),  # TF32
        ((7, 5), torch.float32, torch.contiguous_format, False),
    ],
)
def test_cudnn_copies_images_for_tensor_cores_in_a_convolutions_backward(
    capability: tuple[int, int],
    dtype: torch.dtype,
    layout: torch.memory_format,
    *,
    copied: bool,
) -> None:
    target = CudaTarget(compute_capability=capability, torch_version=(2, 13))
    images = torch.empty(2, 16, 8, 8, dtype=dtype).to(memory_format=layout)
    weight, grad = torch.empty(32, 16, 3, 3, dtype=dtype), images.repeat(1, 2, 1, 1)
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    args = (grad, images, weight, *rest)
    call = Call(aten.convolution_backward.default, args, {}, None, target)
    steps = [step for step in kernel_steps(call) if isinstance(step, KernelScratch)]
    bytes_of_both = 3 * 2 * 16 * 8 * 8 * dtype.itemsize
    expected = [(5 * bytes_of_both // 2,)] * 2 if copied else []
    assert [step.arguments for step in steps] == expected

    patches = (None, [3, 3], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    grad = grad[..., :2, :2].contiguous()
    args = (grad, images[..., :6, :6].to(memory_format=layout), weight, *patches)
    call = Call(aten.convolution_backward.default, args, {}, None, target)
    steps = [step for step in kernel_steps(call) if isinstance(step, KernelScratch)]
    assert [step.arguments for step in steps] == (
        [(2 * (args[0].nbytes + args[1].nbytes),)] * 2 if copied else []
    )


@pytest.mark.parametrize("func", [aten.cumsum.default, aten.cumprod.default])
def test_a_running_sum_of_every_dtype_has_its_storage_or_is_unverified(
    func: OpOverload,
) -> None:
    for dtype in (torch.uint8, torch.int16, torch.bfloat16, torch.complex128):
        row = torch.empty(5000, dtype=dtype)
        [step] = allocated(func, (row, 0), row)
        card = DeviceProperties((8, 0), 108, 2048)
        assert scratch_bytes(card, step.rule, step.arguments)[0] > 0
    odd = torch.empty(5000, dtype=torch.float8_e5m2)
    assert Unverified() in steps_of(func, (odd, 0), odd)
