"""What is evaluated while it trains: models, cards and budgets, as plain data.

Training batches are small where evaluation is to be what fills the budget; ``full``
cases leave the training batch to the plan, so that training fills it as well.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from tests.accuracy.case import Case, Input, Model
from tests.accuracy.models import (
    BERT,
    BERT_PADDED,
    GPT2,
    GPT2_CACHE,
    LLAMA_1024,
    QWEN,
    T5_SMALL,
    VIT,
    WHISPER,
)

LORA_RANK: Final = 16


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A training and the budget in which it is also evaluated.

    Attributes:
        case: What trains; its batch size is given to the plan unless ``full``.
        vram: The budget, as ``budgetfit.plan`` takes it.
        full: The plan chooses the training batch, for 32 samples an optimizer step.
        lora: Adapters on a base in bf16.
        also: Loops beside those that every case has: TRL's ``"sft"`` and ``"dpo"``, and
            ``"metrics"``, a Trainer with ``compute_metrics``.
    """

    case: Case
    vram: str
    full: bool = False
    lora: bool = False
    also: tuple[str, ...] = ()


def _of_length(model: Model, length: int, **settings: Any) -> Model:
    """The same with sequences of another length."""
    return replace(
        model,
        name=f"{model.name.removesuffix('-s1024')}-s{length}",
        settings={**model.settings, **settings},
        inputs=tuple(
            replace(each, shape=(length,), padding=each.padding and length // 8)
            for each in model.inputs
        ),
    )


_LLAMA: Final = replace(
    LLAMA_1024,
    name="llama-210m",
    settings={
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
        "use_cache": False,
    },
)
_CLASSIFIER: Final = replace(
    BERT,
    name="bert-base-classifier",
    builder="BertForSequenceClassification",
    inputs=(
        Input(name="input_ids", shape=(512,), high=30_522),
        Input(name="labels", shape=(), high=2),
    ),
)


def _classifier(length: int) -> Model:
    ids, labels = _CLASSIFIER.inputs
    return replace(
        _CLASSIFIER,
        name=f"{_CLASSIFIER.name}-s{length}",
        inputs=(replace(ids, shape=(length,)), labels),
    )


_BART: Final = Model(
    name="bart-base",
    builder="BartForConditionalGeneration",
    config="BartConfig",
    settings={
        "d_model": 768,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
    },  # use_cache stays on, as transformers has it
    inputs=(
        Input(name="input_ids", shape=(512,), high=50_265),
        Input(name="labels", shape=(128,), high=50_265),
    ),
    blocks=("model.encoder.layers", "model.decoder.layers"),
)
_T5_CACHE: Final = replace(
    T5_SMALL, name="t5-small-cache", settings={"decoder_start_token_id": 0}
)


def _case(
    model: Model,
    gpu: str,
    precision: Any,
    vram: str,
    *,
    batch_size: int = 2,
    recompute: bool = False,
    **more: Any,
) -> Evaluated:
    words = [model.name, precision, gpu, vram]
    words += ["lora"] * more.get("lora", False) + ["full"] * more.get("full", False)
    case = Case(
        name="-".join(words),
        model=model,
        batch_size=batch_size,
        precision=precision,
        checkpointing="recompute" if recompute else "keep",
        gpu=gpu,
    )
    return Evaluated(case=case, vram=vram, **more)


_CASES: Final = (
    _case(GPT2, "rtx-4090", "bf16-mixed", "12GB", recompute=True, also=("sft", "dpo")),
    _case(GPT2, "t4", "fp16-mixed", "10GB", full=True),
    _case(_of_length(GPT2, 128), "t4", "fp32", "4GB"),
    _case(GPT2_CACHE, "rtx-4090", "bf16-mixed", "10GB"),
    _case(_of_length(_LLAMA, 2048), "rtx-4090", "bf16-mixed", "14GB", also=("sft",)),
    _case(_of_length(_LLAMA, 512), "t4", "fp16-mixed", "8GB", also=("metrics",)),
    _case(_of_length(_LLAMA, 2048), "a100-40gb", "bf16", "8GB"),
    _case(_of_length(_LLAMA, 1024), "rtx-4090", "fp32", "12GB", recompute=True),
    _case(LLAMA_1024, "rtx-4090", "bf16-mixed", "10GB", lora=True, also=("sft",)),
    _case(_of_length(QWEN, 128), "rtx-4090", "bf16-mixed", "16GB", also=("sft",)),
    _case(_of_length(QWEN, 128), "a10g", "bf16", "8GB"),
    _case(_classifier(128), "t4", "fp16-mixed", "4GB", batch_size=8, also=("metrics",)),
    _case(_classifier(512), "rtx-4090", "fp32", "4GB"),
    _case(_classifier(512), "rtx-4090", "bf16-mixed", "6GB", full=True),
    _case(BERT, "rtx-4090", "bf16-mixed", "6GB"),
    _case(BERT_PADDED, "t4", "fp16-mixed", "6GB"),
    _case(T5_SMALL, "rtx-4090", "bf16-mixed", "4GB", also=("metrics",)),
    _case(_T5_CACHE, "t4", "fp32", "4GB"),
    _case(_BART, "rtx-4090", "fp16-mixed", "6GB"),
    _case(WHISPER, "rtx-4090", "bf16-mixed", "10GB"),
    _case(VIT, "rtx-4090", "bf16-mixed", "4GB", also=("metrics",)),
    _case(VIT, "t4", "fp32", "4GB", full=True),
)
CASES: Final = {each.case.name: each for each in _CASES}
