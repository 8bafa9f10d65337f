"""peft: add LoRA adapters to a model, on meta or with weights."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from budgetfit.applying.meta_copy import copy_to_meta
from budgetfit.core.adapter import Adapter, peft_task, trained_heads
from budgetfit.errors import InputError
from budgetfit.integrations.model_sources.resolved_model import Materialize
from budgetfit.integrations.optional_imports import import_library, quiet_import
from budgetfit.integrations.quantization.quantize_linear import (
    compiled_when_called,
    quantize,
)
from budgetfit.integrations.quantization.traceable_layers import (
    is_quantized,
    quantized_meta_copy,
    with_traceable_layers,
)
from budgetfit.integrations.quantization.unquantized_modules import size_notes
from budgetfit.integrations.source_code.model_loading import (
    DEVICE_MAP,
    adapter_imports,
    adapter_lines,
    quantization_config,
)
from budgetfit.integrations.source_code.python_source import call_source


def adapted_meta_copy(
    base: nn.Module, adapter: Adapter
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a meta copy of a model with adapters, for tracing; and notes.

    Raises:
        InputError: If peft or bitsandbytes is not installed, the base has adapters
            already, or ``target_modules`` matches no module.
    """
    model = quantized_meta_copy(base)
    if adapter.quantization is not None and not is_quantized(model):
        quantize(model, adapter)
    notes = (
        size_notes(model, prepared=adapter.prepared)
        if adapter.quantization is not None
        else ()
    )
    return traceable_model(_with_lora(model, adapter, without_values=True)), notes


def traceable_model(model: nn.Module) -> nn.Module:
    """Return the model to trace for one that may have peft adapters.

    peft stores in every layer its own module path, so that no two blocks are equal. It
    is removed from a meta copy; no forward reads it.
    """
    copied = with_traceable_layers(model)
    if not has_adapters(model):
        return copied
    if copied is model:
        copied = copy_to_meta(model)
    for module in copied.modules():
        noted = vars(module).get("kwargs")
        if isinstance(noted, dict):
            noted.pop("target_name", None)
    return copied


def attach_adapters(
    base: nn.Module, adapter: Adapter, device: torch.device | str | None = None
) -> nn.Module:
    """Add the planned adapters to a base with weights, in place."""
    if adapter.quantization is not None and not is_quantized(base):
        quantize(base, adapter, device)
    model = _with_lora(base, adapter, without_values=False)
    return model if device is None else model.to(device)


def materialize_with_adapter(
    make: Materialize | None, adapter: Adapter | None
) -> Materialize | None:
    """Return a builder of the model with random weights and adapters."""
    if make is None or adapter is None:
        return make

    def materialize(
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> nn.Module:
        quantized = (
            adapter.quantization is not None
        )  # quantized from host memory, layer by layer
        base = make("cpu" if quantized else device, dtype)
        return attach_adapters(base, adapter, device)

    return materialize


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has peft layers; does not import peft."""
    return any(
        cls.__name__ == "BaseTunerLayer"
        for module in model.modules()
        for cls in type(module).__mro__
    )


def ensure_adapters(
    model: nn.Module, adapter: Adapter
) -> tuple[nn.Module, Callable[[], object]]:
    """Return the model with adapters, and a function that restores the plain one.

    A model that has adapters already is returned as it is.

    Raises:
        InputError: If the base must be loaded quantized, and is not.
    """
    if has_adapters(model):
        return model, lambda: None
    if adapter.quantization is not None and not is_quantized(model):
        raise InputError(
            f"The plan is for a base in {adapter.quantization}, and this model is not "
            f"quantised. Load it so:\n{loading_code(adapter, type(model).__name__)}"
        )
    trained = [(p, p.requires_grad, p.dtype) for p in model.parameters()]
    adapted_model = _with_lora(model, adapter, without_values=False)

    def restore() -> None:
        adapted_model.base_model.unload()
        vars(model).pop("peft_config", None)
        for parameter, requires_grad, dtype in trained:
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(requires_grad)

    return adapted_model, restore


def loading_code(
    adapter: Adapter, class_name: str = "", *, several: bool = False
) -> str:
    """Return source that loads a model with adapters; ``several``: on each rank."""
    if not trained_heads(class_name):  # which the class has, and the task tells peft
        class_name = ""
    names = ", ".join(name for home, name in adapter_imports(adapter) if home == "peft")
    config = quantization_config(adapter, 4, class_name)
    arguments = ["name", *([f"quantization_config={config}"] if config else [])]
    if config and several:
        arguments.append(DEVICE_MAP)
    loaded = call_source(
        f"{class_name or 'AutoModelForCausalLM'}.from_pretrained",
        arguments,
        0,
        len("model = "),
    )
    lines = [
        f"from peft import {names}",
        f"model = {loaded}",
        *adapter_lines(adapter, class_name=class_name),
    ]
    if config and several:
        lines.insert(0, "from accelerate import PartialState")
    return "\n".join(lines) + "\n"


def library() -> Any:
    """Import peft, or say what to install."""
    with compiled_when_called():  # it imports bitsandbytes where that is installed
        return import_library(
            "peft", "LoRA is made by peft, which is not installed: pip install peft."
        )


def _with_lora(model: nn.Module, adapter: Adapter, *, without_values: bool) -> Any:
    peft = library()
    if has_adapters(model):
        raise InputError(
            f"{type(model).__name__} has adapters already: plan it without method=, or "
            "hand in its base."
        )
    if adapter.prepared:
        model = peft.prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=False
        )
    class_name = type(model).__name__
    config = peft.LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=_targets(adapter),
        task_type=peft_task(class_name),
        modules_to_save=trained_heads(class_name) or None,
    )
    try:
        with warnings.catch_warnings(), quiet_import():  # imports torchao and others
            # peft warns of deprecated transformers names, and detects GPT-2's
            # transposed layers itself.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            # fused experts, for which peft suggests other targets
            warnings.filterwarnings("ignore", message=".*(rank|alpha)_pattern keys")
            made = peft.get_peft_model(model, config, low_cpu_mem_usage=without_values)
    except ValueError as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise InputError(
            f"peft cannot adapt the model: {said}. Name its own "
            'linear layers in target_modules, or leave it at "all-linear".'
        ) from error
    if without_values:  # while planning; peft itself trains what it has found
        _refuse_unmatched(made, adapter)
    # The new wrapper is in training mode; a base loaded in eval mode would look like a
    # part that is deliberately kept in eval mode.
    return made.train(model.training)


def _refuse_unmatched(made: Any, adapter: Adapter) -> None:
    """Raise InputError for names in ``target_modules`` that match no module."""
    # Those that peft has converted itself (fused experts) are no longer in its config.
    if isinstance(adapter.target_modules, str):
        return
    found = [
        *made.base_model.targeted_module_names,
        *getattr(made.base_model, "targeted_parameter_names", ()),
    ]
    (config,) = made.peft_config.values()
    unmatched = [
        name
        for name in adapter.target_modules
        if name in config.target_modules
        and not any(f".{path}".endswith(f".{name}") for path in found)
    ]
    if unmatched:
        others = [name for name in adapter.target_modules if name not in unmatched]
        raise InputError(
            f"target_modules: no module to adapt is called {', '.join(unmatched)}, and "
            f"only {', '.join(others)} would be adapted. Use the model's own names, or "
            "leave this one out."
        )


def _targets(adapter: Adapter) -> str | list[str]:
    targets = adapter.target_modules
    return targets if isinstance(targets, str) else list(targets)
