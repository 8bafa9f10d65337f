"""The registry of kernel scratch rules, and the card they ask about.

A rule says how much memory a CUDA kernel takes from the caching allocator for itself.
It is a function of the card and of whole numbers that are affine in the batch size
(element counts, rows, columns), so one trace serves every card and batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Rule = Callable[["KernelCard", tuple[int, ...]], list[int]]

RULES: dict[str, Rule] = {}
PARTS: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class KernelCard:
    """What a launch configuration asks of a card.

    ``compute_capability`` is (major, minor), ``threads_per_sm`` the most threads that
    one streaming multiprocessor holds (``maxThreadsPerMultiProcessor``).
    """

    compute_capability: tuple[int, int]
    sm_count: int
    threads_per_sm: int


def rule(name: str, *, parts: int) -> Callable[[Rule], Rule]:
    """Register a rule that returns ``parts`` sizes in bytes, whatever its arguments.

    A part that is not allocated is 0: traces at two batch sizes then have the same
    events.

    Raises:
        ValueError: The name is taken.
    """

    def register(function: Rule) -> Rule:
        if name in RULES:
            raise ValueError(f"there already is a scratch rule named {name!r}")
        RULES[name] = function
        PARTS[name] = parts
        return function

    return register


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up."""
    return -(-numerator // denominator)


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple that is not below ``number``."""
    return ceil_div(number, multiple) * multiple


def block_bytes(*sizes_bytes: int) -> int:
    """Return what the allocator counts for these requests (memory-model B1)."""
    return sum(round_up(size, 512) for size in sizes_bytes)


def larger(*alternatives: list[int]) -> list[int]:
    """Return the parts that are alive at the worst of several moments of one kernel.

    Moments that follow each other share no memory at the peak, so only the largest
    counts; the parts of the others become 0.
    """
    worst = max(range(len(alternatives)), key=lambda k: block_bytes(*alternatives[k]))
    return [
        size if k == worst else 0
        for k, moment in enumerate(alternatives)
        for size in moment
    ]
