"""Cases that cover every pair of settings: an all-pairs design, frozen as data.

Each model meets every precision, every optimizer, every way of checkpointing that it
has, and both counts of micro-batches; over all rows every pair of (precision,
checkpointing, optimizer, accumulation, card) occurs that can. ``test_recordings.py``
holds them to it.

The rows were drawn at random until they did so, the last two added by hand. Batch sizes
fill a fifth or three quarters of the card, by estimates of budgetfit where they were
drawn: what is recorded does not depend on whether those were right.
"""

from typing import Final, NamedTuple, cast

from tests.accuracy import models
from tests.accuracy.case import Checkpointing, Model, Precision


class Row(NamedTuple):
    """One case."""

    model: Model
    gpu: str
    batch_size: int
    precision: Precision
    checkpointing: Checkpointing
    optimizer: str
    gradient_accumulation_steps: int


_TABLE: Final = """
    GPT2_355M         a100-40gb  32 fp16-mixed recompute adafactor         4
    GPT2_355M         rtx-4090    1 bf16       mixed     adamw_torch_fused 4
    GPT2_355M         b200        8 fp32       keep      adamw_torch       1
    GPT2_355M         h100-80gb  64 bf16-mixed recompute sgd_momentum      1
    LLAMA_3B          h100-80gb   1 fp16-mixed keep      adamw_torch       4
    LLAMA_3B          b200       16 bf16-mixed recompute adamw_torch_fused 4
    LLAMA_3B          h100-80gb   1 fp32       mixed     adafactor         1
    LLAMA_3B          a100-40gb   1 bf16       keep      sgd_momentum      1
    QWEN              rtx-3090    1 fp16-mixed mixed     sgd_momentum      1
    QWEN              a10g        1 bf16       keep      adafactor         1
    QWEN              t4          1 fp32       recompute adamw_torch_fused 4
    QWEN              a100-40gb   8 bf16-mixed mixed     adamw_torch       4
    MIXTRAL           rtx-3090    2 bf16-mixed keep      adafactor         4
    MIXTRAL           rtx-4090   32 bf16       recompute adamw_torch       1
    MIXTRAL           b200       64 fp16-mixed mixed     sgd_momentum      4
    MIXTRAL           t4          6 fp32       keep      adamw_torch_fused 1
    PLAIN_GPT         t4         12 fp32       keep      adafactor         1
    PLAIN_GPT         a10g       24 fp16-mixed mixed     adamw_torch_fused 4
    PLAIN_GPT         rtx-3090   12 bf16       recompute adamw_torch       4
    PLAIN_GPT         rtx-4090    4 bf16-mixed keep      sgd_momentum      1
    LSTM              a10g      256 fp32       keep      sgd_momentum      1
    LSTM              h100-80gb 256 bf16-mixed keep      adamw_torch_fused 4
    LSTM              b200      512 bf16       keep      adafactor         1
    LSTM              t4         96 fp16-mixed keep      adamw_torch       4
    BERT_LARGE        t4         16 fp16-mixed mixed     adafactor         1
    BERT_LARGE        a100-40gb   2 fp32       keep      adamw_torch_fused 4
    BERT_LARGE        a10g       32 bf16-mixed recompute adamw_torch       4
    BERT_LARGE        h100-80gb  64 bf16       mixed     sgd_momentum      1
    MODERNBERT        rtx-3090    4 bf16-mixed recompute adamw_torch_fused 1
    MODERNBERT        rtx-4090   12 fp32       mixed     adafactor         4
    MODERNBERT        t4          1 fp16-mixed keep      sgd_momentum      4
    MODERNBERT        h100-80gb  64 bf16       recompute adamw_torch       1
    T5_BASE           a10g       48 bf16       keep      adamw_torch_fused 1
    T5_BASE           a100-40gb  64 bf16-mixed recompute sgd_momentum      4
    T5_BASE           rtx-3090    8 fp32       keep      adafactor         1
    T5_BASE           rtx-4090  128 fp16-mixed recompute adamw_torch       4
    TORCH_TRANSFORMER rtx-4090  512 fp16-mixed recompute adamw_torch_fused 1
    TORCH_TRANSFORMER a100-40gb  64 bf16       mixed     adamw_torch       4
    TORCH_TRANSFORMER a10g       96 bf16-mixed keep      adafactor         1
    TORCH_TRANSFORMER t4         32 fp32       recompute sgd_momentum      4
    WHISPER           a10g       48 fp32       recompute adamw_torch_fused 1
    WHISPER           rtx-4090   16 bf16-mixed keep      sgd_momentum      4
    WHISPER           b200      384 bf16       recompute adafactor         1
    WHISPER           t4          1 fp16-mixed keep      adamw_torch       4
    WAV2VEC2          b200      512 bf16       recompute sgd_momentum      4
    WAV2VEC2          h100-80gb 192 fp16-mixed keep      adafactor         4
    WAV2VEC2          a10g       12 bf16-mixed recompute adamw_torch_fused 1
    WAV2VEC2          a100-40gb  24 fp32       keep      adamw_torch       1
    VIT_LARGE         a10g       96 fp16-mixed mixed     adamw_torch       4
    VIT_LARGE         t4          1 fp32       keep      adafactor         4
    VIT_LARGE         rtx-4090  128 bf16-mixed recompute sgd_momentum      1
    VIT_LARGE         h100-80gb 512 bf16       mixed     adamw_torch_fused 1
    SWIN              a10g      256 fp16-mixed recompute adafactor         4
    SWIN              rtx-3090  128 fp32       keep      adamw_torch       1
    SWIN              rtx-4090   96 bf16       recompute adamw_torch_fused 4
    SWIN              h100-80gb 192 bf16-mixed keep      sgd_momentum      1
    CONVNEXT          h100-80gb 384 bf16-mixed recompute sgd_momentum      1
    CONVNEXT          b200      512 fp32       keep      adamw_torch_fused 4
    CONVNEXT          t4        256 fp16-mixed recompute adamw_torch       4
    CONVNEXT          rtx-3090  192 bf16       keep      adafactor         1
    RESNET50          rtx-3090   96 bf16       keep      adamw_torch       4
    RESNET50          b200      512 fp16-mixed recompute adamw_torch_fused 1
    RESNET50          t4         96 fp32       keep      sgd_momentum      4
    RESNET50          a100-40gb 384 bf16-mixed recompute adafactor         1
    MLP_MIXER         t4        128 fp16-mixed keep      adamw_torch_fused 1
    MLP_MIXER         rtx-4090  512 bf16-mixed recompute adamw_torch       4
    MLP_MIXER         b200      512 fp32       mixed     sgd_momentum      1
    MLP_MIXER         a10g       64 bf16       keep      adafactor         4
    GPT2              h100-80gb  48 bf16       mixed     adamw_torch       1
    GPT2              a100-40gb   8 fp32       recompute sgd_momentum      4
    GPT2              b200       96 fp16-mixed keep      adafactor         1
    LLAMA_1024        rtx-3090   24 bf16       recompute adamw_torch_fused 1
    LLAMA_1024        b200       32 fp16-mixed keep      adamw_torch       1
    LLAMA_1024        t4          1 fp32       mixed     adafactor         4
    BERT              a10g       48 fp16-mixed mixed     sgd_momentum      1
    BERT              b200      512 bf16       keep      adafactor         4
    BERT              h100-80gb  64 fp32       recompute adamw_torch       1
    VIT               a10g      512 bf16-mixed recompute sgd_momentum      1
    VIT               b200      512 fp16-mixed mixed     adamw_torch_fused 1
    VIT               t4         12 fp32       keep      adafactor         4
    LLAMA_1024        a100-40gb   2 bf16-mixed keep      sgd_momentum      1
    VIT               rtx-3090   64 bf16       keep      adamw_torch       1
"""


def _row(words: str) -> Row:
    model, gpu, size, precision, checkpointing, optimizer, steps = words.split()
    return Row(
        getattr(models, model),
        gpu,
        int(size),
        cast("Precision", precision),
        cast("Checkpointing", checkpointing),
        optimizer,
        int(steps),
    )


PAIRWISE: Final = tuple(map(_row, _TABLE.strip().splitlines()))
