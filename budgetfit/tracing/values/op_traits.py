"""Op traits for constant propagation: mutates, random, data-dependent, indexes."""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch._ops import OpOverload

from budgetfit.tracing.call_cache import Args
from budgetfit.tracing.values.assumptions import ASSUMPTIONS, AssumedValue

aten = torch.ops.aten

# Their outputs depend on no tensor values.
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
# Their result is a Python number, or has a data-dependent shape.
DATA_DEPENDENT = frozenset(
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
# Of equal elements each answers for all, along any dimensions.
QUANTIFIERS = frozenset(
    getattr(op, overload)
    for op in (aten.any, aten.all)
    for overload in ("default", "dim", "dims")
)
# They accept boolean masks among their indices.
TAKES_MASKS = frozenset({aten.index.Tensor, aten._unsafe_index.Tensor})
LIKE = frozenset(op for op in CONSTANTS if "like" in str(op) or "new_" in str(op))


_INDEX_LISTS = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_index.Tensor,
)
# Their second argument is a dimension, the third the indices along it.
_ALONG_DIM = (
    aten.gather.default,
    aten.index_select.default,
    aten.index_add.default,
    aten.index_add_.default,
    aten.index_copy.default,
    aten.index_copy_.default,
    aten.scatter.src,
    aten.scatter_.src,
    aten.scatter.value,
    aten.scatter_.value,
    aten.scatter_add.default,
    aten.scatter_add_.default,
    aten.scatter_reduce.two,
    aten.scatter_reduce_.two,
)
INDEX_OPS = frozenset((*_INDEX_LISTS, *_ALONG_DIM))
_MASKS = (torch.bool, torch.uint8)


class OpTraits(NamedTuple):
    """Traits of an op, for constant propagation."""

    mutates: bool
    random: bool
    constant: bool
    like: bool
    takes_masks: bool
    data_dependent: bool
    pointwise: bool
    view: bool
    takes_indices: bool
    assumption: Callable[..., AssumedValue | None] | None


@functools.cache
def traits_of(func: OpOverload) -> OpTraits:
    """Return an op's traits, looked up once."""
    return OpTraits(
        mutates=func._schema.is_mutable,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        constant=func in CONSTANTS,
        like=func in LIKE,
        takes_masks=func in TAKES_MASKS,
        data_dependent=func in DATA_DEPENDENT,
        pointwise=torch.Tag.pointwise in func.tags,
        view=func.is_view,
        takes_indices=func in INDEX_OPS,
        assumption=ASSUMPTIONS.get(func),
    )


def indices_of(func: OpOverload, args: Args) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each indexed dimension of the first argument, with its indices."""
    # Masks, which say which elements and not where they are, are left out.
    if func in _INDEX_LISTS:
        dim = 0
        for indices in args[1]:
            if indices is None:
                dim += 1
            elif indices.dtype in _MASKS:  # one of several dimensions takes as many
                dim += indices.dim()
            else:
                yield dim, indices
                dim += 1
    elif args[0].dim():
        yield int(args[1]) % args[0].dim(), args[2]
