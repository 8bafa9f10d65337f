"""Chunked cross-entropy: output head and loss of a causal LM in sequence chunks.

The logits of a vocabulary of 128,000 are the largest tensors of many trainings: bf16
logits, their fp32 copy, its log-softmax and the gradients of both, for every position.
With ``n`` chunks, the logits of each chunk are computed, reduced to its loss and
dropped, and recomputed in backward (non-reentrant checkpointing). Loss and gradients
are the same up to the order of sums, not bit for bit; those of many chunks are added up
in fp32 (``gradient_sum``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from budgetfit.applying.data_parallel import is_sharded_itself
from budgetfit.applying.loss.call_model import is_transformers_model, uses_loss_function
from budgetfit.applying.loss.deferred_logits import (
    CannotChunkLossError,
    DeferredLogits,
    refuse_chunking,
)
from budgetfit.applying.loss.gradient_sum import weights_of_parts
from budgetfit.applying.undo import Undo
from budgetfit.errors import InputError
from budgetfit.utils.user_code import function_of, users_hooks

# In 16 bits. An addition rounds by 2^-9 in bf16: the sum of 8 is 0.4 % off, which is
# less than the gradients of the whole loss are, that of 64 two to four per cent.
MOST_ADDED_IN_16_BITS: Final = 8
_LOSS = "ForCausalLMLoss"  # transformers.loss.loss_utils
_LOSS_NOT_REACHED = (
    "its loss function never got what its output head returns (a batch without labels "
    "has no loss)"
)


def can_chunk_loss(model: nn.Module, loss: object = None) -> bool:
    """Return whether ``chunk_loss`` supports this model, without running it.

    What the model does between its head and its loss is only known when it runs: a
    training step may still raise ``CannotChunkLossError``. The user's own ``loss``
    replaces the model's, so there is nothing to chunk.
    """
    causal = _causal_model(model) if loss is None else None
    if causal is None:
        return False
    return not users_hooks(causal.get_output_embeddings().modules())


def rounding_of_parts(dtype: torch.dtype) -> float:
    """Return the relative error of adding up parts' gradients; ``dtype``: head's."""
    return MOST_ADDED_IN_16_BITS * torch.finfo(dtype).eps / 2


def chunk_loss(
    model: nn.Module,
    parts: int,
    undo: Undo,
    *,
    loss: object = None,
    determinism_check: str = "default",
) -> ChunkedLoss:
    """Make ``model`` compute head and loss in ``parts`` within ``training_forward``.

    Elsewhere, in evaluation for example, it computes logits as before. ``parts``: of
    the sequence, at least 2. ``loss``: the user's own, which must be None.
    ``determinism_check``: see ``apply_segments``.

    Raises:
        InputError: If the model's loss cannot be chunked; nothing is changed then.
    """
    if loss is not None:
        raise InputError(
            "loss_chunks cuts the loss that the model computes itself, and loss= takes "
            "its place. Leave loss= out, or plan with it, or use a Recipe with "
            "loss_chunks=1."
        )
    causal = _causal_model(model)
    if causal is None:
        raise InputError(
            f"loss_chunks cuts the output head and the loss of a causal language model "
            f"of transformers, and {type(model).__name__} is none. Use a Recipe "
            "with loss_chunks=1."
        )
    head = causal.get_output_embeddings()
    _check_head(head)
    plain = _plain_loss(causal)
    chunked = ChunkedLoss(head, plain, parts, determinism_check)
    forward = head.forward
    if isinstance(forward, _DeferredHeadForward):
        forward = forward.__wrapped__
    undo.set_attribute(head, "forward", _DeferredHeadForward(chunked, forward))
    undo.set_attribute(causal, "_loss_function", chunked)  # what its property reads
    return chunked


def _check_head(head: nn.Module) -> None:
    """Refuse a head that FSDP2 has in a group of its own, or with a user's hooks."""
    # The backward of one chunk frees its weights, which the next one multiplies by.
    if is_sharded_itself(head):
        raise InputError(
            "fully_shard has the output head in a group of its own, whose weights are "
            "freed after the first chunk of the loss. Call it for the blocks and the "
            "model alone, as budgetfit.apply and plan.lightning_callback() do; or, "
            "where accelerate calls it, plan with checkpointing='full', which leaves "
            "the loss whole."
        )
    # They would run for the head as a whole and once more for each part, twice.
    if hooks := users_hooks(head.modules()):
        name = getattr(function_of(hooks[0]), "__qualname__", "one")
        raise InputError(
            f"The output head has a forward hook ({name}), which would run again for "
            "each part that loss_chunks cuts the loss into. Remove the hook, or use a "
            "Recipe with loss_chunks=1."
        )


class ChunkedLoss:
    """Replacement of transformers' loss function, shared with the head's forward.

    An object rather than a closure, so that a deep copy of the model is independent.
    """

    def __init__(
        self,
        head: nn.Module,
        plain: Callable[..., torch.Tensor],
        parts: int,
        determinism_check: str,
    ) -> None:
        self._head = head
        self._plain = plain
        self._parts = parts
        self._check = determinism_check
        # A Linear draws no random numbers; an adapter around it may have dropout.
        self._random = type(head) is not nn.Linear
        self._defers = False
        self._deferred = False  # the head returned DeferredLogits
        self._loss_reached = False  # the loss function received them

    @contextmanager
    def training_forward(self) -> Iterator[None]:
        """Defer the logits of model calls inside the context.

        Raises:
            CannotChunkLossError: If the model's loss was not computed from the
                deferred logits.
            InputError: If the head was sharded or got hooks meanwhile.
        """
        _check_head(self._head)
        self._defers, self._deferred, self._loss_reached = True, False, False
        try:
            yield
        except CannotChunkLossError:
            raise
        except Exception as error:
            if self._deferred and not self._loss_reached:
                text = " ".join(str(error).split())[:200].rstrip(".")
                reason = f"it needs its logits ({type(error).__name__}: {text})"
                if isinstance(error, InputError):
                    reason = _LOSS_NOT_REACHED
                refuse_chunking(reason, error)
            raise
        finally:
            self._defers = False
        if not self._loss_reached:
            refuse_chunking(_LOSS_NOT_REACHED)

    def deferred(self, hidden: torch.Tensor) -> DeferredLogits | None:
        """Return the deferred logits of ``hidden``; None where they are computed."""
        if not (self._defers and torch.is_grad_enabled()):
            return None
        self._deferred = True
        return DeferredLogits(hidden)

    def __call__(  # noqa: PLR0913, PLR0917 - transformers' signature
        self,
        logits: torch.Tensor | DeferredLogits,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Compute ``transformers.loss.loss_utils.ForCausalLMLoss``, in chunks."""
        if not isinstance(logits, DeferredLogits):
            return self._plain(
                logits,
                labels,
                vocab_size,
                num_items_in_batch,
                ignore_index,
                shift_labels,
                **kwargs,
            )
        self._loss_reached = True
        hidden = logits.hidden
        targets = _shifted(labels, shift_labels, ignore_index).to(hidden.device)
        if targets.shape != hidden.shape[:-1]:
            refuse_chunking(
                f"labels of shape {tuple(targets.shape)} do not go with hidden states "
                f"of shape {tuple(hidden.shape)}"
            )
        count = num_items_in_batch
        if count is None:
            count = (targets != ignore_index).sum()
        elif isinstance(count, torch.Tensor):
            count = count.to(hidden.device)
        ops = logits.ops

        def part_loss(
            hidden: torch.Tensor,
            targets: torch.Tensor,
            weights: dict[str, torch.Tensor],
        ) -> torch.Tensor:
            """Return the summed loss of a chunk in fp32, by ``weights`` of the head."""
            logits = (
                functional_call(self._head, weights, (hidden,))
                if weights
                else self._head(hidden)
            )
            for op in ops:
                logits = op.apply(logits)
            return functional.cross_entropy(
                logits.float().view(-1, vocab_size),
                targets.reshape(-1),
                ignore_index=ignore_index,
                reduction="sum",
            )

        return self._total(part_loss, hidden, targets) / count

    def _total(
        self,
        part_loss: Callable[..., torch.Tensor],
        hidden: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """Return the sum of the losses of all chunks, in order."""
        sizes = _even_sizes(targets.shape[-1], self._parts)
        weights = (
            weights_of_parts(self._head, len(sizes))
            if len(sizes) > MOST_ADDED_IN_16_BITS
            else itertools.repeat({}, len(sizes))
        )
        defers, self._defers = self._defers, False
        before = _versions(self._head)
        try:
            # One split rather than slices: its backward is one cat, where each slice
            # would allocate a gradient of the whole sequence.
            losses = [
                checkpoint(
                    part_loss,
                    part,
                    part_targets,
                    part_weights,
                    use_reentrant=False,
                    preserve_rng_state=self._random,
                    determinism_check="none" if self._check == "none" else "default",
                )
                for part, part_targets, part_weights in zip(
                    hidden.split(sizes, dim=-2),
                    targets.split(sizes, dim=-1),
                    weights,
                    strict=True,
                )
            ]
        finally:
            self._defers = defers
        if _versions(self._head) != before:
            refuse_chunking(
                "its output head writes to its buffers, as spectral_norm does, and "
                "would do so for each part"
            )
        return functools.reduce(torch.add, losses)


class _DeferredHeadForward:
    """Replacement of the head's ``forward`` that can defer its logits."""

    def __init__(self, chunked: ChunkedLoss, plain: Callable[..., object]) -> None:
        functools.update_wrapper(self, plain)
        self.__wrapped__ = plain
        self._chunked = chunked

    def __call__(self, *args: Any, **kwargs: object) -> object:
        """Return the logits, or ``DeferredLogits``."""
        alone = len(args) == 1 and not kwargs
        deferred = self._chunked.deferred(args[0]) if alone else None
        return self.__wrapped__(*args, **kwargs) if deferred is None else deferred


def _shifted(
    labels: torch.Tensor | None, shift_labels: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """Return labels shifted by one position (as ``ForCausalLMLoss``)."""
    if shift_labels is not None:
        return shift_labels
    if labels is None:
        refuse_chunking("its loss function got no labels")
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def _versions(head: nn.Module) -> list[tuple[int, int]]:
    """Return the buffers' identities and version counters."""
    buffers = [each for each in head.buffers() if not each.is_inference()]
    return [(id(each), each._version) for each in buffers]


def _even_sizes(length: int, parts: int) -> list[int]:
    """Split ``length`` into ``parts`` sizes that differ by at most one."""
    parts = min(parts, length)
    size, left = divmod(length, parts)
    return [size + (part < left) for part in range(parts)]


def _plain_loss(model: Any) -> Any:
    """Return the loss function of a model, that from before it was chunked."""
    # A model that was copied or pickled as a whole while a run trained it has the
    # run's.
    loss = model.loss_function
    return loss._plain if isinstance(loss, ChunkedLoss) else loss


def _causal_model(model: nn.Module) -> Any:
    """Return the causal LM in ``model``, itself or inside a wrapper, or None."""
    # It has an output head, and its forward passes logits to ``self.loss_function``,
    # which is transformers' ``ForCausalLMLoss``.
    module: Any
    for module in model.modules():
        if (
            is_transformers_model(module)
            and uses_loss_function(type(module))
            and getattr(_plain_loss(module), "__name__", "") == _LOSS
            and isinstance(module.get_output_embeddings(), nn.Module)
        ):
            return module
    return None
