from collections.abc import Iterator, Sequence

import pytest

from budgetfit.core.block_profile import BlockOption, ChainProfile
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.memory.chain.peak import (
    ChainPoint,
    chain_peak_bytes,
    chain_points,
    chain_time_ns,
)
from budgetfit.solvers.problem import Problem
from tests.solvers.chains import (
    block,
    chain_of,
    equal_blocks,
    option,
    random_chain,
    seeded,
    single,
)
from tests.solvers.exhaustive import all_plans

KEEP = option("keep", saved=10, forward=14, backward=3)
RECOMPUTE = option("recompute", saved=1, forward=5, backward=12, extra=4)


def test_kept_blocks_pile_up_in_the_forward_and_shrink_in_the_backward() -> None:
    chain = chain_of(*equal_blocks(2, KEEP, gradient=2), static=100, optimizer=7)
    assert chain_points(chain, ()) == (
        ChainPoint("forward layers.0", 114),  # 100 + f 14
        ChainPoint("forward layers.1", 124),  # 100 + S 10 + f 14
        ChainPoint("backward layers.1", 123),  # 100 + 2 S 20 + b 3
        ChainPoint("backward layers.0", 116),  # 100 + S 10 + x 1 + g 2 + b 3
        ChainPoint("optimizer step", 111),  # 100 + 2 g 4 + 7
    )


def test_a_recomputed_block_costs_what_was_measured_of_it() -> None:
    blocks = equal_blocks(2, KEEP, RECOMPUTE, gradient=2)
    chain = chain_of(*blocks, static=100)
    assert chain_points(chain, single(0)) == (
        ChainPoint("forward layers.0", 105),  # 100 + f 5
        ChainPoint("forward layers.1", 115),  # 100 + S 1 + f 14
        ChainPoint("backward layers.1", 114),  # 100 + 1 + S 10 + b 3
        ChainPoint("backward layers.0", 116),  # 100 + S 1 + x 1 + g 2 + b 12
        ChainPoint("optimizer step", 104),  # 100 + 2 g 4
    )


def test_a_segment_saves_its_input_and_is_recomputed_as_a_chain_of_its_own() -> None:
    blocks = equal_blocks(3, KEEP, RECOMPUTE, gradient=2)
    chain = chain_of(*blocks, static=100)
    assert chain_points(chain, [Segment(("layers.0", "layers.1"))]) == (
        ChainPoint("forward layers.0", 105),  # 100 + f 5
        ChainPoint("forward layers.1", 106),  # and the segment's input 1
        ChainPoint("forward layers.2", 115),  # 100 + S 1 + f 14
        ChainPoint("backward layers.2", 114),  # 100 + 1 + S 10 + b 3
        # The segment's input is part of the first block's S from here on. Its output's
        # gradient 1 is alive until its last block's backward has run.
        ChainPoint("recompute layers.0", 117),  # 100 + g 2 + gradient 1 + f 14
        ChainPoint("recompute layers.1", 127),  # and S 10
        ChainPoint("backward layers.1", 126),  # 100 + g 2 + 2 S 20 + gradient 1 + b 3
        ChainPoint("backward layers.0", 118),  # 100 + 2 g 4 + S 10 + gradient 1 + b 3
        ChainPoint("optimizer step", 106),  # 100 + 3 g 6
    )


def test_the_incoming_gradient_of_a_segment_is_freed_after_its_last_block() -> None:
    # Only the last block's output is large: what it costs is not there for block 0.
    blocks = [
        block("a", KEEP, RECOMPUTE, output=1),
        block("b", KEEP, RECOMPUTE, output=50),
        block("c", option("keep", 50, 51, 0), output=0),
    ]
    points = dict(chain_points(chain_of(*blocks), [Segment(("a", "b"))]))
    assert points["recompute a"] == 50 + 14
    assert points["backward b"] == 20 + 50 + 3
    assert points["backward a"] == 10 + 1 + 3


def test_weight_copies_live_to_the_end_of_the_forward_and_no_further() -> None:
    keep = option("keep", saved=10, forward=14, backward=3, cached=1)
    recompute = option("recompute", saved=1, forward=9, backward=12, cached=4)
    chain = chain_of(*equal_blocks(3, keep, recompute), static=100)
    points = dict(chain_points(chain, single(0, 1)))
    assert points["forward layers.1"] == 100 + 1 + 4 + 9
    assert points["forward layers.2"] == 100 + 2 * 1 + 2 * 4 + 14
    assert points["backward layers.2"] == 100 + 2 * 1 + 10 + 3
    assert points["backward layers.1"] == 100 + 2 * 1 + 1 + 12
    kept = dict(chain_points(chain, ()))
    assert kept["forward layers.2"] == 100 + 2 * 10 + 2 * 1 + 14
    assert kept["backward layers.2"] == 100 + 3 * 10 + 3


def test_a_segment_leaves_the_weight_copies_of_all_its_blocks() -> None:
    keep = option("keep", saved=10, forward=14, backward=3)
    recompute = option("recompute", saved=1, forward=9, backward=12, cached=4)
    chain = chain_of(*equal_blocks(3, keep, recompute), static=100)
    points = dict(chain_points(chain, [Segment(("layers.0", "layers.1"))]))
    assert points["forward layers.1"] == 100 + 1 + 4 + 9
    assert points["forward layers.2"] == 100 + 1 + 2 * 4 + 14
    # Recomputed blocks' S holds the copies that they save: nothing is added.
    assert points["recompute layers.1"] == 100 + 1 + 10 + 14


def test_copies_that_nothing_saves_live_to_the_end_of_the_recomputation() -> None:
    keep = option("keep", saved=10, forward=14, backward=3, cached=2)
    chain = chain_of(*equal_blocks(3, keep, RECOMPUTE), static=100)
    points = dict(chain_points(chain, [Segment(("layers.0", "layers.1"))]))
    assert points["recompute layers.1"] == 100 + 1 + 10 + 2 + 14
    assert points["backward layers.1"] == 100 + 1 + 2 * 10 + 3


@pytest.mark.parametrize(("on_host", "kept"), [(False, 5), (True, 0)])
def test_a_first_block_that_does_not_save_its_input_has_it_held_for_it(
    *, on_host: bool, kept: int
) -> None:
    keeps_less = option("keep", saved=3, forward=9, backward=2)
    saves_input = option("recompute", saved=5, forward=10, backward=12)
    recompute = option("recompute", kept, 10, 12, input_on_host=on_host)
    blocks = equal_blocks(2, keeps_less, saves_input, recompute, output=5)
    pair = Segment(("layers.0", "layers.1"), input_on_host=on_host)
    points = dict(chain_points(chain_of(*blocks), [pair]))
    assert points["forward layers.1"] == kept + 10
    assert points["recompute layers.1"] == 3 + 5 + 9
    assert points["backward layers.0"] == 3 + 5 + 5 + 2


def test_a_block_in_a_segment_needs_no_more_than_recomputed_alone() -> None:
    # Measured alone: 1 + 10 above what is before it, where keeping has 10 + 3.
    alone = option("recompute", saved=1, forward=5, backward=10)
    chain = chain_of(*equal_blocks(2, KEEP, alone), static=100)
    points = dict(chain_points(chain, [Segment(("layers.0", "layers.1"))]))
    assert points["recompute layers.1"] == 100 + 10 + 14
    assert points["backward layers.1"] == 100 + 10 + 1 + 10
    assert points["backward layers.0"] == 100 + 1 + 1 + 10


def test_one_block_has_no_incoming_gradient() -> None:
    chain = chain_of(*equal_blocks(1, KEEP, output=50))
    assert dict(chain_points(chain, ()))["backward layers.0"] == 10 + 3


def test_the_peak_is_the_highest_point() -> None:
    chain = chain_of(*equal_blocks(2, KEEP, RECOMPUTE), static=100, optimizer=60)
    assert chain_peak_bytes(chain, ()) == 160


# Measured in live CPU storages of real blocks, in MiB (solver-facts, section 8).
@pytest.mark.parametrize(
    ("recomputed", "peak", "measured_mib"),
    [
        ((0, 1, 2, 3, 4, 5), 51, 12.77),
        ((0, 1, 3, 4, 5, 7), 70, 17.52),
        ((2, 3, 4, 5, 6, 7), 81, 20.28),
    ],
)
def test_the_order_of_the_same_eight_blocks_decides_the_peak(
    recomputed: tuple[int, ...], peak: int, measured_mib: float
) -> None:
    x_mib = 0.25
    keep = option("keep", saved=20, forward=24, backward=4)
    recompute = option("recompute", saved=1, forward=16, backward=23)
    # One x that lasts: the caller's own input.
    chain = chain_of(*equal_blocks(8, keep, recompute, gradient=3), static=1)
    assert chain_peak_bytes(chain, single(*recomputed)) == peak
    assert peak * x_mib == pytest.approx(measured_mib, abs=0.04)


def test_keeping_first_can_be_lower_because_nothing_comes_into_the_last_block() -> None:
    # solver-facts 4.2, correction 3: large weight gradients turn the order around.
    keep = option("keep", saved=9, forward=12, backward=4)
    recompute = option("recompute", saved=3, forward=12, backward=20)
    blocks = equal_blocks(2, keep, recompute, gradient=8, output=3)
    chain = chain_of(*blocks, input_bytes=3)
    assert chain_peak_bytes(chain, single(0)) == 34  # S 3 + x 3 + g 8 + b 20
    assert chain_peak_bytes(chain, single(1)) == 32  # S 9 + S 3 + b 20


def test_time_is_the_plain_passes_and_every_wrapped_block_again() -> None:
    chain = chain_of(*equal_blocks(3, KEEP, RECOMPUTE), optimizer_ns=1000)
    assert chain_time_ns(chain, ()) == 3 * (10 + 20)
    assert chain_time_ns(chain, single(2)) == 90 + 4
    # In a segment the recomputation stops early in the last block only: the first runs
    # its whole forward of 10.
    assert chain_time_ns(chain, [Segment(("layers.0", "layers.1"))]) == 90 + 10 + 4


def test_segments_may_come_in_any_order() -> None:
    chain = chain_of(*equal_blocks(4, KEEP, RECOMPUTE))
    assert chain_points(chain, single(2, 0)) == chain_points(chain, single(0, 2))


def test_the_formula_is_a_ledger_of_what_is_allocated_and_freed() -> None:
    rnd = seeded(5)
    for _ in range(300):  # some first blocks save less than the input held for them
        others = rnd.choice([0, 1, 2])
        chain = random_chain(rnd, rnd.randint(1, 5 - others), most_others=others)
        for plan in all_plans(Problem(chain=chain, limit_bytes=0, nested=others > 0)):
            points = [point.bytes for point in chain_points(chain, plan)]
            assert points == list(Ledger(chain, plan).points())


class Ledger:
    """The same program as named allocations that come and go, one at a time."""

    def __init__(self, chain: ChainProfile, plan: Sequence[Segment]) -> None:
        self.blocks = chain.blocks
        self.alive: dict[tuple[str, int], int] = {("static", 0): chain.static_bytes}
        self.optimizer_bytes = chain.optimizer_bytes
        numbers = {each.name: number for number, each in enumerate(chain.blocks)}
        self.segments = {numbers[name]: each for each in plan for name in each.blocks}
        steps = [[numbers[name] for name in segment.blocks] for segment in plan]
        kept = set(range(len(chain.blocks))) - set(self.segments)
        self.steps = sorted([*steps, *([number] for number in kept)])

    def at(self, extra_bytes: int) -> int:
        return sum(self.alive.values()) + extra_bytes

    def free(self, kind: str) -> None:
        self.alive = {key: size for key, size in self.alive.items() if key[0] != kind}

    def chosen(self, number: int) -> BlockOption:
        block, segment = self.blocks[number], self.segments.get(number)
        found = block.keep if segment is None else block.option_in(segment)
        assert found is not None
        return found

    def recomputed(self, number: int) -> BlockOption:
        found = self.blocks[number].option("recompute")
        assert found is not None
        return found

    def points(self) -> Iterator[int]:
        for step in self.steps:
            for number in step:
                yield self.at(self.chosen(number).forward_bytes)
                if number == step[0]:
                    self.alive["saved", number] = self.chosen(number).saved_bytes
                self.alive["cast", number] = self.chosen(number).cached_bytes
        self.free("cast")
        for step in reversed(self.steps):
            nested = len(step) > 1 and self.segments[step[0]].nested
            if len(step) > 1:
                yield from self.recomputation(step, nested=nested)
            for number in reversed(step):
                yield from self.backward(number, inside=len(step) > 1 and not nested)
            self.free("input")
        self.free("incoming")
        yield self.at(self.optimizer_bytes)

    def recomputation(self, step: list[int], *, nested: bool) -> Iterator[int]:
        del self.alive["saved", step[0]]  # what is left of it on the device
        input_bytes = self.recomputed(step[0]).saved_bytes
        for number in step:
            used = self.recomputed(number) if nested else self.blocks[number].keep
            if not (nested and number == step[-1]):
                yield self.at(used.forward_bytes)
                self.alive["cast", number] = used.cached_bytes
            self.alive["saved", number] = used.saved_bytes
            if number == step[0] and used.saved_bytes < input_bytes:
                self.alive["input", number] = input_bytes
        self.free("cast")

    def backward(self, number: int, *, inside: bool) -> Iterator[int]:
        keep, alone = self.blocks[number].keep, self.chosen(number)
        if inside:
            alone = self.recomputed(number)
            own = self.alive["saved", number] + self.alive.get(("input", number), 0)
            least = min(
                keep.backward_bytes, alone.saved_bytes + alone.backward_bytes - own
            )
            yield self.at(least)
        elif self.nested(number):
            yield self.at(self.recomputed(number).backward_bytes)
        else:
            yield self.at(alone.backward_bytes)
        del self.alive["saved", number]
        self.free("incoming")
        self.alive["gradient", number] = self.blocks[number].gradient_bytes
        if number:
            self.alive["incoming", number] = self.blocks[number - 1].output_bytes

    def nested(self, number: int) -> bool:
        segment = self.segments.get(number)
        return segment is not None and segment.nested


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(("nowhere",))], "The chain has no block 'nowhere'"),
        (single(3), "Block 'layers.3' cannot be wrapped with mode 'recompute'"),
        (
            [Segment(("layers.0",), mode="offload")],
            "Block 'layers.0' cannot be wrapped with mode 'offload'",
        ),
        ([Segment(("layers.0", "layers.2"))], "'layers.0' and 'layers.2' of one seg"),
        ([Segment(("layers.1", "layers.0"))], "'layers.1' and 'layers.0' of one seg"),
        (
            [Segment(("layers.1", "layers.2"))],
            "Block 'layers.1' does not hand its output straight to 'layers.2'",
        ),
        (single(0, 0), "Block 'layers.0' is in more than one segment"),
        (
            [Segment(("layers.0", "layers.1")), *single(1)],
            "Block 'layers.1' is in more than one segment",
        ),
    ],
)
def test_segments_that_the_chain_cannot_run_are_refused_by_name(
    segments: Sequence[Segment], message: str
) -> None:
    blocks = [
        block("layers.0", KEEP, RECOMPUTE),
        block("layers.1", KEEP, RECOMPUTE, joins_next=False),
        block("layers.2", KEEP, RECOMPUTE),
        block("layers.3", KEEP),
    ]
    chain = chain_of(*blocks)
    with pytest.raises(InputError, match=message):
        chain_points(chain, segments)
    with pytest.raises(InputError, match=message):
        chain_time_ns(chain, segments)


def test_one_block_costs_what_its_option_says() -> None:
    offload = option("offload", saved=0, forward=14, backward=13, extra=3)
    one, two = ("aten.mm.default:0",), ("aten.mm.default:0", "aten.mm.default:1")
    less = option("selective", 4, 9, 11, extra=2, saved_ops=one)
    more = option("selective", 6, 9, 8, extra=1, saved_ops=two)
    on_host = option("recompute", 0, 5, 12, extra=6, input_on_host=True)
    chain = chain_of(*equal_blocks(2, KEEP, RECOMPUTE, offload, less, more, on_host))
    last = ("layers.1",)
    expected = {
        Segment(last, mode="offload"): (0 + 13, 3),
        Segment(last, mode="selective", saved_ops=one): (4 + 11, 2),
        Segment(last, mode="selective", saved_ops=two): (6 + 8, 1),
        Segment(last): (1 + 12, 4),
        Segment(last, input_on_host=True): (0 + 12, 6),
    }
    for segment, (used, extra_ns) in expected.items():
        points = dict(chain_points(chain, [segment]))
        assert points["backward layers.1"] == 10 + used
        assert chain_time_ns(chain, [segment]) == 60 + extra_ns


def test_a_segments_input_on_the_host_comes_back_when_it_is_recomputed() -> None:
    on_host = option("recompute", 0, 6, 12, extra=6, input_on_host=True)
    blocks = equal_blocks(3, KEEP, RECOMPUTE, on_host, gradient=2)
    chain = chain_of(*blocks, static=100)
    pair = Segment(("layers.0", "layers.1"), input_on_host=True)
    assert chain_points(chain, [pair]) == (
        ChainPoint("forward layers.0", 106),  # 100 + f 6 with the copy to the host
        ChainPoint("forward layers.1", 105),  # nothing of the segment is left
        ChainPoint("forward layers.2", 114),  # 100 + f 14
        ChainPoint("backward layers.2", 113),  # 100 + S 10 + b 3
        ChainPoint("recompute layers.0", 117),  # 100 + x 1 + g 2 + f 14, input inside
        ChainPoint("recompute layers.1", 127),  # and S 10
        ChainPoint("backward layers.1", 126),  # 100 + x 1 + g 2 + 2 S 20 + b 3
        ChainPoint("backward layers.0", 118),  # 100 + S 10 + x 1 + 2 g 4 + b 3
        ChainPoint("optimizer step", 106),
    )
    # The first block: 6 with the copy, and 10 - 4 for the end of its forward.
    assert chain_time_ns(chain, [pair]) == 90 + 6 + 6 + 4


def test_a_nested_segment_holds_inputs_and_recomputes_one_block_at_a_time() -> None:
    blocks = equal_blocks(4, KEEP, RECOMPUTE, gradient=2)
    chain = chain_of(*blocks, static=100)
    three = Segment(("layers.0", "layers.1", "layers.2"), nested=True)
    assert chain_points(chain, [three])[4:] == (
        ChainPoint("backward layers.3", 114),  # 100 + S 1 + S 10 + b 3
        ChainPoint("recompute layers.0", 108),  # 100 + x 1 + g 2 + f 5
        ChainPoint("recompute layers.1", 109),  # and S 1; layers.2 is not run again
        ChainPoint("backward layers.2", 118),  # 100 + x 1 + g 2 + 3 S 3 + b 12
        ChainPoint("backward layers.1", 119),  # one S less, g 2 more
        ChainPoint("backward layers.0", 120),
        ChainPoint("optimizer step", 108),
    )
    # Three blocks recomputed, and all but the last one's forward once more.
    assert chain_time_ns(chain, [three]) == 4 * 30 + 3 * 4 + 2 * 10


def test_nested_on_the_host_counts_the_input_once() -> None:
    on_host = option("recompute", 0, 6, 12, extra=6, input_on_host=True)
    chain = chain_of(*equal_blocks(3, KEEP, RECOMPUTE, on_host))
    pair = Segment(("layers.0", "layers.1"), nested=True, input_on_host=True)
    points = dict(chain_points(chain, [pair]))
    assert points["recompute layers.0"] == 1 + 5
    assert points["backward layers.1"] == 1 + 2 + 12
    assert chain_time_ns(chain, [pair]) == 90 + 6 + 4 + 10


# Two levels of about sqrt(n) blocks. One below solver-facts 4.6, which counts a
# segment's input twice, with the segment and with its first block.
@pytest.mark.parametrize(
    ("count", "length", "peak"), [(24, 4, 26), (48, 6, 30), (80, 8, 34), (126, 10, 39)]
)
def test_two_levels_are_far_below_one(count: int, length: int, peak: int) -> None:
    keep = option("keep", saved=17, forward=18, backward=0)
    recompute = option("recompute", saved=1, forward=2, backward=17, extra=1)
    chain = chain_of(*equal_blocks(count, keep, recompute))
    names = [each.name for each in chain.blocks]
    plan = [
        Segment(blocks := tuple(names[at : at + length]), nested=len(blocks) > 1)
        for at in range(0, count, length)
    ]
    assert chain_peak_bytes(chain, plan) == peak


def test_options_that_a_block_does_not_have_are_refused_by_name() -> None:
    one, other = ("aten.mm.default:0",), ("aten.bmm.default:0",)
    some = option("selective", 4, 9, 11, saved_ops=one)
    on_host = option("recompute", 0, 5, 12, input_on_host=True)
    blocks = [
        block("layers.0", KEEP, RECOMPUTE, some),
        block("layers.1", KEEP, some, on_host),
    ]
    chain = chain_of(*blocks)
    refused = {
        Segment(("layers.0",), mode="selective", saved_ops=other): (
            "Block 'layers.0' cannot save just aten.bmm.default:0. "
            "Sets of ops that it can save: aten.mm.default:0."
        ),
        Segment(("layers.0",), input_on_host=True): (
            "Block 'layers.0' cannot have its input on the host"
        ),
        Segment(("layers.0", "layers.1"), input_on_host=True): (
            "Block 'layers.0' cannot have its input on the host"
        ),
        Segment(("layers.1",)): "Block 'layers.1' cannot be wrapped with mode 'recom",
    }
    for segment, message in refused.items():
        with pytest.raises(InputError, match=message):
            chain_points(chain, [segment])
