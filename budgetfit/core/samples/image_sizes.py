"""Sizes of the images of a data set, and the batches that are made of them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from budgetfit.core.samples.sample_lengths import LengthSummary
from budgetfit.core.validation import (
    MAX_PIXELS,
    check_positive_int,
    is_whole,
    parse_image_size,
)
from budgetfit.errors import InputError

Size: TypeAlias = tuple[int, int]  # height and width in pixels
ImageSizes: TypeAlias = Iterable[Any] | Mapping[Any, int] | str

STRIDE: Final = 32  # pixels; convolution networks halve their sides five times
_EXAMPLE: Final = (
    "image_sizes must be a list of sizes such as [480, (480, 640)], images by size "
    'such as {480: 900, 800: 100}, or text: "480,480x640", "480-800:32" for every 32'
)


@dataclass(frozen=True, slots=True)
class ImageSizeSummary:
    """Histogram of image sizes; images of a batch are padded to the largest of them.

    Attributes:
        counts: ((height, width), images), by pixels.
        padded_to: Batches that are drawn are padded to a multiple of it.
    """

    counts: tuple[tuple[Size, int], ...]
    padded_to: int = 1
    # Strides and patches cut what is left of a side: some sizes may be far off.
    checked_at: ClassVar[tuple[float, ...]] = (1 / 3, 2 / 3)
    most_error: ClassVar[float] = 0.01

    @property
    def planned(self) -> Size:
        """Largest height and width, which a batch may have at once."""
        sizes = [size for size, _ in self.counts]
        return max(height for height, _ in sizes), max(width for _, width in sizes)

    @property
    def shortest(self) -> Size:
        """The size of fewest pixels."""
        return self.counts[0][0]

    @property
    def vary(self) -> bool:
        """Whether batches of several sizes occur."""
        return len(self.counts) > 1

    @property
    def multiples(self) -> tuple[int, ...]:
        """Numbers of pixels to pad both sides to multiples of."""
        # Image processors know no largest size, and would pad it beyond what was
        # planned.
        fitting = (
            n for n in (32, 64, 128, 256) if not any(s % n for s in self.planned)
        )
        return tuple(n for n in fitting if n < max(self.planned))

    @property
    def kept(self) -> list[tuple[Size, int]]:
        """Images by size."""
        return list(self.counts)

    @staticmethod
    def extent(size: Size) -> int:
        """Return the pixels: what the bytes of a step are a polynomial of."""
        return size[0] * size[1]

    def padded(self, size: Size, multiple: int) -> Size:
        """Return both sides as multiples, but no larger than the largest."""
        height, width = (-(-side // multiple) * multiple for side in size)
        return min(height, self.planned[0]), min(width, self.planned[1])

    def alike(self, drawn: Iterable[Size]) -> list[list[Size]]:
        """Return sizes that may run one program, each by pixels."""
        # Those whose sides are multiples of ``STRIDE``, and others.
        every = {*drawn, self.planned}
        every |= {self.padded(each, n) for each in every for n in self.multiples}
        ordered = sorted(every, key=lambda size: (self.extent(size), size))
        even = [size for size in ordered if not any(side % STRIDE for side in size)]
        return [even, [size for size in ordered if size not in even]]

    def draw(
        self, batch_size: int, micro_batches: int, updates: int, seed: int
    ) -> list[tuple[Size, ...]]:
        """Draw the sizes of the micro-batches of so many updates.

        That of even seeds is the largest height and width of ``batch_size`` images, as
        image processors pad them; of odd ones that of a single image, as where all of a
        batch are resized alike.
        """
        together = 1 if seed % 2 else batch_size
        sizes = np.array([size for size, _ in self.counts])
        shares = np.array([count for _, count in self.counts], np.float64)
        random, shape = np.random.default_rng(seed), (updates, micro_batches, together)
        places = random.choice(len(sizes), shape, p=shares / shares.sum())
        drawn = sizes[places].max(axis=2).tolist()
        return [
            tuple(self.padded((height, width), self.padded_to) for height, width in row)
            for row in drawn
        ]

    def span(self) -> str:
        """Describe the sizes: "images of 480x480 to 800x1333 pixels"."""
        low, high = self.shortest, self.planned
        return f"images of {low[0]}x{low[1]} to {high[0]}x{high[1]} pixels"

    def notes(self) -> tuple[str, ...]:
        """Describe the planned size."""
        text = f"planned for {self.span()} in batches that are padded to their largest"
        return (text,) if self.vary else ()


SampleSizes: TypeAlias = LengthSummary | ImageSizeSummary


def summarize_image_sizes(sizes: ImageSizes) -> ImageSizeSummary:
    """Summarize sizes of ``parse_image_size``, as a list, a mapping to counts, or text.

    Raises:
        InputError: If there is none, or one of them or of the counts is not valid.
    """
    given = list(_of_text(sizes)) if isinstance(sizes, str) else sizes
    if not isinstance(given, Iterable):
        raise InputError(f"{_EXAMPLE}; got {sizes!r:.80}.")
    pairs = given.items() if isinstance(given, Mapping) else [(n, 1) for n in given]
    counted: Counter[Size] = Counter()
    for size, count in pairs:
        counted[parse_image_size(size)] += check_positive_int("images", count)
    if not counted:
        raise InputError(f"image_sizes is empty; {_EXAMPLE}.")
    ordered = sorted(counted.items(), key=lambda row: (row[0][0] * row[0][1], row[0]))
    return ImageSizeSummary(tuple(ordered))


def _of_text(text: str) -> Iterable[object]:
    """Yield the sizes of ``"480,480x640"`` and ``"480-800:32"``."""
    for word in text.split(","):
        ends, _, step = word.strip().partition(":")
        low, dash, high = ends.partition("-")
        if not dash:
            yield ends
            continue
        if not all(map(is_whole, (low, high, step or "1"))):
            raise InputError(f"{_EXAMPLE}; got {word!r:.40}.")
        first, last, by = int(low), int(high), int(step or STRIDE)
        if not 0 < first <= last <= MAX_PIXELS or not by:
            raise InputError(f"{_EXAMPLE}; got {word!r:.40}.")
        yield from [*range(first, last, by), last]
