"""TRL: arguments for ``SFTConfig``, and whether TRL computes a model's loss itself."""

from __future__ import annotations

import dataclasses
from string import Template
from typing import TYPE_CHECKING, Any, Final

from budgetfit.integrations.export_words import (
    about,
    keywords,
    planned_length,
    source,
)
from budgetfit.integrations.installed import find_attribute
from budgetfit.integrations.trainer_arguments import exported, planned_arguments

if TYPE_CHECKING:
    from torch import nn

    from budgetfit.core.plan import Plan


def sft_arguments(plan: Plan, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for the installed ``SFTConfig``.

    Those of ``TrainingArguments``, where TRL's own defaults (bf16 and checkpointing on)
    are answered too, and the planned length of a sample.

    Raises:
        InputError: If TRL is not installed, or as ``training_arguments``.
    """
    config = find_attribute("trl", "SFTConfig")
    known = {item.name for item in dataclasses.fields(config) if item.init}
    length = planned_length(plan)
    if length is not None and "max_length" in known:
        overrides = {"max_length": length, **overrides}
    return planned_arguments(plan, known, overrides)


def has_fused_head(model: nn.Module) -> bool:
    """Say whether TRL has replaced the forward by one that cuts the loss itself.

    Seen by the argument that TRL's forward takes; accelerate's wrappers lie around it,
    PEFT's module too.
    """
    return any(_takes_fused_head(module) for module in model.modules())


def _takes_fused_head(module: nn.Module) -> bool:
    forward: Any = vars(module).get("forward")
    while forward is not None:
        code = getattr(forward, "__code__", None)
        if code is not None and "fused_lm_head" in code.co_varnames:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


_TEXT: Final = Template('''\
"""$about
"""

from trl import SFTConfig, SFTTrainer

import budgetfit

plan = budgetfit.Plan.load($plan)


def make_trainer(model, train_dataset, processing_class, **options):
    """Return an SFTTrainer of the planned model, which trains as planned."""
    args = SFTConfig(
        output_dir="out",
$arguments    )
    return SFTTrainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        processing_class=processing_class,
        callbacks=[plan.trainer_callback()],  # recomputes the planned blocks
$optimizer        **options,
    )
''')


def export_text(plan: Plan, plan_file: str) -> str:
    """Return Python source with a function that makes the SFTTrainer.

    Raises:
        InputError: As ``sft_arguments``.
    """
    overrides, optimizer = exported(plan)
    return _TEXT.substitute(
        about="\n".join(about(plan, "An SFTTrainer")),
        plan=source(plan_file),
        arguments=keywords(sft_arguments(plan, overrides), 8),
        optimizer=optimizer,
    )
