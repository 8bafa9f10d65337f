"""Validate arguments before torch is imported, which takes seconds.

The api validates the same arguments again, with the same functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def check_before_torch_import(  # noqa: PLR0913 - one argument each
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
    """Check arguments without torch; they are those of ``budgetfit.plan``.

    Args:
        model: Only checked for an existing file with a config or a factory; hub ids are
            not checked.
        gpus: Names of GPUs; None: this machine's.
        vram: Memory limit.
        headroom: Kept free; ``"0"`` for none.
        precision: One name, or several to compare.
        objective: None where the command has none.
        batch_size: Samples of a micro-batch.
        effective_batch_size: Samples of an optimizer step.

    Raises:
        InputError: For the first invalid argument.
    """
    # Imported here to keep --help fast.
    from budgetfit.core.precision import find_precision  # noqa: PLC0415
    from budgetfit.core.requested_precision import (  # noqa: PLC0415
        check_batch,
        check_objective,
        requested_precisions,
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
    named = [find_gpu(name) for name in gpus if name is not None]
    if len(named) == 1:
        requested_precisions(precision, named[0])
    else:  # each GPU of a comparison reports what it cannot compute in
        for name in [precision] if isinstance(precision, str) else precision:
            if name != "auto":
                find_precision(name)
    if model is not None:
        check_model_text(model)
