"""Arguments of plan, estimate and verify that cannot be what was meant."""

import functools
from typing import Any

import torch
from torch import nn

import budgetfit
from budgetfit import InputError, Recipe
from tests.applying.small_models import Stack, batch_for, make
from tests.misuse.case import Case, add, refused, right, unharmed
from tests.misuse.training import options_of, plan_of
from tests.models import text

SIZE = "is not a memory size"


def _plan(options: dict[str, Any]) -> None:
    model = make("stack")
    with unharmed(model):
        budgetfit.plan(model, **options_of("stack", **options))


for number, (options, words) in enumerate(
    [
        ({"vram": "24 bananas"}, SIZE),
        ({"vram": -24}, SIZE),
        ({"vram": 0}, SIZE),
        ({"vram": 24}, "24 B leave nothing to plan with"),
        ({"vram": "24"}, SIZE),
        ({"vram": 2**70}, "is more memory than any machine has"),
        ({"host_ram": "99999999999GB"}, "is more memory than any machine has"),
        ({"vram": float("nan")}, SIZE),
        (
            {"vram": "rtx-4090", "gpu": None},
            "is a card and no memory size: use gpu='rtx-4090'",
        ),
        ({"vram": batch_for("stack")}, f"A dict {SIZE}"),
        ({"gpu": "rtx-5099"}, "not in the card table"),
        ({"gpu": 0}, "gpu must be a name"),
        ({"headroom": "half"}, SIZE),
        ({"host_ram": -1}, SIZE),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"batch_size": 4.0}, "batch_size must be a whole number"),
        ({"batch_size": "4"}, "batch_size must be a whole number"),
        ({"effective_batch_size": 0}, "effective_batch_size must be a whole number"),
        ({"effective_batch_size": 6}, "does not divide effective_batch_size 6"),
        ({"effective_batch_size": 2}, "does not divide|effective_batch_size 2"),
        ({"precision": torch.bfloat16}, "is not a precision"),
        ({"precision": "half"}, "is not a precision"),
        ({"optimizer": "adamwizard"}, "is not an optimizer"),
        ({"checkpointing": True}, "checkpointing must be"),
        ({"checkpointing": ["layers.17"]}, "has no block|not a block|Its blocks"),
        ({"checkpointing": "every-0"}, "checkpointing"),
        ({"objective": "fastest"}, "Use one of"),
        ({"batch": {}}, "for example batch="),
        ({"batch": "a text"}, "a batch holds tensors"),
        ({"batch": torch.zeros(0, 16)}, "The batch is empty"),
        ({"batch": {"x": [1.0, 2.0], "labels": [0, 1]}}, "tensors"),
        ({"lengths": "long"}, "lengths must be a list"),
        ({"max_length": -1}, "max_length must be a whole number"),
        ({"method": "dora"}, "method|lora"),
        ({"image_size": 32}, "image_size=, frames= and text_only="),
        ({"max_length": 64}, "changes nothing in a batch that is given"),
    ]
):
    shown = ", ".join(
        f"{name}={'a batch' if isinstance(value, dict) and value else repr(value)}"
        for name, value in options.items()
    )
    add(
        Case(
            subject="arguments",
            name=f"plan_{number}",
            did=f"plan(model, {shown})",
            kind=InputError,
            words=words,
            do=functools.partial(_plan, options),
        )
    )


@refused("No batch can be made for Odd.*batch=", InputError)
def no_batch() -> None:
    """plan(model) without a batch, of a model that does not say what it takes."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).mean()

    budgetfit.plan(Odd(), gpu="t4")


@refused("cannot run on fake tensors.*batch=", budgetfit.TraceError)
def a_batch_of_another_model() -> None:
    """plan(model, batch=...) with a batch of another model."""
    _plan({"batch": text(4)})


@refused("accumulation", InputError)
def no_accumulation() -> None:
    """Recipe(gradient_accumulation_steps=0)."""
    Recipe(batch_size=4, gradient_accumulation_steps=0)


@refused("batch_size", InputError)
def no_batch_size() -> None:
    """Recipe(batch_size=-1)."""
    Recipe(batch_size=-1)


@refused("make one: Stack", InputError)
def a_class() -> None:
    """plan(Model), with the class and not an instance."""
    budgetfit.plan(Stack, gpu="t4")  # type: ignore[arg-type]


@refused("A model is expected, not a Plan", InputError)
def a_plan_for_a_model() -> None:
    """plan(plan)."""
    budgetfit.plan(plan_of(), gpu="t4")  # type: ignore[arg-type]


@refused("no trainable parameter", InputError)
def a_frozen_model() -> None:
    """plan(model) of a model that is frozen as a whole."""
    model = make("stack").requires_grad_(requires_grad=False)
    with unharmed(model):
        budgetfit.plan(model, **options_of("stack"))


@refused("Does not fit", budgetfit.DoesNotFitError)
def a_card_that_is_too_small() -> None:
    """A model whose weights alone are larger than the card."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(20_000, 20_000) for _ in range(12)))
    options = {"batch": torch.zeros(2, 20_000), "gpu": "t4", "precision": "fp32"}
    budgetfit.plan(model, loss=lambda outputs, _: outputs.mean(), **options)


@refused("steps", InputError)
def too_few_steps() -> None:
    """verify(plan, steps=1)."""
    _verify(steps=1)


@refused("cannot be verified on", InputError)
def another_device() -> None:
    """verify(plan, device="tpu")."""
    _verify(device="tpu")


@refused("CUDA", InputError)
def no_card() -> None:
    """verify(plan) on a machine without a card."""
    if torch.cuda.is_available():
        raise InputError("CUDA is here")
    _verify(device=None)


@refused("unexpected keyword argument 'input_ids'", TypeError)
def another_batch_to_verify() -> None:
    """verify(plan, batch=...) with a batch of another model."""
    _verify(batch=text(4))


@refused("A fresh process is handed text", InputError)
def a_live_model_in_a_fresh_process() -> None:
    """verify(plan, model, fresh_process=True) with a live model."""
    _verify(fresh_process=True)


def _verify(**options: Any) -> None:
    model = make("stack")
    settings = {"batch": batch_for("stack"), "device": "cpu", **options}
    if options.get("fresh_process"):
        settings["batch"] = None
    with unharmed(model):
        budgetfit.verify(plan_of(), model, **settings)


@right()
def planned_under_other_settings_of_torch() -> None:
    """plan() under autocast, no_grad and a default dtype of float64."""
    model, options = make("stack"), options_of("stack")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.autocast("cpu"):
            made = budgetfit.plan(model, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.estimate.allocated_bytes == plan_of().estimate.allocated_bytes


@refused("weight of Sequential has no shape yet.*Call the model once", InputError)
def lazy_module() -> None:
    """nn.LazyLinear that has not seen a batch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(8))
    budgetfit.plan(model, vram="2GB", batch=torch.zeros(4, 4))
