"""Build a ChainProfile: bytes and times of each block under each option, from traces.

The bytes are measured on the live bytes of a trace with everything kept, of one with
every block recomputed, and of traces in which blocks have other options. What runs
outside the blocks can only be kept.

Not every block needs a trace of every option: blocks of one type run the same ops on
the same sizes and differ only in their position. The cost of an option is what the
block costs kept (or recomputed), plus what the option changed on a block of its type.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any, TypeVar

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile, Mode
from budgetfit.core.step_trace import OP_COST_COLUMNS, StepTrace
from budgetfit.memory.chain.option_costs import OptionDelta, base_mode, option_deltas
from budgetfit.memory.chain.stages import (
    MeasuredChain,
    OptionTrace,
    Stage,
    StageBytes,
    max_stage_bytes,
    steady_micro_step,
)

Row = TypeVar("Row", ChainProfile, BlockProfile, BlockOption)
Measure = Callable[[OptionTrace], MeasuredChain]


def chain_profile(
    kept: StepTrace,
    recomputed: OptionTrace | None,
    measured: Measure,
    *,
    option_traces: Sequence[OptionTrace] = (),
    optimizer_ns: int = 0,
) -> ChainProfile:
    """Return the profile of the chain at the batch size at which traces are measured.

    Args:
        kept: A trace with nothing recomputed.
        recomputed: A trace with every block recomputed by itself; None if blocks can
            only be kept.
        measured: Measures a trace: ``MeasuredChain.of`` with all but that.
        option_traces: Traces with further options on some blocks, the rest recomputed.
        optimizer_ns: Time of one optimizer step.
    """
    types = block_types(kept) if option_traces else {}
    plain = measured(OptionTrace(kept, ()))
    rerun = None if recomputed is None else measured(recomputed)
    tried = [(option_trace, measured(option_trace)) for option_trace in option_traces]
    everything = [plain, *([rerun] if rerun else []), *(each for _, each in tried)]
    rows = plain.rows | _max_outside_blocks(plain.chain, everything)
    deltas = option_deltas(plain, rerun, tried, types) if rerun else {}

    def block(stage: Stage) -> BlockProfile:
        allowed = deltas.get(types.get(stage.name, -1), ())
        return _block_profile(stage, rows[stage.name], plain, rerun, allowed)

    static = max(each.static for each in everything)
    gradients = sum(row.gradient for row in rows.values())
    return ChainProfile(
        batch_size=plain.live.batch_size,
        static_bytes=static,
        input_bytes=0,
        optimizer_bytes=max(0, plain.optimizer_peak - static - gradients),
        optimizer_ns=optimizer_ns,
        blocks=tuple(block(stage) for stage in plain.chain),
    )


def profile_on_line(
    first: ChainProfile, second: ChainProfile, batch_size: int
) -> ChainProfile | None:
    """Return the profile at a batch size, on the line through two others.

    Bytes and times do not fall as the batch grows. None where the two differ in more
    than numbers: they have other blocks or options.
    """
    span = second.batch_size - first.batch_size
    place = Fraction(batch_size - first.batch_size, span)
    try:
        blocks = tuple(
            _block_on_line(one, other, place)
            for one, other in zip(first.blocks, second.blocks, strict=True)
        )
        one, other = (replace(each, blocks=blocks) for each in (first, second))
        return _on_line(one, other, place)
    except ValueError:
        return None


def _block_on_line(
    one: BlockProfile, other: BlockProfile, place: Fraction
) -> BlockProfile:
    options = tuple(
        _on_line(low, high, place)
        for low, high in zip(one.options, other.options, strict=True)
    )
    one, other = (replace(each, options=options) for each in (one, other))
    return _on_line(one, other, place)


def _on_line(one: Row, other: Row, place: Fraction) -> Row:
    """Return the row at a place (0: ``one``, 1: ``other``), or raise ValueError."""
    changed: dict[str, Any] = {}
    for field in fields(one):
        low, high = (getattr(each, field.name) for each in (one, other))
        if type(low) is int and type(high) is int:
            changed[field.name] = max(0, low + math.ceil(max(0, high - low) * place))
        elif low != high:
            raise ValueError(field.name)
    return replace(one, **changed)


def with_epilogue(
    chain: ChainProfile, before: OptionTrace, after: OptionTrace, measured: Measure
) -> ChainProfile:
    """Return the chain with another epilogue: a chunked loss.

    ``before``: a trace of a program like the chain's; ``after``: one that differs from
    it after the blocks only; ``measured``: as in ``chain_profile``.
    """
    old, new = measured(before), measured(after)
    last = chain.blocks[-1]
    one, other = old.rows[last.name], new.rows[last.name]
    saved = max(0, last.keep.saved_bytes + other.saved - one.saved)
    alive = other.saved + other.backward - one.saved - one.backward
    option = BlockOption(
        mode="keep",
        saved_bytes=saved,
        forward_bytes=last.keep.forward_bytes + other.forward - one.forward,
        backward_bytes=last.keep.saved_bytes + last.keep.backward_bytes + alive - saved,
        cached_bytes=max(0, last.keep.cached_bytes + other.cached - one.cached),
    )
    (forward_ns, backward_ns), (new_forward_ns, new_backward_ns) = (
        each.times[last.name] for each in (old, new)
    )
    changed = replace(
        last,
        options=(option,),
        gradient_bytes=last.gradient_bytes + other.gradient - one.gradient,
        forward_ns=max(0, last.forward_ns + new_forward_ns - forward_ns),
        backward_ns=max(0, last.backward_ns + new_backward_ns - backward_ns),
    )
    return replace(
        chain,
        static_bytes=max(chain.static_bytes, new.static),
        blocks=(*chain.blocks[:-1], changed),
    )


def with_options_of(chain: ChainProfile, other: ChainProfile) -> ChainProfile:
    """Return the chain with the further options of another one's blocks.

    Args:
        chain: With nothing but kept and recomputed blocks.
        other: The same model, whose gradients outlive the step (or do not). An option
            changes a block's bytes and times alike; where the batch size is another
            one, bytes in proportion to that and times to the block's.
    """
    larger = Fraction(chain.batch_size, other.batch_size)
    blocks = (
        replace(block, options=(*block.options, *_options_on(block, like, larger)))
        for block, like in zip(chain.blocks, other.blocks, strict=True)
    )
    return replace(chain, blocks=tuple(blocks))


def _options_on(
    block: BlockProfile, like: BlockProfile, larger: Fraction
) -> Iterator[BlockOption]:
    """Yield further options of ``like`` as they are on ``block``, in a larger batch."""
    longer, its_ns = larger, like.forward_ns + like.backward_ns
    if larger != 1 and its_ns:
        longer = Fraction(block.forward_ns + block.backward_ns, its_ns)

    def change(name: str, option: BlockOption, base: BlockOption) -> int:
        changed: int = getattr(option, name) - getattr(base, name)
        return math.ceil(changed * (longer if name == "extra_ns" else larger))

    known = {like.option("keep"), like.option("recompute")}
    for option in like.options:
        mode = base_mode(option.mode)
        mine, its = block.option(mode), like.option(mode)
        if option in known or mine is None or its is None:
            continue
        saved = max(0, mine.saved_bytes + change("saved_bytes", option, its))
        alive = mine.saved_bytes + mine.backward_bytes
        alive += change("saved_bytes", option, its)
        alive += change("backward_bytes", option, its)
        cached = mine.cached_bytes + change("cached_bytes", option, its)
        yield replace(
            option,
            saved_bytes=saved,
            forward_bytes=mine.forward_bytes + change("forward_bytes", option, its),
            backward_bytes=alive - saved,
            cached_bytes=max(0, cached),
            extra_ns=max(0, mine.extra_ns + change("extra_ns", option, its)),
            host_bytes=math.ceil(option.host_bytes * larger),
        )


def block_types(kept: StepTrace) -> dict[str, int]:
    """Return a number for each block, equal for blocks of the same type."""
    # Those run the same ops on the same sizes in the last traced forward.
    step, micro_step = steady_micro_step(kept)
    ops = kept.ops
    types: dict[tuple[bytes, ...], int] = {}
    found = {}
    for row in kept.passes:
        if (row.direction, row.step, row.micro_step) != ("forward", step, micro_step):
            continue
        first, last = ops.event.searchsorted([row.start, row.end], side="right")
        alike = tuple(
            getattr(ops, name)[first:last].tobytes() for name in OP_COST_COLUMNS
        )
        found[kept.block_names[row.block]] = types.setdefault(alike, len(types))
    return found


def _max_outside_blocks(
    chain: Sequence[Stage], everything: Sequence[MeasuredChain]
) -> dict[str, StageBytes]:
    """Return the maximal costs of the stages outside blocks that all traces have."""
    return {
        stage.name: max_stage_bytes([each.rows[stage.name] for each in everything])
        for stage in chain
        if stage.block < 0 and all(stage.name in each.rows for each in everything)
    }


def _block_profile(
    stage: Stage,
    kept: StageBytes,
    plain: MeasuredChain,
    rerun: MeasuredChain | None,
    deltas: Sequence[OptionDelta],
) -> BlockProfile:
    """Return a stage's costs kept, recomputed, and with the options of its type."""
    name = stage.name
    others = [delta.on(name, plain, rerun) for delta in deltas if rerun is not None]
    forward_ns, backward_ns = plain.times[name]
    return BlockProfile(
        name=name,
        options=(
            _option("keep", kept, 0),
            *_recompute(stage, plain, rerun),
            *(option for option in others if option is not None),
        ),
        gradient_bytes=kept.gradient,
        output_bytes=stage.output_bytes,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        joins_next=stage.joins_next,
    )


def _recompute(
    stage: Stage, plain: MeasuredChain, rerun: MeasuredChain | None
) -> tuple[BlockOption, ...]:
    """Return the option to recompute the block, if it was traced."""
    if stage.block < 0 or rerun is None or stage.name not in rerun.rows:
        return ()
    extra_ns = sum(rerun.times[stage.name]) - sum(plain.times[stage.name])
    return (_option("recompute", rerun.rows[stage.name], max(0, extra_ns)),)


def _option(mode: Mode, row: StageBytes, extra_ns: int) -> BlockOption:
    return BlockOption(
        mode=mode,
        saved_bytes=row.saved,
        forward_bytes=row.forward,
        backward_bytes=row.backward,
        cached_bytes=row.cached,
        extra_ns=extra_ns,
    )
