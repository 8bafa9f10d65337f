"""The recorded cases, as data: models, the matrix over cards, and further programs.

Batch sizes were chosen so that every peak exceeds 1 GiB and, where the model's weights
allow it, fits the card.
"""

import dataclasses
from pathlib import Path
from typing import Any, Final

from tests.accuracy.case import CARDS, Case, Checkpointing, Input, Model, Precision

RECORDINGS: Final = Path(__file__).parent / "recordings"


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

# Model, card, samples per micro-batch with everything kept, and with every block
# recomputed.
_BATCHES: Final = (
    (GPT2, "t4", 4, 8),
    (GPT2, "rtx-4090", 8, 12),
    (GPT2, "h100-80gb", 24, 40),
    (LLAMA_1024, "t4", 1, 2),
    (LLAMA_1024, "rtx-4090", 1, 2),
    (LLAMA_2048, "h100-80gb", 4, 8),
    (BERT, "t4", 8, 32),
    (BERT, "rtx-4090", 16, 64),
    (BERT, "h100-80gb", 48, 128),
    (VIT, "t4", 32, 96),
    (VIT, "rtx-4090", 64, 192),
    (VIT, "h100-80gb", 192, 512),
)
_PRECISIONS: Final[tuple[Precision, ...]] = ("fp32", "bf16-mixed", "fp16-mixed")


def _case(  # noqa: PLR0913  # a case has this many sides
    model: Model,
    gpu: str,
    batch_size: int,
    precision: Precision,
    checkpointing: Checkpointing = "keep",
    mark: str = "",
    **more: Any,  # noqa: ANN401  # the other fields of a Case
) -> Case:
    """A case with the name that says what it is; ``mark`` names what is special."""
    parts = [model.name, precision, checkpointing, f"b{batch_size}", mark, gpu]
    return Case(
        name="-".join(part for part in parts if part),
        model=model,
        batch_size=batch_size,
        precision=precision,
        checkpointing=checkpointing,
        gpu=gpu,
        **more,
    )


def _matrix() -> list[Case]:
    """Models x precisions x checkpointing x cards; no bf16 on a card without it."""
    cases = []
    for model, gpu, kept, recomputed in _BATCHES:
        # 1.1 billion fp32 parameters with gradients and AdamW states are 17.6 GB.
        memory = 80 if model is LLAMA_1024 and gpu == "t4" else 0
        for precision in _PRECISIONS:
            if precision == "bf16-mixed" and not CARDS[gpu].has_bf16:
                continue
            more = {"imitated_memory_gib": memory}
            cases += [
                _case(model, gpu, kept, precision, "keep", **more),
                _case(model, gpu, recomputed, precision, "recompute", **more),
            ]
    return cases


CASES: Final = {case.name: case for case in _matrix()}


def case_named(name: str) -> Case:
    """The case of that name.

    Raises:
        KeyError: When there is none.
    """
    if name not in CASES:
        msg = f"no case is called {name!r}; the names are in tests/accuracy/cases.py"
        raise KeyError(msg)
    return CASES[name]


def recording_path(recording: dict[str, Any], folder: Path = RECORDINGS) -> Path:
    """Where a recording belongs: by its origin, then by its case.

    A recording made with cuDNN stands beside the one made without it.
    """
    suffix = "-cudnn" if recording["software"]["cudnn_enabled"] else ""
    origin = recording["origin"].replace(" ", "-")
    return folder / origin / f"{recording['name']}{suffix}.json"
