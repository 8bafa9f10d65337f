"""Format numbers, sizes, times and recipes as plain strings."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from budgetfit.batches.sample_count import batch_from_shapes, sample_dimensions
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.samples.sample_dims import FIRST_DIM, SampleDims
from budgetfit.gpus.table import gpus_of_class
from budgetfit.utils.format_bytes import format_bytes

_MOST_RANGES: Final = 10  # ranges of block numbers in one line; --json has all
_MOST_OP_SETS: Final = 2  # sets of saved ops that are told apart; --json has all
_MS_PER_S: Final = 1000
_STEP: Final = 1000  # between k, M, B and T
_TWO_DIGITS: Final = 10  # what has them needs no decimals
_THREE_DIGITS: Final = 100
_DAYS_FROM_H: Final = 72


def count_text(count: float) -> str:
    """Format a large number with three digits and k, M, B or T.

    >>> count_text(1_711_376_384)
    '1.71 B'
    >>> count_text(512)
    '512'
    """
    for unit in ("", " k", " M", " B", " T"):
        text = f"{count:.3g}"
        if float(text) < _STEP or unit == " T":
            return f"{text}{unit}"
        count /= _STEP
    raise AssertionError


def time_text(milliseconds: float, like: float = 0.0) -> str:
    """Format a time in ms below ten seconds, in s above or where ``like`` is above.

    >>> time_text(412.4), time_text(0.25), time_text(12_340), time_text(9_000, 12_340)
    ('412 ms', '0.25 ms', '12.3 s', '9.0 s')
    """
    if max(milliseconds, like) >= 10 * _MS_PER_S:
        return f"{milliseconds / _MS_PER_S:,.1f} s"
    digits = 0 if milliseconds >= _TWO_DIGITS else 2
    return f"{milliseconds:,.{digits}f} ms"


def scaled_text(factor: float) -> str:
    """Say by what measured steps of the GPU have scaled a time; empty if not at all.

    >>> scaled_text(1.324), scaled_text(1.0)
    (' (x 1.32, as measured)', '')
    """
    return f" (x {factor:.2f}, as measured)" if factor != 1 else ""


def hours_text(hours: float) -> str:
    """Format hours of training, also in days where they are many.

    >>> hours_text(0.001), hours_text(0.25), hours_text(10.52), hours_text(312)
    ('3.6 s', '15 min', '10.5 h', '312 h (13.0 days)')
    """
    if hours < 1:
        minutes = 60 * hours
        return f"{minutes:.2g} min" if minutes >= 1 else f"{60 * minutes:.2g} s"
    text = f"{hours:,.{int(hours < _THREE_DIGITS)}f} h"
    return text if hours < _DAYS_FROM_H else f"{text} ({hours / 24:,.1f} days)"


def money_text(amount: float) -> str:
    """Format money with two decimals, below 1 with three digits; no currency.

    >>> money_text(1234.5), money_text(1.6), money_text(0.35), money_text(0.00421)
    ('1,234.50', '1.60', '0.350', '0.00421')
    """
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:#.3g}"


def percent_text(ratio: float) -> str:
    """Format a signed relative difference.

    >>> percent_text(0.18), percent_text(-0.0042)
    ('+18 %', '-0.42 %')
    """
    percent = 100 * ratio
    return f"{percent:+.0f} %" if abs(percent) >= _TWO_DIGITS else f"{percent:+.2f} %"


def faster_text(ratio: float) -> str:
    """Say how much faster something is, from the ratio of rates less one.

    >>> faster_text(0.18), faster_text(-0.0042)
    ('18 % faster', '0.42 % slower')
    """
    return f"{percent_text(abs(ratio))[1:]} {'faster' if ratio >= 0 else 'slower'}"


def size_text(size_bytes: int) -> str:
    """Format a size in GiB and, where it is round, also in GB.

    >>> size_text(24 * 10**9)
    '24GB = 22.35 GiB'
    >>> size_text(24 * 2**30)
    '24GiB = 25.77 GB'
    """
    if size_bytes % 10**8 == 0:
        return f"{size_bytes / 10**9:g}GB = {format_bytes(size_bytes)}"
    if size_bytes % 2**30 == 0:
        return f"{size_bytes // 2**30}GiB = {size_bytes / 10**9:.2f} GB"
    return format_bytes(size_bytes)


def memory_class_text(size_bytes: int) -> str | None:
    """Name the GPUs with this nominal memory, with their real capacities.

    Returns:
        None where no GPU has this nominal memory. Real capacities are shown because
        GPUs "with 24 GB" differ.
    """
    for unit_bytes in (10**9, 2**30):
        class_gb, rest = divmod(size_bytes, unit_bytes)
        gpus = gpus_of_class(class_gb) if rest == 0 else ()
        if gpus:
            least = min(gpus, key=lambda gpu: gpu.total_bytes)
            most = max(gpus, key=lambda gpu: gpu.total_bytes)
            named = [least] if least == most else [least, most]
            text = " to ".join(
                f"{format_bytes(gpu.total_bytes)} ({gpu.name})" for gpu in named
            )
            return f"Cards sold as {class_gb} GB have {text}; --gpu NAME plans for one."
    return None


def sample_text(
    batch: dict[str, tuple[tuple[int, ...], str]], dims: SampleDims | None = None
) -> str:
    """Describe one sample of a batch: every tensor without its sample dimension.

    That is the first one, unless ``dims`` says otherwise; parts shared by all samples
    keep their shape.

    >>> sample_text({"input_ids": ((2, 512), "int64"), "labels": ((2,), "int64")})
    'input_ids 512 int64, labels int64'
    """
    dims = dims or FIRST_DIM
    found: dict[str, int | None] = dict.fromkeys(batch, dims.default)
    if dims.named:
        found |= sample_dimensions(batch_from_shapes(batch), dims)

    def one(name: str, shape: tuple[int, ...]) -> str:
        dim = found[name]
        return "x".join(str(size) for at, size in enumerate(shape) if at != dim)

    return ", ".join(
        " ".join(filter(None, (name, one(name, shape), dtype)))
        for name, (shape, dtype) in batch.items()
    )


def blocks_text(recipe: Recipe, blocks: Sequence[str]) -> str:
    """Describe the checkpointing of all blocks, in execution order, in one line.

    For example ``recompute blocks 0-15 (16 of 24); keep all activations of blocks
    16-23``.
    """
    if not blocks:
        return "no repeated blocks to checkpoint; everything is kept"
    wrapped = set(recipe.wrapped_blocks)
    kept = [block for block in blocks if block not in wrapped]
    if not wrapped:
        return "keep all activations; nothing is recomputed"
    alike: dict[tuple[str, str], list[Segment]] = {}
    named = len({segment.saved_ops for segment in recipe.segments if segment.saved_ops})
    for segment in recipe.segments:
        treatment = _treatment(segment)
        if segment.saved_ops and named > _MOST_OP_SETS:
            treatment = "recompute", " but save selected ops"
        alike.setdefault(treatment, []).append(segment)
    parts = []
    for (verb, how), segments in alike.items():
        each = " in each" if "outputs" in how and len(segments) > 1 else ""
        parts.append(f"{verb} {_segments_text(segments, blocks)}{how}{each}")
    if kept:
        parts.append(f"keep all activations of {_names_text(kept, blocks)}")
    return "; ".join(parts)


def _treatment(segment: Segment) -> tuple[str, str]:
    """Return the verb before and the text after the block numbers."""
    if segment.mode == "selective":
        return "recompute", f" but save the outputs of {ops_text(segment.saved_ops)}"
    if segment.mode == "offload":
        return "offload activations of", ""
    hows = []
    if segment.nested:
        hows.append("in two levels")
    if segment.input_on_host:
        hows.append("inputs wait on the host")
    return "recompute", "".join(f", {how}" for how in hows)


def ops_text(saved_ops: Iterable[str]) -> str:
    """Summarize saved ops: attention, matrix products, and the number of others.

    >>> ops_text(("aten.add.Tensor:0", "aten.mm.default:0", "aten.mm.default:3"))
    '2 matrix products, 1 more op'
    """
    saved_ops = list(saved_ops)
    kinds = [_kind(op) for op in saved_ops]
    texts = ["attention"] if "attention" in kinds else []
    products, others = kinds.count("product"), kinds.count("other")
    if products:
        texts.append(f"{products} matrix product{'s' if products > 1 else ''}")
    if others:
        ops = f"op{'s' if others > 1 else ''}"
        texts.append(f"{others} {'more ' if texts else ''}{ops}")
    return ", ".join(texts)


def _kind(op: str) -> str:
    """Classify an op: ``aten.mm.default:0`` is a matrix product."""
    if "attention" in op:
        return "attention"
    products = ("mm", "addmm", "bmm", "baddbmm", "convolution")
    return "product" if op.split(".")[1] in products else "other"


def _segments_text(segments: Sequence[Segment], blocks: Sequence[str]) -> str:
    names = [name for segment in segments for name in segment.blocks]
    lengths = sorted({len(segment.blocks) for segment in segments})
    which = f"{_names_text(names, blocks)} ({len(names)} of {len(blocks)})"
    if len(names) == len(blocks):
        which = f"all {len(blocks)} blocks"
    if lengths == [1]:
        return which
    if lengths[0] == lengths[-1]:
        return f"{which} in segments of {lengths[0]} blocks"
    return (
        f"{which} in {len(segments)} segments of {lengths[0]} to {lengths[-1]} blocks"
    )


def _names_text(names: Iterable[str], blocks: Sequence[str]) -> str:
    """Block numbers as ranges; with parent names for several chains of blocks."""
    names = list(names)
    parents = {_split(block)[0] for block in blocks}
    texts = []
    for parent, group in itertools.groupby(
        map(_split, names), key=lambda pair: pair[0]
    ):
        numbers = [number for _, number in group]
        if any(number is None for number in numbers):
            texts.append(parent)
        else:
            ranges = _ranges([number for number in numbers if number is not None])
            alone = "block" if len(names) == 1 else "blocks"
            texts.append(f"{parent if len(parents) > 1 else alone} {ranges}")
    return ", ".join(texts)


def _split(name: str) -> tuple[str, int | None]:
    """Split ``"model.layers.7"`` into parent and number; other names stay whole."""
    parent, _, last = name.rpartition(".")
    return (parent, int(last)) if last.isdecimal() else (name, None)


def _ranges(numbers: Sequence[int]) -> str:
    """Format ``[0, 1, 2, 5]`` as ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(texts) > _MOST_RANGES:
        texts = [*texts[:_MOST_RANGES], "..."]
    return ", ".join(texts)
