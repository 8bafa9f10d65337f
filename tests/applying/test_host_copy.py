"""The two ops: clones on a CPU, nothing but shapes on fakes, known to the log."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from budgetfit.applying.host_copy import (
    record_copies,
    to_device,
    to_host,
    wait_for_copies,
)
from budgetfit.core.step_trace import RATES, TO_DEVICE, TO_HOST
from budgetfit.gpus.table import find_gpu
from budgetfit.tracing.cuda.op_semantics import imitate_cuda
from budgetfit.tracing.cuda.target import CudaTarget, installed_torch_version
from budgetfit.tracing.fake.model_copy import fake_mode
from budgetfit.tracing.recording.storage_log import StorageLog

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_copy_there_and_back_has_the_same_values_in_memory_of_its_own(
    dtype: torch.dtype,
) -> None:
    x = torch.arange(12).to(dtype)
    host = to_host(x)
    back = to_device(host, CPU)
    assert torch.equal(back, x)
    assert back.dtype == dtype
    assert len({t.untyped_storage().data_ptr() for t in (x, host, back)}) == 3


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    assert record_copies(CPU) is None
    wait_for_copies(CPU)


def test_the_ops_have_the_names_that_traces_know() -> None:
    assert str(torch.ops.budgetfit.to_host.default) == TO_HOST
    assert str(torch.ops.budgetfit.to_device.default) == TO_DEVICE


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fakes_of_any_device_have_shapes_and_devices_as_real_ones(device: str) -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4, dtype=torch.float16, device=device)
        host = to_host(x)
        back = to_device(host, x.device)
    assert (host.shape, host.dtype) == (x.shape, x.dtype)
    assert host.device.type == ("meta" if device == "meta" else "cpu")
    assert (back.shape, back.dtype, back.device) == (x.shape, x.dtype, x.device)


def test_a_log_counts_no_byte_of_what_waits_in_host_memory() -> None:
    log = StorageLog()
    with log:
        x = torch.zeros(1000)
        host = to_host(x)
        assert (log.live_bytes, log.peak_bytes) == (4000, 4000)
        del x
        assert log.live_bytes == 0
        back = to_device(host, CPU)
        assert (log.live_bytes, log.peak_bytes) == (4000, 4000)
    assert back.shape == (1000,)


def test_a_trace_prices_both_copies_at_the_bus_and_knows_their_memory() -> None:
    # 6 fp32 numbers: 24 bytes cross the bus each way; only the copy back takes memory.
    gpu = find_gpu("rtx-4090")
    target = CudaTarget(
        compute_capability=gpu.compute_capability,
        torch_version=installed_torch_version(),
        cudnn=True,
    )
    semantics, imitation = imitate_cuda(target)
    with fake_mode():
        log = StorageLog(semantics)
        with imitation, log:
            x = torch.empty(2, 3)
            host = to_host(x)
            back = to_device(host, x.device)
    assert back.device == x.device
    copies = [op for op in log.ops if op.name.startswith("budgetfit.")]
    assert [op.name for op in copies] == [TO_HOST, TO_DEVICE]
    assert {RATES[op.cost.rate] for op in copies} == {"host"}
    assert [op.cost.moved_bytes for op in copies] == [24, 24]
    assert log.sizes == [24, 0, 24]
    assert log.unverified == {}
