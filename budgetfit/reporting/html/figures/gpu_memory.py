"""What the process takes of the GPU's memory."""

from budgetfit.core.plan import Plan
from budgetfit.reporting.html.colors import color
from budgetfit.reporting.html.section import Cell, Section, Table, memory
from budgetfit.reporting.html.svg import Drawing, draw
from budgetfit.utils.format_bytes import format_bytes

_BAR = 0.5


def section(plan: Plan) -> Section:
    """Return the process as nvidia-smi shows it, against the GPU and the limit."""
    estimate, budget = plan.estimate, plan.budget
    total = max(budget.total_bytes, plan.gpu.total_bytes)
    others = estimate.process_bytes - estimate.reserved_bytes
    nccl = _nccl_bytes(plan)
    parts = [
        ("allocated by tensors", estimate.allocated_bytes, "activations"),
        (
            "cached by the allocator",
            estimate.reserved_bytes - estimate.allocated_bytes,
            "cached",
        ),
        ("CUDA context and kernels", others - nccl, "context"),
    ]
    if nccl:
        parts.append(("NCCL, at most", nccl, "buffers"))

    def paint(drawing: Drawing) -> None:
        axes, start = drawing.axes, 0
        axes.barh(0, total, _BAR, color=color("panel"), edgecolor=color("line"), lw=1)
        for name, size, shade in parts:
            (bar,) = axes.barh(0, size, _BAR, start, color=color(shade), lw=0)
            drawing.say(bar, f"{name}: {format_bytes(size)}")
            start += size
        axes.plot([limit] * 2, [-0.36, 0.36], color=color("limit"), lw=2)
        if span is not None:
            axes.plot(span, [-0.31] * 2, color=color("ink"), lw=1.6)
            for end in span:
                axes.plot([end] * 2, [-0.34, -0.28], color=color("ink"), lw=1.6)
        axes.set_xlim(0, max(total, estimate.process_bytes) * 1.02)
        axes.set_ylim(-0.42, 0.42)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        drawing.memory_axis("x", total)
        axes.grid(visible=False)

    limit = budget.usable_bytes + others
    span = estimate.process_range_bytes
    left = budget.usable_bytes - estimate.reserved_bytes
    fits = f"{format_bytes(left)} below" if left >= 0 else f"{format_bytes(-left)} over"
    return Section(
        title="The process on the GPU",
        text=f"nvidia-smi is expected to show {format_bytes(estimate.process_bytes)} "
        f"of {format_bytes(budget.total_bytes)}: {fits} the limit (the line), which "
        f"leaves {format_bytes(budget.total_bytes - limit)} free."
        + (" The bracket is the range in which it is expected." if span else ""),
        figure=draw(paint, label="The process on the GPU", height=120),
        legend=tuple((name, shade) for name, _, shade in parts),
        table=Table(
            caption="The process on the GPU", columns=("", "bytes"), rows=_rows(plan)
        ),
    )


def _rows(plan: Plan) -> tuple[tuple[Cell, ...], ...]:
    estimate, budget = plan.estimate, plan.budget
    span = estimate.process_range_bytes or ()
    nccl = _nccl_bytes(plan)
    sizes = (
        ("allocated (torch.cuda.max_memory_allocated)", estimate.allocated_bytes),
        ("reserved (torch.cuda.max_memory_reserved)", estimate.reserved_bytes),
        ("process (nvidia-smi)", estimate.process_bytes),
        *zip(("process, at least", "process, at most"), span, strict=False),
        ("limit on reserved", budget.usable_bytes),
        ("set aside for the CUDA context", budget.context_bytes),
        *([("set aside for NCCL", nccl)] if nccl else []),
        ("headroom", budget.headroom_bytes),
        ("planned for", budget.total_bytes),
        (f"memory of {plan.gpu.name}", plan.gpu.total_bytes),
    )
    return tuple((name, memory(size)) for name, size in sizes)


def _nccl_bytes(plan: Plan) -> int:
    """The upper end of NCCL's memory, which is what the process is counted with."""
    return plan.estimate.nccl_bytes[1] if plan.estimate.nccl_bytes is not None else 0
