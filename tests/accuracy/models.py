"""The models of the recorded cases and their batches, as data."""

from typing import Final

from tests.accuracy.case import Input, Model


def _text(length: int, vocabulary: int) -> tuple[Input, ...]:
    """Token ids and labels of one length; no attention mask, nothing is padded."""
    return (
        Input(name="input_ids", shape=(length,), high=vocabulary),
        Input(name="labels", shape=(length,), high=vocabulary),
    )


def _llama(length: int) -> Model:
    return Model(
        name=f"llama-1.1b-s{length}",
        builder="LlamaForCausalLM",
        config="LlamaConfig",
        settings={
            "hidden_size": 2048,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "intermediate_size": 5632,
            "vocab_size": 32_000,
            "max_position_embeddings": 2048,
            "use_cache": False,
        },
        inputs=_text(length, 32_000),
    )


GPT2: Final = Model(
    name="gpt2-124m",
    builder="GPT2LMHeadModel",
    config="GPT2Config",
    settings={"use_cache": False},
    inputs=_text(1024, 50_257),
)
LLAMA_1024: Final = _llama(1024)
LLAMA_2048: Final = _llama(2048)
BERT: Final = Model(
    name="bert-base",
    builder="BertForMaskedLM",
    config="BertConfig",
    inputs=_text(512, 30_522),
)
VIT: Final = Model(
    name="vit-base",
    builder="ViTForImageClassification",
    config="ViTConfig",
    inputs=(
        Input(name="pixel_values", shape=(3, 224, 224), dtype="float32"),
        Input(name="labels", shape=(), high=2),
    ),
)
GPT2_EAGER: Final = Model(
    name="gpt2-124m-eager",
    builder="GPT2LMHeadModel",
    config="GPT2Config",
    settings={"use_cache": False, "attn_implementation": "eager"},
    inputs=_text(1024, 50_257),
)
# transformers' default: keys and values are collected for generation, in training too.
GPT2_CACHE: Final = Model(
    name="gpt2-124m-cache",
    builder="GPT2LMHeadModel",
    config="GPT2Config",
    inputs=_text(1024, 50_257),
)


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
    )


T5_SMALL: Final = _t5("t5-small")
T5_BASE: Final = _t5("t5-base", d_model=768, d_ff=3072, num_layers=12, num_heads=12)
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
    note=(
        "which expert gets which token is not known without a GPU: grouped_mm keeps "
        "all tokens in one tensor, so no size depends on it"
    ),
)
TORCH_TRANSFORMER: Final = Model(
    name="torch-transformer",
    builder="TorchTransformer",
    settings={"width": 512, "heads": 8, "depth": 6, "target": 384},
    inputs=(
        Input(name="source", shape=(512, 512), dtype="float32"),
        Input(name="target", shape=(384, 512), dtype="float32"),
    ),
    blocks=("transformer.encoder.layers", "transformer.decoder.layers"),
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
)
RESNET50: Final = Model(
    name="resnet-50",
    builder="ResNetForImageClassification",
    config="ResNetConfig",
    inputs=VIT.inputs,
    blocks=tuple(f"resnet.encoder.stages.{stage}.layers" for stage in range(4)),
    note="convolutions run without cuDNN: a GPU that uses it needs other workspaces",
)
