"""The calls that are recorded, by family."""

from collections.abc import Callable, Iterator
from functools import partial

from tests.accuracy.op_level import (
    convolution_cases,
    harvested_cases,
    index_cases,
    layer_cases,
    module_cases,
    odd_cases,
    plain_cases,
    reduction_cases,
)
from tests.accuracy.op_level.op_layouts import Case

# Recordings of odd calls: any layout, dtype and size.
ODD = (
    "embedding_bags",
    "folds",
    "long_rows",
    "numbers",
    "odd_batch_norms",
    "odd_calls",
    "odd_calls_2",
    "odd_calls_3",
    "odd_cells",
    "odd_reductions",
    "wide_attention",
)
FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "attention": layer_cases.attention,
    "attention_forward": layer_cases.attention_forward,
    "batch_norms": module_cases.batch_norms,
    "binary": plain_cases.binary,
    "convolutions": index_cases.convolutions,
    "every_convolution": convolution_cases.every_convolution,
    "embeddings": layer_cases.embeddings,
    "group_norms": layer_cases.group_norms,
    "gathers": index_cases.gathers,
    "harvested": harvested_cases.harvested,
    "images": index_cases.images,
    "in_place": plain_cases.in_place,
    "makers": plain_cases.makers,
    "large_reductions": reduction_cases.large_reductions,
    "losses": reduction_cases.losses,
    "more_losses": module_cases.more_losses,
    "more_norms": module_cases.more_norms,
    "norms": layer_cases.norms,
    "embedding_bags": layer_cases.embedding_bags,
    "folds": module_cases.folds,
    "long_rows": index_cases.long_rows,
    "numbers": plain_cases.numbers,
    "odd_batch_norms": module_cases.odd_batch_norms,
    "odd_cells": module_cases.odd_cells,
    "odd_calls": partial(odd_cases.odd, 61),
    "odd_calls_2": partial(odd_cases.odd, 62),
    "odd_calls_3": partial(odd_cases.odd, 63),
    "odd_reductions": reduction_cases.odd_reductions,
    "other_reductions": reduction_cases.other_reductions,
    "optimizers": plain_cases.optimizers,
    "poolings": module_cases.poolings,
    "products": index_cases.products,
    "rarer": module_cases.rarer,
    "recurrent": module_cases.recurrent,
    "resizings": module_cases.resizings,
    "scatters": index_cases.scatters,
    "sorts": index_cases.sorts,
    "softmaxes": reduction_cases.softmaxes,
    "sums": reduction_cases.sums,
    "wide_attention": layer_cases.wide_attention,
    "unary": plain_cases.unary,
}
