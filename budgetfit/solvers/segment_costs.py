"""Peak bytes of segments of several blocks, in their forward and backward.

Each function yields all lengths in one pass over the blocks, by the formula of
``memory.chain.peak``.
"""

from collections.abc import Iterator, Sequence

from budgetfit.core.block_profile import BlockOption, BlockProfile


def forward_needs(options: Sequence[BlockOption]) -> Iterator[tuple[int, int]]:
    """Yield cached bytes and forward peak of ever longer segments.

    Args:
        options: Each block's option to recompute it.
    """
    input_bytes = cached = most = 0  # the first block's f holds its own input
    for option in options:
        most = max(most, cached + input_bytes + option.forward_bytes)
        cached += option.cached_bytes
        input_bytes = options[0].saved_bytes
        yield cached, most


def backward_needs(
    blocks: Sequence[BlockProfile],
    options: Sequence[BlockOption],
    incoming: Sequence[int],
    *,
    nested: bool,
) -> Iterator[int]:
    """Yield the peak of recomputation and backward of ever longer segments.

    Args:
        blocks: From the segment's first on.
        options: Each block's option to recompute it.
        incoming: Live bytes at each one's backward: ``transitions.incoming_bytes``.
        nested: Whether blocks inside are checkpointed again. The recomputation then
            leaves out the last block: its need comes after.
    """
    input_bytes = options[0].saved_bytes
    held = cached = recompute = backward = 0
    for block, option, arriving in zip(blocks, options, incoming, strict=False):
        ran = option if nested else block.keep
        forward = max(recompute, held + cached + ran.forward_bytes)
        alone = held + option.saved_bytes + option.backward_bytes
        # The segment's input is counted once, with the block that saves it too.
        holds_input = block is not blocks[0] or ran.saved_bytes >= input_bytes
        held += ran.saved_bytes + (0 if holds_input else input_bytes)
        used = alone if nested else min(held + ran.backward_bytes, alone)
        backward = max(backward, used + arriving)
        yield max(backward, (recompute if nested else forward) + arriving)
        recompute = forward
        cached += ran.cached_bytes
