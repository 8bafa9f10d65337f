"""Settings of a model that change what it takes, and no name or size of a parameter."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn

    from budgetfit.core.plan import Plan

_SCALARS: Final = (bool, int, float, str, type(None))
# Of a transformers config: where it is from, and what training does not ask for.
_PASSED_OVER: Final = ("transformers_version", "dtype", "use_cache", "model_type")
_ENDS: Final = ("_token_id", "name_or_path")
_SHOWN: Final = 4  # differences in a warning


def settings_of(model: nn.Module) -> dict[str, Any]:
    """Return the layers without parameters, counted, and the numbers of a config.

    For example ``{"Dropout(p=0.1, inplace=False)": 25, "config.attn_pdrop": 0.1}``.
    """
    layers = Counter(
        f"{type(module).__name__}({module.extra_repr()})"
        for module in model.modules()
        if next(module.children(), None) is None
        and next(module.parameters(), None) is None
    )
    config = getattr(model, "config", None)
    values = vars(config) if hasattr(config, "to_dict") else {}
    return dict(layers) | {
        f"config.{name}": value
        for name, value in values.items()
        if isinstance(value, _SCALARS)
        and not name.startswith("_")
        and name not in _PASSED_OVER
        and not name.endswith(_ENDS)
    }


def warn_of_other_settings(plan: Plan, model: nn.Module) -> None:
    """Warn of a model whose layers or config are not those that were planned.

    Of a config, names that only one has are passed over: releases of transformers add
    some.
    """
    planned = plan.model.settings
    if not planned:  # of a plan that knows none
        return
    found = settings_of(model)
    differences = [
        f"{name} is {found.get(name, 0)}, not {planned.get(name, 0)}"
        for name in sorted({*planned, *found})
        if found.get(name, 0) != planned.get(name, 0)
        and (not name.startswith("config.") or (name in planned and name in found))
    ]
    if differences:
        more = len(differences) - _SHOWN
        warnings.warn(
            "The model has other settings than were planned: "
            + "; ".join(differences[:_SHOWN])
            + (f"; and {more} more" if more > 0 else "")
            + ". It may take more memory: plan again for this model.",
            stacklevel=4,
        )
