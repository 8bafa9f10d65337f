"""Encoders that fill in masked tokens, and other pretraining heads of text models."""

from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from tests.zoo.shrink import small_entries

# Those that see too, of proteins, and those that other tables have.
_OTHER_TABLES = {
    "BartForConditionalGeneration",
    "EsmForMaskedLM",
    "EsmcForMaskedLM",
    "MBartForConditionalGeneration",
    "ModernVBertForMaskedLM",
    "MvpForConditionalGeneration",
    "NeoMMEForMaskedLM",
    "PerceiverForMaskedLM",
    "UltraVBertForMaskedLM",
    "XLMWithLMHeadModel",
}

ENTRIES = [
    *small_entries(
        "masked LM",
        (
            name
            for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
            if name not in _OTHER_TABLES
        ),
    ),
    *small_entries(
        "pretraining",
        (
            "AlbertForPreTraining",
            "BertForPreTraining",
            "BigBirdForPreTraining",
            "ElectraForPreTraining",
            "ErnieForPreTraining",
            "FNetForPreTraining",
            "FunnelForPreTraining",
            "MegatronBertForPreTraining",
            "MobileBertForPreTraining",
            "RoCBertForPreTraining",
            "SplinterForPreTraining",
        ),
    ),
]
