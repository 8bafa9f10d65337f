"""Cost of a block option, extrapolated from one block to all blocks of its type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from budgetfit.core.block_profile import BlockOption, Mode
from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.stages import MeasuredChain, OptionTrace
from budgetfit.memory.host_copies import host_copy_bytes


class OptionDelta(NamedTuple):
    """Difference between an option and its baseline (keep or recompute) on a block.

    ``alive`` is the difference of saved + backward bytes, ``host`` the pinned host
    memory of the option; the other bytes are those of ``StageBytes``.
    """

    segment: Segment
    saved: int
    cached: int
    forward: int
    alive: int
    extra_ns: int
    host: int

    @classmethod
    def measured(
        cls, segment: Segment, base: MeasuredChain, tried: MeasuredChain
    ) -> OptionDelta:
        """Compare the only block of ``segment`` in two traces."""
        name = segment.blocks[0]
        row, before = tried.rows[name], base.rows[name]
        stage = next(each for each in tried.chain if each.name == name)
        live = tried.live
        return cls(
            segment,
            saved=row.saved - before.saved,
            cached=row.cached - before.cached,
            forward=row.forward - before.forward,
            alive=row.saved + row.backward - before.saved - before.backward,
            extra_ns=sum(tried.times[name]) - sum(base.times[name]),
            host=host_copy_bytes(live.trace, live.batch_size, *stage.forward),
        )

    def on(
        self, name: str, plain: MeasuredChain, rerun: MeasuredChain
    ) -> BlockOption | None:
        """Return the option's costs on another block of the type, if it can be wrapped.

        ``plain`` recomputes nothing, ``rerun`` every block.
        """
        if name not in rerun.rows:
            return None
        base = _base(self.segment, plain, rerun)
        row = base.rows[name]
        saved = max(0, row.saved + self.saved)
        base_ns = sum(base.times[name]) - sum(plain.times[name])
        return BlockOption(
            mode=self.segment.mode,
            saved_ops=self.segment.saved_ops,
            input_on_host=self.segment.input_on_host,
            saved_bytes=saved,
            cached_bytes=max(0, row.cached + self.cached),
            forward_bytes=row.forward + self.forward,
            backward_bytes=row.saved + row.backward + self.alive - saved,
            extra_ns=max(0, base_ns + self.extra_ns),
            host_bytes=self.host,
        )


def option_deltas(
    plain: MeasuredChain,
    rerun: MeasuredChain,
    tried: Sequence[tuple[OptionTrace, MeasuredChain]],
    types: Mapping[str, int],
) -> dict[int, list[OptionDelta]]:
    """Return the differences of all measured options, by block type.

    ``plain`` recomputes nothing, ``rerun`` every block, and ``tried`` are traces with
    further options. ``types``: each block's type; a block without one has -1.
    """
    found: dict[int, dict[tuple[object, ...], OptionDelta]] = {}
    for option_trace, measured in tried:
        for segment in option_trace.segments:
            name = segment.blocks[0]
            is_plain = segment.mode == "recompute" and not segment.input_on_host
            if is_plain or name not in measured.rows:
                continue
            options = found.setdefault(types.get(name, -1), {})
            key = segment.mode, segment.saved_ops, segment.input_on_host
            if key not in options:
                base = _base(segment, plain, rerun)
                options[key] = OptionDelta.measured(segment, base, measured)
    return {kind: list(deltas.values()) for kind, deltas in found.items()}


def _base(
    segment: Segment, plain: MeasuredChain, rerun: MeasuredChain
) -> MeasuredChain:
    return plain if base_mode(segment.mode) == "keep" else rerun


def base_mode(mode: Mode) -> Mode:
    """Return what an option is compared with: keep for offloading, else recompute."""
    return "keep" if mode in {"keep", "offload"} else "recompute"
