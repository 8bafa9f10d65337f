"""Encoders with decoders that write text."""

from torch import nn
from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

from tests.zoo.entry import Entry
from tests.zoo.shrink import shrink, small_entries


def _bert_to_bert() -> nn.Module:
    encoder, decoder = shrink(BertConfig()), shrink(BertConfig())
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return EncoderDecoderModel(config)


ENTRIES = [
    *small_entries(
        "sequence to sequence",
        (
            "BartForConditionalGeneration",
            "BigBirdPegasusForConditionalGeneration",
            "BlenderbotForConditionalGeneration",
            "BlenderbotSmallForConditionalGeneration",
            "FSMTForConditionalGeneration",
            "LEDForConditionalGeneration",
            "LongT5ForConditionalGeneration",
            "M2M100ForConditionalGeneration",
            "MBartForConditionalGeneration",
            "MT5ForConditionalGeneration",
            "MarianMTModel",
            "MvpForConditionalGeneration",
            "NllbMoeForConditionalGeneration",
            "PLBartForConditionalGeneration",
            "PegasusForConditionalGeneration",
            "PegasusXForConditionalGeneration",
            "ProphetNetForConditionalGeneration",
            "SeamlessM4TForTextToText",
            "SeamlessM4Tv2ForTextToText",
            "SwitchTransformersForConditionalGeneration",
            "T5ForConditionalGeneration",
            "T5Gemma2ForConditionalGeneration",
            "T5GemmaForConditionalGeneration",
            "UMT5ForConditionalGeneration",
        ),
    ),
    Entry("EncoderDecoderModel", "sequence to sequence", _bert_to_bert),
]
