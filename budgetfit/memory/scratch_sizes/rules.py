"""Registry of rules for the scratch memory of CUDA kernels.

A rule returns how much memory a kernel takes from the caching allocator. It depends on
the GPU and on integers that are affine in the batch size (element counts, rows,
columns), so that one trace serves every GPU and batch size.
"""

from collections.abc import Callable
from dataclasses import dataclass

Rule = Callable[..., list[int]]
MAX_INDEX = 2**31 - 1  # of a kernel with 32-bit indices, in bytes as in elements

RULES: dict[str, Rule] = {}
PARTS: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Properties of a GPU that kernel launch configurations depend on.

    As ``cudaDeviceProp``: ``compute_capability`` is (major, minor), ``sm_count``
    ``multiProcessorCount``, ``threads_per_sm`` ``maxThreadsPerMultiProcessor``.
    """

    compute_capability: tuple[int, int]
    sm_count: int
    threads_per_sm: int


def rule(*, parts: int) -> Callable[[Rule], Rule]:
    """Register a rule by its function's name, which traces contain.

    It gets the GPU and a kernel's arguments, and returns ``parts`` sizes in bytes,
    whatever these are. A part that is not allocated is 0, so that traces at two batch
    sizes have the same events.

    Raises:
        ValueError: The name is taken.
    """

    def register(function: Rule) -> Rule:
        name = function.__name__
        if name in RULES:
            raise ValueError(f"there already is a scratch rule named {name!r}")
        RULES[name] = function
        PARTS[name] = parts
        return function

    return register


def scratch_bytes(
    device: DeviceProperties, rule_name: str, arguments: tuple[int, ...]
) -> list[int]:
    """Return the scratch requests of a kernel call in bytes, unrounded, in order.

    The number of parts depends on the rule only; a part that is not allocated is 0.

    Raises:
        KeyError: There is no such rule.
    """
    sizes = RULES[rule_name](device, *arguments)
    assert len(sizes) == PARTS[rule_name], rule_name  # noqa: S101 - invariant
    return sizes


@rule(parts=1)
def buffer(_: DeviceProperties, size_bytes: int) -> list[int]:
    """Return the bytes of a temporary tensor, which a kernel's arguments tell."""
    return [size_bytes]


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient rounded up."""
    return -(-numerator // denominator)


def round_up(number: int, multiple: int) -> int:
    """Return ``number`` rounded up to a multiple."""
    return ceil_div(number, multiple) * multiple


def rounded_bytes(*sizes_bytes: int) -> int:
    """Return the sum of requests, each rounded up to the allocator's 512 bytes."""
    return sum(round_up(size, 512) for size in sizes_bytes)


def last_power_of_two(number: int) -> int:
    """Return the largest power of two that is not above ``number``; at least 1."""
    return 1 << (max(number, 1).bit_length() - 1)
