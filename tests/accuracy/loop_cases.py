"""Models in training loops: what ``loops.py`` records and predicts, as plain data."""

from dataclasses import dataclass, replace
from typing import Any, Final

from tests.accuracy.case import Case, Input, Model, Precision

GPU: Final = "rtx-4090"
STEPS: Final = 5  # optimizer steps; evaluation follows the third
LORA_RANK: Final = 16


@dataclass(frozen=True, kw_only=True)
class LoopCase:
    """A model that a loop trains.

    Attributes:
        name: Unique.
        case: What trains: model, batch, precision, accumulation, what is recomputed.
        loop: ``plain``, ``accelerate``, ``trainer``, ``sft`` or ``lightning``.
        settings: Fields of ``budgetfit.Loop`` beside the kind.
        saved_modules: ``modules_to_save`` of a LoRA adapter on a base in bf16.
        liger: Whether the model is made of Liger's kernels, as
            ``AutoLigerKernelForCausalLM`` makes it.
    """

    name: str
    case: Case
    loop: str
    settings: tuple[tuple[str, Any], ...] = ()
    saved_modules: tuple[str, ...] = ()
    liger: bool = False


def _language_model(
    name: str, builder: str, config: str, vocabulary: int, **settings: Any
) -> Model:
    return Model(
        name=name,
        builder=builder,
        config=config,
        settings={"vocab_size": vocabulary, **settings},
        inputs=(
            Input(name="input_ids", shape=(512,), high=vocabulary),
            Input(name="attention_mask", shape=(512,), padding=64),
            Input(name="labels", shape=(512,), high=vocabulary),
        ),
    )


_LLAMA_LIKE: Final = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
}
# With transformers' default of use_cache: True, where the model generates.
GPT2: Final = _language_model(
    "gpt2", "GPT2LMHeadModel", "GPT2Config", 50_257, n_layer=6
)
LLAMA: Final = _language_model(
    "llama", "LlamaForCausalLM", "LlamaConfig", 32_000, **_LLAMA_LIKE
)
QWEN3: Final = _language_model(
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3Config",
    64_000,
    **_LLAMA_LIKE,
    head_dim=64,
    tie_word_embeddings=True,
)
MISTRAL: Final = _language_model(
    "mistral", "MistralForCausalLM", "MistralConfig", 32_000, **_LLAMA_LIKE
)
PYTHIA: Final = _language_model(
    "pythia",
    "GPTNeoXForCausalLM",
    "GPTNeoXConfig",
    50_304,
    hidden_size=768,
    num_hidden_layers=6,
    num_attention_heads=12,
    intermediate_size=3072,
)
BERT: Final = Model(
    name="bert",
    builder="BertForSequenceClassification",
    config="BertConfig",
    settings={"num_hidden_layers": 8},
    inputs=(
        Input(name="input_ids", shape=(256,), high=30_522),
        Input(name="attention_mask", shape=(256,), padding=32),
        Input(name="labels", shape=()),
    ),
)
VIT: Final = Model(
    name="vit",
    builder="ViTForImageClassification",
    config="ViTConfig",
    settings={"num_hidden_layers": 8},
    inputs=(
        Input(name="pixel_values", shape=(3, 224, 224), dtype="float32"),
        Input(name="labels", shape=()),
    ),
)
T5: Final = Model(
    name="t5",
    builder="T5ForConditionalGeneration",
    config="T5Config",
    settings={
        "num_layers": 6,
        "num_decoder_layers": 6,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
    inputs=(
        Input(name="input_ids", shape=(256,), high=32_128),
        Input(name="labels", shape=(128,), high=32_128),
    ),
)


def _case(
    model: Model, batch_size: int, precision: Precision, accumulation: int = 1
) -> Case:
    return Case(
        name=model.name,
        model=model,
        batch_size=batch_size,
        precision=precision,
        gradient_accumulation_steps=accumulation,
        gpu=GPU,
    )


_GPT2: Final = _case(GPT2, 8, "bf16-mixed")
_LLAMA: Final = _case(LLAMA, 4, "bf16-mixed", 4)
_BERT: Final = _case(BERT, 16, "fp32")
_VIT: Final = _case(VIT, 32, "fp16-mixed", 2)
_T5: Final = _case(T5, 8, "fp32")
_QWEN3: Final = _case(QWEN3, 4, "bf16-mixed", 2)
_MISTRAL: Final = _case(MISTRAL, 4, "bf16")
_SFT: Final = (_GPT2, _LLAMA, _QWEN3, _MISTRAL, _case(PYTHIA, 8, "bf16-mixed"))
_ALL: Final = (_GPT2, _LLAMA, _BERT, _VIT, _T5)
_MODELS: Final = {
    "plain": _ALL,
    "trainer": _ALL,
    "sft": _SFT,
    "accelerate": _ALL,
    "lightning": _ALL,
}


def _loops() -> list[LoopCase]:
    """Every loop with five models, everything kept and every block recomputed."""
    return [
        LoopCase(
            name=f"{loop}-{case.name}-{what}",
            case=replace(case, checkpointing=what),
            loop=loop,
        )
        for loop, cases in _MODELS.items()
        for case in cases
        for what in ("keep", "recompute")
    ]


def _with(loop: str, case: Case, mark: str, **settings: Any) -> LoopCase:
    return LoopCase(
        name=f"{loop}-{case.name}-{mark}",
        case=case,
        loop=loop,
        settings=tuple(settings.items()),
    )


def _saving(
    loop: str, case: Case, *modules: str, precision: Precision = "bf16"
) -> LoopCase:
    return LoopCase(
        name=f"{loop}-{case.name}-{precision}-saves-{'-'.join(modules)}",
        case=replace(case, precision=precision, gradient_accumulation_steps=1),
        loop=loop,
        saved_modules=modules,
    )


SWITCHES: Final = (
    _with("plain", _GPT2, "ema", ema=True),
    _with("plain", _BERT, "ema", ema=True),
    _with("plain", _LLAMA, "clip", max_grad_norm=1.0),
    _with("plain", _T5, "clip", max_grad_norm=1.0),
    _with("plain", _GPT2, "zeros", set_to_none=False),
    _with("plain", _BERT, "zeros", set_to_none=False),
    _with("plain", _GPT2, "evaluation", evaluation_batch_size=16),
    _with("plain", _LLAMA, "evaluation", evaluation_batch_size=4),
    _with("plain", _BERT, "evaluation", evaluation_batch_size=64),
    _with("accelerate", _VIT, "clip", max_grad_norm=1.0),
    _with("accelerate", _GPT2, "zeros", set_to_none=False),
    _with("accelerate", _GPT2, "evaluation", evaluation_batch_size=16),
    _with("trainer", _GPT2, "ema", ema=True),
    _with("trainer", _GPT2, "evaluation", evaluation_batch_size=16),
    _with("trainer", _BERT, "evaluation", evaluation_batch_size=64),
    _with("lightning", _BERT, "clip", max_grad_norm=1.0),
    _with("lightning", _BERT, "ema", ema=True),
    _with("lightning", _T5, "evaluation", evaluation_batch_size=32),
    _saving("plain", _LLAMA, "lm_head"),
    _saving("plain", _LLAMA, "embed_tokens", "lm_head"),
    _saving("plain", _GPT2, "lm_head", precision="bf16-mixed"),
    _saving("trainer", _LLAMA, "lm_head", precision="bf16-mixed"),
    _saving("trainer", _GPT2, "lm_head"),
)


def _liger(case: Case) -> LoopCase:
    return LoopCase(
        name=f"plain-{case.name}-liger-{case.checkpointing}",
        case=case,
        loop="plain",
        liger=True,
    )


_FOR_LIGER: Final = (_LLAMA, _QWEN3, _MISTRAL)
# What takes the place of logits and padding, beside the same without it.
KERNELS: Final = (
    *(
        _liger(replace(case, checkpointing=what))
        for case in _FOR_LIGER
        for what in ("keep", "recompute")
    ),
    *(_with("trainer", case, "keep") for case in (_QWEN3, _MISTRAL)),
    *(
        _with(loop, case, "liger", use_liger_kernel=True)
        for loop in ("trainer", "sft")
        for case in _FOR_LIGER
    ),
    *(_with("sft", case, "packing", packing=True) for case in (_GPT2, *_FOR_LIGER)),
    _with("sft", _LLAMA, "packing-liger", packing=True, use_liger_kernel=True),
    # LoRA: the head is frozen.
    LoopCase(
        name="trainer-llama-liger-saves-embed_tokens",
        case=_case(LLAMA, 4, "bf16"),
        loop="trainer",
        settings=(("use_liger_kernel", True),),
        saved_modules=("embed_tokens",),
    ),
    LoopCase(
        name="plain-llama-liger-saves-embed_tokens",
        case=_case(LLAMA, 4, "bf16"),
        loop="plain",
        saved_modules=("embed_tokens",),
        liger=True,
    ),
)
CASES: Final = {each.name: each for each in (*_loops(), *SWITCHES, *KERNELS)}
