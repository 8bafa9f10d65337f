"""Decoders that predict the next token: dense, mixtures of experts, state spaces."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo.shrink import small_entries

# Models that also see or hear; they are in another table.
_OTHER_TABLES = {
    "BltForCausalLM",
    "FuyuForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Gemma4AssistantForCausalLM",  # drafts for a Gemma4 and reads its states
    "Gemma4UnifiedAssistantForCausalLM",
    "GitForCausalLM",
    "GotOcr2ForConditionalGeneration",
    "MossTranscribeDiarizeForConditionalGeneration",
    "Phi4MultimodalForCausalLM",
}

ENTRIES = list(
    small_entries(
        "causal LM",
        (
            name
            for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            if name not in _OTHER_TABLES
        ),
    )
)
