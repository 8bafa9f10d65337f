"""Host memory of a step: pinned copies of a trace, and optimizer states on the CPU."""

from budgetfit.core.step_trace import (
    HOST_STATE,
    SHARD_TO_HOST,
    TO_HOST,
    Phase,
    StepTrace,
)


def host_copy_bytes(
    trace: StepTrace, batch_size: int, start: int, end: int, name: str = TO_HOST
) -> int:
    """Return the pinned bytes of copies to the host after ``start``, up to ``end``.

    ``name``: of the op that copies.
    """
    # PyTorch's caching host allocator rounds each request up to a power of two.
    if name not in trace.op_names:
        return 0
    ops = trace.ops
    selected = (ops.name == trace.op_names.index(name)) & (
        (ops.event > start) & (ops.event <= end)
    )
    sizes = ops.bytes_fixed[selected] + ops.bytes_per_sample[selected] * batch_size
    return sum(1 << (int(size) - 1).bit_length() for size in sizes if size)


def setup_host_bytes(trace: StepTrace, batch_size: int) -> int:
    """Return the bytes of what stays for the run, or for each of its steps.

    That is what a CPU-offloaded optimizer copies, or the weights of ``fully_shard``
    with ``CPUOffloadPolicy``, their gradients and optimizer states.
    """

    def copied(phase: Phase, name: str) -> int:
        return host_copy_bytes(trace, batch_size, phase.start, phase.end, name)

    setup = [phase for phase in trace.phases if phase.name == "setup"]
    backwards = [phase for phase in trace.phases if phase.name == "backward"]
    gradients = max((copied(each, SHARD_TO_HOST) for each in backwards), default=0)
    weights = sum(
        copied(phase, name) for phase in setup for name in (TO_HOST, SHARD_TO_HOST)
    )
    return weights + gradients + host_state_bytes(trace)


def host_state_bytes(trace: StepTrace) -> int:
    """Return the bytes of optimizer states on the CPU, which are not pinned."""
    if HOST_STATE not in trace.op_names:
        return 0
    ops = trace.ops
    is_state = ops.name == trace.op_names.index(HOST_STATE)
    first = trace.phases[[each.name for each in trace.phases].index("optimizer")]
    return int(ops.bytes_fixed[is_state & (ops.event <= first.end)].sum())


def step_host_bytes(trace: StepTrace, batch_size: int) -> int:
    """Return the bytes of ``setup_host_bytes`` and of one forward pass."""
    forward = [phase for phase in trace.phases if phase.name == "forward"][-1]
    return host_copy_bytes(
        trace, batch_size, forward.start, forward.end
    ) + setup_host_bytes(trace, batch_size)
