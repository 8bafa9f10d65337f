"""timm: build the architecture of a timm ``config.json``, without weights."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from budgetfit.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from budgetfit.integrations.model_sources.resolved_model import Materialize


def timm_builder(fields: dict[str, Any]) -> Materialize:
    """Return a function that builds the model of a timm config; downloads nothing.

    Raises:
        InputError: timm is not installed.
    """
    try:
        timm = import_module("timm")
    except ImportError as error:
        raise InputError(
            f"{fields['architecture']} is a timm model and timm cannot be imported "
            f"({error}). Install it: pip install timm."
        ) from error

    arguments = dict(fields.get("model_args") or {})
    if "num_classes" in fields:
        arguments["num_classes"] = fields["num_classes"]

    def materialize(
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> nn.Module:
        return timm.create_model(
            fields["architecture"],
            pretrained=False,
            pretrained_cfg=fields["pretrained_cfg"],
            device=device,
            dtype=dtype,
            **arguments,
        )

    return materialize
