"""Copy a model with fake tensors (FakeTensorMode): same modules, no memory."""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from budgetfit.errors import TraceError
from budgetfit.tracing.fake.host_tensor import as_host_tensor, moves_attributes
from budgetfit.tracing.fake.shortened_model import (
    Shortening,
    close_gaps,
    placeholder_memo,
)
from budgetfit.tracing.fake.tensor_factory import FakeTensorFactory, strides_on_cuda
from budgetfit.tracing.fake.uncopyable_values import uncopyable_memo
from budgetfit.utils.copy_model import deepcopy_model


def fake_copy(
    model: nn.Module,
    mode: FakeTensorMode,
    short: Shortening | None = None,
    on_fake: Callable[[torch.Tensor, torch.Tensor], None] = lambda *_: None,
) -> nn.Module:
    """Return a deep copy of ``model`` with fake parameters and buffers on the CPU.

    The model may live on the CPU, on CUDA or on meta; it is not changed. Tied
    parameters stay tied and ``requires_grad`` stays. With ``short`` the copy has fewer
    blocks. ``on_fake`` is called with each tensor and its fake.

    Raises:
        TraceError: If the model cannot be copied: it holds open files or iterators,
            or TorchScript.
    """
    copied = kept_modules(model, short)
    _refuse_scripts(copied)
    fakes = _fakes_of_tensors(copied.values(), mode, on_fake)
    left_out = () if short is None else short.left_out
    with _CopiesOnCpu(mode):
        memo = (placeholder_memo(model, left_out) if short is not None else {}) | fakes
        try:
            fake = deepcopy_model(model, memo)
        except Exception:  # noqa: BLE001 - the attributes are tried one by one
            gaps = {} if short is None else placeholder_memo(model, left_out)
            memo = gaps | fakes
            fake = _copy_with_replacements(model, memo)
        _add_hooks(copied.values(), memo)
    if short is not None:
        close_gaps(fake, short)
    return fake


def _add_hooks(modules: Iterable[nn.Module], copies: dict[int, Any]) -> None:
    """Register copies of parameters' hooks on the fakes; ``deepcopy`` leaves them out.

    A hook that cannot be copied, or that needs values, is taken to return a new
    gradient; one that runs after a gradient is accumulated, to leave it there.
    """
    parameters = {
        id(parameter): parameter
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None
    }
    for key, parameter in parameters.items():
        for hook in (parameter._backward_hooks or {}).values():
            own = _copy_of_hook(hook, copies) or torch.clone
            copies[key].register_hook(_on_fakes(own))
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            if own := _copy_of_hook(hook, copies):
                copies[key].register_post_accumulate_grad_hook(_after_fakes(own))


def _copy_of_hook(hook: object, copies: dict[int, Any]) -> Any:
    """Return a copy of a hook; None of one that cannot be copied."""
    try:
        return copy.deepcopy(hook, copies)
    except Exception:  # noqa: BLE001 - of anything that it holds
        return None


def _on_fakes(hook: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], Any]:
    def call(gradient: torch.Tensor) -> Any:
        try:
            return hook(gradient)
        except Exception:  # noqa: BLE001 - what a hook does
            return gradient.clone()

    return call


def _after_fakes(
    hook: Callable[[torch.Tensor], object],
) -> Callable[[torch.Tensor], None]:
    def call(parameter: torch.Tensor) -> None:
        with contextlib.suppress(Exception):  # what a hook does
            hook(parameter)

    return call


class _CopiesOnCpu(FakeCopyMode):
    """Copies tensors in containers to the CPU; torch would allocate CUDA memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            with torch._C.DisableTorchFunction():
                tensor, memo = args
                if tensor.device.type == "cuda" and id(tensor) not in memo:
                    fakes = FakeTensorFactory(self.fake_mode)
                    memo[id(tensor)] = (
                        fakes.parameter(tensor)
                        if isinstance(tensor, torch.nn.Parameter)
                        else fakes.empty(
                            tensor.shape, tensor.stride(), tensor.dtype
                        ).requires_grad_(tensor.requires_grad)
                    )
                    return memo[id(tensor)]
        made = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.__deepcopy__ and not isinstance(args[0], nn.Parameter):
            as_host_tensor(made)
        return made


def _copy_with_replacements(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a model with attributes that ``deepcopy`` refuses."""
    memo |= uncopyable_memo(model, memo)
    try:
        return deepcopy_model(model, memo)
    except Exception as error:
        raise TraceError(
            f"The model cannot be copied: {type(error).__name__}: {error}. Remove "
            "what cannot be deep-copied from its attributes.",
            module=type(model).__name__,
            op="deepcopy",
        ) from error


def kept_modules(model: nn.Module, short: Shortening | None) -> dict[str, nn.Module]:
    """Return the modules that a copy of the model has, by their paths in the model."""
    left_out = () if short is None else short.left_out
    return dict(model.named_modules({model.get_submodule(name) for name in left_out}))


def _refuse_scripts(modules: Mapping[str, nn.Module]) -> None:
    """Raise for TorchScript, which runs outside Python, where nothing is dispatched."""
    for name, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"{name!r} is" if name else "The model is"
            raise TraceError(
                f"{where} TorchScript ({module.original_name}), which cannot be traced "
                "or checkpointed. Plan and train the plain module, and script the "
                "trained one.",
                module=name or type(module).__name__,
                op="torch.jit.script",
            )


def _fakes_of_tensors(
    modules: Iterable[nn.Module],
    mode: FakeTensorMode,
    on_fake: Callable[[torch.Tensor, torch.Tensor], None],
) -> dict[int, Any]:
    """Return a ``deepcopy`` memo with a fake CPU tensor for each tensor of modules."""
    # These are parameters, buffers and tensor attributes. ``Module.to`` on fake
    # parameters fails with "Couldn't swap", and a copied meta parameter stays on meta
    # and loses its ``Parameter`` type.
    fakes = FakeTensorFactory(mode)
    memo: dict[int, Any] = {}
    modules = list(modules)
    buffers = {id(each) for module in modules for each in module._buffers.values()}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = fakes.parameter(parameter)
                on_fake(parameter, memo[id(parameter)])
        moves = moves_attributes(module)
        for tensor in (*module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                fake = fakes.empty(tensor.shape, strides_on_cuda(tensor), tensor.dtype)
                on_fake(tensor, fake)
                memo[id(tensor)] = fake
                if not (tensor.is_cuda or id(tensor) in buffers or moves):
                    as_host_tensor(fake)
    return memo


@contextlib.contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """Enter a FakeTensorMode that accepts small real tensors made by models."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@contextlib.contextmanager
def silence_fake_tensor_log() -> Iterator[None]:
    """Disable the log of torch's fake tensors: failures become errors or notes."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
