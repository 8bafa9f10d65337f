"""Cases that cover every pair of settings: an all-pairs design, frozen as data.

Each model meets every precision, every optimizer, every way of checkpointing that it
has, and both counts of micro-batches; over all rows every pair of (precision,
checkpointing, optimizer, accumulation, card) occurs that can. ``test_recordings.py``
holds them to it.

The rows were drawn at random until they did so, the last two added by hand. Batch sizes
fill a fifth or three quarters of the card, by estimates of budgetfit where they were
drawn: what is recorded does not depend on whether those were right.
"""

from typing import Final, NamedTuple

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


PAIRWISE: Final = tuple(
    Row(*row)
    for row in (
        (models.GPT2_355M, "a100-40gb", 32, "fp16-mixed", "recompute", "adafactor", 4),
        (models.GPT2_355M, "rtx-4090", 1, "bf16", "mixed", "adamw_torch_fused", 4),
        (models.GPT2_355M, "b200", 8, "fp32", "keep", "adamw_torch", 1),
        (
            models.GPT2_355M,
            "h100-80gb",
            64,
            "bf16-mixed",
            "recompute",
            "sgd_momentum",
            1,
        ),
        (models.LLAMA_3B, "h100-80gb", 1, "fp16-mixed", "keep", "adamw_torch", 4),
        (
            models.LLAMA_3B,
            "b200",
            16,
            "bf16-mixed",
            "recompute",
            "adamw_torch_fused",
            4,
        ),
        (models.LLAMA_3B, "h100-80gb", 1, "fp32", "mixed", "adafactor", 1),
        (models.LLAMA_3B, "a100-40gb", 1, "bf16", "keep", "sgd_momentum", 1),
        (models.QWEN, "rtx-3090", 1, "fp16-mixed", "mixed", "sgd_momentum", 1),
        (models.QWEN, "a10g", 1, "bf16", "keep", "adafactor", 1),
        (models.QWEN, "t4", 1, "fp32", "recompute", "adamw_torch_fused", 4),
        (models.QWEN, "a100-40gb", 8, "bf16-mixed", "mixed", "adamw_torch", 4),
        (models.MIXTRAL, "rtx-3090", 2, "bf16-mixed", "keep", "adafactor", 4),
        (models.MIXTRAL, "rtx-4090", 32, "bf16", "recompute", "adamw_torch", 1),
        (models.MIXTRAL, "b200", 64, "fp16-mixed", "mixed", "sgd_momentum", 4),
        (models.MIXTRAL, "t4", 6, "fp32", "keep", "adamw_torch_fused", 1),
        (models.PLAIN_GPT, "t4", 12, "fp32", "keep", "adafactor", 1),
        (models.PLAIN_GPT, "a10g", 24, "fp16-mixed", "mixed", "adamw_torch_fused", 4),
        (models.PLAIN_GPT, "rtx-3090", 12, "bf16", "recompute", "adamw_torch", 4),
        (models.PLAIN_GPT, "rtx-4090", 4, "bf16-mixed", "keep", "sgd_momentum", 1),
        (models.LSTM, "a10g", 256, "fp32", "keep", "sgd_momentum", 1),
        (models.LSTM, "h100-80gb", 256, "bf16-mixed", "keep", "adamw_torch_fused", 4),
        (models.LSTM, "b200", 512, "bf16", "keep", "adafactor", 1),
        (models.LSTM, "t4", 96, "fp16-mixed", "keep", "adamw_torch", 4),
        (models.BERT_LARGE, "t4", 16, "fp16-mixed", "mixed", "adafactor", 1),
        (models.BERT_LARGE, "a100-40gb", 2, "fp32", "keep", "adamw_torch_fused", 4),
        (models.BERT_LARGE, "a10g", 32, "bf16-mixed", "recompute", "adamw_torch", 4),
        (models.BERT_LARGE, "h100-80gb", 64, "bf16", "mixed", "sgd_momentum", 1),
        (
            models.MODERNBERT,
            "rtx-3090",
            4,
            "bf16-mixed",
            "recompute",
            "adamw_torch_fused",
            1,
        ),
        (models.MODERNBERT, "rtx-4090", 12, "fp32", "mixed", "adafactor", 4),
        (models.MODERNBERT, "t4", 1, "fp16-mixed", "keep", "sgd_momentum", 4),
        (models.MODERNBERT, "h100-80gb", 64, "bf16", "recompute", "adamw_torch", 1),
        (models.T5_BASE, "a10g", 48, "bf16", "keep", "adamw_torch_fused", 1),
        (models.T5_BASE, "a100-40gb", 64, "bf16-mixed", "recompute", "sgd_momentum", 4),
        (models.T5_BASE, "rtx-3090", 8, "fp32", "keep", "adafactor", 1),
        (models.T5_BASE, "rtx-4090", 128, "fp16-mixed", "recompute", "adamw_torch", 4),
        (
            models.TORCH_TRANSFORMER,
            "rtx-4090",
            512,
            "fp16-mixed",
            "recompute",
            "adamw_torch_fused",
            1,
        ),
        (models.TORCH_TRANSFORMER, "a100-40gb", 64, "bf16", "mixed", "adamw_torch", 4),
        (models.TORCH_TRANSFORMER, "a10g", 96, "bf16-mixed", "keep", "adafactor", 1),
        (models.TORCH_TRANSFORMER, "t4", 32, "fp32", "recompute", "sgd_momentum", 4),
        (models.WHISPER, "a10g", 48, "fp32", "recompute", "adamw_torch_fused", 1),
        (models.WHISPER, "rtx-4090", 16, "bf16-mixed", "keep", "sgd_momentum", 4),
        (models.WHISPER, "b200", 384, "bf16", "recompute", "adafactor", 1),
        (models.WHISPER, "t4", 1, "fp16-mixed", "keep", "adamw_torch", 4),
        (models.WAV2VEC2, "b200", 512, "bf16", "recompute", "sgd_momentum", 4),
        (models.WAV2VEC2, "h100-80gb", 192, "fp16-mixed", "keep", "adafactor", 4),
        (
            models.WAV2VEC2,
            "a10g",
            12,
            "bf16-mixed",
            "recompute",
            "adamw_torch_fused",
            1,
        ),
        (models.WAV2VEC2, "a100-40gb", 24, "fp32", "keep", "adamw_torch", 1),
        (models.VIT_LARGE, "a10g", 96, "fp16-mixed", "mixed", "adamw_torch", 4),
        (models.VIT_LARGE, "t4", 1, "fp32", "keep", "adafactor", 4),
        (
            models.VIT_LARGE,
            "rtx-4090",
            128,
            "bf16-mixed",
            "recompute",
            "sgd_momentum",
            1,
        ),
        (models.VIT_LARGE, "h100-80gb", 512, "bf16", "mixed", "adamw_torch_fused", 1),
        (models.SWIN, "a10g", 256, "fp16-mixed", "recompute", "adafactor", 4),
        (models.SWIN, "rtx-3090", 128, "fp32", "keep", "adamw_torch", 1),
        (models.SWIN, "rtx-4090", 96, "bf16", "recompute", "adamw_torch_fused", 4),
        (models.SWIN, "h100-80gb", 192, "bf16-mixed", "keep", "sgd_momentum", 1),
        (
            models.CONVNEXT,
            "h100-80gb",
            384,
            "bf16-mixed",
            "recompute",
            "sgd_momentum",
            1,
        ),
        (models.CONVNEXT, "b200", 512, "fp32", "keep", "adamw_torch_fused", 4),
        (models.CONVNEXT, "t4", 256, "fp16-mixed", "recompute", "adamw_torch", 4),
        (models.CONVNEXT, "rtx-3090", 192, "bf16", "keep", "adafactor", 1),
        (models.RESNET50, "rtx-3090", 96, "bf16", "keep", "adamw_torch", 4),
        (
            models.RESNET50,
            "b200",
            512,
            "fp16-mixed",
            "recompute",
            "adamw_torch_fused",
            1,
        ),
        (models.RESNET50, "t4", 96, "fp32", "keep", "sgd_momentum", 4),
        (models.RESNET50, "a100-40gb", 384, "bf16-mixed", "recompute", "adafactor", 1),
        (models.MLP_MIXER, "t4", 128, "fp16-mixed", "keep", "adamw_torch_fused", 1),
        (
            models.MLP_MIXER,
            "rtx-4090",
            512,
            "bf16-mixed",
            "recompute",
            "adamw_torch",
            4,
        ),
        (models.MLP_MIXER, "b200", 512, "fp32", "mixed", "sgd_momentum", 1),
        (models.MLP_MIXER, "a10g", 64, "bf16", "keep", "adafactor", 4),
        (models.GPT2, "h100-80gb", 48, "bf16", "mixed", "adamw_torch", 1),
        (models.GPT2, "a100-40gb", 8, "fp32", "recompute", "sgd_momentum", 4),
        (models.GPT2, "b200", 96, "fp16-mixed", "keep", "adafactor", 1),
        (
            models.LLAMA_1024,
            "rtx-3090",
            24,
            "bf16",
            "recompute",
            "adamw_torch_fused",
            1,
        ),
        (models.LLAMA_1024, "b200", 32, "fp16-mixed", "keep", "adamw_torch", 1),
        (models.LLAMA_1024, "t4", 1, "fp32", "mixed", "adafactor", 4),
        (models.BERT, "a10g", 48, "fp16-mixed", "mixed", "sgd_momentum", 1),
        (models.BERT, "b200", 512, "bf16", "keep", "adafactor", 4),
        (models.BERT, "h100-80gb", 64, "fp32", "recompute", "adamw_torch", 1),
        (models.VIT, "a10g", 512, "bf16-mixed", "recompute", "sgd_momentum", 1),
        (models.VIT, "b200", 512, "fp16-mixed", "mixed", "adamw_torch_fused", 1),
        (models.VIT, "t4", 12, "fp32", "keep", "adafactor", 4),
        (models.LLAMA_1024, "a100-40gb", 2, "bf16-mixed", "keep", "sgd_momentum", 1),
        (models.VIT, "rtx-3090", 64, "bf16", "keep", "adamw_torch", 1),
    )
)
