"""The calls that are recorded, by family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.accuracy.op_level import (
    convolution_cases,
    harvested_cases,
    index_cases,
    layer_cases,
    reduction_cases,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.accuracy.op_level.op_layouts import Case

FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "attention": layer_cases.attention,
    "attention_forward": layer_cases.attention_forward,
    "convolutions": index_cases.convolutions,
    "every_convolution": convolution_cases.every_convolution,
    "embeddings": layer_cases.embeddings,
    "group_norms": layer_cases.group_norms,
    "gathers": index_cases.gathers,
    "harvested": harvested_cases.harvested,
    "images": index_cases.images,
    "large_reductions": reduction_cases.large_reductions,
    "losses": reduction_cases.losses,
    "norms": layer_cases.norms,
    "other_reductions": reduction_cases.other_reductions,
    "products": index_cases.products,
    "scatters": index_cases.scatters,
    "sorts": index_cases.sorts,
    "softmaxes": reduction_cases.softmaxes,
    "sums": reduction_cases.sums,
}
