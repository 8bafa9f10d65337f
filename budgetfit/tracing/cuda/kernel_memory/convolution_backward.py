"""Scratch memory inside the backward of convolutions without cuDNN.

Sources as in ``convolution``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from budgetfit.tracing.cuda.kernel_memory.convolution import (
    VOLUME,
    Convolution,
    bias_sum,
    contiguous_allocs,
    group_slice,
)
from budgetfit.tracing.cuda.kernel_memory.reduction import (
    InputLayout,
    input_vec_size,
    reduction,
)
from budgetfit.tracing.cuda.kernel_memory.registry import (
    Alloc,
    Args,
    Free,
    Gemm,
    KernelStep,
    Kwargs,
    Output,
    buffer,
    register_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class GradientSteps(NamedTuple):
    """The steps that allocate the gradients of one group; None: not needed."""

    image: KernelStep | None
    weight: KernelStep | None
    bias: KernelStep | None


@register_steps("convolution_backward")
def convolution_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[KernelStep]:
    """Gradients of the input, the weight and the bias, each if needed."""
    grad, tensor, weight, _, stride, padding, dilation, transposed, _, groups = args[
        :10
    ]
    mask = args[10]
    call = Convolution(
        input=tensor,
        weight=weight,
        bias=mask[2],
        stride=tuple(stride),
        padding=tuple(padding),
        dilation=tuple(dilation),
        transposed=transposed,
        groups=groups,
        output_shape=tuple(grad.shape),
    )
    outputs = GradientSteps(
        *(Output(k) if wanted else None for k, wanted in enumerate(mask))
    )
    if call.kernel == "depthwise":
        yield from _depthwise(call, grad, outputs)
        return
    yield from contiguous_allocs(tensor, weight)
    if groups == 1:
        yield from _one_group(call, outputs, grad)
        return
    for _ in range(groups):
        yield from _group(call, outputs, grad)
    yield from (step for step in outputs if step is not None)


def _group(
    call: Convolution, outputs: GradientSteps, grad: Tensor
) -> Iterator[KernelStep]:
    """One of several groups: copied slices, and gradients that are joined later."""
    copies = [group_slice(grad, call.groups)]
    if call.input.is_contiguous():
        copies.append(group_slice(call.input, call.groups))
    elif call.input.shape[0] > 1:
        copies.append(call.group_share(call.input.numel()))
    allocs = [copy for copy in copies if copy is not None]
    yield from allocs
    sizes = (call.input.numel(), call.weight.numel(), grad.shape[1])
    results = GradientSteps(
        *(
            None if step is None else call.group_share(size)
            for step, size in zip(outputs, sizes, strict=True)
        )
    )
    yield from _one_group(call, results, grad)
    yield from (Free(copy) for copy in reversed(allocs))


def _one_group(
    call: Convolution, results: GradientSteps, grad: Tensor
) -> Iterator[KernelStep]:
    channels = grad.shape[1] // call.groups
    turned = not grad.is_contiguous() and (call.groups == 1 or channels > 1)
    copy = call.group_share(grad.numel()) if turned else None
    shape = (grad.shape[0], channels, *grad.shape[2:])
    if call.kernel == "transposed":
        yield from _transposed(call, results, copy, shape)
        return
    if copy is not None:
        yield copy
    if call.kernel == "plain":
        yield from _plain(call, results, shape)
    else:
        yield from _dilated(call, results, shape)
    if copy is not None:
        yield Free(copy)


def _plain(
    call: Convolution, results: GradientSteps, shape: tuple[int, ...]
) -> Iterator[KernelStep]:
    columns = call.columns
    if results.image is not None:
        yield results.image
        yield columns
        yield Gemm()
    if results.bias is not None:
        yield results.bias
        yield from _freed_at_once(bias_sum(call, shape, _all_but_channels(shape)))
    if results.weight is not None:
        yield results.weight
        if results.image is None:
            yield columns
        yield Gemm()
    if results.image is not None or results.weight is not None:
        yield Free(columns)


def _dilated(
    call: Convolution, results: GradientSteps, shape: tuple[int, ...]
) -> Iterator[KernelStep]:
    """The bias is summed sample by sample, with the same requests each time."""
    yield from (step for step in results if step is not None)
    columns = call.columns
    wanted = results.image is not None or results.weight is not None
    if wanted:
        yield columns
        yield Gemm()
    if results.bias is not None:
        image = shape[1:]
        total = Alloc(buffer(call.bytes_of(shape[1])))
        yield total
        yield from _freed_at_once(bias_sum(call, image, list(range(1, len(image)))))
        yield Free(total)
    if wanted:
        yield Free(columns)


def _transposed(
    call: Convolution,
    results: GradientSteps,
    copy: Alloc | None,
    shape: tuple[int, ...],
) -> Iterator[KernelStep]:
    """The input's gradient, then those of weight and bias, each with its own copy."""
    columns = [] if call.is_pointwise else [call.columns]
    if results.image is not None:
        first = [] if copy is None else [copy]
        yield from first
        yield results.image
        yield from columns
        yield Gemm()
        yield from (Free(alloc) for alloc in reversed((*first, *columns)))
    if results.weight is None and results.bias is None:
        return
    yield from (step for step in results[1:] if step is not None)
    second = [] if copy is None else [Alloc(copy.scratch)]
    second += [Alloc(alloc.scratch) for alloc in columns]
    yield from second
    if results.bias is not None:
        yield from _freed_at_once(bias_sum(call, shape, _all_but_channels(shape)))
    yield Gemm()
    yield from (Free(alloc) for alloc in reversed(second))


def _depthwise(
    call: Convolution, grad: Tensor, outputs: GradientSteps
) -> Iterator[KernelStep]:
    """The weight's gradient is first, except in 3-D; a 1-D input is copied earlier."""
    wanted = outputs.image is not None or outputs.weight is not None
    copies = contiguous_allocs(grad) if wanted else []
    image = contiguous_allocs(call.input) if outputs.weight is not None else []
    if call.dims == 1:
        yield from contiguous_allocs(call.input)
        image = []
    if call.dims == VOLUME:
        yield from (step for step in outputs[:2] if step is not None)
        yield from (*copies, *image)
        yield from (Free(alloc) for alloc in image)
    else:
        yield from (*copies, *image)
        if outputs.weight is not None:
            yield outputs.weight
        yield from (Free(alloc) for alloc in image)
        if outputs.image is not None:
            yield outputs.image
        yield from (Free(alloc) for alloc in copies)
    if outputs.bias is not None:
        yield outputs.bias
        yield from _freed_at_once(
            Alloc(
                reduction(
                    InputLayout.of(grad),
                    _all_but_channels(tuple(grad.shape)),
                    input_vector=input_vec_size(grad.dtype),
                    out_dtype=grad.dtype,
                )
            )
        )


def _freed_at_once(alloc: Alloc) -> Iterator[KernelStep]:
    yield alloc
    yield Free(alloc)


def _all_but_channels(shape: tuple[int, ...]) -> list[int]:
    return [dim for dim in range(len(shape)) if dim != 1]
