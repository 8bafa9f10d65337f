"""The ops whose memory was checked, call by call, against PyTorch's CUDA host code."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._ops import OpOverload


@cache
def verified_ops() -> frozenset[str]:
    """Return their names, like ``mm.default``; the file says how they were proven."""
    text = files(__package__).joinpath("verified_ops.txt").read_text("utf-8")
    lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return frozenset(line[0] for line in lines if line)


def is_verified(func: OpOverload) -> bool:
    """Say whether an op's memory is known. Ops that are not aten's never are."""
    return func.namespace == "aten" and str(func)[len("aten.") :] in verified_ops()
