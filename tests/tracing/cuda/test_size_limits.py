"""Sizes that CUDA's kernels refuse are refused, with the largest that runs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import budgetfit
from budgetfit import Recipe, TraceError
from budgetfit.tracing.cuda.kernel_memory.registry import Call
from budgetfit.tracing.cuda.size_limits import size_limits
from budgetfit.tracing.cuda.target import CudaTarget

aten = torch.ops.aten
TARGET = CudaTarget(compute_capability=(8, 9), torch_version=(2, 13))
SIDE, CHANNELS = 64, 16
PIXELS = SIDE * SIDE * CHANNELS  # 32,768 of these are 2**31
LONG = 2**31
ADAPTIVE_AVG_POOL2D = aten._adaptive_avg_pool2d.default
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default


def _tensor(*shape: int, last: bool = False, dtype: torch.dtype = torch.half) -> Tensor:
    tensor = torch.empty(*shape, device="meta", dtype=dtype)
    return tensor.to(memory_format=torch.channels_last) if last else tensor


def _images(samples: int, side: int = SIDE, *, last: bool = False) -> Tensor:
    return _tensor(samples, CHANNELS, side, side, last=last)


def _row(length: int) -> Tensor:
    return _tensor(1, 1, length)


def _indices(count: int) -> Tensor:
    return _tensor(count, dtype=torch.long)


def _shape(samples: int, side: int) -> list[int]:
    return [samples, CHANNELS, side, side]


# What torch 2.13 refuses, by a size: it takes one less.
REFUSED: dict[str, tuple[int, Callable[[int], tuple[torch._ops.OpOverload, tuple]]]] = {
    "reflection_pad1d": (
        LONG - 1,
        lambda n: (aten.reflection_pad1d.default, (_row(n), [0, 0])),
    ),
    "reflection_pad1d_backward": (
        LONG - 1,
        lambda n: (aten.reflection_pad1d_backward.default, (_row(n), _row(n), [0, 0])),
    ),
    "reflection_pad2d": (
        LONG // PIXELS,
        lambda n: (aten.reflection_pad2d.default, (_images(n), [1] * 4)),
    ),
    "replication_pad2d_backward": (
        LONG // (CHANNELS * 66 * 66) + 1,
        lambda n: (
            aten.replication_pad2d_backward.default,
            (_images(n, 66), _images(n), [1] * 4),
        ),
    ),
    "upsample_nearest1d": (
        LONG,
        lambda n: (aten.upsample_nearest1d.default, (_row(n), [n])),
    ),
    "upsample_nearest1d_backward": (
        LONG,
        lambda n: (aten.upsample_nearest1d_backward.default, (_row(n), [n], [1, 1, n])),
    ),
    "upsample_nearest2d_backward": (
        LONG // PIXELS,
        lambda n: (
            aten.upsample_nearest2d_backward.default,
            (_images(n, 32, last=True), [32, 32], _shape(n, SIDE)),
        ),
    ),
    "upsample_bilinear2d": (
        LONG // PIXELS,
        lambda n: (
            aten.upsample_bilinear2d.default,
            (_images(n, last=True), [32, 32], False),
        ),
    ),
    "upsample_bilinear2d_backward": (
        LONG // PIXELS,
        lambda n: (
            aten.upsample_bilinear2d_backward.default,
            (_images(n), [SIDE, SIDE], _shape(n, 32), False),
        ),
    ),
    "_adaptive_avg_pool2d": (
        LONG // PIXELS,
        lambda n: (ADAPTIVE_AVG_POOL2D, (_images(n, last=True), [7, 7])),
    ),
    "sort": (LONG, lambda n: (aten.sort.default, (_row(n), -1))),
    "kthvalue": (LONG, lambda n: (aten.kthvalue.default, (_row(n), 1, -1))),
    "median": (LONG, lambda n: (aten.median.default, (_row(n),))),
    "embedding_dense_backward": (
        LONG,
        lambda n: (
            aten.embedding_dense_backward.default,
            (_tensor(n, 1), _indices(n), 100, -1, False),
        ),
    ),
    "_index_put_impl_": (
        LONG,
        lambda n: (
            aten._index_put_impl_.default,
            (_tensor(100), [_indices(n)], _tensor(n), True),
        ),
    ),
    "_scaled_dot_product_flash_attention": (
        65_536,
        lambda n: (FLASH, (_tensor(n, 2, 16, 64),) * 3),
    ),
    "_scaled_dot_product_efficient_attention": (
        65_536,
        lambda n: (EFFICIENT, (*(_tensor(2, n, 16, 64),) * 3, None, True)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_first_size_that_is_refused_exceeds_a_limit(name: str) -> None:
    least, call_at = REFUSED[name]
    for size in (least - 1, least):
        func, args = call_at(size)
        out = _row(size) if "1d" in name else _images(size, last=True)
        limits = size_limits(Call(func, args, {}, out, TARGET))
        exceeded = [limit for limit in limits if limit.number > limit.most]
        assert bool(exceeded) == (size == least), limits


def test_other_formats_and_ops_have_no_limit() -> None:
    images = _images(40_000)
    for func, args in (
        (aten.upsample_bilinear2d.default, (images, [32, 32], False)),
        (ADAPTIVE_AVG_POOL2D, (images, [7, 7])),
        (aten.add.Tensor, (images, images)),
        (aten.median.dim, (images, 0)),
        (aten._index_put_impl_.default, (images, [_indices(4)], images, False)),
    ):
        assert size_limits(Call(func, args, {}, images, TARGET)) == ()


class Padded(nn.Module):
    """Convolutions of reflected images, of 32 x 64 x 64 numbers a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(functional.pad(x, (1, 1, 1, 1), mode="reflect"))
        return x.mean()


LARGEST = 65_535  # the next has 2**31 numbers before a padding
IMAGE = torch.zeros(2, 3, 64, 64)


def test_a_batch_size_beyond_the_limit_is_refused_with_the_largest() -> None:
    reason = (
        f"cannot train with batch_size {LARGEST + 1} on CUDA: aten.reflection_pad2d "
        "gets 2,147,483,648 elements of its input, and its kernel (ReflectionPad.cu) "
        "takes up to 2,147,483,646. Use "
    )
    batch, recipe = {"batch": IMAGE, "gpu": "h200"}, Recipe(batch_size=LARGEST + 1)
    with pytest.raises(TraceError) as error:
        budgetfit.plan(Padded(), **batch, batch_size=LARGEST + 1)
    assert f"{reason}batch_size={LARGEST} or less." in str(error.value)
    with pytest.raises(TraceError) as error:
        budgetfit.estimate(Padded(), **batch, recipe=recipe)
    assert f"{reason}a smaller batch_size, about {LARGEST}." in str(error.value)


def test_samples_that_are_too_large_by_themselves_are_refused_with_that_reason() -> (
    None
):
    large = torch.empty(1, 3, 2**14, 2**14, device="meta")
    with pytest.raises(TraceError, match="Use smaller samples, or another op"):
        budgetfit.plan(Padded(), batch=large, gpu="h200", batch_size=1)


@pytest.mark.parametrize("effective", [None, 4 * (LARGEST + 1)])
def test_the_largest_batch_is_the_largest_that_runs(effective: int | None) -> None:
    plan = budgetfit.plan(
        Padded(),
        batch=IMAGE,
        gpu="h200",
        objective="batch_size",
        effective_batch_size=effective,
    )
    size = plan.recipe.batch_size
    assert size == (LARGEST if effective is None else (LARGEST + 1) // 2)
    assert plan.estimate.eval_batch_size == LARGEST
