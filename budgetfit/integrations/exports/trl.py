"""TRL: export a plan as ``SFTConfig`` arguments, SFT and DPO scripts."""

import dataclasses
from typing import Any, Final

from torch import nn

from budgetfit.core.plan import Plan
from budgetfit.errors import InputError
from budgetfit.integrations.exports.language_models import refuse_unless_language_model
from budgetfit.integrations.exports.trainer_arguments import (
    known_fields,
    planned_arguments,
)
from budgetfit.integrations.exports.trainer_script import ScriptParts, program_text
from budgetfit.integrations.optional_imports import import_attribute
from budgetfit.integrations.source_code.python_source import (
    exported_eval_batch_size,
    planned_length,
    planned_padding,
)
from budgetfit.reporting.formatting import sample_text
from budgetfit.utils.format_bytes import format_bytes


def sft_arguments(plan: Plan, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for the installed ``SFTConfig``.

    Those of ``TrainingArguments``, overriding TRL's defaults (bf16 and checkpointing
    on), and the planned sequence length and padding.

    Raises:
        InputError: If TRL is not installed, or as ``training_arguments``.
    """
    known = known_fields(import_attribute("trl", "SFTConfig"))
    planned = {name: n for name, n in _length(plan).items() if name in known}
    return planned_arguments(plan, known, {**planned, **overrides})


def has_fused_head(model: nn.Module) -> bool:
    """Whether TRL has replaced the forward by one that chunks the loss itself."""
    # Detected by an argument of TRL's forward, inside accelerate's wrappers and PEFT's
    # module.
    return any(_takes_fused_head(module) for module in model.modules())


def _takes_fused_head(module: nn.Module) -> bool:
    forward: Any = vars(module).get("forward")
    while forward is not None:
        code = getattr(forward, "__code__", None)
        if code is not None and "fused_lm_head" in code.co_varnames:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def has_pairs(args: object) -> bool:
    """Whether these are TRL's arguments for DPO or a reward: samples are pairs."""
    # Both sequences of a pair run in one forward (TRL 1.16, the trainers' collators).
    names = {cls.__name__ for cls in type(args).__mro__}
    return not names.isdisjoint({"DPOConfig", "RewardConfig"})


def export_text(plan: Plan, plan_file: str) -> str:
    """Return a Python script with an SFTTrainer; does not import TRL.

    Raises:
        InputError: If it is no causal language model, or the trainer has no such
            optimizer.
    """
    refuse_unless_language_model(plan, "SFTTrainer")
    return program_text(plan, plan_file, _SFT)


def dpo_text(plan: Plan, plan_file: str) -> str:
    """Return a Python script with a DPOTrainer; does not import TRL.

    Raises:
        InputError: If a micro-batch has an odd number of samples, or images beside
            text, or as ``export_text``.
    """
    refuse_unless_language_model(plan, "DPOTrainer")
    if "pixel_values" in plan.model.batch:
        raise InputError(
            "Only plans of texts can be exported for DPO, and a sample of this one is "
            f"{sample_text(plan.model.batch)}. Use --to trainer instead."
        )
    size = plan.recipe.batch_size
    if size % 2:
        raise InputError(
            "A sample of DPO is a pair, two sequences of the planned length, and the "
            f"plan's micro-batch of {size} cannot be halved. Plan again with an even "
            f"one: --batch-size {max(2, size - 1)}."
        )
    remarks = (*_reference(plan), *_DPO.remarks)
    return program_text(plan, plan_file, dataclasses.replace(_DPO, remarks=remarks))


def _reference(plan: Plan) -> list[str]:
    """Say what the card holds for the reference log-probabilities."""
    # See TRL 1.16's ``DPOTrainer.__init__`` and ``_precompute_ref_logps``.
    pair = "A pair is two of the planned samples. The reference log-probabilities are"
    parallelism = plan.recipe.parallelism
    if plan.adapter is not None:
        copy = format_bytes(_BYTES_OF_FLOAT32 * plan.model.trainable_count)
        base = "computed before training: no second base model is on the card."
        adapters = f"the frozen copy of the adapters that TRL adds and keeps ({copy})."
        return [pair, f"{base} Not predicted:", adapters]
    if parallelism is not None and parallelism.engine == "fsdp2":
        return [
            pair,
            "computed with a second copy of the model, dropped before training.",
        ]
    return [
        pair,
        "computed before training: no second copy of the model is on the card.",
    ]


def _length(plan: Plan) -> dict[str, Any]:
    """Return the longest length, and what batches are padded to a multiple of."""
    length = planned_length(plan)
    longest = {} if length is None else {"max_length": length}
    return {**longest, **planned_padding(plan)}


def _pairs(plan: Plan) -> dict[str, Any]:
    """Return halved batch sizes, and precomputed reference log probabilities."""
    found = {
        "per_device_train_batch_size": plan.recipe.batch_size // 2,
        "precompute_ref_log_probs": True,
        **_length(plan),
    }
    if (samples := exported_eval_batch_size(plan)) is not None:
        found["per_device_eval_batch_size"] = max(samples // 2, 1)
    return found


_BYTES_OF_FLOAT32: Final = 4  # in which PEFT adds adapters beside others
# Fields of TRL 1.16's SFTConfig and DPOConfig (trl/trainer/sft_config.py,
# dpo_config.py) that TrainingArguments does not have. In both trainers the model chunks
# its loss (trl's add_fused_lm_head).
_SFT: Final = ScriptParts(
    what="An SFTTrainer",
    library="trl",
    trainer="SFTTrainer",
    arguments="SFTConfig",
    extra=frozenset({"max_length", "pad_to_multiple_of"}),
    settings=_length,
    columns='"text" or "messages"',
    cuts_loss=True,
)
_DPO: Final = ScriptParts(
    what="A DPOTrainer",
    library="trl",
    trainer="DPOTrainer",
    arguments="DPOConfig",
    extra=frozenset({"max_length", "pad_to_multiple_of", "precompute_ref_log_probs"}),
    settings=_pairs,
    columns='"prompt", "chosen" and "rejected"',
    cuts_loss=True,
    remarks=("Not predicted: the few more tensors of DPO's own loss.",),
)
