"""Batches of the same samples at another sequence length or image size."""

from collections.abc import Mapping

import torch

from budgetfit.batches.batch_tree import change_tensors, describe_batch
from budgetfit.batches.sample_count import sample_dimensions
from budgetfit.core.samples.sample_dims import FIRST_DIM, SINGLE_TENSOR, SampleDims

Shape = tuple[int, ...]


def with_length(batch: object, longest: int, length: int, dims: SampleDims) -> object:
    """Return a batch with sequences of ``length`` positions instead of ``longest``."""
    # Every dimension of ``longest``, other than that of the samples, is a sequence's.
    samples = sample_dimensions(batch, dims)
    shapes = {
        name: tuple(
            length if size == longest and dim != samples.get(name) else size
            for dim, size in enumerate(shape)
        )
        for name, (shape, _) in describe_batch(batch).items()
    }
    return with_shapes(batch, shapes)


def with_image_size(
    batch: object, largest: Shape, size: Shape, dims: SampleDims = FIRST_DIM
) -> object:
    """Return a batch whose images and masks have another height and width."""
    # Two neighbouring dimensions of ``largest``, none of them that of the samples, are
    # an image's.
    samples = sample_dimensions(batch, dims)
    shapes = {}
    for name, (shape, _) in describe_batch(batch).items():
        found = [
            at
            for at in range(len(shape) - 1)
            if shape[at : at + 2] == largest and samples.get(name) not in (at, at + 1)
        ]
        # The last ones: [samples, channels, height, width].
        at = found[-1] if found else len(shape)
        shapes[name] = (*shape[:at], *size, *shape[at + 2 :]) if found else shape
    return with_shapes(batch, shapes)


def with_shapes(batch: object, shapes: Mapping[str, Shape]) -> object:
    """Return a batch whose tensors have other sizes, of evenly spaced positions.

    Every value is one of the given tensor's, in the given order: ids stay valid, and a
    mask keeps its share of padding. ``shapes``: by path, as ``describe_batch`` names
    them; tensors without one, or of another rank, are unchanged.
    """

    def resized(tensor: torch.Tensor, path: str) -> torch.Tensor:
        shape = shapes.get(path or SINGLE_TENSOR, tuple(tensor.shape))
        if len(shape) != tensor.dim() or 0 in tensor.shape:
            return tensor
        for dim, size in enumerate(shape):
            if tensor.shape[dim] != size:
                places = torch.arange(size, device=tensor.device)
                places = places * tensor.shape[dim] // size
                tensor = tensor.detach().index_select(dim, places)
        return tensor

    return change_tensors(batch, resized)
