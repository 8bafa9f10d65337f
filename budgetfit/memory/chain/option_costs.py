"""What an option changed on the block that tried it, added to others of its type."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from budgetfit.core.block_profile import BlockOption
from budgetfit.memory.host_copies import host_copy_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from budgetfit.core.recipe import Segment
    from budgetfit.memory.chain.measured_trace import Measured, Probe


class OptionChange(NamedTuple):
    """What an option changes on a block against keeping or recomputing it.

    ``alive`` is S + b; ``host`` is what the option itself copies to pinned host memory;
    the other bytes are those of ``StationBytes``.
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
        cls, segment: Segment, base: Measured, tried: Measured
    ) -> OptionChange:
        """Compare the one block of ``segment`` in two traces."""
        name = segment.blocks[0]
        row, before = tried.rows[name], base.rows[name]
        station = next(each for each in tried.chain if each.name == name)
        curve = tried.curve
        return cls(
            segment,
            saved=row.saved - before.saved,
            cached=row.cached - before.cached,
            forward=row.forward - before.forward,
            alive=row.saved + row.backward - before.saved - before.backward,
            extra_ns=sum(tried.times[name]) - sum(base.times[name]),
            host=host_copy_bytes(curve.trace, curve.batch_size, *station.forward),
        )

    def on(self, name: str, plain: Measured, again: Measured) -> BlockOption | None:
        """Return the option for another block of the same type, if it can be wrapped.

        Args:
            name: The block.
            plain: A trace with nothing recomputed.
            again: One with every block recomputed.
        """
        if name not in again.rows:
            return None
        base = _base(self.segment, plain, again)
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


def changes_by_type(
    plain: Measured,
    again: Measured,
    tried: Sequence[tuple[Probe, Measured]],
    types: Mapping[str, int],
) -> dict[int, list[OptionChange]]:
    """Return what each tried option changes, once for each type of block.

    Args:
        plain: A trace with nothing recomputed.
        again: One with every block recomputed.
        tried: Those that try further options.
        types: Each block's type; -1 stands for a block without one.
    """
    found: dict[int, dict[tuple[object, ...], OptionChange]] = {}
    for probe, measured in tried:
        for segment in probe.segments:
            name = segment.blocks[0]
            is_plain = segment.mode == "recompute" and not segment.input_on_host
            if is_plain or name not in measured.rows:
                continue
            options = found.setdefault(types.get(name, -1), {})
            key = segment.mode, segment.saved_ops, segment.input_on_host
            if key not in options:
                base = _base(segment, plain, again)
                options[key] = OptionChange.measured(segment, base, measured)
    return {kind: list(changes.values()) for kind, changes in found.items()}


def _base(segment: Segment, plain: Measured, again: Measured) -> Measured:
    """Return what an option is compared with: what is offloaded was kept."""
    return plain if segment.mode == "offload" else again
