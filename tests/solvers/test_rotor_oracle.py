"""Against rotor (Beaumont et al. 2019, arXiv 1911.13214) in plain Python, whole bytes.

rotor may recompute what it recomputes, as deep as it likes; a plan of ours recomputes a
segment at one level. So it runs twice: with one level it must agree with ours exactly,
and with any number it may only be faster by nesting. Derived from the chain formula and
not from rotor's code, which disagrees with itself about the base case (facts P15).
"""

from dataclasses import replace
from functools import cache

from budgetfit.core.block_profile import ChainProfile
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.chain_dp import chain_dp
from budgetfit.solvers.problem import Problem
from tests.solvers.chains import block, chain_of, option, seeded

NEVER = 10**9


def plain_chain(seed: int, count: int) -> ChainProfile:
    """Blocks without transients of their own, in rotor's terms."""
    rnd = seeded(seed)
    inputs = [rnd.randint(1, 5) for _ in range(count + 1)]
    blocks = []
    for number in range(count):
        x, after = inputs[number : number + 2]
        saved = x + rnd.randint(0, 20)
        backward = x  # the gradient of its input is made
        alone = saved + max(after, backward) - x
        forward_ns = rnd.randint(1, 9)
        made = block(
            f"layers.{number}",
            option("keep", saved, saved + after, backward),
            option("recompute", x, x + after, alone, extra=forward_ns),
            output=after,
        )
        blocks.append(replace(made, forward_ns=forward_ns, backward_ns=0))
    return chain_of(*blocks, input_bytes=inputs[0])


def rotor(chain: ChainProfile, limit_bytes: int, levels: int) -> int:
    """Return the least forward time, ``NEVER`` where nothing fits."""
    count = len(chain.blocks)
    x = [chain.block_input_bytes(number) for number in range(count)]
    out = [each.output_bytes for each in chain.blocks]
    held = [each.keep.saved_bytes for each in chain.blocks]
    times = [each.forward_ns for each in chain.blocks]

    @cache
    def least(first: int, last: int, room: int, level: int) -> int:
        """Blocks first to last, forward and backward, the input beside the room."""
        arriving = out[last] if last + 1 < count else 0
        # Keep the first block, then the others, then its backward.
        kept = held[first] - x[first]
        comes = out[first] if first + 1 < count else 0
        fits = (
            kept + out[first] + (arriving if level < levels else 0) <= room
            and kept + comes + x[first] <= room
        )
        best = NEVER
        if fits and first == last:
            best = times[first]
        elif fits:
            rest = least(first + 1, last, room - kept - x[first + 1], level)
            best = times[first] + rest
        if level == 0:
            return best
        # Run some blocks without saving, then the others, then those with saving.
        for split in range(first + 1, last + 2):
            inside = range(first, split)
            passing = [
                (x[number] if number > first else 0)
                + out[number]
                + (arriving if level < levels else 0)
                for number in inside
            ]
            if max(passing) > room:
                break
            rest = 0
            if split <= last:
                rest = least(split, last, room - x[split], level)
            elif level < levels:
                break  # the same blocks once more gain nothing
            again = least(first, split - 1, room, level - 1)
            best = min(best, sum(times[number] for number in inside) + rest + again)
        return best

    return least(0, count - 1, limit_bytes - x[0], levels)


def test_one_level_of_rotor_is_never_better_and_never_worse() -> None:
    rnd = seeded(80)
    found = 0
    for seed in range(60):
        chain = plain_chain(seed, rnd.randint(1, 10))
        limit_bytes = int(chain_peak_bytes(chain, ()) * rnd.uniform(0.3, 1))
        ours = chain_dp(Problem(chain=chain, limit_bytes=limit_bytes))
        expected = rotor(chain, limit_bytes, levels=1)
        if ours.segments is None:
            assert expected >= NEVER
            continue
        assert chain_time_ns(chain, ours.segments) == expected
        found += 1
    assert 30 < found < 60


def test_any_depth_of_rotor_is_no_slower_than_one() -> None:
    for seed in range(10):
        chain = plain_chain(seed, 7)
        limit_bytes = int(chain_peak_bytes(chain, ()) * 0.5)
        one, many = (rotor(chain, limit_bytes, levels) for levels in (1, 3))
        assert many <= one
