"""Calls that layers make: normalizations, embeddings, attention."""

import random
from collections.abc import Iterator

import torch

from tests.accuracy.op_level.op_layouts import FLOATS, Case, heads_of, seeded, tensor


def norms() -> Iterator[Case]:
    """Backward of layer_norm and rms_norm."""
    rng = seeded(3)
    for _ in range(80):
        dtype = rng.choice(FLOATS)
        columns = rng.choice((64, 100, 256, 768, 1024, 4096))
        rows = rng.choice((8, 8192, 65536, 65537, 70000, 131072, 262144))
        if rows * columns > 2**28:
            rows = 1024
        x = tensor([2, rows // 2, columns], dtype)
        if rng.random() < 0.2:
            x = tensor([2, rows // 2, columns], dtype, [columns, 2 * columns, 1])
        grad = tensor([2, rows // 2, columns], dtype)
        if rng.random() < 0.3:
            grad = tensor([2, rows // 2, columns], dtype, [columns, 2 * columns, 1])
        stats = tensor([2, rows // 2, 1], torch.float32)
        weight = tensor([columns], dtype)
        gamma = rng.random() < 0.8
        mask = [rng.random() < 0.8, gamma, gamma and rng.random() < 0.8]
        if rng.random() < 0.5:
            args = [grad, x, [columns], stats, stats, weight, weight, mask]
            yield "native_layer_norm_backward", args, {}
        else:
            args = [grad, x, [columns], stats, weight, mask[:2]]
            yield "_fused_rms_norm_backward", args, {}


def group_norms() -> Iterator[Case]:
    """Group normalization, forward and backward."""
    rng = seeded(8)
    for _ in range(60):
        dtype = rng.choice(FLOATS)
        samples, groups = rng.choice((1, 2, 8)), rng.choice((1, 8, 32))
        channels, side = groups * rng.choice((1, 4, 8)), rng.choice((7, 32, 64))
        shape = [samples, channels, side, side]
        x = tensor(shape, dtype)
        weight = rng.choice((None, tensor([channels], dtype)))
        sizes = [samples, channels, side * side, groups]
        yield "native_group_norm", [x, weight, weight, *sizes, 1e-5], {}
        stats = tensor([samples, groups], dtype)
        mask = [rng.random() < 0.8, weight is not None, weight is not None]
        args = [x, x, stats, stats, weight, *sizes, mask]
        yield "native_group_norm_backward", args, {}


def embeddings() -> Iterator[Case]:
    """Backward of an embedding of any number of indices."""
    yield from _embeddings(seeded(4), 60, counted=False)


def counted_embeddings() -> Iterator[Case]:
    """The same with gradients divided by how often a row occurs."""
    yield from _embeddings(seeded(7), 40, counted=True)


def _embeddings(rng: random.Random, number: int, *, counted: bool) -> Iterator[Case]:
    for _ in range(number):
        count = rng.choice((100, 3072, 3073, 8192, 5000, 100_000))
        rows = rng.choice((2, 512, 5000, 50257))
        columns = rng.choice((64, 768, 1000))
        dtype = rng.choice(FLOATS)
        index = rng.choice((torch.int64, torch.int32))
        grad = tensor([2, count // 2, columns], dtype)
        if rng.random() < 0.2:
            grad = tensor([2, count // 2, columns], dtype, [columns, 2 * columns, 1])
        if rng.random() < 0.1:
            grad = tensor([2, count // 2, columns], dtype, [0, columns, 1])
        padding = rng.choice((-1, 0))
        indices = tensor([2, count // 2], index)
        yield "embedding_dense_backward", [grad, indices, rows, padding, counted], {}


def attention() -> Iterator[Case]:
    """Backward of flash and of memory-efficient attention."""
    rng = seeded(5)
    for _ in range(200):
        flash = rng.random() < 0.4
        dtype = rng.choice(FLOATS[1:] if flash else FLOATS)
        batch, heads = rng.choice((1, 2, 5, 40)), rng.choice((1, 8, 12))
        width = rng.choice((8, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256))
        length = rng.choice((1, 100, 197, 512, 1000))
        keys = rng.choice((length, length, 77, 300))
        few = rng.choice((heads, 4)) if flash and heads % 4 == 0 else heads
        shape = [batch, heads, length, width]
        query = heads_of(rng, shape, dtype)
        key = heads_of(rng, [batch, few, keys, width], dtype)
        value = heads_of(rng, [batch, few, keys, width], dtype)
        grad = heads_of(rng, shape, dtype)
        out = heads_of(seeded(1), shape, dtype)
        drop = rng.choice((0.0, 0.1))
        seed = torch.zeros((), dtype=torch.int64)  # on the host outside CUDA graphs
        if flash:
            lse = tensor([batch, heads, length])
            seed = tensor([2], torch.uint64)
            rest = [
                None,
                None,
                length,
                keys,
                drop,
                True,
                seed,
                tensor([], torch.uint64),
            ]
            args = [grad, query, key, value, out, lse, *rest]
            yield "_scaled_dot_product_flash_attention_backward", args, {}
            continue
        lse = tensor([batch, heads, -(-length // 32) * 32])
        rest = [drop, [True, True, True, False], False]
        args = [grad, query, key, value, None, out, lse, seed, seed, *rest]
        yield "_scaled_dot_product_efficient_attention_backward", args, {}


def attention_forward() -> Iterator[Case]:
    """Flash attention, where few queries meet many keys."""
    rng = seeded(13)
    for _ in range(80):
        dtype = rng.choice(FLOATS[1:])
        batch, heads = rng.choice((1, 2, 4)), rng.choice((1, 8, 16))
        width = rng.choice((32, 64, 96, 128, 192, 256))
        length, keys = rng.choice((2, 64, 100, 500)), rng.choice((100, 1500, 4000))
        query = heads_of(rng, [batch, heads, length, width], dtype)
        key = heads_of(rng, [batch, heads, keys, width], dtype)
        args = [query, key, key, rng.choice((0.0, 0.0, 0.1)), False]
        yield "_scaled_dot_product_flash_attention", args, {}


def wide_attention() -> Iterator[Case]:
    """Memory-efficient attention with heads of any width, with a bias, both ways."""
    rng = seeded(51)
    for _ in range(60):
        dtype = rng.choice((*FLOATS, *FLOATS[1:]))
        batch, heads = rng.choice((1, 2)), rng.choice((1, 4, 8))
        width = rng.choice((64, 136, 160, 256, 256, 512))
        wide = rng.choice((width, width, 64, 128, 192))
        length, keys = rng.choice((1, 100, 512, 1000)), rng.choice((8, 104, 512))
        query = heads_of(rng, [batch, heads, length, width], dtype)
        key = heads_of(rng, [batch, heads, keys, width], dtype)
        value = heads_of(rng, [batch, heads, keys, wide], dtype)
        shape = [batch, heads, length, keys]
        mask = rng.choice((None, tensor(shape, dtype, [0, 0, keys, 1])))
        drop, train = rng.choice((0.0, 0.0, 0.1)), rng.random() < 0.7
        args = [query, key, value, mask, train, drop]
        yield "_scaled_dot_product_efficient_attention", args, {}
        grad, out = (
            heads_of(rng, [batch, heads, length, wide], dtype) for _ in range(2)
        )
        lse = tensor([batch, heads, -(-length // 32) * 32])
        seed = torch.zeros((), dtype=torch.int64)
        wanted = [True, True, True, mask is not None and rng.random() < 0.3]
        rest = [lse, seed, seed, drop, wanted, False]
        args = [grad, query, key, value, mask, out, *rest]
        yield "_scaled_dot_product_efficient_attention_backward", args, {}


def embedding_bags() -> Iterator[Case]:
    """Bags of embeddings: sum, mean and maximum, forward and backward."""
    rng = seeded(52)
    for _ in range(60):
        dtype, index = rng.choice(FLOATS), rng.choice((torch.int64, torch.int32))
        rows, columns = rng.choice((10, 500, 50_000)), rng.choice((16, 100, 512))
        count, bags = rng.choice((20, 3000, 40_000, 200_000)), rng.choice((1, 8, 700))
        mode, sparse = rng.randint(0, 2), False
        weight = tensor([rows, columns], dtype)
        weights = rng.choice((None, None, tensor([count], dtype))) if not mode else None
        last = rng.random() < 0.3
        indices, offsets = tensor([count], index), tensor([bags], index)
        rest = [rng.random() < 0.3, mode, sparse, weights, last, rng.choice((-1, 0))]
        yield "_embedding_bag", [weight, indices, offsets, *rest], {}
        yield "_embedding_bag_forward_only", [weight, indices, offsets, *rest], {}
        bags -= last
        if not bags:
            continue
        grad = tensor([bags, columns], dtype)
        sizes = tensor([bags], index)
        places = tensor([bags, columns] if mode == 2 else [0], index)
        bag = tensor([count] if mode < 2 else [0], index)
        chosen = [indices, bag, sizes, places, rows]
        rest = [rest[0], mode, weights, rest[-1]]
        yield "_embedding_bag_dense_backward", [grad, *chosen, *rest], {}
        every = tensor([count], index)
        chosen = [indices, offsets, every, sizes, places, rows, *rest[:2], sparse]
        yield "_embedding_bag_backward", [grad, *chosen, *rest[2:]], {}
        if weights is not None:
            chosen = [weight, indices, tensor([bags], index), bag, mode, rest[-1]]
            yield "_embedding_bag_per_sample_weights_backward", [grad, *chosen], {}
