"""Check that a live model is the one that a plan was made for."""

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from budgetfit.applying.attention_implementation import describe_attention
from budgetfit.applying.data_parallel import planned_classes
from budgetfit.applying.quantized_layers.nf4_linear import (
    element_count,
    parameter_count,
)
from budgetfit.applying.torch_compile import unwrap_compiled
from budgetfit.core.plan import Plan
from budgetfit.errors import InputError


def is_same_model(plan: Plan, model: nn.Module) -> bool:
    """Whether the model has the planned class, blocks, parameters and attention."""
    return not (_difference(plan, model) or _trained_otherwise(plan, model))


def check_same_model(plan: Plan, model: nn.Module) -> None:
    """Check that the model is the planned one.

    Raises:
        InputError: If classes of the model or its blocks, counts of parameters, all or
            trained, or attention differ, a planned block is missing, or it is lazy.
    """
    refuse_no_module(model)
    refuse_lazy_parameters(model, type(model).__name__)
    difference, instead = _difference(plan, model), "Plan again for this model."
    if not difference:
        difference = _trained_otherwise(plan, model)
        instead = (
            "Use requires_grad_() to freeze and train what was planned, or plan "
            "this model as it is: budgetfit.plan(model)."
        )
    if difference:
        raise InputError(
            f"The plan was made for {plan.model.name}, and this model {difference}. "
            f"{instead}"
        )


def refuse_no_module(model: object) -> None:
    """Refuse what is no module, as a path or a class."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"The model must be a torch.nn.Module, not a {type(model).__name__}. Hand "
            "in the one that was planned, with its weights."
        )


def refuse_lazy_parameters(model: nn.Module, name: str) -> None:
    """Refuse a model with parameters of lazy modules that have seen no batch."""
    for path, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise InputError(
                f"{path} of {name} has no shape yet: lazy modules get theirs from the "
                "first batch. Call the model once, model(inputs), and go on then."
            )


def _difference(plan: Plan, model: nn.Module) -> str:
    """Return the first difference from the planned model as text; empty if none."""
    # Which parameters are trained is ``_trained_otherwise``.
    modules = dict(model.named_modules())
    missing = [name for name in plan.recipe.wrapped_blocks if name not in modules]
    if missing:
        return f"has no block {missing[0]!r}"
    classes = _other_classes(plan, model)
    if classes:
        return classes
    count, planned = parameter_count(model), plan.model.parameter_count
    if planned not in (count, count - _inactive_count(model)):
        return f"has {count:,} parameters, not {planned:,}"
    attention = describe_attention(model)
    if attention and plan.model.attention and attention != plan.model.attention:
        return f"has attention {attention}, not {plan.model.attention}"
    return ""


def _trained_otherwise(plan: Plan, model: nn.Module) -> str:
    """Return a difference in which parameters are trained; empty if none is known."""
    trained, planned = trainable_count(model), plan.model.trainable_count
    if trained == planned:
        return ""
    names = _names_trained_otherwise(plan, model)
    return f"trains {trained:,} parameters, not {planned:,}{names}"


def _names_trained_otherwise(plan: Plan, model: nn.Module) -> str:
    """Name parameters that are frozen in one of both models, as far as is known."""
    # A saved plan has no names: of a model that trains less, the frozen ones are named.
    planned = getattr(plan.source, "model", None)
    known = dict(planned.named_parameters()) if planned is not None else {}
    frozen: list[str] = []
    trained: list[str] = []
    for name, parameter in model.named_parameters():
        other = known.get(name)
        if other is not None and other.requires_grad != parameter.requires_grad:
            (trained if parameter.requires_grad else frozen).append(name)
    trains_less = trainable_count(model) < plan.model.trainable_count
    if trains_less and not (frozen or trained):
        frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    return "".join(
        f"; {what}: {', '.join(names[:3])}{f' and {more} more' if more > 0 else ''}"
        for what, names in (("frozen here", frozen), ("trained only here", trained))
        if names
        for more in (len(names) - 3,)
    )


def _other_classes(plan: Plan, model: nn.Module) -> str:
    """Return a difference in class of the model or its blocks; empty if none."""
    planned, block_type = plan.model.type_name, plan.model.block_type
    inner = unwrap_model(model)
    if planned and planned not in _class_names(inner):
        return f"is a {type(inner).__name__}, not a {planned}"
    modules = dict(model.named_modules())
    blocks = [
        unwrap_compiled(modules[name]) for name in plan.model.blocks if name in modules
    ]
    if blocks and block_type and not any(block_type in _class_names(b) for b in blocks):
        return f"has blocks of {type(blocks[0]).__name__}, not of {block_type}"
    return ""


def _class_names(module: nn.Module) -> list[str]:
    """Return a module's class and the base classes whose ``forward`` it inherits."""
    names = []
    for kind in planned_classes(unwrap_compiled(module)):
        names.append(kind.__name__)
        if "forward" in vars(kind):
            break
    return names


def unwrap_model(model: nn.Module) -> nn.Module:
    """Unwrap a model from torch.compile and peft."""
    # DistributedDataParallel stays: a wrapped model is not the planned one.
    model = unwrap_compiled(model)
    find: Any = getattr(model, "get_base_model", None)
    return unwrap_compiled(find()) if callable(find) else model


def trainable_count(model: nn.Module) -> int:
    """Return the number of trainable parameters (elements)."""
    return sum(element_count(p) for p in model.parameters() if p.requires_grad)


def _inactive_count(model: nn.Module) -> int:
    """Return the number of parameters in inactive peft adapters."""
    # TRL's DPOTrainer keeps a copy of the adapter as its reference.
    layers: list[Any] = list(model.modules())
    inactive = {
        parameter
        for layer in layers
        if hasattr(layer, "adapter_layer_names") and hasattr(layer, "active_adapters")
        for name in layer.adapter_layer_names
        for adapter, part in getattr(layer, name, {}).items()
        if adapter not in layer.active_adapters
        for parameter in (part.parameters() if isinstance(part, nn.Module) else (part,))
    }
    return sum(element_count(parameter) for parameter in inactive)
