"""The steps that a plan can be cut into, each with its bytes as two numbers per pass.

The same rule C as ``memory.chain_peak`` (the tests hold them together), written so that
what a step needs above the bytes before it is one number for the forward and one for
the backward pass. The gradients that later blocks leave behind are a known sum, because
every plan computes all of them.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from budgetfit.core.block_profile import BlockOption, ChainProfile
from budgetfit.solvers.problem import Problem


class ChainStep(NamedTuple):
    """Blocks up to ``stop - 1``: kept (one block), or recomputed as one segment.

    Attributes:
        stop: Number of the block after it.
        saved_bytes: What it adds to the bytes alive in front of later steps.
        cached_bytes: What it adds to that in the forward pass only.
        forward_bytes: Most bytes alive above those in front of it, in its forward.
        backward_bytes: The same for its backward, later gradients included.
        extra_ns: Time above the plain forward and backward.
        wrapped: How many blocks it recomputes; 0 for a kept block.
    """

    stop: int
    saved_bytes: int
    cached_bytes: int
    forward_bytes: int
    backward_bytes: int
    extra_ns: int
    wrapped: int


def chain_steps(problem: Problem) -> list[list[ChainStep]]:
    """Return, for each block, the steps that start there: segments, then keeping it."""
    chain = problem.chain
    incoming = incoming_bytes(chain)
    return [
        [
            *_segments(problem, start, incoming),
            _one_block(start, block.keep, incoming[start], wrapped=0),
        ]
        for start, block in enumerate(chain.blocks)
    ]


def incoming_bytes(chain: ChainProfile) -> list[int]:
    """Return what each block's backward finds alive besides everything saved.

    The gradient of its output (none comes into the last block) and the weight gradients
    of all later blocks.
    """
    later = list(accumulate(block.gradient_bytes for block in reversed(chain.blocks)))
    outputs = [block.output_bytes for block in chain.blocks[:-1]]
    return [
        output + gradients
        for output, gradients in zip([*outputs, 0], [*later[-2::-1], 0], strict=True)
    ]


def _one_block(
    start: int, option: BlockOption, incoming: int, *, wrapped: int
) -> ChainStep:
    return ChainStep(
        stop=start + 1,
        saved_bytes=option.saved_bytes,
        cached_bytes=option.cached_bytes,
        forward_bytes=option.forward_bytes,
        backward_bytes=option.saved_bytes + incoming + option.backward_bytes,
        extra_ns=option.extra_ns,
        wrapped=wrapped,
    )


def _segments(problem: Problem, start: int, incoming: list[int]) -> Iterator[ChainStep]:
    """Yield the recomputed segments that start at a block, the shortest first."""
    blocks = problem.chain.blocks[start : start + problem.longest_segment(start)]
    options = [o for block in blocks if (o := block.option("recompute")) is not None]
    if not options:
        return
    yield _one_block(start, options[0], incoming[start], wrapped=1)
    input_bytes = options[0].saved_bytes
    held = 0  # S of the inner blocks so far, the segment's input counted once
    cached = extra_ns = inner_cached = 0
    forward = backward = recompute = 0
    for length, (block, option) in enumerate(zip(blocks, options, strict=True), 1):
        keep = block.keep
        arriving = incoming[start + length - 1]
        own_input = 0 if length == 1 else input_bytes
        forward = max(forward, cached + own_input + option.forward_bytes)
        recompute = max(recompute, held + inner_cached + keep.forward_bytes)
        alone = held + option.saved_bytes + option.backward_bytes
        held += keep.saved_bytes
        if length == 1 and keep.saved_bytes < input_bytes:
            held += input_bytes
        backward = max(backward, min(held + keep.backward_bytes, alone) + arriving)
        cached += option.cached_bytes
        inner_cached += keep.cached_bytes
        extra_ns += option.extra_ns
        if length > 1:
            yield ChainStep(
                stop=start + length,
                saved_bytes=input_bytes,
                cached_bytes=cached,
                forward_bytes=forward,
                backward_bytes=max(backward, recompute + arriving),
                extra_ns=extra_ns,
                wrapped=length,
            )
