"""Memory that NCCL takes outside PyTorch's allocator, from published reports.

What a communicator takes depends on topology, channels and version, and no library
tells it beforehand. Reports: nccl#964 (4 x A100, NVLink): 544 MB for a communicator of
two ranks, 688 MB for more; nccl#864: 1.6 GB for one, about 6 GB for three and more.
"""

from dataclasses import dataclass
from typing import Final

_MIB: Final = 2**20
_OF_TWO_RANKS: Final = 544 * _MIB
_OF_MORE: Final = 688 * _MIB
_MOST: Final = 1600 * _MIB
_MOST_OF_ALL: Final = 6000 * _MIB


@dataclass(frozen=True, slots=True)
class NcclMemory:
    """Bytes of NCCL in one process: a range. Budgets set the upper end aside.

    ``communicators``: how many groups of ranks exchange data.
    """

    communicators: int
    low_bytes: int
    high_bytes: int

    @property
    def source(self) -> str:
        """Where the numbers are from."""
        plural = "s" if self.communicators > 1 else ""
        return (
            f"{self.communicators} NCCL communicator{plural}, reports of 544 MiB to "
            "1.6 GiB each (NVIDIA/nccl#964, #864)"
        )


def nccl_memory(ranks: int, communicators: int) -> NcclMemory:
    """Return what NCCL takes for so many communicators of at most ``ranks`` ranks."""
    each = _OF_TWO_RANKS if ranks == 2 else _OF_MORE  # noqa: PLR2004 - two ranks
    return NcclMemory(
        communicators,
        communicators * each,
        min(communicators * _MOST, max(_MOST_OF_ALL, communicators * each)),
    )
