"""What shares of its data-sheet rates a GPU's large matrix products and copies reach.

By GPU (``kernel_shares.toml``, a source for each number); what kinds of ops reach of
these is in ``timing.kind_shares``.
"""

import functools
import tomllib
from importlib import resources
from typing import Any, NamedTuple

from budgetfit.gpus.table import Gpu


class RateShares(NamedTuple):
    """Shares of a GPU's rates that large matrix products and copies reach.

    Attributes:
        tensor_16bit: Of the fp16 and bf16 rates of tensor cores.
        tf32: Of their tf32 rate.
        fp32: Of the rate outside tensor cores.
        bandwidth: Of the memory bandwidth.
        host: How long hosts of such GPUs need to launch a kernel, times what a
            workstation's does.
        source: Where they are from; "measured", "by analogy with ..." or "assumed".
        together: ``tensor_16bit`` of GPUs that train together; 0.0: the same.
    """

    tensor_16bit: float
    tf32: float
    fp32: float
    bandwidth: float
    source: str
    host: float = 1.0
    together: float = 0.0

    @property
    def origins(self) -> str:
        """The source in short: which of measured, by analogy and assumed."""
        known = ("measured", "by analogy", "assumed")
        return ", ".join(origin for origin in known if origin in self.source)


@functools.cache
def find_shares(gpu: Gpu, *, together: bool = False) -> RateShares:
    """Return a GPU's shares, or its architecture's; ``together``: with other GPUs."""
    table = _table()
    row = table["gpu"].get(gpu.name)
    if row is None:
        capability = ".".join(map(str, gpu.compute_capability))
        row = table["capability"].get(capability, table["other"])
    shares = RateShares(**row)
    if together and shares.together:
        return shares._replace(tensor_16bit=shares.together)
    return shares


@functools.cache
def _table() -> dict[str, Any]:
    path = resources.files("budgetfit.gpus") / "kernel_shares.toml"
    return tomllib.loads(path.read_text("utf-8"))
