"""Worked examples from rules M15 to M39 of cuda-memory.md, and laws of all rules."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetfit.memory.scratch_sizes.matmul import (
    cublas_workspace_is_persistent,
    cublaslt_workspace_is_separate,
)
from budgetfit.memory.scratch_sizes.rules import (
    PARTS,
    RULES,
    DeviceProperties,
    rounded_bytes,
    rule,
    scratch_bytes,
)

T4 = DeviceProperties((7, 5), 40, 1024)
A100 = DeviceProperties((8, 0), 108, 2048)
RTX_3090 = DeviceProperties((8, 6), 82, 1536)
H100 = DeviceProperties((9, 0), 132, 2048)
RTX_5090 = DeviceProperties((12, 0), 170, 1536)
CARDS = (T4, A100, RTX_3090, H100, RTX_5090)


def column_sums(rows: int, columns: int, element: int = 4) -> tuple[int, ...]:
    """Return the arguments of summing a contiguous matrix over its rows."""
    vector = 16 // element
    return (element, 4, vector, int(element < 4), 1, 0, rows, columns, columns, 1)


def card_of(capability: tuple[int, int]) -> DeviceProperties:
    return DeviceProperties(capability, 1, 2048)


# Rule, card, arguments, the bytes of its parts.
EXAMPLES: list[tuple[str, DeviceProperties, tuple[int, ...], list[int]]] = [
    # The bias gradient of a wide layer, as measured: 8192 rows x 3072 columns in bf16,
    # 24 tiles of outputs, 4 bytes a counter.
    *(
        ("reduction", card, column_sums(8192, 3072, element=2), [0, size, 96])
        for card, size in (
            (RTX_3090, 64_487_424),
            (A100, 113_246_208),
            (H100, 138_412_032),
            (RTX_5090, 133_693_440),
        )
    ),
    # A sum over rows of 768 columns takes 48 MiB on every card.
    *(
        ("reduction", card, column_sums(8192, 768), [0, 50_331_648, 24])
        for card in (A100, H100, RTX_3090, RTX_5090)
    ),
    # With many outputs it is not split: over the columns.
    ("reduction", A100, (4, 4, 4, 0, 0b10, 0, 8192, 768, 768, 1), [0, 0, 0]),
    ("reduction", A100, column_sums(0, 768), [0, 0, 0]),
    # 131,072 rows take two passes: 32 x 1024 blocks / 24 tiles of columns = 1365 rows
    # of partial sums.
    (
        *("norm_backward", A100, (131_072, 768, 4, 1, 1)),
        [1365 * 768 * 4, 1365 * 768 * 4, 3072, 8_650_752, 24],
    ),
    ("norm_backward", A100, (65_536, 768, 4, 1, 1), [0, 0, 0, 0, 0]),
    # Batch 2 x 12 heads, 1000 queries padded to 1024, width 80 padded to 96.
    (
        *("flash_attention_backward", A100, (24, 1000, 1000, 80, 2, 0)),
        [98_304, 9_437_184, 0, 0],
    ),
    # Grouped queries expand the gradients of keys and values: 24 x 1024 x 128 in bf16.
    (
        *("flash_attention_backward", A100, (24, 1024, 1024, 128, 2, 1)),
        [98_304, 12_582_912, 6_291_456, 6_291_456],
    ),
    # It follows shared memory: bf16, width 80, dropout, 1000 queries and keys (M27)
    *(
        (
            *("efficient_attention_backward", card),
            *((24, 12, 1000, 1000, 80, 80, 0, 1), [size]),
        )
        for card, size in (
            (A100, 12_585_984),
            (H100, 12_585_984),
            (RTX_3090, 25_178_112),
        )
    ),
    # More than 65,535 samples take several launches.
    *(
        ("efficient_attention_launches", A100, (samples, 10), parts)
        for samples, parts in (
            (65_535, [0, 0, 655_350, 655_350]),
            (65_536, [655_350, 10, 0, 655_350]),
            (200_000, [655_350, 655_350, 0, 655_350]),
        )
    ),
    # 8192 indices into 50257 rows of 768: (819 + 8192) x 768 x 4 bytes (M35)
    (
        *("embedding_partials", A100, (8192, 50_257, 768, 8, 4, 0, 0)),
        [72_088, 27_681_792, 0],
    ),
    ("embedding_indices", A100, (8192, 8, 0), [65_536]),
    ("embedding_sort", A100, (8192, 50_257, 8, 0), [138_751]),
    ("embedding_unique", A100, (8192, 8, 0), [1279]),
    ("embedding_scan", A100, (8192, 50_257, 8, 0), [1279]),
    # Few indices need no sort,
    ("embedding_indices", A100, (3072, 8, 0), [0]),
    ("embedding_sort", A100, (3072, 9, 8, 0), [0]),
    ("embedding_unique", A100, (3072, 8, 0), [0]),
    ("embedding_segments", A100, (3072, 9, 8, 0), [0]),
    ("embedding_scan", A100, (3072, 9, 8, 0), [0]),
    ("embedding_count", A100, (3072, 8, 0), [0]),
    ("embedding_partials", A100, (3072, 9, 64, 8, 4, 0, 0), [0, 0, 0]),
    # but for those of bags.
    ("embedding_indices", A100, (20, 8, 1), [160]),
    ("embedding_partials", A100, (20, 50, 16, 8, 4, 1, 1), [176, 22 * 16 * 4, 0]),
    # A row of 20,000 is shared among blocks. 4 numbers a thread and 256 threads: 50
    # blocks, each with 256 counts of 2 bytes.
    ("topk", A100, (1, 19_999, 4), [0] * 8),
    ("topk", A100, (1, 50_257, 4), [4, 8, 8, 50 * 512, 1024, 200, 200, 1279]),
    ("scan", A100, (10**6, 8, 0), [18_943]),  # as measured
    *(
        ("cublas_workspace", card_of(capability), version, [size])
        for capability, version, size in (
            ((7, 5), (2, 13), 8_519_680),
            ((8, 9), (2, 13), 8_519_680),
            ((9, 0), (2, 10), 33_554_432),
            ((12, 0), (2, 10), 8_519_680),
            ((9, 0), (2, 11), 33_554_432),
            ((10, 0), (2, 11), 8_519_680),
            ((10, 0), (2, 12), 33_554_432),
            ((12, 0), (2, 13), 33_554_432),
            ((11, 0), (2, 13), 8_519_680),
            ((11, 0), (2, 14), 33_554_432),
            ((8, 0), (2, 15), 8_519_680),
        )
    ),
    *(
        ("cublaslt_workspace", card_of(capability), (), [1 << 20])
        for capability in ((7, 5), (8, 9), (9, 0), (10, 0))
    ),
]


@pytest.mark.parametrize(("name", "card", "arguments", "parts"), EXAMPLES)
def test_a_rule_gives_the_bytes_of_its_worked_examples(
    name: str, card: DeviceProperties, arguments: tuple[int, ...], parts: list[int]
) -> None:
    assert scratch_bytes(card, name, arguments) == parts


def test_a_sum_above_2_gib_is_split_and_bf16_needs_an_accumulator() -> None:
    # 2^18 x 8192 elements in bf16 are 4 GiB: in fp32 8192 sums take 32 KiB
    parts = scratch_bytes(A100, "reduction", column_sums(2**18, 8192, element=2))
    assert parts[0] == 8192 * 4
    parts = scratch_bytes(A100, "reduction", column_sums(2**18, 8192))
    assert parts[0] == 0


def test_very_long_rows_are_sorted_one_by_one() -> None:
    one = scratch_bytes(A100, "sort", (1, 1_000_000, 4))
    assert scratch_bytes(A100, "sort", (8, 1_000_000, 4)) == one
    assert scratch_bytes(A100, "sort", (8, 999_999, 4))[2] == 8 * 999_999 * 8


def test_sorts_of_16_bits_before_hopper_take_the_most_blocks_that_fit() -> None:
    _, old, *_ = scratch_bytes(A100, "sort", (1, 50_257, 2))
    _, new, *_ = scratch_bytes(H100, "sort", (1, 50_257, 2))
    assert (old, new) == (4_971_775, 516_607)


def test_a_sort_of_a_million_floats_takes_what_was_measured() -> None:
    assert scratch_bytes(A100, "sort", (1, 10**6, 4))[:2] == [8_000_000, 12_342_527]
    assert scratch_bytes(H100, "sort", (1, 10**6, 4))[:2] == [8_000_000, 12_200_191]


def test_the_workspace_of_cublas_stays_up_to_2_14() -> None:
    assert cublas_workspace_is_persistent((2, 14))
    assert not cublas_workspace_is_persistent((2, 15))


def test_cublaslt_shares_the_workspace_of_cublas_in_2_12_to_2_14() -> None:
    separate = {
        minor: cublaslt_workspace_is_separate((2, minor)) for minor in range(11, 16)
    }
    assert [minor for minor, alone in separate.items() if alone] == [11, 15]


def test_a_rule_is_registered_once() -> None:
    with pytest.raises(ValueError, match="already is a scratch rule named 'buffer'"):
        rule(parts=1)(RULES["buffer"])


def test_an_unknown_rule_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no_such_rule"):
        scratch_bytes(A100, "no_such_rule", ())


def test_requests_are_rounded_up_to_512_bytes_each() -> None:
    assert rounded_bytes(1, 512, 513, 0) == 512 + 512 + 1024


# One strategy for each argument of each rule that takes numbers of things.
COUNT = st.integers(1, 3 * 10**5)
WIDTH = st.integers(1, 512)
BYTES = st.sampled_from((2, 4))
FLAG = st.integers(0, 1)
INDEX = st.sampled_from((4, 8))
ARGUMENTS = {
    "buffer": (COUNT,),
    "chunk_cat": (COUNT, COUNT),
    "cublas_workspace": (st.just(2), st.integers(10, 15)),
    "cublaslt_workspace": (),
    "efficient_attention_backward": (COUNT, *[WIDTH] * 5, FLAG, FLAG),
    "efficient_attention_launches": (COUNT, COUNT),
    "embedding_count": (COUNT, st.just(8), FLAG),
    "embedding_indices": (COUNT, INDEX, FLAG),
    "embedding_scan": (COUNT, COUNT, INDEX, FLAG),
    "embedding_segments": (COUNT, COUNT, INDEX, FLAG),
    "embedding_sort": (COUNT, COUNT, INDEX, FLAG),
    "embedding_unique": (COUNT, INDEX, FLAG),
    "embedding_partials": (COUNT, COUNT, WIDTH, INDEX, BYTES, FLAG, FLAG),
    "flash_attention_backward": (COUNT, WIDTH, WIDTH, WIDTH, st.just(2), FLAG),
    "flash_attention_forward": (COUNT, WIDTH, WIDTH, WIDTH, FLAG),
    "batch_norm_statistics": (COUNT, WIDTH, st.sampled_from((2, 4))),
    "grouped_matmul": (WIDTH, COUNT, WIDTH, COUNT, WIDTH),
    "index_put_sort": (COUNT, COUNT),
    "masked_scatter": (COUNT,),
    "norm_backward": (COUNT, WIDTH, BYTES, FLAG, FLAG),
    "scan": (COUNT, st.sampled_from((2, 4, 8)), FLAG),
    "scan_by_key": (COUNT, INDEX, FLAG),
    "sort": (WIDTH, COUNT, st.sampled_from((1, 2, 4, 8))),
    "split_with_sizes_copy": (st.integers(2, 64), COUNT, COUNT),
    "topk": (WIDTH, COUNT, st.sampled_from((1, 2, 4, 8))),
}


def test_every_rule_has_its_law_here() -> None:
    assert {*ARGUMENTS, "reduction"} == set(RULES)


@pytest.mark.parametrize("name", ARGUMENTS)
@given(data=st.data())
def test_a_rule_has_the_same_number_of_parts_whatever_its_arguments(
    name: str, data: st.DataObject
) -> None:
    card = data.draw(st.sampled_from(CARDS))
    arguments = tuple(data.draw(strategy) for strategy in ARGUMENTS[name])
    parts = scratch_bytes(card, name, arguments)
    assert len(parts) == PARTS[name]
    assert all(isinstance(part, int) and part >= 0 for part in parts)


def test_the_copies_of_fsdp2_pack_the_numbers_of_their_blocks() -> None:
    """Blocks of 2048 bytes; of a copy-out as many as run at once, twice over.

    A card of 2 x 1024 threads runs 16 blocks of 128, so that 32 are launched at once.
    """
    card = DeviceProperties((8, 0), 2, 1024)
    # 6 numbers for each of 2 tensors, 2 more, and 1 + 3 blocks.
    assert scratch_bytes(card, "chunk_cat", (2048, 4097)) == [8 * (6 * 2 + 2 + 1 + 3)]
    # 8 blocks on 4 ranks are 32: each reads one tile.
    few = 4 * 2 + 1 + 4 + 4
    assert scratch_bytes(card, "split_with_sizes_copy", (4, 8192, 8192)) == [8 * few]
    # 32 blocks on 4 ranks are four times as many: two ranks and two tiles for each.
    many = 4 * 2 + 1 + 8 + 8
    sizes = (4, 2**15, 2**15)
    assert scratch_bytes(card, "split_with_sizes_copy", sizes) == [8 * many]


@given(
    st.sampled_from(CARDS),
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.integers(1, 15),
)
def test_a_reduction_splits_only_while_the_card_has_idle_multiprocessors(
    card: DeviceProperties, sizes: list[int], random: Random, mask: int
) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)
    strides, step = [0] * len(sizes), 1
    for dim in order:
        strides[dim], step = step, step * sizes[dim]
    arguments = (4, 4, 4, 0, mask, 0, *sizes, *strides)
    accumulator, partial, counters = scratch_bytes(card, "reduction", arguments)
    assert accumulator == 0  # below 2 GiB
    assert (partial == 0) == (counters == 0)
    # a counter for each of at most as many blocks as fit on the card at once
    assert counters <= 4 * card.sm_count * card.threads_per_sm // 32


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from(CARDS))
def test_a_matrix_and_its_transpose_reduced_the_same_way_take_the_same(
    m: int, n: int, card: DeviceProperties
) -> None:
    rows = scratch_bytes(card, "reduction", (4, 4, 4, 0, 0b01, 0, m, n, n, 1))
    same = scratch_bytes(card, "reduction", (4, 4, 4, 0, 0b10, 0, n, m, 1, n))
    assert rows == same


@pytest.mark.parametrize(
    ("item", "in_arrays", "items", "sizes"),
    [
        (1, 0, (122_880, 20_029_440), (767, 21_503)),
        (2, 0, (122_880, 20_029_440), (767, 21_503)),
        (2, 1, (122_880, 20_029_440), (1279, 42_495)),
        (4, 0, (61_440, 20_029_440), (1023, 84_223)),
        (8, 0, (14_336, 20_013_056), (1279, 358_399)),
        (8, 1, (28_672, 20_013_056), (1791, 447_999)),
        (16, 1, (6144, 20_004_864), (2303, 1_877_247)),
    ],
)
def test_a_scan_of_each_type_takes_what_was_recorded(
    item: int, in_arrays: int, items: tuple[int, int], sizes: tuple[int, int]
) -> None:
    # PyTorch's host code for each of five architectures: one item more takes more
    for count, size in zip(items, sizes, strict=True):
        for card in CARDS:
            assert scratch_bytes(card, "scan", (count, item, in_arrays)) == [size]
            assert scratch_bytes(card, "scan", (count + 1, item, in_arrays)) > [size]
