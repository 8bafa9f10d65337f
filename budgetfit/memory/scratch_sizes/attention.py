# ruff: noqa: PLR2004 - the numbers are the sizes of the kernels' own tiles
"""Scratch memory of the fused attention kernels: flash and memory-efficient.

Sources: ``aten/src/ATen/native/transformers/cuda/attention_backward.cu`` and
``flash_attn/flash_api.cpp``; installed with the wheel, ``mem_eff_attention/
kernel_backward.h`` (``Params::workspace_size``) and ``kernels/cutlassB.h`` (which
kernels exist); PyTorch 2.13.
"""

from typing import NamedTuple

import numpy as np

from budgetfit.memory.scratch_sizes.rules import (
    DeviceProperties,
    ceil_div,
    round_up,
    rule,
)

SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))  # 99 KiB for one block
SEED_BYTES = 16
MAX_SPLITS = 128  # of the keys, in flash attention
LOCK_BYTES = 16  # before each tile of the dq accumulator
MOST_SAMPLES = 2**16 - 1  # that one launch of the memory-efficient kernels takes
SPLIT_BLOCKS = 200  # keys are split into about this many blocks, over all heads


@rule(parts=3)
def flash_attention_forward(device: DeviceProperties, *arguments: int) -> list[int]:
    """Return [logsumexp of the splits, outputs of the splits, random state] in bytes.

    Few rows over many keys are split over the idle SMs (split-KV); not with dropout,
    which keeps a second random state. Arguments: batch x heads, queries, keys, head
    dimension, 1 with dropout.
    """
    rows, queries, keys, head_dim, dropout = arguments
    if dropout:
        return [0, 0, SEED_BYTES]
    block = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    splits = flash_splits(
        rows * ceil_div(queries, 64), 2 * device.sm_count, ceil_div(keys, block)
    )
    if splits <= 1:
        return [0, 0, 0]
    width = round_up(head_dim, 32 if head_dim <= 128 else 64)
    each = splits * rows * queries * 4
    return [each, each * width, 0]


def flash_splits(blocks: int, slots: int, key_blocks: int) -> int:
    """Return into how many parts the keys are split (``num_splits_heuristic``).

    ``blocks``: thread blocks without a split; ``slots``: how many run at once.
    """
    if not blocks or blocks >= np.float32(0.8) * np.float32(slots):
        return 1
    efficiency: dict[int, np.float32] = {}
    for splits in range(1, min(MAX_SPLITS, slots, key_blocks) + 1):
        size = ceil_div(key_blocks, splits)
        if splits == 1 or size != ceil_div(key_blocks, splits - 1):
            waves = np.float32(blocks * splits) / np.float32(slots)
            efficiency[splits] = waves / np.ceil(waves)
    best = float(max(efficiency.values()))
    return next(n for n, value in efficiency.items() if float(value) >= 0.85 * best)


@rule(parts=4)
def flash_attention_backward(_: DeviceProperties, *arguments: int) -> list[int]:
    """Return [softmax_d, dq accumulator, expanded dk, expanded dv] in bytes.

    Arguments: batch x query heads, queries, keys, head dimension, bytes per element,
    and 1 where keys and values have fewer heads than queries.
    """
    rows, queries, keys, head_dim, element_bytes, grouped = arguments
    padded = rows * round_up(queries, 128)
    width = round_up(head_dim, 32 if head_dim <= 128 else 64)
    expanded = rows * keys * round_up(head_dim, 8) * element_bytes if grouped else 0
    return [padded * 4, padded * width * 4, expanded, expanded]


class EfficientTile(NamedTuple):
    """The tile of one memory-efficient backward kernel.

    ``in_registers``: dk and dv are accumulated there, else in a buffer.
    """

    queries: int
    keys: int
    in_registers: bool


def efficient_tile(
    device: DeviceProperties, *, single: bool, dropout: bool, head_dim: int
) -> EfficientTile:
    """Return the tile of the first kernel for these inputs that fits the GPU.

    ``single``: fp32 inputs. ``head_dim``: of keys or of values, the larger.
    """
    small = device.compute_capability in SMALL_SHARED_MEMORY
    turing = device.compute_capability < (8, 0)
    if single:
        wide = head_dim > 64 and not small and not turing
        return EfficientTile(128 if wide else 64, 64, in_registers=True)
    if head_dim <= 64:
        return EfficientTile(64, 64, in_registers=True)
    if turing:
        return EfficientTile(128, 64, in_registers=head_dim <= 128)
    if device.compute_capability in ((8, 6), (8, 9)) and head_dim <= 96 and not dropout:
        return EfficientTile(128, 64, in_registers=True)
    if head_dim <= 128:
        side = 64 if small else 128
        return EfficientTile(side, side, in_registers=not small)
    return EfficientTile(128, 64, in_registers=False)


@rule(parts=4)
def efficient_attention_launches(
    _: DeviceProperties, samples: int, sample_bytes: int
) -> list[int]:
    """Return [first of several launches, a later one, the only one, the first of any].

    Those that there are not take 0 bytes. Of later ones that of most samples.
    """
    first, later = min(samples, MOST_SAMPLES), min(samples - MOST_SAMPLES, MOST_SAMPLES)
    shares = (0, 0, first, first) if later <= 0 else (first, later, 0, first)
    return [share * sample_bytes for share in shares]


@rule(parts=1)
def efficient_attention_backward(
    device: DeviceProperties, *arguments: int
) -> list[int]:
    """Return [workspace] in bytes.

    Arguments: batch x heads, heads, queries, keys, head dimension of keys, of values, 1
    for fp32 (0 for 16 bits), 1 with dropout.
    """
    rows, heads, queries, keys, head_dim, value_dim, single, dropout = arguments
    rows = min(rows, MOST_SAMPLES * heads)
    tile = efficient_tile(
        device,
        single=bool(single),
        dropout=bool(dropout),
        head_dim=max(head_dim, value_dim),
    )
    tiles = ceil_div(queries, tile.queries) * ceil_div(head_dim, tile.keys)
    floats = tiles * (LOCK_BYTES // 4 + tile.queries * tile.keys)
    if not tile.in_registers:
        splits = max(1, min(_key_splits(rows, keys, tile.keys), SPLIT_BLOCKS // rows))
        floats += sum(
            splits * tile.keys * round_up(width, tile.queries)
            for width in (head_dim, value_dim)
        )
    return [rows * round_up(floats, 4) * 4]


def _key_splits(rows: int, keys: int, tile_keys: int) -> int:
    if rows >= 256 and keys <= 2 * tile_keys:
        return 1
    return ceil_div(keys, tile_keys)
