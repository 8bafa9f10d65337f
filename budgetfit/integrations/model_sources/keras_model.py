"""Wrap a Keras 3 model (torch backend) as a tree of ``torch.nn.Module``.

A Keras model is a ``torch.nn.Module``, but its layers are not submodules, training is
an argument instead of a mode, and a copy goes through a file. ``KerasModel`` has one
module for each layer, with the layer's own parameters, which replaces the layer's
forward while the model runs. Keras objects are patched only during a call, so a copy of
this tree shares them.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from budgetfit.errors import InputError
from budgetfit.example_batches.request import BatchRequest
from budgetfit.integrations.model_sources.keras_batch import example_batch
from budgetfit.integrations.model_sources.keras_layers import (
    is_whole,
    layers_in,
    named_layers,
    seed_generators,
    unused_name,
)


class _Shared:
    """Reference to a Keras object that ``copy.deepcopy`` shares instead of copying."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


@dataclass(slots=True, eq=False)
class _Call:
    """State of one layer call that its recomputation needs."""

    training: bool
    device: str
    masks: list[Any]
    cast: str | None
    ran: bool = False
    seeds: list[tuple[Any, torch.Tensor]] = field(default_factory=list)


class _KerasModule(nn.Module):
    """Module for a Keras layer or model, sharing the parameters of no sublayer.

    Names begin with ``keras_``: sublayers are attributes of their own names.
    """

    def __init__(self, keras_object: Any) -> None:
        super().__init__()
        self._shared = _Shared(keras_object)
        self._variables: dict[str, _Shared] = {}

    @property
    def keras_object(self) -> Any:
        """The Keras layer or model itself."""
        return self._shared.value

    def keras_register(self, inner: list[Any]) -> None:
        """Register the variables that belong to none of the sublayers ``inner``."""
        inside = {id(variable) for child in inner for variable in child.variables}
        used = set(self._modules) | {"layers"}
        prefix = f"{self.keras_object.path}/"
        for variable in self.keras_object.variables:
            if id(variable) in inside:
                continue
            path = variable.path
            is_own = path.startswith(prefix)
            short = path.removeprefix(prefix) if is_own else variable.name
            name = unused_name(short, used)
            self._variables[name] = _Shared(variable)
            self.register_parameter(name, variable.value)

    def keras_variables(self) -> Iterator[tuple[Any, nn.Parameter]]:
        """Yield the Keras variables, and the parameters that replace their values."""
        for name, variable in self._variables.items():
            parameter = self._parameters[name]
            if parameter is not None:
                yield variable.value, parameter


class KerasLayer(_KerasModule):
    """Module for one Keras layer, sharing its parameters."""

    def __init__(self, layer: Any, known: dict[int, KerasLayer]) -> None:
        super().__init__(layer)
        known[id(layer)] = self
        inner = [] if is_whole(layer) else layers_in(layer)
        for name, child in named_layers(inner):
            self.add_module(name, _module_for(child, known))
        self.keras_register(inner)

    def forward(self, *args: Any, keras_call: _Call, **kwargs: Any) -> Any:
        """Run the layer; the second and later runs of a call are recomputation."""
        layer = self.keras_object
        if not keras_call.ran:  # called by Keras, which has prepared the call
            keras_call.ran = True
            keras_call.seeds = [
                (variable, variable._value.clone())
                for generator in seed_generators(layer)
                for variable in [generator.state]
            ]
            return type(layer).forward(layer, *args, **kwargs)
        for tensor, mask in zip(args, keras_call.masks, strict=False):
            is_tensor = isinstance(tensor, torch.Tensor)
            if mask is not None and is_tensor:
                tensor._keras_mask = mask
        kwargs["training"] = keras_call.training
        with (
            _patched_layers(
                self,
                keras_call.training,
                keras_call.device,
                cast=keras_call.cast,
                but=self,
            ),
            _once_only(layer, keras_call.seeds),
            _plain_errors(),
        ):
            return layer(*args, **kwargs)


class KerasModel(_KerasModule):
    """A ``keras.Model`` as a module tree, sharing its parameters.

    Called with inputs alone it returns what the model returns; with targets too, and a
    model that was compiled with a loss, ``{"loss": ..., "outputs": ...}``: the compiled
    loss and the layers' own (regularizers). Its ``train()`` and ``eval()`` decide about
    Keras's ``training`` argument.

    Attributes:
        layers: The modules of the model's layers, by their Keras names.

    Raises:
        InputError: The model is not built: it has no weights yet.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        layers = layers_in(model)
        if not model.built or not any(True for _ in model.variables):
            raise InputError(
                f"The Keras model {model.name!r} is not built yet: it has no weights. "
                "Give it a keras.Input, or call it once on a batch."
            )
        known: dict[int, KerasLayer] = {}
        named = [
            (name, _module_for(layer, known)) for name, layer in named_layers(layers)
        ]
        self.layers = _container(model, named)
        self.keras_register(layers)

    @property
    def compiled_loss(self) -> Any:
        """The loss given to ``compile(loss=...)``."""
        return getattr(self.keras_object, "loss", None)

    def forward(
        self,
        inputs: Any,
        targets: Any = None,
        sample_weight: torch.Tensor | None = None,
    ) -> Any:
        """Run the model; with ``targets``, its compiled loss too."""
        model = self.keras_object
        cast, device = _cast_to(self), str(next(self.parameters()).device)
        with _patched_layers(self, self.training, device, cast=cast):
            outputs = model(inputs, training=self.training)
            if targets is None or self.compiled_loss is None:
                return outputs
            loss = model.compute_loss(
                x=inputs,
                y=targets,
                y_pred=outputs,
                sample_weight=sample_weight,
                training=self.training,
            )
        return {"loss": loss, "outputs": outputs}

    def make_example_batch(self, request: BatchRequest) -> dict[str, Any]:
        """Return inputs, with targets for a compiled loss."""
        return example_batch(self.keras_object, self.compiled_loss, request)


@contextmanager
def _patched_layers(
    tree: nn.Module,
    training: bool,
    device: str,
    *,
    cast: str | None,
    but: nn.Module | None = None,
) -> Iterator[None]:
    """Redirect Keras layers to the modules of ``tree``, with their parameters."""
    keras: Any = import_module("keras")  # keras is imported already

    with ExitStack() as stack:
        stack.enter_context(keras.device(device))
        for part in _parts(tree):
            for variable, parameter in part.keras_variables():
                _set_for_now(stack, variable, "_value", parameter)
                if parameter.is_floating_point():
                    _set_for_now(stack, variable, "_dtype", _dtype_name(parameter))
            for layer in part.keras_object._flatten_layers() if cast else ():
                if layer.compute_dtype != cast:
                    policy = keras.DTypePolicy(cast)
                    _set_for_now(stack, layer, "_dtype_policy", policy)
            if isinstance(part, KerasLayer) and part is not but:
                forward = functools.partial(_redirect, part, training, device, cast)
                _set_for_now(stack, part.keras_object, "forward", forward)
        if any(isinstance(item, FakeTensor) for item in tree.parameters()):
            # A fake seed tensor has no value: the default generator is used.
            random: Any = import_module("keras.src.backend.torch.random")  # private API
            seeded = random.torch_seed_generator
            stack.callback(setattr, random, "torch_seed_generator", seeded)
            random.torch_seed_generator = lambda _: torch.Generator()
        yield


def _cast_to(tree: nn.Module) -> str | None:
    """Return the dtype to which a precision policy cast the float variables, if any."""
    # Keras layers cast inputs to the dtype of their own policy, which must follow.
    for part in _parts(tree):
        for variable, parameter in part.keras_variables():
            if parameter.is_floating_point():
                now = _dtype_name(parameter)
                return now if now != str(variable._dtype) else None
    return None


def _parts(tree: nn.Module) -> Iterator[_KerasModule]:
    return (part for part in tree.modules() if isinstance(part, _KerasModule))


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _redirect(
    stand_in: KerasLayer,
    training: bool,
    device: str,
    cast: str | None,
    /,  # layers may have arguments of these names
    *args: object,
    **kwargs: object,
) -> Any:
    """Replace ``layer.forward``, which Keras calls after preparing a call."""
    masks = [getattr(value, "_keras_mask", None) for value in args]
    call = _Call(training=training, device=device, masks=masks, cast=cast)
    return stand_in(*args, keras_call=call, **kwargs)


def _set_for_now(stack: ExitStack, owner: Any, name: str, value: object) -> None:
    """Set an attribute, bypassing Keras's ``__setattr__``, until the stack ends."""
    attributes = owner.__dict__
    if name in attributes:
        stack.callback(attributes.__setitem__, name, attributes[name])
    else:
        stack.callback(attributes.pop, name)
    attributes[name] = value


@contextmanager
def _once_only(layer: Any, seeds: list[tuple[Any, torch.Tensor]]) -> Iterator[None]:
    """Recompute a layer with the same seeds, without updating statistics again."""
    states = [variable._value for variable in layer.non_trainable_variables]
    states += [
        variable._value
        for variable, _ in seeds
        if all(variable._value is not state for state in states)
    ]
    now = [state.detach().clone() for state in states]
    for variable, seed in seeds:
        variable._value.data.copy_(seed)  # autograd is not to count it
    try:
        yield
    finally:
        for state, value in zip(states, now, strict=True):
            state.data.copy_(value)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Disable Keras's traceback filtering, also for early stop of recomputation."""
    # Keras would format the arguments of every call on the way, and keep the frames.
    keras: Any = import_module("keras")  # keras is imported already

    filtering = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if filtering:
            keras.config.enable_traceback_filtering()


def _module_for(layer: Any, known: dict[int, KerasLayer]) -> KerasLayer:
    """Return the layer's module; a layer used twice has one."""
    found = known.get(id(layer))
    return _kind(type(layer).__name__)(layer, known) if found is None else found


@functools.cache
def _kind(name: str) -> Callable[..., KerasLayer]:
    """Return a class of this name: repeated blocks are found by their class."""
    return type(name, (KerasLayer,), {"__module__": __name__})


def _container(model: Any, named: list[tuple[str, KerasLayer]]) -> nn.Module:
    """Return the layers as a chain, or as a container without order."""
    if type(model).__name__ == "Sequential":
        return nn.Sequential(OrderedDict(named))
    container = nn.ModuleList()
    for name, child in named:
        container.add_module(name, child)
    return container
