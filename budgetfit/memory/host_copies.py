"""Pinned host memory of offloaded tensors: a trace's copies from device to host."""

from budgetfit.core.step_trace import TO_HOST, StepTrace


def host_copy_bytes(trace: StepTrace, batch_size: int, start: int, end: int) -> int:
    """Return the pinned bytes of copies to the host after ``start``, up to ``end``."""
    # PyTorch's caching host allocator rounds each request up to a power of two.
    if TO_HOST not in trace.op_names:
        return 0
    ops = trace.ops
    selected = (ops.name == trace.op_names.index(TO_HOST)) & (
        (ops.event > start) & (ops.event <= end)
    )
    sizes = ops.bytes_fixed[selected] + ops.bytes_per_sample[selected] * batch_size
    return sum(1 << (int(size) - 1).bit_length() for size in sizes if size)


def setup_host_bytes(trace: StepTrace, batch_size: int) -> int:
    """Return the pinned bytes of a CPU-offloaded optimizer, which stay for the run."""
    return sum(
        host_copy_bytes(trace, batch_size, phase.start, phase.end)
        for phase in trace.phases
        if phase.name == "setup"
    )


def step_host_bytes(trace: StepTrace, batch_size: int) -> int:
    """Return the pinned bytes of the set-up and of one forward pass."""
    forward = [phase for phase in trace.phases if phase.name == "forward"][-1]
    return host_copy_bytes(
        trace, batch_size, forward.start, forward.end
    ) + setup_host_bytes(trace, batch_size)
