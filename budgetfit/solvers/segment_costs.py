"""What segments of several blocks need in their forward and backward, in bytes.

Each is one walk along the blocks that tells of all lengths at once (rule C).
"""

from collections.abc import Iterator, Sequence

from budgetfit.core.block_profile import BlockOption, BlockProfile


def forward_needs(options: Sequence[BlockOption]) -> Iterator[tuple[int, int]]:
    """Yield, for ever longer segments, the copies they leave and the forward's need.

    Args:
        options: Of each block the option to recompute it.
    """
    input_bytes = cached = most = 0  # the first block's f holds its own input
    for option in options:
        most = max(most, cached + input_bytes + option.forward_bytes)
        cached += option.cached_bytes
        input_bytes = options[0].saved_bytes
        yield cached, most


def backward_needs(
    blocks: Sequence[BlockProfile],
    again: Sequence[BlockOption],
    incoming: Sequence[int],
    *,
    nested: bool,
) -> Iterator[int]:
    """Yield, for ever longer segments, what recomputation and backward need.

    Args:
        blocks: From the segment's first on.
        again: Of each of them the option to recompute it.
        incoming: What each one's backward finds alive: ``chain_steps.incoming_bytes``.
        nested: Whether the segment is recomputed in two levels. The last block is then
            not run in the recomputation: its need comes after.
    """
    input_bytes = again[0].saved_bytes
    held = cached = recompute = backward = 0
    for block, option, arriving in zip(blocks, again, incoming, strict=False):
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
