"""Recipes that measure selective checkpointing and offload, several options per trace.

Blocks of one type differ only in position, so that one of them gives an option's cost
for all (``memory.chain.profile``), and one traced step can try several options.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

from budgetfit.core.recipe import Segment

OptionKind = Literal["selective", "offload"]
ALL_OPTION_KINDS: Final[frozenset[OptionKind]] = frozenset(("selective", "offload"))


def option_segments(
    types: Mapping[str, int],
    op_sets: Mapping[int, Sequence[tuple[str, ...]]],
    option_kinds: Collection[OptionKind] = ALL_OPTION_KINDS,
) -> list[tuple[Segment, ...]]:
    """Return the fewest recipes that try every option on a block of each type.

    Args:
        types: Block names in execution order, and their types.
        op_sets: For each type, the op sets of selective checkpointing to try.
        option_kinds: The kinds of options to try.

    Returns:
        The segments of each recipe; blocks that try nothing are recomputed.
    """
    waiting = {
        kind: _options(op_sets.get(kind, ()), option_kinds)
        for kind in set(types.values())
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
    op_sets: Sequence[tuple[str, ...]], option_kinds: Collection[OptionKind]
) -> list[_Option]:
    options: list[_Option] = []
    if "selective" in option_kinds:
        options += [("selective", saved_ops, False) for saved_ops in op_sets]
    if "offload" in option_kinds:
        options += [("offload", (), False), ("recompute", (), True)]
    return options


def _middle(names: list[str]) -> list[str]:
    """Return the inner blocks in order, then the first and the last."""
    return [*names[1:-1], *dict.fromkeys((names[0], names[-1]))]
