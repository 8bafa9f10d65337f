"""Compare settings that affect memory but no parameter: dropout, config values."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from budgetfit.core.plan import Plan

if TYPE_CHECKING:
    from torch import nn


_SCALARS: Final = (bool, int, float, str, type(None))
# Entries of a transformers config that say nothing about training memory.
_IGNORED: Final = ("transformers_version", "dtype", "use_cache", "model_type")
_IGNORED_SUFFIXES: Final = ("_token_id", "name_or_path")
_WRAPPED: Final = ("base_model", "model", "base_layer", "original_module")  # by PEFT
_MAX_SHOWN: Final = 4  # differences in a warning
# How torch's and peft's dicts of tensors show one: "[torch.cuda.FloatTensor of size 2x3
# (GPU 0)]". Its device is no setting.
_TENSOR: Final = re.compile(r"\[torch\.[\w.]*Tensor of size ([\dx]*)[^\]]*\]")


def model_settings(model: nn.Module) -> dict[str, Any]:
    """Return counts of parameter-free layers and the scalar values of the config.

    Layers of PEFT's adapters beside the active ones (TRL's reference for DPO) do not
    run, and are left out.

    For example ``{"Dropout(p=0.1, inplace=False)": 25, "config.attn_pdrop": 0.1}``.
    """
    idle = set(_idle_modules(model))
    layers = Counter(
        _without_device(f"{type(module).__name__}({module.extra_repr()})")
        for module in model.modules()
        if next(module.children(), None) is None
        and next(module.parameters(), None) is None
        and module not in idle
    )
    config = getattr(model, "config", None)
    values = vars(config) if hasattr(config, "to_dict") else {}
    return dict(layers) | {
        f"config.{name}": _in_json(value)
        for name, value in values.items()
        if isinstance(value, _SCALARS)
        and not name.startswith("_")
        and name not in _IGNORED
        and not name.endswith(_IGNORED_SUFFIXES)
    }


def _in_json(value: object) -> object:
    """Return infinity and NaN, which JSON has not, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _idle_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of adapters that are not active."""
    # PEFT's layers hold those of each adapter in containers, by the adapter's name.
    for module in model.modules():
        active = getattr(module, "active_adapters", None)
        if not isinstance(active, list):  # a method of each transformers model
            continue
        for name, child in module.named_children():
            if type(child).__name__ == "ModuleDict" and name not in _WRAPPED:
                for adapter, layers in child.named_children():
                    if adapter not in active:
                        yield from layers.modules()


def _without_device(layer: str) -> str:
    return _TENSOR.sub(r"[\1]", layer)


def warn_changed_settings(plan: Plan, model: nn.Module) -> None:
    """Warn if parameter-free layers or config values differ from the planned ones."""
    # Config entries that only one side has are ignored: releases of transformers add
    # some.
    planned = {_without_device(name): x for name, x in plan.model.settings.items()}
    if not planned:  # saved by a version that did not record them
        return
    found = model_settings(model)
    differences = [
        _difference(name, found.get(name, 0), planned.get(name, 0))
        for name in sorted({*planned, *found})
        if found.get(name, 0) != planned.get(name, 0)
        and (not name.startswith("config.") or (name in planned and name in found))
    ]
    if differences:
        more = len(differences) - _MAX_SHOWN
        warnings.warn(
            "The model has other settings than were planned: "
            + "; ".join(differences[:_MAX_SHOWN])
            + (f"; and {more} more" if more > 0 else "")
            + ". It may take more memory: plan again for this model.",
            stacklevel=4,
        )


def _difference(name: str, found: object, planned: object) -> str:
    if name.startswith("config."):
        return f"{name} is {found}, not {planned}"
    return f"{found} layers {name}, not {planned}"
