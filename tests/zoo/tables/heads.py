"""Text models that classify: whole texts, tokens, spans, choices; and bare encoders.

The bodies are those of the other tables, so that a choice is enough: each kind of
encoder, encoder-decoder and decoder.
"""

from tests.zoo.shrink import small_entries

_HEADS = {
    "sequence classification": """
        AlbertForSequenceClassification BartForSequenceClassification
        BertForSequenceClassification CanineForSequenceClassification
        DebertaV2ForSequenceClassification DistilBertForSequenceClassification
        FunnelForSequenceClassification GPT2ForSequenceClassification
        GemmaForSequenceClassification JambaForSequenceClassification
        LlamaForSequenceClassification LongformerForSequenceClassification
        MarkupLMForSequenceClassification MixtralForSequenceClassification
        ModernBertForSequenceClassification NystromformerForSequenceClassification
        OPTForSequenceClassification Qwen3ForSequenceClassification
        ReformerForSequenceClassification RobertaForSequenceClassification
        T5ForSequenceClassification TapasForSequenceClassification
        XLNetForSequenceClassification
    """,
    "token classification": """
        BertForTokenClassification BigBirdForTokenClassification
        BloomForTokenClassification CanineForTokenClassification
        ConvBertForTokenClassification ElectraForTokenClassification
        FalconForTokenClassification GptOssForTokenClassification
        LukeForTokenClassification MT5ForTokenClassification
        OpenAIPrivacyFilterForTokenClassification Qwen3NextForTokenClassification
        XLMRobertaForTokenClassification
    """,
    "question answering": """
        BertForQuestionAnswering DebertaForQuestionAnswering
        FlaubertForQuestionAnsweringSimple GPTJForQuestionAnswering
        LEDForQuestionAnswering MPNetForQuestionAnswering RemBertForQuestionAnswering
        SplinterForQuestionAnswering SqueezeBertForQuestionAnswering
        T5ForQuestionAnswering XLMForQuestionAnsweringSimple YosoForQuestionAnswering
    """,
    "multiple choice": """
        BertForMultipleChoice CanineForMultipleChoice FNetForMultipleChoice
        MegatronBertForMultipleChoice MobileBertForMultipleChoice
        RoFormerForMultipleChoice XLNetForMultipleChoice XmodForMultipleChoice
    """,
    "next sentence": """
        BertForNextSentencePrediction ErnieForNextSentencePrediction
    """,
    "text encoding": """
        BertModel CLIPTextModel GPT2Model LlamaModel T5EncoderModel T5Model
        XLMRobertaModel
    """,
}

ENTRIES = [
    entry
    for task, names in _HEADS.items()
    for entry in small_entries(task, names.split())
]
