"""peft: a model with LoRA matrices, made by peft itself, with or without weights."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import TYPE_CHECKING, Any

from budgetfit.applying.meta_copy import weightless_copy
from budgetfit.errors import InputError
from budgetfit.integrations.optional_imports import quiet_import
from budgetfit.integrations.quantization.bitsandbytes import (
    is_quantised,
    on_meta,
    with_stand_ins,
)
from budgetfit.integrations.quantization.bitsandbytes_layers import quantise
from budgetfit.integrations.quantization.unquantized_modules import size_notes
from budgetfit.integrations.source_code.common import call
from budgetfit.integrations.source_code.model_loading import (
    adapter_imports,
    adapter_lines,
    quantization_config,
    task_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn

    from budgetfit.core.adapter import Adapter
    from budgetfit.integrations.model_sources.resolved_model import Materialise


def adapted_on_meta(
    base: nn.Module, adapter: Adapter
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a model with adapters for planning, and what to know about it.

    Args:
        base: Not changed, and no weight of it is read.
        adapter: What is added, and how the base is stored.

    Raises:
        InputError: If peft or bitsandbytes is not installed, the base has adapters
            already, or no module of it is meant by ``target_modules``.
    """
    model = on_meta(base)
    if adapter.quantization is not None and not is_quantised(model):
        quantise(model, adapter)
    notes = (
        size_notes(model, prepared=adapter.prepared)
        if adapter.quantization is not None
        else ()
    )
    return to_trace(_with_lora(model, adapter, without_values=True)), notes


def to_trace(model: nn.Module) -> nn.Module:
    """Return what stands in traces for a model that may have adapters.

    peft notes in every layer where that stands, so that no two blocks look alike. A
    copy without weights forgets it; nothing reads it in a forward.

    Raises:
        InputError, TraceError: As ``bitsandbytes.with_stand_ins``.
    """
    if not has_adapters(model):
        return with_stand_ins(model)
    copied = with_stand_ins(model)
    if copied is model:
        copied = weightless_copy(model)
    for module in copied.modules():
        noted = vars(module).get("kwargs")
        if isinstance(noted, dict):
            noted.pop("target_name", None)
    return copied


def adapted(
    base: nn.Module, adapter: Adapter, device: torch.device | str | None = None
) -> nn.Module:
    """Return a base with weights as the model that was planned; it is changed.

    Raises:
        InputError: As ``adapted_on_meta``.
    """
    if adapter.quantization is not None and not is_quantised(base):
        quantise(base, adapter, device)
    model = _with_lora(base, adapter, without_values=False)
    return model if device is None else model.to(device)


def with_adapter(
    make: Materialise | None, adapter: Adapter | None
) -> Materialise | None:
    """Return what builds the planned model with random weights, adapters included."""
    if make is None or adapter is None:
        return make

    def materialise(
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> nn.Module:
        quantised = adapter.quantization is not None  # from host memory, layer by layer
        base = make("cpu" if quantised else device, dtype)
        return adapted(base, adapter, device)

    return materialise


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has layers of peft; it is not imported to tell."""
    return any(
        cls.__name__ == "BaseTunerLayer"
        for module in model.modules()
        for cls in type(module).__mro__
    )


def with_adapters(
    model: nn.Module, adapter: Adapter
) -> tuple[nn.Module, Callable[[], object]]:
    """Return the model to train for a plan, and what gives the plain one back.

    A model with adapters is the one to train; a plain one gets them.

    Raises:
        InputError: If the base must be loaded quantised, and is not.
    """
    if has_adapters(model):
        return model, lambda: None
    if adapter.quantization is not None and not is_quantised(model):
        raise InputError(
            f"The plan is for a base in {adapter.quantization}, and this model is not "
            f"quantised. Load it so:\n{code(adapter)}"
        )
    trained = [(p, p.requires_grad, p.dtype) for p in model.parameters()]
    adapted_model = _with_lora(model, adapter, without_values=False)

    def give_back() -> None:
        adapted_model.base_model.unload()
        vars(model).pop("peft_config", None)
        for parameter, requires_grad, dtype in trained:
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(requires_grad)

    return adapted_model, give_back


@contextlib.contextmanager
def adapters_on(model: nn.Module, adapter: Adapter | None) -> Iterator[nn.Module]:
    """Give a plain model its planned adapters while the context is open."""
    if adapter is None:
        yield model
        return
    adapted_model, give_back = with_adapters(model, adapter)
    try:
        yield adapted_model
    finally:
        give_back()


def code(adapter: Adapter) -> str:
    """Return the lines of Python that load and adapt a model as planned."""
    names = ", ".join(name for home, name in adapter_imports(adapter) if home == "peft")
    config = quantization_config(adapter, 4)
    arguments = ["name", *([f"quantization_config={config}"] if config else [])]
    loaded = call("AutoModelForCausalLM.from_pretrained", arguments, 0, len("model = "))
    lines = [f"from peft import {names}", f"model = {loaded}", *adapter_lines(adapter)]
    return "\n".join(lines) + "\n"


def _with_lora(model: nn.Module, adapter: Adapter, *, without_values: bool) -> Any:  # noqa: ANN401 - a PeftModel
    peft = _library()
    if has_adapters(model):
        raise InputError(
            f"{type(model).__name__} has adapters already: plan it without method=, or "
            "hand in its base."
        )
    if adapter.prepared:
        model = peft.prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=False
        )
    config = peft.LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=_targets(adapter),
        task_type=task_of(type(model).__name__),
    )
    try:
        with warnings.catch_warnings(), quiet_import():  # it imports torchao and others
            # What it calls of transformers is called otherwise by now, and GPT-2's
            # transposed layers it sees by itself.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            # Of fused experts, for which peft itself names them.
            warnings.filterwarnings("ignore", message=".*(rank|alpha)_pattern keys")
            made = peft.get_peft_model(model, config, low_cpu_mem_usage=without_values)
    except ValueError as error:
        raise InputError(
            f"peft cannot adapt the model: {str(error).rstrip('.')}. Name its own "
            'linear layers in target_modules, or leave it at "all-linear".'
        ) from error
    # The wrapper is new, and so in training mode: a base that was loaded for evaluation
    # would seem to be kept in it, as one part of a model that trains.
    return made.train(model.training)


def _targets(adapter: Adapter) -> str | list[str]:
    targets = adapter.target_modules
    return targets if isinstance(targets, str) else list(targets)


def _library() -> Any:  # noqa: ANN401 - the module
    try:
        with quiet_import():
            return importlib.import_module("peft")  # optional, and slow to import
    except ImportError:
        raise InputError(
            "LoRA is made by peft, which is not installed: pip install peft."
        ) from None
