"""compare: the same question to several cards; parse, hand on, nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from budgetfit.arguments import (
    find_card,
    make_subject,
    optimizer_name,
    parse_lengths,
    parse_request,
)
from budgetfit.core.errors import InputError
from budgetfit.planning.candidates import check_batch, check_objective
from budgetfit.planning.compare_cards import OneCard, compare_cards
from budgetfit.tracing.undisturbed import undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch import nn
    from transformers import PretrainedConfig

    from budgetfit.core.card_row import CardRow
    from budgetfit.core.plan import ModelSummary


@undisturbed()
def compare(  # noqa: PLR0913 - the arguments of plan
    model: nn.Module | PretrainedConfig | str,
    gpus: Sequence[str],
    *,
    batch: Any = None,  # noqa: ANN401 - any nesting of tensors
    max_length: int | None = None,
    lengths: Iterable[int] | Mapping[int, int] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    precision: str | Sequence[str] = "auto",
    optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw_torch_fused",
    batch_size: int | None = None,
    effective_batch_size: int | None = None,
    checkpointing: str | Sequence[str] = "auto",
    objective: str = "throughput",
    headroom: int | str | None = None,
    host_ram: int | str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[tuple[CardRow, ...], ModelSummary]:
    """Find the best training settings on each of several cards.

    The arguments are those of ``budgetfit.plan``, with several cards instead of one.

    Returns:
        A row for each card, in their order, and what the model is.

    Raises:
        InputError: Something cannot be what was meant; nothing was traced.
        TraceError: The model cannot run on fake tensors.
    """
    check_objective(objective)
    check_batch(batch_size, effective_batch_size)
    if isinstance(gpus, str) or not gpus:
        raise InputError(
            'Name the cards to compare, for example ["t4", "rtx-4090"] '
            "(--gpus t4,rtx-4090)."
        )
    cards = [find_card(None, name) for name in gpus]
    subject, _ = make_subject(
        model,
        cards[0],
        batch=batch,
        max_length=max_length,
        lengths=parse_lengths(lengths, max_length),
        loss=loss,
        optimizer=optimizer,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    rows = compare_cards(
        subject,
        [OneCard(card.gpu, card.budget(headroom, host_ram)) for card in cards],
        parse_request(checkpointing, objective, batch_size, subject),
        precision=precision,
        optimizer=optimizer_name(optimizer),
        effective_batch_size=effective_batch_size,
        progress=progress,
    )
    return rows, subject.summary()
