"""RMS normalization in a trace: CUDA's fused op, its saved tensors and gradients."""

import pytest
import torch
from torch import nn

from budgetfit.tracing.cuda.dispatch.fused_rms_norm import is_fused
from budgetfit.tracing.cuda.op_semantics import imitate_cuda
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake.model_copy import fake_copy, fake_mode
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.values.known_values import KnownValues

TARGET = CudaTarget(compute_capability=(8, 9), torch_version=(2, 13), cudnn=False)
ROWS, WIDTH = 4 * 100, 256


def traced(module: nn.Module, dtype: torch.dtype) -> list[int]:
    """Return the sizes of what a forward and backward make, the first sum apart."""
    with fake_mode() as mode:
        twin = fake_copy(module, mode)
        semantics, imitation = imitate_cuda(TARGET)
        log = StorageLog(semantics, KnownValues().run)
        with imitation, log:
            x = torch.empty(4, 100, WIDTH, dtype=dtype, requires_grad=True)
            for parameter in twin.parameters():
                log.log_storage(parameter)
            first = len(log.sizes)
            out = twin(x)
            out.backward(out.detach())
    return [size for size in log.sizes[first:] if size]


def test_the_result_and_the_inverse_deviations_in_fp32_are_made_and_no_more() -> None:
    sizes = traced(nn.RMSNorm(WIDTH, dtype=torch.bfloat16), torch.bfloat16)
    values, weight = ROWS * WIDTH * 2, WIDTH * 2
    # Forward: result and a number a row; backward: both gradients.
    assert sizes == [values, ROWS * 4, values, weight]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_weight_of_another_dtype_is_multiplied_step_by_step() -> None:
    sizes = traced(nn.RMSNorm(WIDTH), torch.bfloat16)
    assert len(sizes) > 4


def test_images_with_their_channels_last_are_not_fused() -> None:
    image = torch.empty(2, 3, 8, 8)
    assert is_fused(image, None)
    assert not is_fused(image.to(memory_format=torch.channels_last), None)
    assert is_fused(image.transpose(2, 3), None)
