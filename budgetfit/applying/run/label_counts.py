"""Warn of micro-batches whose labels make no mean, or another one than samples do."""

import warnings
from collections.abc import Mapping
from typing import Final

import torch
from torch import nn

from budgetfit.applying.run.num_items_in_batch import divides_loss

_IGNORED: Final = -100  # the ignore_index of torch's cross_entropy
_LEAST: Final = 1.1  # a difference that is worth a word


class LabelCounts:
    """Counts the labels of an update's micro-batches; warns once of each thing.

    Counted is what transformers takes the mean of, in host memory alone: a count on the
    device would have to be waited for.
    """

    def __init__(self, model: nn.Module) -> None:
        self._due = {"none", "unequal"} if divides_loss(model) else set()
        self._per_sample: list[float] = []

    def count(self, batch: object, samples: float, *, is_first: bool) -> None:
        """Count a micro-batch that is weighed by its samples.

        ``is_first``: of an update.
        """
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if (
            not self._due
            or not isinstance(labels, torch.Tensor)
            or labels.device.type != "cpu"
            or labels.is_floating_point()
            or labels.dim() == 1
        ):
            return
        if is_first:
            self._per_sample = []
        found = int((labels != _IGNORED).sum())
        self._per_sample.append(found / samples)
        if not found and "none" in self._due:
            self._due.remove("none")
            warnings.warn(
                f"All labels of this micro-batch are {_IGNORED}: the mean of no losses "
                "is nan, and so are the weights after this update. Leave it out, or "
                "pass num_items_in_batch=, the labels of the whole update.",
                stacklevel=4,
            )
        least, most = min(self._per_sample), max(self._per_sample)
        if least and most > _LEAST * least and "unequal" in self._due:
            self._due.remove("unequal")
            warnings.warn(
                f"The micro-batches of this update have {least:.4g} to {most:.4g} "
                "labels for each sample, and every sample weighs the same: that is not "
                "the mean over all labels. To train on that, as transformers' Trainer "
                "does, pass num_items_in_batch=, the labels of the whole update.",
                stacklevel=4,
            )
