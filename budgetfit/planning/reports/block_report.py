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

    ``chain``: at the plan's batch size; ``estimate``: judged within a budget.
    """
    segments = estimate.recipe.segments
    beyond = estimate.reserved_bytes - chain_peak_bytes(chain, segments)
    return block_rows(chain, segments, (estimate.usable_bytes or 0) - max(beyond, 0))


def block_rows(
    chain: ChainProfile, segments: Sequence[Segment], limit_bytes: int
) -> tuple[BlockRow, ...]:
    """Return a row for each block that has a choice, in execution order.

    ``chain``: at one batch size; ``limit_bytes``: on live bytes.

    Raises:
        InputError: If the chain does not have the segments.
    """
    own = {name: segment for segment in segments for name in segment.blocks}
    peaks: dict[str, int] = {}
    planned = _Planned(chain, segments)
    for point in planned.points:
        name = point.label.partition(" ")[2]
        peaks[name] = max(point.bytes, peaks.get(name, 0))
    rows = []
    prefix_bytes = chain.static_bytes
    for block in chain.blocks:
        segment = own.get(block.name)
        option = _option_of(block, segment)
        if len(block.options) > 1:
            choices = tuple(
                _choice(planned, segment, block, each) for each in block.options
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


class _Planned:
    """A plan's points and time, and what they are with one block's option changed."""

    def __init__(self, chain: ChainProfile, segments: Sequence[Segment]) -> None:
        self._chain, self._segments = chain, segments
        self.points = chain_points(chain, segments)
        self._places = {point.label: at for at, point in enumerate(self.points)}
        peak_bytes = max(point.bytes for point in self.points)
        self.unchanged = peak_bytes, chain_time_ns(chain, segments)

    def changed(
        self, segment: Segment | None, block: BlockProfile, option: BlockOption
    ) -> tuple[int, int]:
        """Return the peak in bytes and the time in nanoseconds with another option.

        ``segment``: the block's in the plan; None where it is kept.
        """
        if segment is None or len(segment.blocks) == 1:
            return self._changed_alone(block, _option_of(block, segment), option)
        changed = [each for each in self._segments if each is not segment]
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
        chain = self._chain
        return chain_peak_bytes(chain, changed), chain_time_ns(chain, changed)

    def _changed_alone(
        self, block: BlockProfile, old: BlockOption, new: BlockOption
    ) -> tuple[int, int]:
        """Return the same for a block that is in no segment of several."""
        # Only what is between its forward and its backward changes: by what it saves,
        # and until the forward pass ends by what it caches.
        ahead = self._places[f"forward {block.name}"]
        back = self._places[f"backward {block.name}"]
        turn = len(self._chain.blocks)  # a point each, then the backward
        saved = new.saved_bytes - old.saved_bytes
        cached = saved + new.cached_bytes - old.cached_bytes
        peaks = [point.bytes for point in self.points]
        peaks[ahead] += new.forward_bytes - old.forward_bytes
        peaks[ahead + 1 : turn] = [each + cached for each in peaks[ahead + 1 : turn]]
        peaks[turn:back] = [each + saved for each in peaks[turn:back]]
        peaks[back] += saved + new.backward_bytes - old.backward_bytes
        return max(peaks), self.unchanged[1] + new.extra_ns - old.extra_ns


def _choice(
    planned: _Planned, segment: Segment | None, block: BlockProfile, option: BlockOption
) -> BlockChoice:
    """Return peak and time of the plan with another option for one block."""
    as_planned = option == _option_of(block, segment)
    waits = segment is None or segment.blocks[0] == block.name
    peak_bytes, time_ns = (
        planned.unchanged if as_planned else planned.changed(segment, block, option)
    )
    return BlockChoice(
        mode=option.mode,
        saved_ops=option.saved_ops,
        input_on_host=option.input_on_host,
        saved_bytes=option.saved_bytes if waits or not as_planned else 0,
        # ZeRO has given up gradients of later blocks that were counted before it.
        backward_bytes=max(0, option.backward_bytes),
        extra_ms=option.extra_ns / NS_PER_MS,
        plan_peak_bytes=peak_bytes,
        plan_ms=time_ns / NS_PER_MS,
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
