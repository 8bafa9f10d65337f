"""What happens inside the backward of convolutions without cuDNN.

Sources as in ``convolution_temporaries``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from budgetfit.tracing.cuda.kernel_memory.convolution import (
    VOLUME,
    Convolution,
    bias_sum,
    copied,
    sliced,
)
from budgetfit.tracing.cuda.kernel_memory.reduction import (
    Input,
    reduction,
    vector,
)
from budgetfit.tracing.cuda.kernel_memory.registry import (
    Args,
    Born,
    Give,
    InnerStep,
    Kwargs,
    Product,
    Take,
    buffer,
    in_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Results(NamedTuple):
    """How the gradients of one group come to be; None: not asked for."""

    image: InnerStep | None
    weight: InnerStep | None
    bias: InnerStep | None


@in_steps("convolution_backward")
def convolution_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[InnerStep]:
    """Gradients of the input, the weight and the bias, each if asked for."""
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
        outputs=tuple(grad.shape),
    )
    born = Results(*(Born(k) if wanted else None for k, wanted in enumerate(mask)))
    if call.kernel == "depthwise":
        yield from _depthwise(call, grad, born)
        return
    yield from copied(tensor, weight)
    if groups == 1:
        yield from _one_group(call, born, grad)
        return
    for _ in range(groups):
        yield from _group(call, born, grad)
    yield from (step for step in born if step is not None)


def _group(call: Convolution, born: Results, grad: Tensor) -> Iterator[InnerStep]:
    """One of several groups: slices, and gradients that are joined in the end."""
    copies = [sliced(grad, call.groups)]
    if call.input.is_contiguous():
        copies.append(sliced(call.input, call.groups))
    elif call.input.shape[0] > 1:
        copies.append(call.share(call.input.numel()))
    taken = [copy for copy in copies if copy is not None]
    yield from taken
    sizes = (call.input.numel(), call.weight.numel(), grad.shape[1])
    results = Results(
        *(
            None if step is None else call.share(size)
            for step, size in zip(born, sizes, strict=True)
        )
    )
    yield from _one_group(call, results, grad)
    yield from (Give(copy) for copy in reversed(taken))


def _one_group(
    call: Convolution, results: Results, grad: Tensor
) -> Iterator[InnerStep]:
    channels = grad.shape[1] // call.groups
    turned = not grad.is_contiguous() and (call.groups == 1 or channels > 1)
    copy = call.share(grad.numel()) if turned else None
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
        yield Give(copy)


def _plain(
    call: Convolution, results: Results, shape: tuple[int, ...]
) -> Iterator[InnerStep]:
    columns = call.columns
    if results.image is not None:
        yield results.image
        yield columns
        yield Product()
    if results.bias is not None:
        yield results.bias
        yield from _passing(bias_sum(call, shape, _all_but_channels(shape)))
    if results.weight is not None:
        yield results.weight
        if results.image is None:
            yield columns
        yield Product()
    if results.image is not None or results.weight is not None:
        yield Give(columns)


def _dilated(
    call: Convolution, results: Results, shape: tuple[int, ...]
) -> Iterator[InnerStep]:
    """The bias is summed sample by sample, which asks for the same every time."""
    yield from (step for step in results if step is not None)
    columns = call.columns
    wanted = results.image is not None or results.weight is not None
    if wanted:
        yield columns
        yield Product()
    if results.bias is not None:
        image = shape[1:]
        total = Take(buffer(call.bytes_of(shape[1])))
        yield total
        yield from _passing(bias_sum(call, image, list(range(1, len(image)))))
        yield Give(total)
    if wanted:
        yield Give(columns)


def _transposed(
    call: Convolution, results: Results, copy: Take | None, shape: tuple[int, ...]
) -> Iterator[InnerStep]:
    """The input's gradient, then those of weight and bias, each with its own copy."""
    columns = [] if call.point else [call.columns]
    if results.image is not None:
        first = [] if copy is None else [copy]
        yield from first
        yield results.image
        yield from columns
        yield Product()
        yield from (Give(take) for take in reversed((*first, *columns)))
    if results.weight is None and results.bias is None:
        return
    yield from (step for step in results[1:] if step is not None)
    second = [] if copy is None else [Take(copy.scratch)]
    second += [Take(take.scratch) for take in columns]
    yield from second
    if results.bias is not None:
        yield from _passing(bias_sum(call, shape, _all_but_channels(shape)))
    yield Product()
    yield from (Give(take) for take in reversed(second))


def _depthwise(call: Convolution, grad: Tensor, born: Results) -> Iterator[InnerStep]:
    """The weight's gradient comes first, but in 3-D; a 1-D input is copied at once."""
    wanted = born.image is not None or born.weight is not None
    copies = copied(grad) if wanted else []
    image = copied(call.input) if born.weight is not None else []
    if call.dims == 1:
        yield from copied(call.input)
        image = []
    if call.dims == VOLUME:
        yield from (step for step in born[:2] if step is not None)
        yield from (*copies, *image)
        yield from (Give(take) for take in image)
    else:
        yield from (*copies, *image)
        if born.weight is not None:
            yield born.weight
        yield from (Give(take) for take in image)
        if born.image is not None:
            yield born.image
        yield from (Give(take) for take in copies)
    if born.bias is not None:
        yield born.bias
        yield from _passing(
            Take(
                reduction(
                    Input.of(grad),
                    _all_but_channels(tuple(grad.shape)),
                    input_vector=vector(grad.dtype),
                    out_dtype=grad.dtype,
                )
            )
        )


def _passing(take: Take) -> Iterator[InnerStep]:
    yield take
    yield Give(take)


def _all_but_channels(shape: tuple[int, ...]) -> list[int]:
    return [dim for dim in range(len(shape)) if dim != 1]
