"""Text reports of the layer table and the GPU table."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from budgetfit.core.plan import Layer, LayerMemory
from budgetfit.gpus.interconnect import find_link
from budgetfit.gpus.kernel_shares import find_shares
from budgetfit.gpus.table import Gpu
from budgetfit.reporting.formatting import count_text
from budgetfit.reporting.layout import section, table
from budgetfit.utils.format_bytes import format_bytes

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")  # a numeric part of a module path

_LAYER_NOTE: Final = (
    "Weights and saved bytes of one layer. Saved: what autograd keeps from forward to "
    "backward\nwhen nothing is recomputed. GFLOP: one sample's forward, run again."
)
_GPU_NOTE: Final = (
    "memory: as torch reports it. CC: compute capability. fp32 to bf16: dense TFLOP/s. "
    "link: GB/s\nto the host. - unknown or not in hardware, ~ assumed."
)


def layers_text(layers: Sequence[Layer]) -> RenderableType:
    """Render the layer table, one part for each group of dtype policies."""
    # Equal layers share a row: ``24 x model.layers.*.mlp``. Sizes are of one layer.
    parts = [
        _policy_table(precisions, layers) for precisions in _alike_precisions(layers)
    ]
    return Group(*parts, Text(_LAYER_NOTE, style="dim"))


def _policy_table(precisions: Sequence[str], layers: Sequence[Layer]) -> RenderableType:
    sizes = ("parameters", "weights", "saved/sample", "saved fixed", "GFLOP")
    columns = ("layer", "type", *sizes)
    rows: dict[tuple[str, ...], int] = {}
    for layer in layers:
        row = _row(layer, layer.by_precision[precisions[0]])
        rows[row] = rows.get(row, 0) + 1
    named = [
        (f"{count} x {row[0]}" if count > 1 else row[0], *row[1:])
        for row, count in rows.items()
    ]
    return section(", ".join(precisions), table(columns, named, left=(0, 1)))


def _row(layer: Layer, memory: LayerMemory) -> tuple[str, ...]:
    return (
        _NUMBER.sub("*", layer.name),
        layer.type,
        count_text(layer.parameter_count),
        format_bytes(memory.weight_bytes),
        format_bytes(memory.saved_bytes_per_sample),
        format_bytes(memory.saved_bytes),
        f"{layer.recompute_flops_per_sample / 1e9:,.3g}",
    )


def _alike_precisions(layers: Sequence[Layer]) -> list[list[str]]:
    """Group dtype policies under which all layers take the same memory."""
    alike: dict[tuple[LayerMemory, ...], list[str]] = {}
    for precision in layers[0].by_precision if layers else ():
        key = tuple(layer.by_precision[precision] for layer in layers)
        alike.setdefault(key, []).append(precision)
    return list(alike.values())


def gpus_text(gpus: Iterable[Gpu]) -> RenderableType:
    """Render the GPU table; a dash is unknown, a tilde assumed."""
    rated = ("fp32", "tf32", "fp16", "bf16", "GB/s", "link")
    columns = ("--gpu", "sold as", "memory", "CC", "SMs", *rated)
    gpus = list(gpus)
    rates = Group(table(columns, map(_gpu_row, gpus)), Text(_GPU_NOTE, style="dim"))
    shares = ("--gpu", "16-bit", "tf32", "fp32", "GB/s", "from")
    reached = table(shares, map(_shares_row, gpus), left=(0, 5))
    return Group(
        rates,
        section("SHARES OF THESE RATES THAT KERNELS REACH", reached),
        section("WHAT CONNECTS SEVERAL (--gpus), WITHOUT --link", _links(gpus)),
    )


def _links(gpus: Sequence[Gpu]) -> RenderableType:
    """Return the usual link between cards of one kind, and those that have it."""
    of_each: dict[str, list[str]] = {}
    for gpu in gpus:
        of_each.setdefault(find_link(gpu, across_nodes=False).name, []).append(gpu.name)
    most = max(of_each, key=lambda name: len(of_each[name]))
    rows = [
        (name, ", ".join(cards) if name != most else "all others")
        for name, cards in sorted(of_each.items(), key=lambda row: row[0] == most)
    ]
    node = find_link(gpus[0], across_nodes=True).name
    return table(("link", "--gpu"), [*rows, (node, "all")], left=(0, 1))


def _shares_row(gpu: Gpu) -> tuple[str, ...]:
    shares = find_shares(gpu)
    reached = (
        (shares.tensor_16bit, gpu.fp16_tflops),
        (shares.tf32, gpu.tf32_tflops),
        (shares.fp32, gpu.fp32_tflops),
        (shares.bandwidth, gpu.memory_gb_per_s),
    )
    cells = ("-" if rate is None else f"{share:.0%}" for share, rate in reached)
    return (gpu.name, *cells, shares.origins)


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    mark = "~" if gpu.rates_assumed else ""
    rates = (
        *(gpu.fp32_tflops, gpu.tf32_tflops, gpu.fp16_tflops, gpu.bf16_tflops),
        *(gpu.memory_gb_per_s, gpu.link_gb_per_s),
    )
    major, minor = gpu.compute_capability
    return (
        gpu.name,
        f"{gpu.memory_class_gb} GB",
        format_bytes(gpu.total_bytes),
        f"{major}.{minor}",
        str(gpu.sm_count),
        *("-" if rate is None else f"{mark}{rate:.4g}" for rate in rates),
    )
