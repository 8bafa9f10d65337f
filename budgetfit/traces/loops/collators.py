"""What a Trainer's collator makes of samples: an attention mask, or packed rows.

In a trace the batch of the workload stands for the samples; its integers have values.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from budgetfit.core.loop import Loop
from budgetfit.errors import InputError

# Of a packed row. A row with several gets an attention mask of length^2 where the
# attention has no kernel for them; how many there are decides nothing else.
_TEXTS: Final = 2


def collator(loop: Loop) -> Callable[[Any], Any]:
    """Return a function that makes a loop's batch of the workload's."""
    if loop.packing:
        return _packed
    return _with_mask if loop.kind == "sft" else lambda batch: batch


def _with_mask(batch: Any) -> Any:
    """Add the attention mask that TRL's collator makes for every batch of texts."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return batch
    if not _MASKS.isdisjoint(batch):
        return batch
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


_MASKS: Final = frozenset({"attention_mask", "position_ids"})


def _packed(batch: Any) -> Any:
    """Return full rows of several texts, flattened: TRL's collator, ``padding_free``.

    Source: TRL 1.16, ``DataCollatorForLanguageModeling.torch_call``.

    Raises:
        InputError: The batch is not of texts, (samples, tokens).
    """
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if tokens is None or tokens.dim() != 2:  # noqa: PLR2004 - samples and tokens
        raise InputError(
            "packing=True is for texts: the batch needs input_ids of samples x tokens. "
            "Leave packing out, or pass such a batch."
        )
    samples, length = tokens.shape
    first = -(-length // _TEXTS)
    lengths = torch.tensor([first, length - first] * samples)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    texts = torch.arange(len(lengths), dtype=torch.int32)
    positions = torch.cat([torch.arange(count) for count in lengths.tolist()])
    longest = int(lengths.max())
    return {
        "input_ids": tokens.reshape(1, -1),
        "labels": batch.get("labels", tokens).reshape(1, -1),
        "position_ids": positions[None],
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets.clone(),
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": texts.repeat_interleave(lengths)[None],
    }
