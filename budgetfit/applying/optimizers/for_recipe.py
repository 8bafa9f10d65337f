"""Optimizer of a Run: checks and construction from a recipe."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import Parameter

from budgetfit.applying.optimizers import cpu_offload, torchao
from budgetfit.applying.optimizers.factory import make_optimizer, steps_on_cpu
from budgetfit.applying.optimizers.flat_parts import refuse_if_by_shape
from budgetfit.applying.optimizers.in_backward import OptimizerInBackward
from budgetfit.applying.undo import Undo
from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError

CLIPPING_REFUSED = (
    "With optimizer_in_backward gradients are used up before their total norm is "
    "known, so they cannot be clipped to it. Leave max_grad_norm out, or train with "
    "optimizer_in_backward=False."
)
SCALER_REFUSED = (
    "With optimizer_in_backward there can be no GradScaler, as it looks at all "
    "gradients before it lets the optimizer step. Use precision='bf16-mixed' or "
    "'fp32', or optimizer_in_backward=False."
)
SCALER_WITH_OFFLOAD_REFUSED = (
    f"Optimizer {cpu_offload.NAME!r} reads gradients from host memory, where a "
    "GradScaler does not unscale them. Use precision='bf16-mixed' or 'fp32', or "
    "optimizer='adamw_torch'."
)
OFFLOAD_IN_BACKWARD_REFUSED = (
    f"Optimizer {cpu_offload.NAME!r} has hooks of its own in the backward pass "
    "and cannot step there. Use optimizer_in_backward=False."
)
OFFLOAD_ON_SEVERAL_REFUSED = (
    f"Optimizer {cpu_offload.NAME!r} is torchao's for one GPU: it copies gradients to "
    "host memory before the ranks have reduced them. Use "
    'optimizer="adamw_torch_fused" with engine="fsdp2" or engine="zero2", where each '
    "rank holds a part of the states."
)
STATES_ON_CPU_REFUSED = (
    "With cpu_offload optimizers step on the CPU, for which {name!r} has no kernels. "
    'Use optimizer="adamw_torch_fused", or cpu_offload=False.'
)


def make_recipe_optimizer(  # noqa: PLR0913 - make_optimizer's, and where it is undone
    recipe: Recipe,
    optimizer: str | Callable[..., torch.optim.Optimizer],
    parameters: Iterable[torch.nn.Parameter],
    *,
    lr: float,
    device_type: str,
    scaler: torch.amp.GradScaler | None,
    undo: Undo,
) -> torch.optim.Optimizer:
    """Build the recipe's optimizer; ``undo`` removes its hooks on parameters.

    Other arguments are those of ``make_optimizer``.

    Raises:
        InputError: As ``make_optimizer``, or if recipe, optimizer and scaler are
            incompatible.
        NotImplementedError: If torchao's step is to be traced as a CPU runs it.
    """
    offloads = optimizer == cpu_offload.NAME
    if scaler is not None and (offloads or recipe.optimizer_in_backward):
        raise InputError(
            SCALER_REFUSED
            if recipe.optimizer_in_backward
            else SCALER_WITH_OFFLOAD_REFUSED
        )
    if offloads and recipe.optimizer_in_backward:
        raise InputError(OFFLOAD_IN_BACKWARD_REFUSED)
    if offloads and recipe.parallelism is not None:
        raise InputError(OFFLOAD_ON_SEVERAL_REFUSED)

    if recipe.cpu_offload and not steps_on_cpu(recipe.optimizer):
        raise InputError(STATES_ON_CPU_REFUSED.format(name=recipe.optimizer))

    if recipe.zero_stage is not None:
        refuse_if_by_shape(
            lambda probes: make_optimizer(optimizer, probes, lr=lr, device_type="cpu"),
            recipe.optimizer,
        )

    def make(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        found = make_optimizer(optimizer, parameters, lr=lr, device_type=device_type)
        if device_type == "cpu" and isinstance(found, torchao.FakeTorchaoOptimizer):
            raise NotImplementedError(torchao.NOT_ON_CPU)
        return found

    if recipe.optimizer_in_backward:
        made: torch.optim.Optimizer = OptimizerInBackward(parameters, make)
    else:
        made = make(parameters)
    remove_hooks = getattr(made, "remove_hooks", None)
    if remove_hooks is not None:
        undo.add(remove_hooks)
    return made


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    """Return the parameters of an optimizer, on the device of the model."""
    own: list[Parameter] | None = getattr(optimizer, "trained", None)
    if own is not None:
        return own
    return [each for group in optimizer.param_groups for each in group["params"]]


def left_out_text(trainable: int, left_out: int) -> str:
    """Say how many trainable parameters no optimizer has; empty if none."""
    if not left_out:
        return ""
    return (
        f"{left_out} of {trainable} trainable parameters are in no optimizer: they do "
        "not train, and their gradients stay and add up. Freeze them with "
        "requires_grad_(False), or hand them to the optimizer"
    )


def left_out_notes(
    model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] | None
) -> tuple[str, ...]:
    """Return a note on trainable parameters that an optimizer callable leaves out."""
    # It is called with tensors on meta; none where it fails with these.
    if optimizer is None:
        return ()
    trained = [
        torch.nn.Parameter(torch.empty_like(each, device="meta"))
        for each in model.parameters()
        if each.requires_grad
    ]
    try:
        kept = set(trained_parameters(optimizer(trained)))
    except Exception:  # noqa: BLE001 - a trace calls it again, and tells
        return ()
    text = left_out_text(len(trained), len(trained) - len(kept.intersection(trained)))
    return (text,) if text else ()


class ParameterChangeCheck:
    """Detects that parameters of the model or the optimizer were replaced.

    Raises:
        InputError: If it has none of them.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        trained = set(trained_parameters(optimizer))
        self._trainable = {p for p in model.parameters() if p.requires_grad}
        self._trained = trained.intersection(model.parameters())
        self._kinds = {p: _dtype_and_shape(p) for p in model.parameters()}
        self._optimizer, self._all_trained = optimizer, trained
        if not self._trained:
            raise InputError(
                "The optimizer has none of the model's parameters: steps would not "
                "change it. Let the function build it over the parameters that it is "
                "called with: optimizer=lambda parameters: SGD(parameters, lr=0.1)."
            )

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse another model or optimizer than at the start."""
        trained = set(trained_parameters(optimizer))
        if optimizer is not self._optimizer or trained != self._all_trained:
            raise InputError(
                "run.optimizer was replaced, or given other parameters: the run would "
                "update, scale and clip those that it had. Undo it and apply the plan "
                "again; plan(..., optimizer=function) takes a function that makes it."
            )
        known = self._trainable.union(trained)
        there = set()
        for name, parameter in model.named_parameters():
            there.add(parameter)
            now = _dtype_and_shape(parameter)
            before = self._kinds.get(parameter, now)
            # bitsandbytes casts biases of its layers, which are frozen, in forward.
            frozen_less = (
                not parameter.requires_grad
                and now[0].itemsize < before[0].itemsize
                and now[1] == before[1]
            )
            if before != now and not frozen_less:
                raise InputError(
                    f"{name} is {_text(now)} now and was {_text(before)} when the plan "
                    "was applied: weights were cast or resized since (by model.half(), "
                    "model.to(), resize_token_embeddings ...). Undo the run, and plan "
                    "for the model as it is to be trained."
                )
            if parameter.requires_grad and parameter not in known:
                raise InputError(
                    f"{name} is not in the run's optimizer and would never change: it "
                    "was made or unfrozen after apply (by fully_shard, get_peft_model, "
                    "load_state_dict(assign=True) ...). Apply the plan after that."
                )
        gone = self._trained - there
        if gone:
            raise InputError(
                f"{len(gone)} parameters of the run's optimizer are no longer the "
                "model's: steps would not change it. Make or replace layers before "
                "you apply the plan."
            )


def _dtype_and_shape(parameter: nn.Parameter) -> tuple[torch.dtype, tuple[int, ...]]:
    # ZeRO-3 gathers and frees the elements; ``ds_shape`` stays.
    return parameter.dtype, getattr(parameter, "ds_shape", parameter.shape)


def _text(kind: tuple[torch.dtype, tuple[int, ...]]) -> str:
    dtype, shape = kind
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def refuse_clipping(recipe: Recipe, max_grad_norm: float | None) -> None:
    """Refuse gradient clipping with optimizer-in-backward, or to an invalid norm."""
    if max_grad_norm is None:
        return
    if recipe.optimizer_in_backward:
        raise InputError(CLIPPING_REFUSED)
    if not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
        shown = (
            max_grad_norm
            if isinstance(max_grad_norm, (int, float))
            else f"a {type(max_grad_norm).__name__}"
        )
        raise InputError(
            f"max_grad_norm must be a number above zero, got {shown}. Leave it out to "
            "clip nothing; a batch of several parts is one argument: "
            "run.step((inputs, labels))."
        )
