"""Model, batch, loss and optimizer of a plan; resolved again for a saved plan."""

import re
import shlex
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from budgetfit.applying.data_parallel import refuse_wrapped
from budgetfit.applying.loss.prediction_loss import prediction_loss
from budgetfit.applying.optimizers.factory import OPTIMIZER_NAMES
from budgetfit.applying.ranks import same_random_weights
from budgetfit.batches.batch_tree import batch_size_of, describe_batch
from budgetfit.core.adapter import Adapter
from budgetfit.core.plan import Plan
from budgetfit.core.samples.sample_dims import SampleDims
from budgetfit.core.samples.sample_lengths import summarize_lengths
from budgetfit.errors import InputError
from budgetfit.example_batches.make_batch import make_batch
from budgetfit.example_batches.plain_modules import batch_dimension
from budgetfit.inputs.adapter import base_of_adapter
from budgetfit.integrations.model_sources.model_source import (
    as_torch_module,
    resolve_model,
)
from budgetfit.integrations.model_sources.python_factory import load_batch, load_loss
from budgetfit.integrations.model_sources.resolved_model import ResolvedModel
from budgetfit.integrations.peft import loading_code, materialize_with_adapter
from budgetfit.measuring.real_step import find_device
from budgetfit.utils.function_name import is_factory_text, qualified_name
from budgetfit.verification.batch_choice import choose_batch
from budgetfit.workload.model_check import check_same_model, refuse_no_module
from budgetfit.workload.settings_check import warn_changed_settings
from budgetfit.workload.training_setup import TrainingSetup

Loss = Callable[..., Any]
Optimizer = Callable[..., torch.optim.Optimizer]
# The one function that a saved plan can be trained with by its name alone.
_PREDICTION_LOSS = qualified_name(prediction_loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSource:
    """The model, batch, loss and optimizer that a plan was made for.

    ``apply`` and ``verify`` use them. ``model`` is None where a config or hub id was
    planned, which has no weights to train; ``materialize(device)`` then builds one with
    random weights. ``adapter`` is trained on it, with the base as it is stored.
    """

    model: nn.Module | None
    materialize: Callable[..., nn.Module] | None
    batch: Any
    batch_dims: SampleDims
    loss: Loss | None
    optimizer: Optimizer | None
    adapter: Adapter | None = None

    @property
    def batch_size(self) -> int:
        """Samples in the batch."""
        return batch_size_of(self.batch, dims=self.batch_dims)


def model_to_train(plan: Plan, model: nn.Module | None) -> nn.Module:
    """Return the model to train with a plan.

    Raises:
        InputError: If there is none with weights, or it is not the planned one.
    """
    if model is None and plan.source is not None:
        model = plan.source.model
    if model is None:
        hint = "Hand one in: budgetfit.apply(plan, model)."
        if plan.adapter is not None:
            hint = "Load one and hand it in, budgetfit.apply(plan, model):\n"
            several = plan.recipe.parallelism is not None
            hint += loading_code(plan.adapter, plan.model.class_name, several=several)
        raise InputError(
            "This plan has no model with weights to train: it was loaded from disk or "
            f"made from a config. {hint}"
        )
    model = as_torch_module(model)
    refuse_no_module(model)
    refuse_wrapped(model, plan.recipe.parallelism)
    check_same_model(plan, model)
    warn_changed_settings(plan, model)
    return model


def planned_batch_dims(plan: Plan, model: nn.Module) -> SampleDims:
    """Return the planned sample dimensions; of an older plan those of the model."""
    return plan.model.batch_dims or SampleDims(batch_dimension(model))


def parse_loss(loss: object) -> Callable[..., object] | None:
    """Return the loss function, loaded where text names it; refuse all else."""
    if isinstance(loss, str):
        return load_loss(loss)
    if isinstance(loss, nn.modules.loss._Loss):  # noqa: SLF001 - torch's own, all of them
        name = type(loss).__name__
        raise InputError(
            f"loss={name}() takes a target, and a loss here takes the batch: use "
            f"loss=lambda outputs, batch: {name}()(outputs, batch[...])."
        )
    if loss is not None and not callable(loss):
        raise InputError(
            "loss must be a function: loss(outputs, batch) -> scalar; for example "
            "loss=lambda outputs, batch: outputs.mean()."
        )
    return loss


def loss_and_optimizer(
    plan: Plan,
    loss: Loss | str | None,
    optimizer: Optimizer | None,
    calls: Sequence[str] = ("apply", "verify"),
    *,
    factory_may_have_loss: bool = False,
) -> tuple[Loss | None, Optimizer | None]:
    """Return the loss and the optimizer function that a plan was made with.

    A loss may be text: ``file.py:function``. A saved plan has only their names.
    ``calls``: the functions that take them. ``factory_may_have_loss``: the model is a
    factory that was not called yet, and the loss may come from it.

    Raises:
        InputError: If the plan needs one that was not passed.
    """
    loss = parse_loss(loss)
    if plan.source is not None:
        loss = loss if loss is not None else plan.source.loss
        optimizer = optimizer if optimizer is not None else plan.source.optimizer
    name, planned = plan.recipe.optimizer, _asked(plan).get("loss")
    if loss is None and planned == _PREDICTION_LOSS:
        loss = prediction_loss
    if loss is not None and planned is not None:
        _warn_of_another_loss(qualified_name(loss), str(planned))
    for what, given, needed in (
        ("loss", loss, planned),
        ("optimizer", optimizer, None if name in OPTIMIZER_NAMES else name),
    ):
        later = what == "loss" and factory_may_have_loss
        if given is None and needed is not None and not later:
            raise InputError(
                f"The plan was made with {what}={needed}, a function that a saved plan "
                "only names. Hand it in again: "
                + " or ".join(f"{call}(plan, model, {what}=...)" for call in calls)
                + (" (--loss file.py:function)." if what == "loss" else ".")
            )
    return loss, optimizer


def _warn_of_another_loss(handed_in: str, planned: str) -> None:
    """Compare only the last part: a file's function has another module once loaded."""
    if re.split(r"[.:]", handed_in)[-1] != re.split(r"[.:]", planned)[-1]:
        warnings.warn(
            f"The plan was made for loss={planned}, and {handed_in} was handed in: "
            "what it takes was not planned. Plan again with it.",
            stacklevel=4,
        )


def resolve_model_and_batch(  # noqa: PLR0913 - what a saved plan cannot hold
    plan: Plan,
    model: nn.Module | str | None,
    *,
    batch: object,
    loss: Loss | str | None,
    optimizer: Optimizer | None,
    device: str | None,
    trust_remote_code: bool,
) -> TrainingSetup:
    """Return the model, batch, loss and device to verify a plan with.

    A plan made from a config gets random weights.

    Raises:
        InputError: If there is no model, no such device, or no batch can be made.
    """
    chosen = find_device(_device(device))
    several = plan.recipe.parallelism is not None
    with same_random_weights() if several else nullcontext():
        resolved = _resolved(plan, model, trust_remote_code=trust_remote_code)
        # Of several ranks each shards it from host memory.
        home = torch.device("cpu") if several else chosen
        live = _live_model(plan, model, home, resolved)
    if resolved is not None:  # a factory may return its batch and its loss
        batch = resolved.batch if batch is None else batch
        loss = resolved.loss if loss is None else loss
    loss, optimizer = loss_and_optimizer(plan, loss, optimizer)
    check_same_model(plan, live)
    if any(parameter.is_meta for parameter in live.parameters()):
        raise InputError(
            "The model is on the meta device: it has no weights for real steps. Load "
            "them first, or hand in a model that has some: verify(plan, model)."
        )
    dims = planned_batch_dims(plan, live)
    if isinstance(batch, str):
        batch = load_batch(batch)
    elif batch is None:
        batch = planned_batch(plan, live, dims)
    found = choose_batch(plan, batch, dims=dims)
    return TrainingSetup(
        model=live,
        batch=found.batch,
        shorter=found.shorter,
        notes=found.notes,
        batch_dims=dims,
        loss=loss,
        optimizer=optimizer,
        device=chosen,
    )


def model_reference(
    plan: Plan, model: object, *, batch: object, functions: tuple[object, object]
) -> str | None:
    """Return the text that names the model for a subprocess; None: the plan's.

    Raises:
        InputError: An argument cannot be passed to a subprocess as text.
    """
    asked = _asked(plan)
    text = model if isinstance(model, str) else None
    if model is None:
        # Code planned by this process may run; a plan file is data (``_planned_text``).
        planned = asked.get("model")
        text = planned if plan.source is not None else _planned_text(planned)
    is_plain = plan.recipe.optimizer in OPTIMIZER_NAMES and asked.get("loss") in (
        None,
        _PREDICTION_LOSS,
    )
    if text is None or batch is not None or functions != (None, None) or not is_plain:
        raise InputError(
            "A fresh process is handed text: the plan and how to build its model. It "
            "takes a hub id, a config or package.module:factory, as model= here or in "
            "plan(), and no batch=, loss= or optimizer function. For those, verify in "
            "a new Python process of your own."
        )
    return text


def _resolved(
    plan: Plan, model: nn.Module | str | None, *, trust_remote_code: bool
) -> ResolvedModel | None:
    """Resolve the model that a text names: the argument, else the planned one."""
    if model is None and plan.source is None:
        model = _planned_text(_asked(plan).get("model"))
    if not isinstance(model, str):
        return None
    resolved = resolve_model(model, trust_remote_code=trust_remote_code)
    return base_of_adapter(resolved, plan.adapter)


def _live_model(
    plan: Plan,
    model: nn.Module | str | None,
    device: torch.device,
    resolved: ResolvedModel | None,
) -> nn.Module:
    if resolved is not None:
        make = materialize_with_adapter(resolved.materialize, plan.adapter)
        return resolved.model if make is None else make(device)
    if model is None and plan.source is not None:
        model = plan.source.model
        if model is None and plan.source.materialize is not None:
            model = plan.source.materialize(device)
    if model is None:
        raise _no_model(plan, "verify")
    live: nn.Module = as_torch_module(model)
    return live


def planned_lengths(plan: Plan) -> dict[int, int] | None:
    """Return the lengths of a plan's samples, and how many there are of each.

    Of a plan that was saved without them: the shortest and the longest, of which
    batches have the shapes of the planned one. None: they were not given.
    """
    recorded, over = _asked(plan).get("lengths"), plan.varying_lengths
    if isinstance(recorded, dict):
        return {int(length): samples for length, samples in recorded.items()}
    if over is None or not over.of_tokens:
        return None
    return {over.shortest: 1, over.longest: 1}


def names_its_model(plan: Plan) -> bool:
    """Whether the model can be made again from the plan alone, without its code."""
    if plan.source is not None and plan.source.model is not None:
        return True
    return _planned_text(_asked(plan).get("model")) is not None


def has_sizes(plan: Plan) -> bool:
    """Whether the plan says which lengths or image sizes its samples have."""
    asked = _asked(plan)
    return any(asked.get(name) is not None for name in ("lengths", "image_sizes"))


def planned_batch(plan: Plan, model: nn.Module, dims: SampleDims) -> object:
    """Refuse samples of other shapes than planned; ``call`` takes the batch."""
    if plan.source is not None:
        return plan.source.batch
    asked, lengths = _asked(plan), planned_lengths(plan)
    longest = asked.get("max_length")
    batch = make_batch(
        model,
        max_length=longest,
        image_size=asked.get("image_size"),
        frames=asked.get("frames"),
        text_only=asked.get("text_only") or False,
        padded=lengths is not None and summarize_lengths(lengths, longest).vary,
        dims=dims,
    ).batch
    check_batch_shapes(plan, batch, dims)
    return batch


def check_batch_shapes(
    plan: Plan,
    batch: object,
    dims: SampleDims,
    call: str = "verify",
) -> None:
    """Raise InputError if the samples of a batch have other shapes than planned.

    ``call``: the function that takes the batch.
    """

    def samples(batch: dict[str, tuple[tuple[int, ...], str]]) -> object:
        return {
            name: (dims.sample_shape(name, shape), dtype)
            for name, (shape, dtype) in batch.items()
        }

    made = describe_batch(batch)
    if samples(made) != samples(plan.model.batch):
        planned = ", ".join(
            f"{name} {list(shape)}" for name, (shape, _) in plan.model.batch.items()
        )
        raise InputError(
            f"The plan was made for a batch of {planned}, which is not what would be "
            f"made from the model. Hand it in: {call}(plan, model, batch=...) "
            "(--batch file.py:function)."
        )


def planned_arguments(
    plan: Plan,
    model: nn.Module | str | None = None,
    *,
    batch: object = None,
    loss: Loss | str | None = None,
    optimizer: Optimizer | None = None,
) -> dict[str, Any]:
    """Return the arguments of ``plan()`` that say what a plan was made for.

    The model, its batch, loss, optimizer and adapter; not the card.

    Raises:
        InputError: If the plan does not say which model, loss or optimizer.
    """
    asked, source, adapter = _asked(plan), plan.source, plan.adapter
    if model is None and source is not None:
        model = source.model or asked.get("model")
        batch = source.batch if batch is None else batch
    elif model is None:
        model = _planned_text(asked.get("model"))
    if model is None:
        raise _no_model(plan, "check")
    loss, optimizer = loss_and_optimizer(
        plan,
        loss,
        optimizer,
        ("check",),
        factory_may_have_loss=isinstance(model, str) and is_factory_text(model),
    )
    found: dict[str, Any] = {"model": model, "batch": batch, "loss": loss}
    found["optimizer"] = optimizer or plan.recipe.optimizer
    if batch is None:
        for name in ("max_length", "image_size", "frames"):
            found[name] = asked.get(name)
        found["text_only"] = asked.get("text_only") or False
    if asked.get("image_sizes") is not None:  # the largest follows from them
        found |= {"image_sizes": asked["image_sizes"], "image_size": None}
    elif batch is None or has_sizes(plan):
        found["lengths"] = planned_lengths(plan)
        found["max_length"] = asked.get("max_length")
    if adapter is not None:
        found |= {
            "method": adapter.method,
            "lora_r": adapter.r,
            "lora_alpha": adapter.alpha,
            "lora_dropout": adapter.dropout,
            "target_modules": adapter.target_modules,
        }
        stored = adapter.quantization
        found["quantization"] = stored
        # Settings of a base that is not stored so are refused.
        found["double_quantization"] = adapter.double_quantization or stored != "nf4"
        found["prepare_for_kbit"] = adapter.prepared or stored is None
    return found


def check_plan(plan: Plan) -> None:
    """Raise InputError unless ``plan`` is a Plan."""
    if not isinstance(plan, Plan):
        raise InputError(
            f"A Plan is expected, not a {type(plan).__name__}: what plan() returned, "
            'or budgetfit.Plan.load("plan.json").'
        )


def _no_model(plan: Plan, call: str) -> InputError:
    """Return the error for a plan whose model has to be handed in."""
    planned = _asked(plan).get("model")
    if isinstance(planned, str):
        return InputError(
            f"The plan's model is built by {planned}, and code that a plan file names "
            f"is not run unasked. Hand it in: {call}(plan, model), or --model "
            f"{shlex.quote(planned)}."
        )
    return InputError(
        "The plan does not say which model it is for, as it was made from one in "
        f"memory. Hand it in: {call}(plan, model), or --model module:factory."
    )


def _device(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise InputError(
            f'device={str(device)!r} cannot be verified on. Use "cuda", or "cpu" to '
            "check gradients and live bytes without a GPU."
        )
    return chosen


def _asked(plan: Plan) -> dict[str, Any]:
    """Return the recorded arguments of ``plan``; a damaged file may hold anything."""
    asked = plan.provenance.get("asked")
    return asked if isinstance(asked, dict) else {}


def _planned_text(text: object) -> str | None:
    """Return the config or hub id of a plan; never a factory."""
    # A plan file is untrusted: verifying it must not run code that its author chose.
    if isinstance(text, str) and not is_factory_text(text):
        return text
    return None
