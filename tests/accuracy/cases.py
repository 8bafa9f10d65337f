"""The recorded cases, as data: a matrix of models over cards, and further programs.

Batch sizes were chosen so that every peak exceeds 1 GiB and, where the model's weights
allow it, fits the card.
"""

from pathlib import Path
from typing import Any, Final

from tests.accuracy.case import CARDS, Attention, Case, Checkpointing, Model, Precision
from tests.accuracy.models import (
    BERT,
    BERT_EAGER_PADDED,
    BERT_PADDED,
    BERT_SHORT,
    CONVNEXT,
    GPT2,
    GPT2_CACHE,
    GPT2_EAGER,
    GPT2_PADDED,
    GPT2_SHORT,
    LLAMA_1024,
    LLAMA_2048,
    LLAMA_EAGER,
    LLAMA_PADDED,
    LLAMA_SHORT,
    MIXTRAL,
    MLP_MIXER,
    PLAIN_GPT,
    QWEN,
    RESNET50,
    T5_BASE,
    T5_SMALL,
    TORCH_TRANSFORMER,
    VIT,
    VIT_SHORT,
)
from tests.accuracy.pairwise_cases import PAIRWISE

RECORDINGS: Final = Path(__file__).parent / "recordings"


# Model, card, samples per micro-batch with everything kept, and with every block
# recomputed.
_BATCHES: Final = (
    (GPT2, "t4", 4, 8),
    (GPT2, "rtx-4090", 8, 12),
    (GPT2, "h100-80gb", 24, 40),
    (LLAMA_1024, "t4", 1, 2),
    (LLAMA_1024, "rtx-4090", 1, 2),
    (LLAMA_2048, "h100-80gb", 2, 8),
    (BERT, "t4", 8, 32),
    (BERT, "rtx-4090", 16, 64),
    (BERT, "h100-80gb", 48, 128),
    (VIT, "t4", 32, 96),
    (VIT, "rtx-4090", 64, 192),
    (VIT, "h100-80gb", 192, 512),
)
_PRECISIONS: Final[tuple[Precision, ...]] = ("fp32", "bf16-mixed", "fp16-mixed")


def _case(  # a case has this many sides
    model: Model,
    gpu: str,
    batch_size: int,
    precision: Precision,
    checkpointing: Checkpointing = "keep",
    *,
    mark: str = "",
    **more: Any,  # the other fields of a Case
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


def _accumulating() -> list[Case]:
    """Several micro-batches per step: gradients live on between them."""
    rows: list[tuple[int, Model, str, int, Precision, Checkpointing]] = [
        (2, GPT2, "rtx-4090", 8, "bf16-mixed", "keep"),
        (2, GPT2, "t4", 4, "fp16-mixed", "keep"),
        (2, BERT, "t4", 8, "fp32", "keep"),
        (2, LLAMA_1024, "rtx-4090", 1, "bf16-mixed", "keep"),
        (2, LLAMA_2048, "h100-80gb", 8, "bf16-mixed", "recompute"),
        (4, GPT2, "rtx-4090", 8, "bf16-mixed", "keep"),
        (4, GPT2, "rtx-4090", 12, "bf16-mixed", "recompute"),
        (4, VIT, "h100-80gb", 192, "bf16-mixed", "keep"),
    ]
    return [
        _case(*row, mark=f"x{steps}", gradient_accumulation_steps=steps)
        for steps, *row in rows
    ]


def _optimizers() -> list[Case]:
    """The other optimizers: foreach makes temporaries, SGD keeps no state."""
    foreach, sgd = {"optimizer": "adamw_torch"}, {"optimizer": "sgd"}
    return [
        _case(GPT2, "rtx-4090", 8, "bf16-mixed", mark="foreach", **foreach),
        _case(GPT2, "t4", 4, "fp16-mixed", mark="foreach", **foreach),
        _case(LLAMA_2048, "h100-80gb", 4, "bf16-mixed", mark="foreach", **foreach),
        _case(BERT, "t4", 8, "fp16-mixed", mark="foreach", **foreach),
        _case(BERT, "rtx-4090", 64, "fp32", "recompute", mark="foreach", **foreach),
        _case(GPT2, "rtx-4090", 8, "bf16-mixed", mark="sgd", **sgd),
        _case(VIT, "t4", 32, "fp32", mark="sgd", **sgd),
        _case(LLAMA_1024, "t4", 2, "fp16-mixed", "recompute", mark="sgd", **sgd),
    ]


def _pure_bf16() -> list[Case]:
    """Parameters, gradients and states in bf16."""
    return [
        _case(LLAMA_1024, "rtx-4090", 4, "bf16"),
        _case(LLAMA_1024, "rtx-4090", 16, "bf16", "recompute"),
        _case(LLAMA_2048, "h100-80gb", 8, "bf16"),
        _case(GPT2, "h100-80gb", 24, "bf16"),
        _case(BERT, "rtx-4090", 32, "bf16", "recompute"),
        _case(VIT, "rtx-4090", 64, "bf16"),
    ]


def _other_models() -> list[Case]:
    """Encoder-decoders, experts, convolutions, models without transformers."""
    rows: list[tuple[Model, str, int, Precision, Checkpointing]] = [
        (T5_SMALL, "t4", 16, "fp32", "keep"),
        (T5_SMALL, "t4", 16, "fp16-mixed", "keep"),
        (T5_BASE, "rtx-4090", 8, "bf16-mixed", "keep"),
        (T5_BASE, "rtx-4090", 32, "bf16-mixed", "recompute"),
        (T5_BASE, "h100-80gb", 32, "fp32", "keep"),
        (MIXTRAL, "rtx-4090", 4, "bf16-mixed", "keep"),
        (MIXTRAL, "rtx-4090", 8, "bf16-mixed", "recompute"),
        (MIXTRAL, "h100-80gb", 8, "bf16-mixed", "keep"),
        (MIXTRAL, "h100-80gb", 8, "bf16", "keep"),
        (MIXTRAL, "h100-80gb", 8, "fp32", "keep"),
        (TORCH_TRANSFORMER, "t4", 16, "fp32", "keep"),
        (TORCH_TRANSFORMER, "rtx-4090", 32, "bf16-mixed", "keep"),
        (TORCH_TRANSFORMER, "rtx-4090", 64, "bf16-mixed", "recompute"),
        (PLAIN_GPT, "t4", 8, "fp16-mixed", "keep"),
        (PLAIN_GPT, "rtx-4090", 8, "fp32", "keep"),
        (PLAIN_GPT, "rtx-4090", 16, "bf16-mixed", "keep"),
        (PLAIN_GPT, "h100-80gb", 32, "bf16-mixed", "recompute"),
        (RESNET50, "t4", 32, "fp32", "keep"),
        (RESNET50, "rtx-4090", 64, "bf16-mixed", "keep"),
        (RESNET50, "rtx-4090", 64, "fp32", "recompute"),
        (RESNET50, "h100-80gb", 256, "bf16-mixed", "keep"),
        (RESNET50, "h100-80gb", 128, "fp32", "keep"),
        (CONVNEXT, "h100-80gb", 192, "bf16-mixed", "keep"),
        (GPT2_EAGER, "rtx-4090", 4, "bf16-mixed", "keep"),
        (GPT2_EAGER, "t4", 4, "fp16-mixed", "recompute"),
        (GPT2_CACHE, "rtx-4090", 8, "bf16-mixed", "keep"),
    ]
    return [_case(*row) for row in rows]


def _attention() -> list[Case]:
    """Every kernel family, with and without masks, on all kinds of cards."""
    rows: list[tuple[Model, str, int, Precision, Checkpointing, Attention]] = [
        (GPT2, "rtx-4090", 8, "bf16-mixed", "keep", "efficient"),
        (GPT2, "rtx-4090", 4, "bf16-mixed", "keep", "math"),
        (GPT2, "t4", 2, "fp16-mixed", "recompute", "math"),
        (GPT2, "a100-40gb", 8, "fp16-mixed", "recompute", "flash"),
        (GPT2_PADDED, "rtx-4090", 8, "bf16-mixed", "keep", ""),
        (GPT2_PADDED, "t4", 4, "fp16-mixed", "keep", ""),
        (GPT2_PADDED, "h100-80gb", 16, "bf16-mixed", "recompute", "math"),
        (GPT2, "rtx-3090", 6, "fp32", "recompute", "efficient"),
        (LLAMA_PADDED, "a100-40gb", 4, "bf16-mixed", "keep", ""),
        (LLAMA_PADDED, "b200", 16, "bf16", "recompute", ""),
        (LLAMA_EAGER, "h100-80gb", 2, "bf16-mixed", "keep", ""),
        (BERT_PADDED, "a10g", 24, "fp16-mixed", "keep", ""),
        (BERT_PADDED, "rtx-3090", 16, "fp32", "recompute", ""),
        (BERT_PADDED, "h100-80gb", 32, "bf16-mixed", "keep", "math"),
        (BERT_EAGER_PADDED, "t4", 8, "fp32", "keep", ""),
        (BERT_EAGER_PADDED, "rtx-4090", 16, "bf16-mixed", "mixed", ""),
        (VIT, "t4", 32, "fp16-mixed", "keep", "math"),
    ]
    return [_case(*row, mark=kernel, attention=kernel) for *row, kernel in rows]


def _end_of_an_epoch() -> list[Case]:
    """A smaller last batch, and a full one after it."""
    rows: list[tuple[int, Model, str, int, Precision, Checkpointing]] = [
        (3, GPT2, "rtx-4090", 8, "bf16-mixed", "keep"),
        (5, BERT, "t4", 16, "fp16-mixed", "recompute"),
        (1, LLAMA_2048, "h100-80gb", 4, "bf16-mixed", "keep"),
        (7, T5_BASE, "a10g", 16, "bf16-mixed", "keep"),
    ]
    return [
        _case(*row, mark=f"then-b{last}", last_batch_size=last) for last, *row in rows
    ]


def _out_of_memory() -> list[Case]:
    """Less memory than is reserved at ease: the cache is emptied, training goes on."""
    rows: list[tuple[float, Model, str, int, Precision, Checkpointing]] = [
        (26, LLAMA_2048, "h100-80gb", 8, "bf16-mixed", "recompute"),
        (11, QWEN, "rtx-3090", 2, "bf16-mixed", "recompute"),
        (11.3125, GPT2_EAGER, "rtx-4090", 4, "bf16-mixed", "keep"),
        (6.0625, VIT, "rtx-4090", 64, "bf16-mixed", "keep"),
    ]
    return [
        _case(*row, mark="retries", imitated_memory_gib=memory, runs_out=True)
        for memory, *row in rows
    ]


def _pairwise() -> list[Case]:
    """The rows of ``pairwise_cases.py``."""
    return [
        _case(
            row.model,
            row.gpu,
            row.batch_size,
            row.precision,
            row.checkpointing,
            mark=f"x{row.gradient_accumulation_steps}-{row.optimizer}",
            optimizer=row.optimizer,
            gradient_accumulation_steps=row.gradient_accumulation_steps,
        )
        for row in PAIRWISE
    ]


def _expandable_segments() -> list[Case]:
    """The allocator's other way to reserve memory (memory-model B3)."""
    more = {"mark": "expandable", "allocator": "expandable_segments:True"}
    return [
        _case(GPT2, "rtx-4090", 8, "bf16-mixed", "keep", **more),
        _case(GPT2, "rtx-4090", 12, "bf16-mixed", "recompute", **more),
        _case(GPT2, "t4", 4, "fp32", "keep", **more),
        _case(LLAMA_2048, "h100-80gb", 8, "bf16-mixed", "recompute", **more),
        _case(BERT, "t4", 8, "fp16-mixed", "keep", **more),
        _case(VIT, "rtx-4090", 64, "fp32", "keep", **more),
    ]


def _compiled() -> list[Case]:
    """The forward of every block under torch.compile."""
    rows: list[tuple[Model, str, int, Precision, Checkpointing]] = [
        (GPT2, "rtx-4090", 8, "bf16-mixed", "keep"),
        (GPT2, "rtx-4090", 12, "bf16-mixed", "recompute"),
        (GPT2, "rtx-4090", 8, "bf16-mixed", "mixed"),
        (GPT2, "rtx-4090", 8, "fp32", "keep"),
        (GPT2, "t4", 4, "fp16-mixed", "keep"),
        (GPT2, "t4", 8, "fp16-mixed", "recompute"),
        (GPT2, "h100-80gb", 24, "bf16", "keep"),
        (GPT2_PADDED, "rtx-4090", 8, "bf16-mixed", "keep"),
        (GPT2_EAGER, "rtx-4090", 4, "bf16-mixed", "keep"),
        (LLAMA_1024, "rtx-4090", 1, "bf16-mixed", "keep"),
        (LLAMA_1024, "rtx-4090", 4, "bf16", "mixed"),
        (LLAMA_2048, "h100-80gb", 2, "bf16-mixed", "keep"),
        (LLAMA_2048, "h100-80gb", 8, "bf16-mixed", "recompute"),
        (LLAMA_PADDED, "a100-40gb", 4, "bf16-mixed", "keep"),
        (QWEN, "rtx-3090", 2, "bf16-mixed", "recompute"),
        (QWEN, "a100-40gb", 4, "bf16-mixed", "keep"),
        (BERT, "t4", 8, "fp16-mixed", "keep"),
        (BERT, "rtx-4090", 16, "bf16-mixed", "keep"),
        (BERT, "rtx-4090", 16, "fp32", "mixed"),
        (BERT, "h100-80gb", 128, "bf16-mixed", "recompute"),
        (VIT, "t4", 32, "fp16-mixed", "keep"),
        (VIT, "rtx-4090", 64, "bf16-mixed", "keep"),
        (VIT, "rtx-4090", 192, "bf16-mixed", "recompute"),
        (VIT, "h100-80gb", 192, "bf16", "mixed"),
        (T5_SMALL, "t4", 16, "fp32", "keep"),
        (T5_BASE, "rtx-4090", 8, "bf16-mixed", "keep"),
        (MIXTRAL, "rtx-4090", 4, "bf16-mixed", "keep"),
        (MIXTRAL, "h100-80gb", 8, "bf16", "recompute"),
        (CONVNEXT, "rtx-4090", 64, "bf16-mixed", "keep"),
        (CONVNEXT, "t4", 32, "fp32", "recompute"),
        (RESNET50, "rtx-4090", 64, "bf16-mixed", "keep"),
        (PLAIN_GPT, "rtx-4090", 16, "bf16-mixed", "keep"),
        (PLAIN_GPT, "t4", 8, "fp16-mixed", "keep"),
        (MLP_MIXER, "rtx-4090", 64, "bf16-mixed", "mixed"),
        (TORCH_TRANSFORMER, "rtx-4090", 32, "bf16-mixed", "keep"),
    ]
    others: list[tuple[dict[str, Any], Model, str, int, Precision, Checkpointing]] = [
        ({"optimizer": "adamw_torch"}, GPT2, "rtx-4090", 8, "bf16-mixed", "keep"),
        (
            {"gradient_accumulation_steps": 4},
            *(GPT2, "rtx-4090", 8, "bf16-mixed", "mixed"),
        ),
    ]
    compiled = [_case(*row, mark="compiled", compile="blocks") for row in rows]
    for more, *row in others:
        (value,) = more.values()
        mark = f"compiled-{value}" if isinstance(value, str) else f"compiled-x{value}"
        compiled.append(_case(*row, mark=mark, compile="blocks", **more))
    return compiled


def _compiled_models() -> list[Case]:
    """The forward of the model under torch.compile.

    A graph of all blocks takes minutes to compile where one of a block takes seconds.
    """
    rows: list[tuple[Model, str, int, Precision, Checkpointing]] = [
        (GPT2_SHORT, "rtx-4090", 8, "bf16-mixed", "keep"),
        (GPT2_SHORT, "rtx-4090", 12, "bf16-mixed", "recompute"),
        (GPT2_SHORT, "h100-80gb", 24, "bf16", "keep"),
        (LLAMA_SHORT, "rtx-4090", 4, "bf16-mixed", "keep"),
        (LLAMA_SHORT, "a100-40gb", 8, "bf16", "recompute"),
        (BERT_SHORT, "rtx-4090", 16, "bf16-mixed", "keep"),
        (BERT_SHORT, "h100-80gb", 128, "bf16", "recompute"),
        (VIT_SHORT, "rtx-4090", 64, "bf16-mixed", "keep"),
        (VIT_SHORT, "rtx-4090", 192, "bf16-mixed", "recompute"),
        (VIT_SHORT, "h100-80gb", 192, "bf16", "keep"),
    ]
    return [_case(*row, mark="compiled-model", compile="model") for row in rows]


def _all() -> dict[str, Case]:
    groups = (
        _matrix(),
        _accumulating(),
        _optimizers(),
        _pure_bf16(),
        _other_models(),
        _expandable_segments(),
        _attention(),
        _end_of_an_epoch(),
        _out_of_memory(),
        _pairwise(),
        _compiled(),
        _compiled_models(),
    )
    return {case.name: case for group in groups for case in group}


CASES: Final = _all()


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
    """Where a recording belongs: by origin, release of torch and case.

    A recording made with cuDNN stands beside the one made without it.
    """
    software = recording["software"]
    suffix = "-cudnn" if software["cudnn_enabled"] else ""
    folder /= recording["origin"].replace(" ", "-")
    return folder / release(software["torch"]) / f"{recording['name']}{suffix}.json"


def release(version: str) -> str:
    """``"2.13.0+cu130"`` -> ``"torch-2.13"``: what the bytes may differ by."""
    major, minor, *_ = version.split(".")
    return f"torch-{major}.{minor}"
