"""What a forward does with its samples that may differ from rank to rank."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from budgetfit.core.parallelism import Engine
from budgetfit.errors import InputError

_UNEQUAL = {
    "ddp": "DDP then ends in an error",
    "fsdp2": "FSDP2's collectives do not match then (an error or a hang)",
    "deepspeed": "DeepSpeed's collectives may not match then (an error or a hang)",
}
_CHANGED = {
    "ddp": "DDP sends those of rank 0 to all before each forward",
    "fsdp2": "each rank keeps its own",
    "deepspeed": "each rank keeps its own",
}
_LOST = "the next update starts from what the weights were before"
_WRITTEN = {
    "ddp": "each rank changes its own by its own samples",
    "fsdp2": _LOST,
    "deepspeed": _LOST,
}


def experts_note(model: nn.Module, chooser: str | None, engine: Engine) -> list[str]:
    """Return a note on trainable modules that run only if samples are routed to them.

    Those are in a list or dict of modules, in the module that first reads choices which
    depend on weights. Experts whose weights are one tensor always run.

    ``model`` has run. ``chooser``: path of the module that read such choices, or None.
    """
    if chooser is None:
        return []
    module = model.get_submodule(chooser)
    if not any(map(_has_alternatives, (module, *module.children()))):
        return []
    where = f" in {chooser!r}" if chooser else ""
    text = (
        f"which experts run{where} may depend on a rank's samples, and all ranks must "
        f"run the same modules in each step: {_UNEQUAL[engine]}. Use an empty input "
        "for an expert without samples, or add 0 * the sum of its parameters to the "
        "output; models that run all experts in one batched or grouped product need "
        "neither"
    )
    return [text]


def _has_alternatives(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and (
        sum(any(p.requires_grad for p in x.parameters()) for x in module.children()) > 1
    )


def refuse_written_weights(model: nn.Module, engine: Engine) -> None:
    """Have modules refuse to train weights that their forward changes in place.

    Raises:
        InputError: In such a forward.
    """
    before: dict[nn.Module, list[tuple[str, torch.Tensor, int]]] = {}

    def start(module: nn.Module, _: object) -> None:
        before[module] = [
            (name, weight, weight._version)
            for name, weight in module.named_parameters(recurse=False)
            if weight.requires_grad
        ]

    def end(module: nn.Module, *_: object) -> None:
        for name, weight, version in before.pop(module, ()):
            if weight._version != version:
                raise InputError(
                    f"The forward of {type(module).__name__} changes its {name} in "
                    f"place, as nn.Embedding(max_norm=...) does, and {_WRITTEN[engine]}"
                    ": it would train otherwise than in one process. Change weights "
                    "after run.step, from what all ranks have alike, or freeze it."
                )

    for module in model.modules():
        if module._parameters:
            module.register_forward_pre_hook(start)
            module.register_forward_hook(end)


class ChangedBuffers:
    """Watches which buffers of floats the model's own forward changes in place.

    Not those of norms (batch norms have a warning of their own), nor those of
    parametrizations (spectral norm), which see weights alone. Changes through ``.data``
    are not seen.

    Args:
        model: Hooked until ``note``; inside of what wraps it, as DDP writes to buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[str, None] = {}
        self._before: dict[str, tuple[torch.Tensor, int]] = {}
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._start),
            model.register_forward_hook(self._end),
        ]

    def _start(self, model: nn.Module, _: object) -> None:
        self._before = {
            f"{path}.{name}".lstrip("."): (buffer, buffer._version)
            for path, module in model.named_modules()
            if not isinstance(module, _NormBase)
            and "parametrizations" not in path.split(".")
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        }

    def _end(self, *_: object) -> None:
        for name, (buffer, version) in self._before.items():
            if buffer._version != version:
                self._names[name] = None
        self._before = {}

    def note(self, engine: Engine) -> list[str]:
        """Return a note if there are any, and end watching."""
        for hook in self._hooks:
            hook.remove()
        if not self._names:
            return []
        text = (
            f"the forward changes buffers (first {next(iter(self._names))!r}): where "
            "they depend on samples, each rank's are from its own samples, and "
            f"{_CHANGED[engine]}. Use torch.distributed.all_reduce on what they are "
            "computed from if that matters"
        )
        return [text]
