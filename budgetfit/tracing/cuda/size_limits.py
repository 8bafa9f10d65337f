"""The sizes that CUDA kernels refuse: beyond 32-bit indices, or larger than a grid.

Each was seen on PyTorch's CUDA host code (torch 2.13), at the first size that it
refuses. Without them a plan would fit, and its first step would end in a RuntimeError.
Sources: the files that are named, in ``aten/src/ATen/native/cuda``;
``canUse32BitIndexMath`` in ``aten/src/ATen/cuda/detail/IndexUtils.cu``. A grid of CUDA
has up to 2**31 - 1 blocks in x, and 65,535 in y and z.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import Tensor

from budgetfit.core.step_trace import SizeLimit
from budgetfit.tracing.cuda.kernel_memory.images import (
    MIN_LAST_CHANNELS,
    is_channels_last,
)
from budgetfit.tracing.cuda.kernel_memory.registry import Call

INT_MAX: Final = 2**31 - 1
BELOW: Final = INT_MAX - 1  # where the kernel asks for less, not for less or equal
MOST_IN_Y: Final = 65_535
MIN_BILINEAR_CHANNELS: Final = 16  # from here on upsample_bilinear2d has an NHWC kernel

# What is counted, how many there are, and how many are taken.
Row = tuple[str, int, int]
Rule = Callable[[Call], Iterator[Row]]


def _elements(*arguments: tuple[int, str], most: int = INT_MAX) -> Rule:
    """Return a rule for the elements of arguments, by position; -1 is the output."""

    def rule(call: Call) -> Iterator[Row]:
        for position, name in arguments:
            tensor: Any = call.out if position < 0 else call.args[position]
            yield f"elements of its {name}", tensor.numel(), most

    return rule


def _in_channels_last(rule: Rule, min_channels: int = 1) -> Rule:
    """Return a rule for calls whose first argument is in channels-last format."""

    def only(call: Call) -> Iterator[Row]:
        tensor: Tensor = call.args[0]
        if tensor.shape[1] >= min_channels and is_channels_last(tensor):
            yield from rule(call)

    return only


def _row_length(position: int) -> Rule:
    """Return a rule for the length of the dimension that an argument names."""

    def rule(call: Call) -> Iterator[Row]:
        tensor: Tensor = call.args[0]
        dim = call.kwargs.get("dim", call.get(position, -1))
        yield "elements of a row", tensor.shape[dim] if tensor.dim() else 1, INT_MAX

    return rule


def _attention(*, samples: bool) -> Rule:
    """Return a rule for the grid of an attention kernel: heads and perhaps samples."""

    def rule(call: Call) -> Iterator[Row]:
        query: Tensor = call.args[0]
        if samples:
            yield "samples in a batch of attention", query.shape[0], MOST_IN_Y
        yield "attention heads", query.shape[1], MOST_IN_Y

    return rule


def _accumulated(call: Call) -> Iterator[Row]:
    if call.get(3, False):
        indices = [each.numel() for each in call.args[1] if each is not None]
        yield "indices", max(indices), INT_MAX


_INPUT: Final = (0, "input")
_GRADIENT: Final = (0, "output's gradient")
_FIRST: Final = _elements(_INPUT, most=BELOW)
_BOTH: Final = _elements(_GRADIENT, (1, "input"), most=BELOW)
_LONG_ROWS: Final = _row_length(1)
_RULES: Final[dict[str, tuple[str, Rule]]] = {
    "reflection_pad1d": ("ReflectionPad.cu", _FIRST),
    "reflection_pad1d_backward": (
        "ReflectionPad.cu",
        _elements((1, "input"), most=BELOW),
    ),
    "reflection_pad2d": ("ReflectionPad.cu", _FIRST),
    "reflection_pad3d": ("ReflectionPad.cu", _FIRST),
    "reflection_pad3d_backward": ("ReflectionPad.cu", _BOTH),
    "replication_pad2d": ("ReplicationPadding.cu", _FIRST),
    "replication_pad2d_backward": ("ReplicationPadding.cu", _BOTH),
    "replication_pad3d_backward": ("ReplicationPadding.cu", _BOTH),
    "upsample_nearest1d": ("UpSampleNearest1d.cu", _elements((-1, "output"))),
    "_upsample_nearest_exact1d": ("UpSampleNearest1d.cu", _elements((-1, "output"))),
    **dict.fromkeys(
        ("upsample_nearest1d_backward", "_upsample_nearest_exact1d_backward"),
        ("UpSampleNearest1d.cu", _elements(_GRADIENT, (-1, "input's gradient"))),
    ),
    **dict.fromkeys(
        ("upsample_nearest2d_backward", "_upsample_nearest_exact2d_backward"),
        (
            "UpSampleNearest2d.cu",
            _in_channels_last(
                _elements(_GRADIENT, (-1, "input's gradient"), most=BELOW),
                MIN_LAST_CHANNELS,
            ),
        ),
    ),
    "upsample_bilinear2d": (
        "UpSampleBilinear2d.cu",
        _in_channels_last(
            _elements(_INPUT, (-1, "output"), most=BELOW), MIN_BILINEAR_CHANNELS
        ),
    ),
    # Its number of blocks is computed in 32 bits.
    "upsample_bilinear2d_backward": ("UpSampleBilinear2d.cu", _elements(_GRADIENT)),
    "_adaptive_avg_pool2d": ("AdaptiveAveragePooling.cu", _in_channels_last(_FIRST)),
    "_adaptive_avg_pool2d_backward": (
        "AdaptiveAveragePooling.cu",
        _in_channels_last(_elements((1, "input"), most=BELOW)),
    ),
    "sort": ("Sort.cpp", _LONG_ROWS),
    "argsort": ("Sort.cpp", _LONG_ROWS),
    "kthvalue": ("Sorting.cpp", _row_length(2)),
    # Of all elements, which are sorted.
    "median.default": ("Sorting.cpp", _elements(_INPUT)),
    "nanmedian.default": ("Sorting.cpp", _elements(_INPUT)),
    "_unique2": ("Unique.cu", _elements(_INPUT)),
    "unique_consecutive": ("Unique.cu", _elements(_INPUT)),
    # Both sort the indices: ``radix_sort_pairs`` in ``aten/src/ATen/cuda/cub.cuh``.
    "embedding_dense_backward": (
        "EmbeddingBackwardKernel.cu",
        _elements((1, "indices")),
    ),
    "_index_put_impl_": ("Indexing.cu", _accumulated),
    # One block for each distance.
    "_cdist_forward": ("DistanceKernel.cu", _elements((-1, "output"))),
    "_pdist_forward": ("DistanceKernel.cu", _elements((-1, "output"))),
    "_scaled_dot_product_flash_attention": (
        "transformers/cuda/flash_attn/flash_api.cpp",
        _attention(samples=True),
    ),
    "_scaled_dot_product_efficient_attention": (
        "transformers/cuda/attention.cu",
        _attention(samples=False),
    ),
}


def size_limits(call: Call) -> tuple[SizeLimit[int], ...]:
    """Return what the kernels of a call refuse to exceed; () for most ops."""
    if call.func.namespace != "aten":
        return ()
    name = call.func.overloadpacket.__name__
    found = _RULES.get(f"{name}.{call.func._overloadname}") or _RULES.get(name)
    if found is None:
        return ()
    source, rule = found
    return tuple(
        SizeLimit(f"aten.{name}", what, number, most, source)
        for what, number, most in rule(call)
    )
