"""The models of the recorded cases and their batches, as data."""

from dataclasses import replace
from typing import Any, Final

from tests.accuracy.case import Input, Model


def _text(length: int, vocabulary: int) -> tuple[Input, ...]:
    """Token ids and labels of one length; no attention mask, nothing is padded."""
    return (
        Input(name="input_ids", shape=(length,), high=vocabulary),
        Input(name="labels", shape=(length,), high=vocabulary),
    )


def _padded(model: Model) -> Model:
    """The same with an attention mask: every second sample ends in padding."""
    length = model.inputs[0].shape[0]
    mask = Input(name="attention_mask", shape=(length,), padding=length // 8)
    return replace(
        model, name=f"{model.name}-padded", inputs=(*model.inputs, mask), note=""
    )


def _with(model: Model, suffix: str, **settings: Any) -> Model:
    """The same with other settings."""
    return replace(
        model, name=f"{model.name}-{suffix}", settings={**model.settings, **settings}
    )


def _images(size: int = 224) -> tuple[Input, ...]:
    return (
        Input(name="pixel_values", shape=(3, size, size), dtype="float32"),
        Input(name="labels", shape=(), high=2),
    )


# Language models that predict the next token. ----------------------------------------


def _gpt2(name: str, **settings: int) -> Model:
    return Model(
        name=name,
        builder="GPT2LMHeadModel",
        config="GPT2Config",
        settings={"use_cache": False, **settings},
        inputs=_text(1024, 50_257),
        chain="transformer.h",
    )


GPT2: Final = _gpt2("gpt2-124m")
GPT2_SHORT: Final = _gpt2("gpt2-4-layers", n_layer=4)
GPT2_355M: Final = _gpt2("gpt2-355m", n_embd=1024, n_layer=24, n_head=16)
GPT2_PADDED: Final = _padded(GPT2)
GPT2_EAGER: Final = _with(GPT2, "eager", attn_implementation="eager")
# transformers' default: keys and values are collected for generation, in training too.
GPT2_CACHE: Final = _with(GPT2, "cache", use_cache=True)


def _llama(name: str, length: int, **settings: int) -> Model:
    return Model(
        name=name,
        builder="LlamaForCausalLM",
        config="LlamaConfig",
        settings={"use_cache": False, **settings},
        inputs=_text(length, settings["vocab_size"]),
        chain="model.layers",
    )


_LLAMA_1B: Final = {
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
LLAMA_1024: Final = _llama("llama-1.1b-s1024", 1024, **_LLAMA_1B)
LLAMA_2048: Final = _llama("llama-1.1b-s2048", 2048, **_LLAMA_1B)
LLAMA_SHORT: Final = _llama(
    "llama-4-layers-s1024", 1024, **(_LLAMA_1B | {"num_hidden_layers": 4})
)
LLAMA_PADDED: Final = _padded(LLAMA_1024)
LLAMA_EAGER: Final = _with(LLAMA_1024, "eager", attn_implementation="eager")
LLAMA_3B: Final = _llama(
    "llama-3.2b-s2048",
    2048,
    hidden_size=3072,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=8192,
    vocab_size=128_256,
    tie_word_embeddings=True,
)
# The shape of Qwen2.5-0.5B: a vocabulary larger than all else.
QWEN: Final = Model(
    name="qwen-494m-s1024",
    builder="Qwen2ForCausalLM",
    config="Qwen2Config",
    settings={
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "use_cache": False,
    },
    inputs=_text(1024, 151_936),
    chain="model.layers",
)
MIXTRAL: Final = Model(
    name="mixtral-235m",
    builder="MixtralForCausalLM",
    config="MixtralConfig",
    settings={
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
        "use_cache": False,
    },
    inputs=_text(1024, 32_000),
    chain="model.layers",
    note=(
        "which expert gets which token is not known without a GPU: grouped_mm keeps "
        "all tokens in one tensor, so no size depends on it"
    ),
)
PLAIN_GPT: Final = Model(
    name="plain-gpt",
    builder="PlainGpt",
    settings={
        "vocabulary": 32_000,
        "length": 1024,
        "width": 768,
        "heads": 12,
        "depth": 12,
    },
    inputs=_text(1024, 32_000),
    blocks=("blocks",),
    chain="blocks",
)
LSTM: Final = Model(
    name="lstm",
    builder="LstmLanguageModel",
    settings={"vocabulary": 32_000, "width": 1024, "depth": 2, "dropout": 0.5},
    inputs=_text(128, 32_000),
    note="nn.LSTM runs without cuDNN: a GPU that uses it needs other buffers",
)

# Encoders. ---------------------------------------------------------------------------

BERT: Final = Model(
    name="bert-base",
    builder="BertForMaskedLM",
    config="BertConfig",
    inputs=_text(512, 30_522),
    chain="bert.encoder.layer",
)
BERT_SHORT: Final = replace(
    BERT, name="bert-4-layers", settings={"num_hidden_layers": 4}
)
BERT_PADDED: Final = _padded(BERT)
BERT_EAGER_PADDED: Final = _padded(_with(BERT, "eager", attn_implementation="eager"))
_LARGE: Final = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
BERT_LARGE: Final = replace(BERT, name="bert-large", settings=_LARGE)
MODERNBERT: Final = Model(
    name="modernbert-base",
    builder="ModernBertForMaskedLM",
    config="ModernBertConfig",
    settings={"attn_implementation": "sdpa"},
    inputs=_text(1024, 50_368),
    chain="model.layers",
)

# Encoder-decoders. -------------------------------------------------------------------


def _t5(name: str, **settings: int) -> Model:
    return Model(
        name=name,
        builder="T5ForConditionalGeneration",
        config="T5Config",
        settings={"decoder_start_token_id": 0, "use_cache": False, **settings},
        inputs=(
            Input(name="input_ids", shape=(512,), high=32_128),
            Input(name="labels", shape=(128,), high=32_128),
        ),
        # transformers' flag would make attention masks trainable in passing.
        blocks=("encoder.block", "decoder.block"),
    )


T5_SMALL: Final = _t5("t5-small")
T5_BASE: Final = _t5("t5-base", d_model=768, d_ff=3072, num_layers=12, num_heads=12)
TORCH_TRANSFORMER: Final = Model(
    name="torch-transformer",
    builder="TorchTransformer",
    settings={"width": 512, "heads": 8, "depth": 6, "target": 384},
    inputs=(
        Input(name="source", shape=(512, 512), dtype="float32"),
        Input(name="target", shape=(384, 512), dtype="float32"),
    ),
    blocks=("transformer.encoder.layers", "transformer.decoder.layers"),
    chain="transformer.encoder.layers",
)
_NO_CUDNN: Final = (
    "convolutions run without cuDNN: a GPU that uses it needs other workspaces"
)
WHISPER: Final = Model(
    name="whisper-small",
    builder="WhisperForConditionalGeneration",
    config="WhisperConfig",
    settings={
        "d_model": 768,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "use_cache": False,
    },
    inputs=(
        Input(name="input_features", shape=(80, 3000), dtype="float32"),
        Input(name="labels", shape=(224,), high=51_865),
    ),
    note=_NO_CUDNN,
)

# Sound and images. -------------------------------------------------------------------

# Layers are not left out and frames are not masked at random: which ones would be is
# drawn on the host, and the sizes of the step would follow from it.
WAV2VEC2: Final = Model(
    name="wav2vec2-base",
    builder="Wav2Vec2ForSequenceClassification",
    config="Wav2Vec2Config",
    settings={"layerdrop": 0.0, "apply_spec_augment": False},
    inputs=(
        Input(name="input_values", shape=(80_000,), dtype="float32"),
        Input(name="labels", shape=(), high=2),
    ),
    note=_NO_CUDNN,
)


def _vision(name: str, family: str, **more: Any) -> Model:
    return Model(
        name=name,
        builder=f"{family}ForImageClassification",
        config=f"{family}Config",
        inputs=_images(),
        **more,
    )


VIT: Final = _vision("vit-base", "ViT", chain="vit.layers")
VIT_SHORT: Final = replace(VIT, name="vit-4-layers", settings={"num_hidden_layers": 4})
VIT_LARGE: Final = replace(VIT, name="vit-large", settings=_LARGE)
SWIN: Final = _vision(
    "swin-tiny",
    "Swin",
    blocks=("swin.encoder.layers",),  # transformers' flag would nest stages and layers
    note=_NO_CUDNN,
)
CONVNEXT: Final = _vision(
    "convnext-tiny",
    "ConvNext",
    blocks=tuple(f"convnext.encoder.stages.{stage}.layers" for stage in range(4)),
    note=_NO_CUDNN,
)
RESNET50: Final = _vision(
    "resnet-50",
    "ResNet",
    blocks=tuple(f"resnet.encoder.stages.{stage}.layers" for stage in range(4)),
    note=_NO_CUDNN,
)
MLP_MIXER: Final = Model(
    name="mlp-mixer",
    builder="MlpMixer",
    settings={"image": 224, "patch": 16, "width": 768, "depth": 12, "classes": 1000},
    inputs=(
        Input(name="pixel_values", shape=(3, 224, 224), dtype="float32"),
        Input(name="labels", shape=(), high=1000),
    ),
    blocks=("blocks",),
    chain="blocks",
)
