"""Where CUDA's driver puts a new segment (decision 0042).

PyTorch takes the lower of two free blocks of equal size, so that the order of addresses
decides what is reserved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

CHUNK_BYTES: Final = 128 << 20
_PAGE_BYTES: Final = 2 << 20  # of device memory
# Between segments, so that blocks of different segments are never merged.
_GAP_BYTES: Final = 512
_FIRST_ADDRESS: Final = 1 << 49  # room above and below


@dataclass
class SegmentAddresses:
    """Addresses of segments in the order of ``cudaMalloc``.

    The driver puts a chunk of 128 MiB, or a multiple for a larger segment, below those
    before it. What a segment leaves of its chunk is for later ones, from low to high
    addresses; the newest chunk with room comes first. What is freed is not used again.

    Attributes:
        rise: Whether each segment is above those before it instead.
    """

    rise: ClassVar[bool] = False

    _edge: int = _FIRST_ADDRESS  # of the addresses used so far
    # Address and pages, the oldest first.
    _left: list[tuple[int, int]] = field(default_factory=list)
    _most_pages: int = field(default=0, compare=False)  # no more are left anywhere

    def copy(self) -> SegmentAddresses:
        """Return the same state, which goes on on its own."""
        return SegmentAddresses(self._edge, self._left.copy(), self._most_pages)

    def take(self, size_bytes: int) -> int:
        """Return the address of a new segment."""
        pages = -(-size_bytes // _PAGE_BYTES)
        if self.rise:
            address = self._edge
            self._edge += _spaced_bytes(pages)
            return address
        places = range(len(self._left) - 1, -1, -1)
        for place in places if pages <= self._most_pages else ():
            address, room = self._left[place]
            if room >= pages:
                del self._left[place]
                break
        else:
            if pages <= self._most_pages:  # there was less
                self._most_pages = max((room for _, room in self._left), default=0)
            room = -(-size_bytes // CHUNK_BYTES) * (CHUNK_BYTES // _PAGE_BYTES)
            self._edge -= _spaced_bytes(room)
            address, place = self._edge, len(self._left)
        if room > pages:
            rest = address + _spaced_bytes(pages), room - pages
            self._left.insert(place, rest)
            self._most_pages = max(self._most_pages, room - pages)
        return address


def _spaced_bytes(pages: int) -> int:
    return pages * (_PAGE_BYTES + _GAP_BYTES)
