"""Options of diffusers' training scripts (``examples/``) that say what a plan says.

Source: ``parse_args`` of ``examples/text_to_image/train_text_to_image.py`` and
``examples/dreambooth/train_dreambooth_lora_*.py`` (diffusers 0.42).
"""

from typing import Final

from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.integrations.source_code.model_loading import DIFFUSERS

_ADAMW: Final = frozenset({"adamw_torch", "adamw_torch_fused"})
_8BIT_ADAM: Final = frozenset({"adamw_bnb_8bit", "adamw_8bit"})


def script_lines(plan: Plan) -> list[str]:
    """Return comment lines on diffusers' own scripts; none for another model."""
    if not plan.model.class_name.startswith(DIFFUSERS):
        return []
    if plan.recipe.compile != "none":  # they compile nothing
        return []
    options = _options(plan)
    lines = [
        "",
        "Or by the options of diffusers' own training scripts (its examples/):",
        f"    {' '.join(options)}",
    ]
    if plan.recipe.optimizer not in _ADAMW | _8BIT_ADAM:
        lines += [
            f"These scripts have no option for {plan.recipe.optimizer} and train with",
            "AdamW, whose states may take more than predicted.",
        ]
    blocks = plan.recipe.wrapped_blocks
    if blocks and "--gradient_checkpointing" not in options:
        lines += [
            "These scripts recompute every block or none. To recompute those of the",
            "plan, call plan.prepare(model) where they call",
            "model.enable_gradient_checkpointing().",
        ]
    return lines


def _options(plan: Plan) -> list[str]:
    recipe = plan.recipe
    policy = find_precision(recipe.precision)
    options = [
        f"--train_batch_size={recipe.batch_size}",
        f"--gradient_accumulation_steps={recipe.gradient_accumulation_steps}",
        f"--mixed_precision={policy.autocast or 'no'}",
    ]
    size = (plan.provenance.get("asked") or {}).get("image_size")
    if size is not None:
        options.append(f"--resolution={min(map(int, str(size).split('x')))}")
    if policy.tf32:
        options.append("--allow_tf32")
    if recipe.optimizer in _8BIT_ADAM:
        options.append("--use_8bit_adam")
    if plan.adapter is not None:
        options.append(f"--rank={plan.adapter.r}")
    plain = {(len(part.blocks), part.mode, part.nested) for part in recipe.segments}
    every = set(recipe.wrapped_blocks) == set(plan.model.blocks)
    if every and plain == {(1, "recompute", False)}:
        options.append("--gradient_checkpointing")
    return options
