"""The block report: each block's options, and the plan's peak and time with each.

All numbers are the chain formula's, which the solver used; the judge's are for whole
plans.
"""

from collections.abc import Sequence
from dataclasses import replace

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.core.block_report import BlockChoice, BlockRow
from budgetfit.core.plan import Estimate
from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_points, chain_time_ns

NS_PER_MS = 1e6


def block_table(chain: ChainProfile, estimate: Estimate) -> tuple[BlockRow, ...]:
    """Return the block table of a judged plan.

    The limit on live bytes is the usable bytes less what the replay reserved beyond
    live bytes.

    Args:
        chain: At the plan's batch size.
        estimate: The plan, judged within a budget.
    """
    segments = estimate.recipe.segments
    beyond = estimate.reserved_bytes - chain_peak_bytes(chain, segments)
    return block_rows(chain, segments, (estimate.usable_bytes or 0) - max(beyond, 0))


def block_rows(
    chain: ChainProfile, segments: Sequence[Segment], limit_bytes: int
) -> tuple[BlockRow, ...]:
    """Return a row for each block that has a choice, in execution order.

    Args:
        chain: The block profiles, at one batch size.
        segments: The plan.
        limit_bytes: The limit on live bytes.

    Raises:
        InputError: If the chain does not have the segments.
    """
    own = {name: segment for segment in segments for name in segment.blocks}
    peaks: dict[str, int] = {}
    for point in chain_points(chain, segments):
        name = point.label.partition(" ")[2]
        peaks[name] = max(point.bytes, peaks.get(name, 0))
    rows = []
    prefix_bytes = chain.static_bytes
    for block in chain.blocks:
        segment = own.get(block.name)
        option = _option_of(block, segment)
        if len(block.options) > 1:
            choices = tuple(
                _choice(chain, segments, segment, block, each) for each in block.options
            )
            rows.append(
                BlockRow(
                    name=block.name,
                    segment=segment.blocks if segment else (),
                    nested=bool(segment and segment.nested),
                    choices=choices,
                    chosen=block.options.index(option),
                    prefix_bytes=prefix_bytes,
                    peak_bytes=peaks[block.name],
                    limit_bytes=limit_bytes,
                )
            )
        if segment is None or segment.blocks[0] == block.name:
            prefix_bytes += option.saved_bytes
    return tuple(rows)


def _option_of(block: BlockProfile, segment: Segment | None) -> BlockOption:
    option = block.keep if segment is None else block.option_in(segment)
    assert option is not None  # noqa: S101 - chain_points has checked the segments
    return option


def _choice(
    chain: ChainProfile,
    segments: Sequence[Segment],
    segment: Segment | None,
    block: BlockProfile,
    option: BlockOption,
) -> BlockChoice:
    """Return peak and time of the plan with another option for one block."""
    changed = list(segments)
    if option != _option_of(block, segment):
        changed = [each for each in segments if each is not segment]
        changed += _rest_of(segment, block.name)
        if option.mode != "keep":
            changed.append(
                Segment(
                    (block.name,),
                    option.mode,
                    option.saved_ops,
                    input_on_host=option.input_on_host,
                )
            )
    waits = segment is None or segment.blocks[0] == block.name
    as_planned = option == _option_of(block, segment)
    return BlockChoice(
        mode=option.mode,
        saved_ops=option.saved_ops,
        input_on_host=option.input_on_host,
        saved_bytes=option.saved_bytes if waits or not as_planned else 0,
        # ZeRO has given up gradients of later blocks that were counted before it.
        backward_bytes=max(0, option.backward_bytes),
        extra_ms=option.extra_ns / NS_PER_MS,
        plan_peak_bytes=chain_peak_bytes(chain, changed),
        plan_ms=chain_time_ns(chain, changed) / NS_PER_MS,
    )


def _rest_of(segment: Segment | None, name: str) -> list[Segment]:
    """Return the remaining segments when one block is removed from a segment."""
    if segment is None:
        return []
    at = segment.blocks.index(name)
    parts = (segment.blocks[:at], segment.blocks[at + 1 :])
    return [
        replace(
            segment,
            blocks=part,
            nested=segment.nested and len(part) > 1,
            input_on_host=segment.input_on_host and part[0] == segment.blocks[0],
        )
        for part in parts
        if part
    ]
