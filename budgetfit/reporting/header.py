"""Report header: the model, one sample, the GPU and the memory limit."""

from budgetfit.core.allocator.settings import VARIABLE
from budgetfit.core.budget import Budget
from budgetfit.core.plan import ModelSummary, Plan
from budgetfit.gpus.table import Gpu
from budgetfit.reporting.formatting import (
    count_text,
    memory_class_text,
    sample_text,
    size_text,
)
from budgetfit.utils.format_bytes import format_bytes, format_range


def plan_header(plan: Plan) -> list[str]:
    """The model, the GPU, and its usable memory."""
    budget = plan.budget
    usable = f"{format_bytes(budget.usable_bytes)} usable"
    aside = (
        f"the CUDA context takes {cuda_context_text(budget)}, "
        f"{format_bytes(budget.headroom_bytes)} stay free (headroom)"
    )
    nccl = budget.nccl.high_bytes if budget.nccl is not None else 0
    return [
        *model_lines(plan.model),
        f"{gpu_text(plan.gpu, budget.total_bytes)}: {usable}",
        f"  {aside}",
        *([f"  NCCL takes at most {format_bytes(nccl)}"] if nccl else []),
        *([f"  {VARIABLE}={budget.allocator.text}"] if budget.allocator.text else []),
        *gpu_notes(plan.gpu, budget.total_bytes),
        origin_line(plan.model),
    ]


def cuda_context_text(budget: Budget) -> str:
    """Memory set aside for the CUDA context, and its source."""
    size = format_bytes(budget.context_bytes)
    if budget.context is None:
        return size
    if budget.context.measured:
        return f"{size} (measured)"  # date and machine are in the notes
    low, high = budget.context.low_bytes, budget.context.high_bytes
    return f"{size} ({format_range(low, high)})"


def model_lines(model: ModelSummary) -> list[str]:
    """The model and one sample of its batch."""
    text = f"{model.name}: {count_text(model.parameter_count)} parameters"
    if model.trainable_count != model.parameter_count:
        text += f", {count_text(model.trainable_count)} trained,"
    if model.blocks:
        kinds = ", ".join(model.block_types or (model.block_type,))
        text += f" in {len(model.blocks)} blocks of {kinds}"
    text = text.removesuffix(",")
    if not model.batch:
        return [text]
    return [text, f"One sample: {sample_text(model.batch, model.batch_dims)}"]


def gpu_text(gpu: Gpu, total_bytes: int) -> str:
    """The GPU and, where it differs, the limit on it; always in GiB, too."""
    limit = size_text(total_bytes)
    if gpu.total_source == "given":  # only a size was given
        return limit
    if total_bytes == gpu.total_bytes:
        return f"{gpu.name} {limit}"
    return f"{gpu.name} {size_text(gpu.total_bytes)}, limited to {limit}"


def gpu_notes(gpu: Gpu, total_bytes: int) -> list[str]:
    """Notes on the size or the GPU."""
    notes = []
    by_class = memory_class_text(total_bytes)
    if by_class:
        notes.append(by_class)
    if gpu.rates_assumed and gpu.total_source != "given":
        notes.append(f"Speeds are {gpu.source}")
    return notes


def origin_line(model: ModelSummary) -> str:
    """Where the numbers come from: an estimate, of which model source."""
    source = f"; {model.source}" if model.source else ""
    return f"Estimate, no GPU used{source}"
