"""Probes: recipes that try the further options of blocks, many at once.

Blocks of one type differ by their places alone, so one block of a type tells what an
option costs on all of them (``memory.profile``), and one traced step can try several
options side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from budgetfit.core.recipe import Segment

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

Lever = Literal["selective", "offload"]
ALL_LEVERS: Final[frozenset[Lever]] = frozenset(("selective", "offload"))


def probe_segments(
    types: Mapping[str, int],
    op_sets: Mapping[int, Sequence[tuple[str, ...]]],
    levers: Collection[Lever] = ALL_LEVERS,
) -> list[tuple[Segment, ...]]:
    """Return as few recipes as try every option on a block of each type.

    Args:
        types: Block names in the order in which they run, and their types.
        op_sets: For each type, what its blocks could save selectively.
        levers: What to try.

    Returns:
        The segments of each recipe; blocks that try nothing are recomputed.
    """
    waiting = {
        kind: _options(op_sets.get(kind, ()), levers) for kind in set(types.values())
    }
    found = []
    while any(waiting.values()):
        chosen: dict[str, Segment] = {}
        for kind, options in sorted(waiting.items()):
            names = _middle([name for name in types if types[name] == kind])
            for name in names[: len(options)]:
                mode, saved_ops, on_host = options.pop(0)
                chosen[name] = Segment(
                    (name,), mode, saved_ops=saved_ops, input_on_host=on_host
                )
        found.append(tuple(chosen.get(name, Segment((name,))) for name in types))
    return found


_Option = tuple[Literal["recompute", "selective", "offload"], tuple[str, ...], bool]


def _options(
    op_sets: Sequence[tuple[str, ...]], levers: Collection[Lever]
) -> list[_Option]:
    options: list[_Option] = []
    if "selective" in levers:
        options += [("selective", saved_ops, False) for saved_ops in op_sets]
    if "offload" in levers:
        options += [("offload", (), False), ("recompute", (), True)]
    return options


def _middle(names: list[str]) -> list[str]:
    """Put the blocks between the first and the last in front, neighbours together."""
    return [*names[1:-1], *dict.fromkeys((names[0], names[-1]))]
