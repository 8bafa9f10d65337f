"""RMS normalization in a trace: CUDA's fused op, its saved tensors and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from budgetfit.tracing.cuda.dispatch.fused_rms_norm import fused_rms_norm, is_fused
from budgetfit.tracing.cuda.op_semantics import imitate_cuda
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake.model_copy import fake_copy, fake_mode
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.values.known_values import KnownValues

TARGET = CudaTarget(compute_capability=(8, 9), torch_version=(2, 13), cudnn=False)
ROWS, WIDTH = 4 * 100, 256


def backward(out: Tensor, _: Tensor) -> None:
    out.backward(out.detach())


def traced(
    module: nn.Module,
    dtype: torch.dtype,
    differentiate: Callable[[Tensor, Tensor], object] = backward,
) -> list[int]:
    """Return the sizes of what a forward and backward make, the first sum apart."""
    with fake_mode() as mode:
        copied = fake_copy(module, mode)
        semantics, imitation = imitate_cuda(TARGET)
        log = StorageLog(semantics, KnownValues().run)
        with imitation, log:
            x = torch.empty(4, 100, WIDTH, dtype=dtype, requires_grad=True)
            for parameter in copied.parameters():
                log.log_storage(parameter)
            first = len(log.sizes)
            differentiate(copied(x), x)
    return [size for size in log.sizes[first:] if size]


def test_the_result_and_the_inverse_deviations_in_fp32_are_made_and_no_more() -> None:
    sizes = traced(nn.RMSNorm(WIDTH, dtype=torch.bfloat16), torch.bfloat16)
    values, weight = ROWS * WIDTH * 2, WIDTH * 2
    # Forward: result and a number a row; backward: both gradients.
    assert sizes == [values, ROWS * 4, values, weight]


def test_a_gradient_that_is_not_asked_for_is_not_made() -> None:
    sizes = traced(
        nn.RMSNorm(WIDTH),
        torch.float32,
        lambda out, x: torch.autograd.grad(out, x, out.detach()),
    )
    values = ROWS * WIDTH * 4
    assert sizes == [values, ROWS * 4, values]


def test_the_gradient_of_a_gradient_is_made_of_several_ops() -> None:
    def penalty(out: Tensor, x: Tensor) -> None:
        [grad] = torch.autograd.grad(out, x, out.detach(), create_graph=True)
        before.append(sum(grad.shape))
        grad.backward(grad.detach())

    before: list[int] = []
    sizes = traced(nn.RMSNorm(WIDTH), torch.float32, penalty)
    # Forward; rstd to the third power, the scaled gradient, its product with the input
    # and the sum of that; the input with three factors, rstd with the gradient, and
    # their difference.
    values, row = ROWS * WIDTH * 4, ROWS * 4
    assert sizes[:11] == [values, row, row, *[values] * 2, row, *[values] * 5]


def test_gradients_of_gradients_are_right() -> None:
    torch.manual_seed(0)
    x, weight = (
        torch.randn(*shape, dtype=torch.float64) for shape in [(3, 2, 4), (4,)]
    )

    def fused(x: Tensor, weight: Tensor) -> Tensor:
        return fused_rms_norm(x, [4], weight, 1e-3)[0]

    inputs = x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradgradcheck(fused, inputs, check_undefined_grad=False)


def test_the_inverse_deviations_of_doubles_are_doubles() -> None:
    sizes = traced(nn.RMSNorm(WIDTH, dtype=torch.float64), torch.float64)
    assert sizes[:2] == [ROWS * WIDTH * 8, ROWS * 8]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_weight_of_another_dtype_is_multiplied_step_by_step() -> None:
    sizes = traced(nn.RMSNorm(WIDTH), torch.bfloat16)
    assert len(sizes) > 4


def test_images_with_their_channels_last_are_not_fused() -> None:
    image = torch.empty(2, 3, 8, 8)
    assert is_fused(image, None)
    assert not is_fused(image.to(memory_format=torch.channels_last), None)
    assert is_fused(image.transpose(2, 3), None)
