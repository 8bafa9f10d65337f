"""What kinds of ops there are for one who follows values (``known_values``)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from budgetfit.tracing.values.assumptions import RULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from budgetfit.tracing.values.assumptions import Assumed

aten = torch.ops.aten

# Made from nothing but their arguments.
CONSTANTS = frozenset(
    {
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.full.default,
        aten.zeros.default,
        aten.ones.default,
        aten.scalar_tensor.default,
        aten.eye.default,
        aten.tril_indices.default,
        aten.triu_indices.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
# Their result is a number, or has a shape that depends on values.
ASKS_FOR_VALUES = frozenset(
    {
        aten._local_scalar_dense.default,
        aten.is_nonzero.default,
        aten.equal.default,
        aten.nonzero.default,
        aten.masked_select.default,
        aten._unique2.default,
        aten.unique_consecutive.default,
        aten.repeat_interleave.Tensor,
        aten.bincount.default,
        aten.allclose.default,
        aten._ctc_loss.Tensor,
        aten._pack_padded_sequence.default,
    }
)
SCALARS = frozenset({aten._local_scalar_dense.default, aten.is_nonzero.default})
# A mask among their indices stands for the positions where it is true.
TAKES_MASKS = frozenset({aten.index.Tensor, aten._unsafe_index.Tensor})
LIKE = frozenset(op for op in CONSTANTS if "like" in str(op) or "new_" in str(op))


class Nature(NamedTuple):
    """What is to know about an op, looked up once."""

    writes: bool
    random: bool
    constant: bool
    like: bool
    takes_masks: bool
    asks: bool
    pointwise: bool
    rule: Callable[..., Assumed | None] | None


@functools.cache
def nature_of(func: torch._ops.OpOverload) -> Nature:
    """Return an op's nature."""
    return Nature(
        writes=func._schema.is_mutable,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        constant=func in CONSTANTS,
        like=func in LIKE,
        takes_masks=func in TAKES_MASKS,
        asks=func in ASKS_FOR_VALUES,
        pointwise=torch.Tag.pointwise in func.tags,
        rule=RULES.get(func),
    )
