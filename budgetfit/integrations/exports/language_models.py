"""Which plans programs for language models can carry out."""

from budgetfit.core.plan import Plan
from budgetfit.errors import InputError
from budgetfit.reporting.formatting import sample_text


def refuse_unless_language_model(plan: Plan, program: str) -> None:
    """Refuse samples without tokens, and classes that are no causal language model."""
    # Those that also take images are among these. Classes that transformers does not
    # know are not refused.
    if "input_ids" not in plan.model.batch:
        raise InputError(
            f"{program} trains models of language, and a sample of this plan is "
            f"{sample_text(plan.model.batch)}. Use --to trainer or --to torch instead."
        )
    if plan.model.class_name and not _is_causal(plan.model.class_name):
        raise InputError(
            f"{program} trains causal language models, and this plan is for a "
            f"{plan.model.class_name}. Use --to trainer or --to torch instead."
        )


def _is_causal(class_name: str) -> bool:
    """Whether transformers loads a class to continue texts, with images or sounds."""
    import transformers  # noqa: PLC0415 - takes seconds
    from transformers.models.auto import modeling_auto as auto  # noqa: PLC0415

    return class_name not in dir(transformers) or class_name in {
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
        *auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values(),
    }
