"""What a plan may do with the blocks of a model, and how often each then runs."""

from collections.abc import Callable

from budgetfit.core.recipe import Segment

# Some of the calls in a block of any family; what one does not call is skipped.
SAVED = (
    "aten.addmm.default:0",
    "aten.mm.default:0",
    "aten.mm.default:3",
    "aten.convolution.default:0",
    "aten._scaled_dot_product_flash_attention_for_cpu.default:0",
    "aten.native_dropout.default:0",
)


def keep(_: tuple[str, ...]) -> list[Segment]:
    return []


def recompute(blocks: tuple[str, ...]) -> list[Segment]:
    return [Segment((name,)) for name in blocks]


def segments(blocks: tuple[str, ...]) -> list[Segment]:
    """Several blocks in one checkpoint, and in one whose blocks are checkpoints too."""
    middle = len(blocks) // 2
    return [Segment(blocks[:middle]), Segment(blocks[middle:], nested=True)]


def selective(blocks: tuple[str, ...]) -> list[Segment]:
    return [Segment((name,), mode="selective", saved_ops=SAVED) for name in blocks]


def offload(blocks: tuple[str, ...]) -> list[Segment]:
    """Kept activations on the host, and inputs of recomputed blocks, by turns."""
    return [
        Segment((name,), input_on_host=True)
        if number % 2
        else Segment((name,), mode="offload")
        for number, name in enumerate(blocks)
    ]


TREATMENTS: dict[str, Callable[[tuple[str, ...]], list[Segment]]] = {
    "keep": keep,
    "recompute": recompute,
    "segments": segments,
    "selective": selective,
    "offload": offload,
}


def segments_of(
    treatment: str, chains: tuple[tuple[str, ...], ...]
) -> tuple[Segment, ...]:
    """Return the segments of a treatment for a model with these chains of blocks."""
    made = TREATMENTS[treatment]
    return tuple(segment for chain in chains for segment in made(chain))


def runs_again(segments: tuple[Segment, ...]) -> int:
    """Return how many blocks run again in a micro-batch's backward pass, all counted.

    In a nested segment all but the last run twice more: the last is differentiated as
    it was recomputed.
    """
    return sum(
        len(each.blocks) + (len(each.blocks) - 1 if each.nested else 0)
        for each in segments
        if each.mode != "offload"
    )
