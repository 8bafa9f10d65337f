"""Tiny models of many transformers architectures, each a few thousand parameters."""

import transformers as t

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24}
BERT = SIZES | {"vocab_size": 99, "max_position_embeddings": 40}
LLAMA = BERT | {"num_key_value_heads": 1, "pad_token_id": 0}
ENCODER_DECODER = {
    "vocab_size": 99,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
BART = ENCODER_DECODER | {
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": 99,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
GPT2 = {"vocab_size": 99, "n_positions": 40, "n_embd": 16, "n_layer": 1, "n_head": 2}
GPT2 |= {"bos_token_id": 98, "eos_token_id": 98}
VIT = SIZES | {"image_size": 32, "patch_size": 8, "num_channels": 1, "num_labels": 5}
WAVES = SIZES | {
    "vocab_size": 30,
    "conv_dim": (8, 8, 8),
    "conv_stride": (10, 8, 4),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "classifier_proj_size": 8,
    "tdnn_dim": (8, 8),
    "tdnn_kernel": (3, 1),
    "tdnn_dilation": (1, 1),
    "xvector_output_dim": 8,
}
WHISPER = ENCODER_DECODER | {
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SPEECH2TEXT = WHISPER | {
    "input_feat_per_channel": 8,
    "max_source_positions": 600,
    "conv_channels": 16,
}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "window_size": 4,
    "num_labels": 5,
}
CLIP = {
    "text_config": BERT | {"max_position_embeddings": 20, "eos_token_id": 98},
    "vision_config": VIT,
    "projection_dim": 8,
}
SEGFORMER = {
    "image_size": 64,
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 8,
    "num_labels": 5,
}
MAE = VIT | {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 24,
    "mask_ratio": 0.5,
    "norm_pix_loss": True,
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
RESNET |= {"num_labels": 5}
AST = VIT | {"num_mel_bins": 16, "max_length": 24, "frequency_stride": 8}
AST |= {"time_stride": 8}
CAPTION = {"encoder": VIT | {"model_type": "vit"}}
CAPTION |= {"decoder": GPT2 | {"model_type": "gpt2", "add_cross_attention": True}}
CAPTION |= {"pad_token_id": 0, "decoder_start_token_id": 1}
DISTIL = {"vocab_size": 99, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
DISTIL |= {"max_position_embeddings": 40}
BLOOM = {"vocab_size": 99, "hidden_size": 16, "n_layer": 1, "n_head": 2}
VIDEO = VIT | {"num_frames": 4, "tubelet_size": 2}

WAVES_MASKED = WAVES | {"codevector_dim": 8, "proj_codevector_dim": 8}
WAVES_MASKED |= {"num_codevectors_per_group": 4, "num_negatives": 5}
WAVES_MASKED |= {"mask_time_prob": 0.05}
SWIN_OF_SOUND = {
    "hidden_size": 16,
    "patch_embeds_hidden_size": 8,
    "depths": [1, 1],
    "num_hidden_layers": 2,
    "num_attention_heads": [2, 2],
    "spec_size": 32,
    "num_mel_bins": 8,
    "window_size": 4,
}
CLAP = {"text_config": BERT, "audio_config": SWIN_OF_SOUND, "projection_dim": 8}
FUSED_CLAP = CLAP | {"audio_config": SWIN_OF_SOUND | {"enable_fusion": True}}
CODEC = {"num_filters": 2, "hidden_size": 8, "codebook_size": 8, "codebook_dim": 8}
MUSIC = {
    "text_encoder": T5 | {"model_type": "t5"},
    "audio_encoder": CODEC | {"model_type": "encodec"},
    "decoder": {
        "vocab_size": 8,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 16,
        "pad_token_id": 7,
        "bos_token_id": 7,
    },
}

# Class name -> fields of its config: models whose heads compute a loss.
WITH_LOSS = {
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": LLAMA,
    "MixtralForCausalLM": LLAMA | {"num_local_experts": 2},
    "Qwen2ForCausalLM": LLAMA,
    "OPTForCausalLM": BERT | {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "GPTNeoXForCausalLM": BERT,
    "BloomForCausalLM": BLOOM,
    "BertForMaskedLM": BERT,
    "RobertaForMaskedLM": BERT,
    "DistilBertForMaskedLM": DISTIL,
    "AlbertForMaskedLM": BERT | {"embedding_size": 8},
    "DebertaV2ForMaskedLM": BERT,
    "BertForPreTraining": BERT,
    "AlbertForPreTraining": BERT | {"embedding_size": 8},
    "ElectraForPreTraining": BERT | {"embedding_size": 8},
    "T5ForConditionalGeneration": T5,
    "BartForConditionalGeneration": BART,
    "MarianMTModel": BART,
    "PegasusForConditionalGeneration": BART,
    "BertForSequenceClassification": BERT | {"num_labels": 3},
    "RobertaForSequenceClassification": BERT | {"num_labels": 1},
    "LlamaForSequenceClassification": LLAMA | {"num_labels": 3},
    "GPT2ForSequenceClassification": GPT2 | {"num_labels": 3, "pad_token_id": 0},
    "BartForSequenceClassification": BART | {"num_labels": 3},
    "BertForTokenClassification": BERT | {"num_labels": 7},
    "BertForQuestionAnswering": BERT,
    "DistilBertForQuestionAnswering": DISTIL,
    "BertForMultipleChoice": BERT,
    "BertForNextSentencePrediction": BERT,
    "ViTForImageClassification": VIT,
    "DeiTForImageClassification": VIT,
    "ConvNextForImageClassification": RESNET | {"image_size": 32, "num_stages": 2},
    "ResNetForImageClassification": RESNET,
    "SwinForImageClassification": SWIN,
    "SegformerForSemanticSegmentation": SEGFORMER,
    "ViTMAEForPreTraining": MAE,
    "ViTForMaskedImageModeling": VIT | {"encoder_stride": 8},
    "VideoMAEForVideoClassification": VIDEO,
    "VideoMAEForPreTraining": VIDEO | MAE | {"num_channels": 3},
    "TimesformerForVideoClassification": VIDEO,
    "CLIPModel": CLIP,
    "SiglipModel": CLIP,
    "VisionEncoderDecoderModel": CAPTION,
    "Wav2Vec2ForCTC": WAVES,
    "Wav2Vec2ForPreTraining": WAVES_MASKED,
    "ClapModel": CLAP,
    "MusicgenForConditionalGeneration": MUSIC,
    "HubertForSequenceClassification": WAVES | {"num_labels": 3},
    "Wav2Vec2ForAudioFrameClassification": WAVES | {"num_labels": 3},
    "WavLMForXVector": WAVES | {"num_labels": 3},
    "WhisperForConditionalGeneration": WHISPER,
    "WhisperForAudioClassification": WHISPER | {"num_labels": 3},
    "Speech2TextForConditionalGeneration": SPEECH2TEXT,
    "ASTForAudioClassification": AST,
}

WITHOUT_LOSS = {
    "BertModel": BERT,
    "LlamaModel": LLAMA,
    "T5Model": T5,
    "BartModel": BART,
    "ViTModel": VIT,
    "CLIPVisionModel": VIT,
    "Wav2Vec2Model": WAVES,
    "EncodecModel": CODEC,
    "WhisperModel": WHISPER,
}


def tiny_model(name: str) -> t.PreTrainedModel:
    model_class = getattr(t, name)
    fields = (WITH_LOSS | WITHOUT_LOSS)[name]
    return model_class(model_class.config_class(**fields)).train()
