"""What can be told to be wrong before torch is imported, which takes seconds.

The api checks the same words with the same functions; here they are only asked sooner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def check_early(  # noqa: PLR0913 - one word each
    model: str | None = None,
    *,
    gpus: Iterable[str | None] = (),
    vram: str | None = None,
    headroom: str | None = None,
    precision: str | Sequence[str] = "auto",
    objective: str | None = None,
    batch_size: int | None = None,
    effective_batch_size: int | None = None,
) -> None:
    """Refuse what was mistyped; the arguments are those of ``budgetfit.plan``.

    Args:
        model: Only whether a file is there that holds a config or a factory is looked
            at; a hub id is left to the hub.
        gpus: Names of cards; None is this machine's.
        vram: Memory limit.
        headroom: Kept free; ``"0"`` is nothing.
        precision: One name, or several to compare.
        objective: None where there is none.
        batch_size: Samples of a micro-batch.
        effective_batch_size: Samples of an optimizer step.

    Raises:
        InputError: The first of them that cannot be what was meant.
    """
    # Here, so that --help need not wait for them.
    from budgetfit.core.precision import find_precision  # noqa: PLC0415
    from budgetfit.core.requested_precision import (  # noqa: PLC0415
        check_batch,
        check_objective,
        precisions,
    )
    from budgetfit.core.units import parse_bytes  # noqa: PLC0415
    from budgetfit.gpus.table import find_gpu  # noqa: PLC0415
    from budgetfit.integrations.model_sources.model_name import check_model_text  # noqa: PLC0415

    if objective is not None:
        check_objective(objective)
    check_batch(batch_size, effective_batch_size)
    if vram is not None:
        parse_bytes(vram)
    if headroom is not None and headroom != "0":
        parse_bytes(headroom)
    cards = [find_gpu(name) for name in gpus if name is not None]
    if len(cards) == 1:
        precisions(precision, cards[0])
    else:  # of several cards, each tells what it cannot compute in
        for name in [precision] if isinstance(precision, str) else precision:
            if name != "auto":
                find_precision(name)
    if model is not None:
        check_model_text(model)
