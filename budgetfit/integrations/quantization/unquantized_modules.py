"""Note on parameters of a quantized base that stay in 16 bits or become fp32."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from budgetfit.utils.format_bytes import format_bytes

HALF = (torch.float16, torch.bfloat16)
_WORTH_NAMING = 0.01  # share of the model


class _Rest(NamedTuple):
    """A parameter that is not quantized."""

    kind: str
    module: str
    is_own: bool
    size_bytes: int
    half_bytes: int


def size_notes(model: nn.Module, *, prepared: bool) -> tuple[str, ...]:
    """Describe the large parameters of a quantized model that are not quantized.

    ``prepared``: whether peft's ``prepare_model_for_kbit_training`` is to run on the
    model.
    """
    rest = list(_rest(model))
    notes = _own_parameters(model, rest)
    halves = sum(row.half_bytes for row in rest)
    if prepared and halves:
        kinds = Counter[str]()
        for row in rest:
            kinds[row.kind] += row.half_bytes
        names = [
            kind for kind, size in kinds.most_common() if size > _WORTH_NAMING * halves
        ]
        notes.append(
            f"fp32 copies of {_listed(names)}: {format_bytes(2 * halves)}, as peft's "
            "prepare_model_for_kbit_training makes them; skip it: saves "
            f"{format_bytes(halves)} (prepare_for_kbit=False, --no-prepare-for-kbit)"
        )
    return tuple(notes)


def _own_parameters(model: nn.Module, rest: list[_Rest]) -> list[str]:
    """Find modules with weights outside linear layers, such as fused experts."""
    whole = sum(parameter.nbytes for parameter in model.parameters())
    sizes = Counter[str]()
    modules: dict[str, dict[str, None]] = {}
    for row in rest:
        if row.is_own:
            sizes[row.kind] += row.size_bytes
            modules.setdefault(row.kind, {})[row.module] = None
    return [
        f"not quantised: {format_bytes(size)} in {len(modules[kind])} {kind} (such as "
        f"{next(iter(modules[kind]))}), which hold their weights themselves: "
        "bitsandbytes quantises linear layers only"
        for kind, size in sizes.most_common()
        if size > _WORTH_NAMING * whole
    ]


def _rest(model: nn.Module) -> Iterator[_Rest]:
    find_head = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    seen: set[int] = set()
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen or not _is_plain(parameter):
                continue
            seen.add(id(parameter))
            kind = _kind(module, parameter, head)
            half_bytes = parameter.numel() * 2 if parameter.dtype in HALF else 0
            is_own = kind == type(module).__name__
            yield _Rest(kind, path, is_own, parameter.nbytes, half_bytes)


def _is_plain(parameter: nn.Parameter) -> bool:
    packed = type(parameter).__name__ in ("Params4bit", "Int8Params")
    return parameter.is_floating_point() and not packed


def _kind(module: nn.Module, parameter: nn.Parameter, head: object) -> str:
    if parameter.dim() <= 1:  # biases, too
        return "norms"
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if module is head:
        return "head"
    if isinstance(module, nn.Linear):
        return "linear layers that are left out"
    return type(module).__name__


def _listed(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
