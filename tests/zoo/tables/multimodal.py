"""Stock models of images and text, of documents, and of sound and text."""

from typing import Any

from tests.zoo.shrink import small_entries

Models = dict[str, dict[str, Any]]
_AS_IS = {"/": 1}


def _plain(names: str) -> Models:
    return {name: {} for name in names.split()}


CONTRAST: Models = {
    **_plain(
        "CLIPModel AltCLIPModel BlipModel ChineseCLIPModel CLIPSegModel "
        "MetaClip2Model GroupViTModel OwlViTModel VisionTextDualEncoderModel"
    ),
    "SiglipModel": {"text_config.projection_size": 64},
}
VISION_LANGUAGE: Models = {
    **_plain(
        "BlipForConditionalGeneration Cohere2VisionForConditionalGeneration "
        "Florence2ForConditionalGeneration FuyuForCausalLM GitForCausalLM "
        "GotOcr2ForConditionalGeneration Idefics3ForConditionalGeneration "
        "InternVLForConditionalGeneration Lfm2VlForConditionalGeneration "
        "LlavaForConditionalGeneration LlavaNextForConditionalGeneration "
        "LlavaOnevisionForConditionalGeneration VideoLlavaForConditionalGeneration "
        "VipLlavaForConditionalGeneration Mistral3ForConditionalGeneration "
        "Ovis2ForConditionalGeneration PaliGemmaForConditionalGeneration "
        "SmolVLMForConditionalGeneration AriaForConditionalGeneration "
        "Gemma3ForConditionalGeneration DeepseekVLForConditionalGeneration "
        "VisionEncoderDecoderModel"
    ),
    "Qwen2VLForConditionalGeneration": {
        "/": 16,
        "vision_config.num_heads": 2,
        "vision_config.hidden_size": 512,
    },
    "AyaVisionForConditionalGeneration": {
        "/": 4,
        "vision_config.num_attention_heads": 4,
        "vision_config.hidden_size": 64,
        "text_config.hidden_size": 256,
        "text_config.intermediate_size": 256,
        "text_config.num_attention_heads": 4,
        "text_config.num_key_value_heads": 2,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "/": 16,
        "vision_config.hidden_size": 80,
        "vision_config.num_heads": 2,
        "vision_config.intermediate_size": 64,
        "vision_config.depth": 2,
        "vision_config.fullatt_block_indexes": [1],
        "vision_config.out_hidden_size": 512,
    },
    "Qwen3VLForConditionalGeneration": {
        "/": 8,
        "vision_config.out_hidden_size": 512,
        "vision_config.depth": 3,
        "vision_config.deepstack_visual_indexes": [0, 1],
    },
    "Llama4ForConditionalGeneration": {
        "/": 8,
        "text_config.intermediate_size": 256,
        "text_config.intermediate_size_mlp": 256,
        "text_config.num_local_experts": 4,
    },
    "Blip2ForConditionalGeneration": {"image_token_index": 1000, "num_query_tokens": 4},
}
QUESTIONS: Models = _plain(
    "ViltForQuestionAnswering BlipForQuestionAnswering LxmertForQuestionAnswering "
    "TapasForQuestionAnswering"
)
DOCUMENTS: Models = {
    **_plain(
        "LayoutLMForTokenClassification LayoutLMForQuestionAnswering "
        "BrosForTokenClassification MarkupLMForTokenClassification"
    ),
    "LiltForTokenClassification": _AS_IS,
    "LayoutLMv3ForTokenClassification": _AS_IS,
    "LayoutLMv3ForQuestionAnswering": _AS_IS,
}
AUDIO_LANGUAGE: Models = _plain(
    "Qwen2AudioForConditionalGeneration VoxtralForConditionalGeneration "
    "AudioFlamingo3ForConditionalGeneration"
)

ENTRIES = [
    *small_entries("image and text contrast", CONTRAST),
    *small_entries("vision-language", VISION_LANGUAGE),
    *small_entries("visual questions", QUESTIONS),
    *small_entries("documents", DOCUMENTS),
    *small_entries("audio-language", AUDIO_LANGUAGE),
]
