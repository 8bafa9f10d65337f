"""Text report of an estimate: peaks, memory by category, what is not modelled."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from budgetfit.core.loop import RUN
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import Estimate, ModelSummary
from budgetfit.core.recipe import Recipe
from budgetfit.core.units import parse_bytes
from budgetfit.gpus.table import find_gpu, generic_gpu
from budgetfit.reporting.formatting import (
    blocks_text,
    hours_text,
    scaled_text,
    time_text,
)
from budgetfit.reporting.header import gpu_notes, gpu_text, model_lines, origin_line
from budgetfit.reporting.layout import (
    WIDTH,
    Bar,
    bullets,
    commands_text,
    fits_text,
    lines,
    section,
)
from budgetfit.utils.format_bytes import format_bytes, format_range
from budgetfit.utils.format_rate import rate_text

_SMALL_SHARE = 0.002  # of the process: smaller categories share a row
_MOST_LAYERS = 3  # largest layers to list


def estimate_text(  # noqa: PLR0913 - what may be shown
    estimate: Estimate,
    *,
    model: ModelSummary | None = None,
    vram: str | None = None,
    gpu: str | None = None,
    then: str = "",
    samples: int | None = None,
) -> RenderableType:
    """Render an estimate.

    ``model`` is needed to name the checkpointed blocks; ``vram`` and ``gpu`` are as
    typed. ``then``: the command to suggest where the settings do not fit; ``samples``:
    per epoch, to show its time.
    """
    blocks = model.blocks if model else ()
    body = lines(
        [
            *_loop_lines(estimate),
            *recipe_lines(estimate.recipe, blocks, as_is=estimate.as_is),
            *time_lines(estimate, samples),
            *peak_lines(estimate),
            *phase_lines(estimate),
        ]
    )
    header = _header(model, vram, gpu)
    parts = [lines([*header, ""])] if header else []
    parts.append(section("ESTIMATE", body, limit_text(estimate)))
    parts.append(memory_section(estimate))
    if estimate.notes:
        parts.append(section("WATCH OUT", bullets(estimate.notes)))
    if estimate.fits is False:
        parts += _next(then)
    return Group(*parts)


def limit_text(estimate: Estimate) -> Text:
    """Reserved of usable memory, and whether it fits."""
    text = Text("")
    if estimate.usable_bytes is not None:
        text.append(
            f"reserved {format_bytes(estimate.reserved_bytes)} "
            f"of {format_bytes(estimate.usable_bytes)} usable   "
        )
    return text.append_text(fits_text(estimate.fits, estimate.left_bytes))


def _next(then: str) -> list[RenderableType]:
    """The suggested command, never wrapped."""
    command = then or "budgetfit.plan(model, ...)"
    return [Text("NEXT: settings that fit", "bold"), commands_text([command])]


def _loop_lines(estimate: Estimate) -> list[str]:
    """The training loop, where it is another than that of plans."""
    if estimate.loop == RUN:
        return []
    return [f"training loop: {estimate.loop.describe()}"]


def _header(model: ModelSummary | None, vram: str | None, gpu: str | None) -> list[str]:
    device = find_gpu(gpu) if gpu else None
    sizes = [device.total_bytes] if device else []
    if vram:
        sizes.append(parse_bytes(vram))
    total_bytes = min(sizes, default=None)
    texts = model_lines(model) if model else []
    if total_bytes is not None:
        device = device or generic_gpu(total_bytes)
        texts += [gpu_text(device, total_bytes), *gpu_notes(device, total_bytes)]
    return [*texts, origin_line(model)] if model else texts


def recipe_lines(
    recipe: Recipe, blocks: Sequence[str], *, as_is: str = ""
) -> list[str]:
    """The settings, by their names in transformers.

    ``as_is``: the dtypes of weights that the recipe does not cast.
    """
    if blocks or not recipe.segments:
        checkpointing = blocks_text(recipe, blocks) if blocks else "everything is kept"
    else:
        checkpointing = f"recompute {len(recipe.wrapped_blocks)} blocks"
    several = recipe.parallelism
    batch = (
        f"batch_size {recipe.batch_size}{' on each rank' if several else ''}"
        f"   gradient_accumulation_steps {recipe.gradient_accumulation_steps}"
        f"   (effective batch size {recipe.effective_batch_size})"
    )
    texts = [
        *engine_lines(several),
        batch,
        *([f"{recipe.reduction} (sync_each_batch=True)"] if recipe.reduction else []),
        f"precision {recipe.precision}   optimizer {recipe.optimizer}",
        *([f"as-is: weights {as_is}, no autocast"] if as_is else []),
        checkpointing,
    ]
    if recipe.compile == "blocks":
        texts.append("torch.compile for the forward of each block")
    elif recipe.compile == "model":
        texts.append("torch.compile for the forward of the model")
    if recipe.loss_chunks > 1:
        texts.append(f"output head and loss in {recipe.loss_chunks} parts")
    if recipe.optimizer_in_backward:
        texts.append("optimizer steps in the backward pass")
    return texts


def engine_lines(parallelism: Parallelism | None) -> list[str]:
    """The engine that trains on several GPUs, and its settings."""
    if parallelism is None:
        return []
    given = parallelism
    nodes = f" on {given.nodes} nodes" if given.nodes > 1 else ""
    texts = [f"engine {given.describe()}   {given.gpus} ranks{nodes}"]
    if given.engine == "deepspeed" and given.param_dtype is not None:
        texts.append(
            f"{given.param_dtype}.enabled in place of autocast; the optimizer keeps "
            "fp32 weights"
        )
    elif given.param_dtype is not None:
        texts.append(
            f"MixedPrecisionPolicy(param_dtype={given.param_dtype}, "
            f"reduce_dtype={given.reduce_dtype}) in place of autocast"
        )
    return texts


def peak_lines(estimate: Estimate) -> list[str]:
    """The three peaks by name (allocated, reserved, process), host and evaluation."""
    peaks = (
        f"peak allocated {format_bytes(estimate.allocated_bytes)}"
        f"   reserved {format_bytes(estimate.reserved_bytes)}"
        f"   process {process_text(estimate)}"
    )
    texts = [peaks]
    if estimate.nccl_bytes is not None:
        nccl = format_range(*estimate.nccl_bytes)
        texts.append(f"of the process, NCCL {nccl} (published reports)")
    if estimate.host_bytes:
        texts.append(f"{estimate.host_memory} {format_bytes(estimate.host_bytes)}")
    samples = estimate.eval_batch_size
    if samples is not None:
        found = f"batch_size up to {samples}" if samples else "not even 1 sample fits"
        whole = ", with all logits at once" if estimate.recipe.loss_chunks > 1 else ""
        texts.append(f"evaluation: {found}{whole}")
    return texts


def phase_lines(estimate: Estimate) -> list[str]:
    """The allocated peak of each phase."""
    phases = ", ".join(
        f"{phase} {format_bytes(peak_bytes)}"
        for phase, peak_bytes in estimate.phase_peaks_bytes.items()
    )
    return [f"allocated by phase: {phases}"]


def process_text(estimate: Estimate) -> str:
    """The range that nvidia-smi is expected to show; one number without a budget."""
    if estimate.process_range_bytes is None:
        return format_bytes(estimate.process_bytes)
    return format_range(*estimate.process_range_bytes)


def time_lines(
    estimate: Estimate, samples: int | None = None, hours_of_data: float | None = None
) -> list[str]:
    """Step time, throughput and epoch time, marked as estimates.

    ``hours_of_data``: for ``samples`` samples, where not all are the longest.
    """
    rate = rate_text(estimate.samples_per_s)
    scaled = scaled_text(estimate.time_factor)
    texts = [f"optimizer step {range_text(estimate)}, {rate} samples/s{scaled}"]
    if estimate.network:
        waits = time_text(estimate.network_ms, like=estimate.step_ms)
        texts.append(f"{waits} of it wait for the network ({estimate.network})")
    if samples is not None:
        hours = [hours_of_data or estimate.hours(samples)]
        if estimate.step_range_ms is not None:
            hours = [hours[0] * ms / estimate.step_ms for ms in estimate.step_range_ms]
        texts.append(f"{samples:,} samples: {' to '.join(map(hours_text, hours))}")
    return texts


def range_text(estimate: Estimate) -> str:
    """Format the step's time and the range in which it is expected."""
    if estimate.step_range_ms is None:
        return time_text(estimate.step_ms)
    low_ms, high_ms = estimate.step_range_ms
    step, low = (time_text(ms, like=high_ms) for ms in (estimate.step_ms, low_ms))
    return f"{step} ({low.split()[0]} to {time_text(high_ms)})"


def memory_section(estimate: Estimate) -> RenderableType:
    """Memory by category at the peak, largest first, up to the whole process."""
    rows = _categories(estimate)
    cached_bytes = estimate.reserved_bytes - estimate.allocated_bytes
    nccl_bytes = estimate.nccl_bytes[1] if estimate.nccl_bytes is not None else 0
    context_bytes = estimate.process_bytes - estimate.reserved_bytes - nccl_bytes
    if cached_bytes > 0:
        rows.append(("allocator: cached, rounding", cached_bytes))
    if context_bytes > 0:
        rows.append(("CUDA context and kernels", context_bytes))
    if nccl_bytes > 0:
        rows.append(("NCCL, at most", nccl_bytes))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(justify="right")
    for name, size_bytes in rows:
        share = size_bytes / max(estimate.process_bytes, 1)
        grid.add_row(Text(name), Text(format_bytes(size_bytes)), Bar(share, width=32))
    whole = "whole process (nvidia-smi)"
    grid.add_row(Text(whole), Text(format_bytes(estimate.process_bytes)))
    body: list[RenderableType] = [grid]
    layers = _largest_layers(estimate)
    if layers:
        body.append(Text(layers))
    return section(f"WHERE IT GOES at the peak{_moment(estimate)}", Group(*body))


def _largest_layers(estimate: Estimate) -> str:
    """The largest layers at the peak, as many as fit in one line."""
    text = ""
    for layer, size_bytes in estimate.timeline.at_peak_layers[:_MOST_LAYERS]:
        more = f"{text}, " if text else "largest layers: "
        name = layer.removeprefix("base_model.model.")  # peft's
        more += f"{name or 'outside every layer'} {format_bytes(size_bytes)}"
        if text and len(more) > WIDTH - 4:
            break
        text = more
    return text


def _categories(estimate: Estimate) -> list[tuple[str, int]]:
    """Live bytes by category at the peak, largest first; small ones together."""
    small_bytes = estimate.process_bytes * _SMALL_SHARE
    parts = sorted(estimate.at_peak_bytes.items(), key=lambda pair: -pair[1])
    rows = [
        (name.replace("_", " "), size_bytes)
        for name, size_bytes in parts
        if size_bytes > small_bytes
    ]
    small = {name: size for name, size in parts if 0 < size <= small_bytes}
    if small:
        rows.append((", ".join(small).replace("_", " "), sum(small.values())))
    return rows


def _moment(estimate: Estimate) -> str:
    """The phase and block of the peak."""
    points = estimate.timeline.points
    if not points:
        return ""
    point = points[estimate.timeline.peak]
    where = f"{point.phase} of {point.block}" if point.block else point.phase
    return f" ({where})"
