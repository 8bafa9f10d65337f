"""Values of small whole-number tensors, beside their fakes."""

# ruff: noqa: ARG005 - some questions ignore what they are given

import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.nn import functional
from torch.nn.utils import rnn
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.tracing.cuda.dispatch.composite_ops import cuda_composite_ops
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake.model_copy import fake_mode
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.values.assumptions import (
    ALL_DIFFERENT,
    EVEN_CHOICE,
    FULL_MASK,
    RANDOM_CHOICE,
    READ_NUMBER,
)
from budgetfit.tracing.values.known_values import KnownValues, UnknownValueError
from budgetfit.tracing.values.library_patches import patch_libraries
from budgetfit.tracing.values.propagation import (
    MAX_FLOATS,
    MAX_INTEGERS,
    PropagatedValues,
)


@pytest.fixture
def values() -> Iterator[KnownValues]:
    """Follow values while the test runs on fake tensors."""
    known = KnownValues()
    with fake_mode(), StorageLog(None, known.run):
        yield known


@pytest.fixture
def stand_in(values: KnownValues) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a fake tensor whose values are those of a real one."""

    def fake(real: torch.Tensor) -> torch.Tensor:
        copied = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
        values.record(copied, real)
        return copied

    return fake


TARGET = CudaTarget(compute_capability=(8, 0), torch_version=(2, 13))
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all": lambda x: bool((x == 1).all()),
    "any": lambda x: bool((x == 0).any()),
    "sum": lambda x: int(x.sum()),
    "item": lambda x: x[0, 3].item(),
    "list": lambda x: x.sum(1).tolist(),
    "running": lambda x: (x.cumsum(1) * x)[1].tolist(),
    "maximum": lambda x: int(x.max()),
    "equal": lambda x: torch.equal(x, x.clone()),
    "not equal": lambda x: torch.equal(x, x + 1),
    "argmax": lambda x: x.argmax(1).tolist(),
    "where": lambda x: torch.where(x == 0, -100, x).tolist(),
    "made here": lambda x: int((torch.arange(4) * x[0]).sum()),
    "filled": lambda x: int(torch.zeros_like(x).sum() + torch.full((2,), 7).sum()),
    "of a constant": lambda x: int((torch.tensor([2, 3]) + x.sum()).sum()),
    "in place": lambda x: int(x.clone().add_(1).sum()),
    "through a view": lambda x: int(x.t().reshape(-1)[:3].sum()),
    "through floats": lambda x: (x.float() * 2.0).sum().item(),
    "a mask of ones": lambda x: bool(torch.ones(2, 4).to(torch.bool).all()),
    "bincount": lambda x: torch.bincount(x.reshape(-1)).tolist(),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_as_the_real_tensor_would(
    stand_in: Callable[[torch.Tensor], torch.Tensor], question: str
) -> None:
    ask = QUESTIONS[question]
    copied = stand_in(MASK)
    got = ask(copied)
    with torch.utils._python_dispatch._disable_current_modes():
        assert got == ask(MASK.clone())


SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "mask of rows": lambda x: x[x[:, 2] > 0],
    "mask after a slice": lambda x: x[:, x[0] > 0],
    "masked select": lambda x: x.masked_select(x > 0),
    "unique": torch.unique,
    "repeat": lambda x: torch.repeat_interleave(x[0]),
    "where": lambda x: torch.where(x > 0)[1],
}


@pytest.mark.parametrize("question", SHAPES)
def test_a_shape_that_depends_on_values_is_the_real_one(
    stand_in: Callable[[torch.Tensor], torch.Tensor], question: str
) -> None:
    ask = SHAPES[question]
    out = ask(stand_in(MASK))
    with torch.utils._python_dispatch._disable_current_modes():
        real = ask(MASK.clone())
    assert out.shape == real.shape
    assert out.dtype == real.dtype
    assert out.tolist() == real.tolist()  # and its values are known in turn


ASSUMED: dict[str, tuple[Callable[[torch.Tensor], Any], Any, str]] = {
    "a number read": (lambda x: (torch.empty(2, 4) * x).sum().item(), 1.0, READ_NUMBER),
    "a float's mask": (lambda x: bool((torch.empty(4) > 0).any()), True, FULL_MASK),
    "how many are true": (lambda x: int((torch.empty(5) < 0).sum()), 5, FULL_MASK),
    "the opposite": (lambda x: int((~(torch.empty(5) < 0)).sum()), 5, FULL_MASK),
    "and as many": (
        lambda x: x[(torch.empty(2, 5) == 0).sum(1) != 5].shape[0],
        2,
        FULL_MASK,
    ),
    "beside what is known": (
        lambda x: int(((torch.empty(2, 4) > 0) & (x > 0)).sum()),
        5,
        FULL_MASK,
    ),
    "finite numbers": (lambda x: bool(torch.isfinite(torch.empty(3)).all()), True, ""),
    "no nan": (lambda x: bool(torch.isnan(torch.empty(3)).any()), False, ""),
    "one is not another": (
        lambda x: torch.equal(torch.empty(3), torch.empty(3)),
        False,
        ALL_DIFFERENT,
    ),
    "a mask": (lambda x: x[torch.empty(2, 4) > 0].shape[0], 8, FULL_MASK),
    "rows of a mask": (lambda x: x[torch.empty(2) > 0].shape[0], 2, FULL_MASK),
    "positions": (lambda x: (torch.empty(2, 4) > 0).nonzero().shape, (8, 2), FULL_MASK),
    "a mask selects": (
        lambda x: torch.empty(2, 4).masked_select(x > 0).shape[0],
        5,
        "",
    ),
    "unique": (lambda x: torch.unique(torch.empty(7)).shape[0], 7, ALL_DIFFERENT),
    "experts": (
        lambda x: torch.bincount(torch.empty(6, 4).topk(2)[1].flatten()).tolist(),
        [3, 3, 3, 3],
        EVEN_CHOICE,
    ),
    "the best": (
        lambda x: torch.empty(6, 3).argmax(-1).tolist(),
        [0, 1, 2, 0, 1, 2],
        EVEN_CHOICE,
    ),
    "an order": (
        lambda x: torch.empty(2, 3).argsort().tolist(),
        [[0, 1, 2], [1, 2, 0]],
        EVEN_CHOICE,
    ),
    "one random number": (lambda x: int(torch.randint(1, 4, (1,))), 3, RANDOM_CHOICE),
    "random numbers": (
        lambda x: torch.randint_like(x[0], 3).tolist(),
        [0, 1, 2, 0],
        RANDOM_CHOICE,
    ),
    "a random permutation": (
        lambda x: torch.randperm(4).tolist(),
        [0, 1, 2, 3],
        RANDOM_CHOICE,
    ),
}


@pytest.mark.parametrize("question", ASSUMED)
def test_what_depends_on_weights_or_chance_is_assumed_by_a_rule_that_is_noted(
    question: str, values: KnownValues
) -> None:
    ask, answer, note = ASSUMED[question]
    copied = torch.empty(2, 4, dtype=torch.long)
    values.record(copied, MASK)
    assert ask(copied) == answer
    assert list(values.notes) == ([note] if note else [])


def test_what_is_written_number_by_number_is_known(values: KnownValues) -> None:
    shapes = torch.empty((2, 2), dtype=torch.long)
    for level, (height, width) in enumerate([(8, 6), (4, 3)]):
        shapes[level, 0], shapes[level, 1] = height, width
    assert int(shapes.prod(1).sum()) == 60
    assert values.notes == {}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_of_one_sample_is_no_index_past_it(
    stand_in: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    with _disable_current_modes():
        real = torch.tensor([[1, 0, 1, 1]], dtype=dtype)
        last, past = torch.tensor([0, 5, 5]), torch.tensor([0, 5, 6])
    x, mask = torch.zeros(1, 4, 6), stand_in(real)
    put = torch.ops.aten.index_put_.default  # what x[mask] = value runs
    put(x, [mask], torch.ones(6))
    put(x, [mask, stand_in(last)], torch.ones(3))  # the mask has two dimensions
    with pytest.raises(IndexError, match=r"index 6 .* dimension 2 with size 6"):
        put(x, [mask, stand_in(past)], torch.ones(3))


def test_indices_of_which_all_rows_are_one_are_checked(
    stand_in: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with _disable_current_modes():
        last, past = (torch.tensor([[0, n]]).expand(3, 2) for n in (5, 6))
    x = torch.zeros(3, 6)
    assert x.gather(1, stand_in(last)).shape == (3, 2)
    with pytest.raises(IndexError, match=r"index 6 .* dimension 1 with size 6"):
        x.gather(1, stand_in(past))


def test_nothing_is_noted_where_no_one_asks(values: KnownValues) -> None:
    x = torch.empty(4, 4)
    torch.where(x > 0, x, 0).topk(2)
    assert values.notes == {}


def test_a_note_says_which_module_asked_first(values: KnownValues) -> None:
    for name in ("first", "second"):
        values.where = lambda name=name: name
        torch.empty(()).item()
    assert values.note_lines() == [f"{READ_NUMBER} (first in 'first')"]


def _through_a_view(x: torch.Tensor) -> int:
    copy = x.clone()
    view = copy[0]
    copy.copy_(torch.empty(2, 4).long())
    return int(view.sum())


UNKNOWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "made random in place": lambda x: int(x.clone().random_(0, 9).sum()),
    "much memory as it comes": lambda x: int(torch.empty(9999, dtype=int).sum()),
    "a copy of the unknown": lambda x: int(
        x.clone().copy_(torch.empty(2, 4).long()).sum()
    ),
    "a view of what became unknown": _through_a_view,
    "rounded": lambda x: int(torch.empty(4).long().sum()),
    "repeated as often": lambda x: x[0].repeat_interleave(torch.empty(4).long()),
    "counted": lambda x: torch.bincount(torch.empty(4).long()),
}


@pytest.mark.parametrize("question", UNKNOWN)
def test_whole_numbers_that_nothing_says_are_not_guessed(
    stand_in: Callable[[torch.Tensor], torch.Tensor], question: str
) -> None:
    copied = stand_in(MASK)
    with pytest.raises(UnknownValueError, match="it needs values that are not known"):
        UNKNOWN[question](copied)


def test_of_an_optimizer_nothing_is_assumed(values: KnownValues) -> None:
    values.phase = "optimizer"
    number = torch.empty(())
    with pytest.raises(DataDependentOutputException):
        number.item()


@pytest.mark.usefixtures("values")
def test_a_loop_that_ends_on_a_no_is_not_told_yes_for_ever() -> None:
    x = torch.empty(())

    def ends() -> None:
        while x > 1:
            pass

    with pytest.raises(UnknownValueError, match="a loop ends when values say so"):
        ends()


def test_a_tensor_that_was_not_remembered_is_unknown(
    stand_in: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    known = stand_in(MASK)
    unknown = torch.empty(2, 4).long()
    with pytest.raises(UnknownValueError):
        int((known + unknown).sum())


def test_what_is_too_large_to_be_worth_its_time_is_unknown(values: KnownValues) -> None:
    small = torch.zeros(MAX_INTEGERS, dtype=torch.long)
    assert int(small.sum()) == 0
    large = torch.zeros(MAX_INTEGERS + 1, dtype=torch.long)
    with pytest.raises(UnknownValueError):
        int(large.sum())
    floats = torch.zeros(MAX_FLOATS + 1)
    assert floats.sum().item() == 1.0
    assert list(values.notes) == [READ_NUMBER]


def test_in_a_large_batch_nothing_is_assumed_for_what_a_small_one_says() -> None:
    for assumes in (True, False):
        values = KnownValues(assumes_for_large=assumes)
        with fake_mode(), StorageLog(None, values.run):
            tokens = torch.empty(MAX_INTEGERS + 1, dtype=torch.long)
            with torch.utils._python_dispatch._disable_current_modes():
                real = torch.zeros(MAX_INTEGERS + 1, dtype=torch.long)
            values.record(tokens, real)
            if assumes:
                assert tokens[tokens == 7].shape == tokens.shape
            else:
                with pytest.raises(UnknownValueError, match="more whole numbers than"):
                    _ = tokens[tokens == 7]


@pytest.mark.usefixtures("values")
def test_a_large_mask_is_as_full_as_a_small_one() -> None:
    x = torch.empty(2, MAX_INTEGERS)
    assert x[(x > 0) & ~(x > 9)].shape == (2 * MAX_INTEGERS,)
    assert bool(torch.isfinite(x).all())


def test_a_large_mask_with_equal_rows_keeps_its_values(values: KnownValues) -> None:
    # As transformers makes Longformer's mask, which the model asks for global tokens.
    count = MAX_INTEGERS // 512
    padding = torch.tensor([0, 5])[:, None]
    keys = torch.arange(count) < count - padding
    mask = (torch.arange(count)[:, None] >= 0) & keys[:, None, None]
    row = torch.where(mask, 0.0, -1.0)[:, 0, 0]
    assert mask.numel() > MAX_INTEGERS
    assert row.sum(1).tolist() == [0, -5]
    assert not values.notes
    row[:, 0] = 3  # as the other rows, which shared its memory, are not
    assert row.sum(1).tolist() == [3, -2]
    assert values.value(mask) is not None
    assert values.value(row._base) is None


def test_a_large_mask_that_is_known_picks_what_it_says(values: KnownValues) -> None:
    # As Voxtral and 22 others compare their placeholders with their features.
    tokens, width = torch.arange(6), MAX_INTEGERS // 4
    x = torch.empty(6, width)
    mask = (tokens < 2)[:, None].expand_as(x)
    assert x[mask].shape == (2 * width,)
    assert x[~mask].shape == (4 * width,)
    assert not values.notes


@pytest.mark.parametrize(
    ("view", "is_known"),
    [
        (lambda x: x.as_strided((x.numel(),), (1,), 0), False),  # as offloading asks
        (lambda x: x.view(-1), False),
        (lambda x: x.flatten(1), False),
        (lambda x: x.squeeze(1).unflatten(-1, (4, -1)), True),
        (lambda x: x[:, :, :8].reshape(-1), True),
    ],
    ids=["as_strided", "view", "flatten", "unflatten", "reshape"],
)
def test_views_of_a_large_mask_with_equal_rows_are_those_of_the_fake(
    values: KnownValues, view: Callable[[torch.Tensor], torch.Tensor], is_known: bool
) -> None:
    length = MAX_INTEGERS // 512
    keys = torch.arange(length) < length - torch.tensor([0, 5])[:, None]
    mask = (torch.arange(length)[:, None] >= 0) & keys[:, None, None]
    found = view(mask)
    real = values.value(found)
    assert (real is not None) == is_known
    assert real is None or real.shape == found.shape


@pytest.mark.parametrize("element", [True, False])
@pytest.mark.parametrize("asked", [{}, {"dim": 1}, {"dim": [0, 1]}], ids=str)
@pytest.mark.parametrize("ask", [torch.any, torch.all])
def test_one_of_equal_elements_answers_for_all(
    ask: Callable[..., torch.Tensor],
    asked: dict[str, object],
    element: bool,
    values: KnownValues,
) -> None:
    fake = torch.empty(3, 4, dtype=torch.bool)
    with _disable_current_modes():
        real = torch.tensor(element).expand(3, 4)
    values.record(fake, real)
    answer = values.value(ask(fake, **asked))
    with _disable_current_modes():
        assert answer is not None
        assert not any(answer.stride())  # not computed element by element
        assert torch.equal(answer, ask(real, **asked))


@pytest.mark.usefixtures("values")
def test_a_full_mask_can_be_written_to() -> None:
    mask = torch.empty(2, 3) > 0
    mask.logical_and_(torch.tensor([True, False, True]))
    assert mask.tolist() == [[True, False, True]] * 2


def test_known_values_are_looked_through_as_often_for_long_lists_that_are_written(
    stand_in: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with _disable_current_modes():
        many = torch.ones(MAX_FLOATS + 1, dtype=torch.long)
    large = stand_in(many)
    searches: list[int] = []
    find = PropagatedValues._aliases

    def spy(known: PropagatedValues, storages: set[int]) -> list[torch.Tensor]:
        searches.append(len(storages))
        return find(known, storages)

    monkeypatch.setattr(PropagatedValues, "_aliases", spy)
    for count in (3, 30):
        searches.clear()
        torch._foreach_add_([torch.zeros(()) for _ in range(count)], 1)
        assert searches == [count, count]  # before it is written and after
    assert int(large.sum()) == MAX_FLOATS + 1


@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_sequences_are_as_long_as_the_lengths_say(batch_first: bool) -> None:
    lengths, x = torch.tensor([3, 1]), torch.randn(2, 4, 5)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    pack, pad = rnn.pack_padded_sequence, rnn.pad_packed_sequence
    real, (padded, _) = (
        packed := pack(x, lengths, batch_first=batch_first),
        pad(packed, batch_first=batch_first, total_length=4),
    )
    values = KnownValues()
    with fake_mode(), cuda_composite_ops(TARGET), StorageLog(None, values.run):
        copied = torch.empty(x.shape)
        fake = pack(copied, lengths, batch_first=batch_first)
        again, found = pad(fake, batch_first=batch_first, total_length=4)
    assert fake.data.shape == real.data.shape
    assert torch.equal(fake.batch_sizes, real.batch_sizes)
    assert again.shape == padded.shape
    assert again.stride() == padded.stride()
    assert found.tolist() == [3, 1]


@pytest.mark.parametrize("targets", [torch.ones(2, 6), torch.ones(5)])
def test_ctc_has_a_table_as_wide_as_the_longest_target(targets: torch.Tensor) -> None:
    values = KnownValues()
    seen: list[tuple[int, ...]] = []
    targets = targets.long()

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        out = values.run(func, args, kwargs)
        if func is torch.ops.aten._ctc_loss.Tensor:
            seen.extend(tuple(x.shape) for x in out)
        return out

    with fake_mode(), StorageLog(None, run):
        log_probs = torch.empty(9, 2, 4, requires_grad=True).log_softmax(-1)
        lengths = torch.tensor([9, 8]), torch.tensor([4, 1])
        functional.ctc_loss(log_probs, targets, *lengths).backward()
    assert seen == [(2,), (2, 9, 9)]


def test_numpy_gets_values_of_a_fake() -> None:
    values = KnownValues()
    with fake_mode(), patch_libraries(values), StorageLog(None, values.run):
        copied = torch.empty(2, 4, dtype=torch.long)
        values.record(copied, MASK)
        assert np.array_equal(copied.numpy(), MASK.tolist())
        cost = torch.empty(3, 2)
        rows, columns = linear_sum_assignment(cost.detach().cpu())
        assert len(rows) == len(columns) == 2
        with pytest.raises(UnknownValueError, match="numpy"):
            torch.empty(2).long().numpy()
    assert list(values.notes) == [READ_NUMBER]
    assert "numpy" not in vars(FakeTensor)


def test_a_tensor_can_be_made_of_a_list_of_fakes() -> None:
    values = KnownValues()
    with fake_mode(), patch_libraries(values), StorageLog(None, values.run):
        fake = torch.empty(2, 4, dtype=torch.long)
        values.record(fake, MASK)
        made = torch.tensor([[row.sum(), 5] for row in fake], device=fake.device)
        assert made.tolist() == [[3, 5], [2, 5]]
    assert torch.tensor([torch.tensor(2)]).tolist() == [2]
    assert isinstance(torch.tensor, type(torch.zeros))


def test_a_tensor_can_be_indexed_by_lists_of_fakes() -> None:
    values, real = KnownValues(), MASK.clone()
    with fake_mode(), patch_libraries(values), StorageLog(None, values.run):
        fake = torch.empty(2, 4, dtype=torch.long)
        values.record(fake, real)
        rows, columns = zip(*fake.nonzero(), strict=True)
        assert fake[rows, list(columns)].tolist() == [1] * 5
        fake[list(rows), columns] = 7
        assert fake.tolist() == [[7, 7, 7, 0], [7, 7, 0, 0]]
        assert (
            fake[[row.sum() - 2 for row in fake[:, :0]]].tolist() == [[7, 7, 7, 0]] * 2
        )
    assert "__getitem__" not in vars(FakeTensor)


def test_a_lone_number_in_text_is_written_out() -> None:
    values = KnownValues()
    with fake_mode(), patch_libraries(values), StorageLog(None, values.run):
        fake = torch.empty(2, 4, dtype=torch.long)
        values.record(fake, MASK)
        assert f"expert_{fake.sum():03d}" == "expert_005"
        assert "FakeTensor" in f"{fake}"
    assert "__format__" not in vars(FakeTensor)


@pytest.mark.usefixtures("values")
def test_a_lone_random_number_lets_every_layer_run() -> None:
    for chance in (torch.rand([]), torch.rand(1)):
        assert not chance < 0.999999  # layerdrop: skip if below its probability
        assert chance < 1


def test_following_values_leaves_no_mark_in_the_log() -> None:
    def ask(x: torch.Tensor) -> None:
        bool((x == 1).all())

    values = KnownValues()
    with fake_mode(), StorageLog(None, values.run) as log:
        copied = torch.empty(2, 4, dtype=torch.long)
        values.record(copied, MASK)
        ask(copied)
        with_values = list(log.sizes)
    with StorageLog() as log:
        ask(MASK.clone())
    assert with_values == log.sizes


def test_values_are_forgotten_with_their_tensors(values: KnownValues) -> None:
    x = torch.arange(4)
    y = x + 1
    assert len(values._values._real) == 2
    del x, y
    assert len(values._values._real) == 0


@pytest.mark.usefixtures("values")
def test_zeros_like_an_unknown_tensor_are_known() -> None:
    unknown = torch.empty(3, 4)
    assert not torch.zeros_like(unknown).any()
    assert torch.ones_like(unknown, dtype=torch.int64).sum().item() == 12


def _expert_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Route each row to one of four experts, as a loop over masks does."""
    chosen = (x @ weight)[:, :4].argmax(-1)
    out = torch.zeros_like(x)
    for expert in range(4):
        rows = torch.where(chosen == expert)[0]
        out = out.index_add(0, rows, torch.tanh(x[rows] @ weight))
    return out.sum()


STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a mask": lambda x, w: (h := x @ w)[h > 0].square().sum(),
    "its opposite too": lambda x, w: (
        (h := x @ w)[m := h[:, 0] > 0].square().sum() + h[~m].exp().sum()
    ),
    "positions": lambda x, w: (
        (x @ w)[(x @ w)[:, 0].gt(0).nonzero(as_tuple=True)].exp().sum()
    ),
    "selected": lambda x, w: (h := x @ w).masked_select(h > 0.5).exp().sum(),
    "a branch": lambda x, w: (h.exp() if (h := x @ w).sum() > 0 else h).sum(),
}


def _peak_bytes(log: StorageLog, step: Any, x: Any, weight: Any) -> int:
    log.reset_peak()
    step(x, weight).backward()
    return log.peak_bytes


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from([*STEPS]), rows=st.integers(2, 40), seed=st.integers(0, 999)
)
def test_a_step_never_takes_more_than_with_full_masks(
    name: str, rows: int, seed: int
) -> None:
    """The bound that the note promises, against real numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=generator)
    weight = torch.randn(8, 8, generator=generator).requires_grad_()
    with StorageLog() as log:
        real = _peak_bytes(log, STEPS[name], x, weight)
    values = KnownValues()
    with fake_mode(), StorageLog(None, values.run) as log:
        fakes = torch.empty(rows, 8), torch.empty(8, 8, requires_grad=True)
        assert _peak_bytes(log, STEPS[name], *fakes) >= real
    assert list(values.notes) == [FULL_MASK]


def test_experts_together_take_what_they_really_take() -> None:
    """Whoever gets which rows, what is kept for the backward pass is the same."""
    x, weight = torch.randn(32, 8), torch.randn(8, 8, requires_grad=True)
    with StorageLog() as log:
        out = _expert_sum(x, weight)
        real = log.live_bytes
    del out
    values = KnownValues()
    with fake_mode(), StorageLog(None, values.run) as log:
        fakes = torch.empty(32, 8), torch.empty(8, 8, requires_grad=True)
        before = log.live_bytes
        out = _expert_sum(*fakes)
        assert log.live_bytes - before == real
        del out
    assert list(values.notes) == [EVEN_CHOICE]


def test_a_list_of_known_numbers_is_read_at_once(
    values: KnownValues, stand_in: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    fake = stand_in(MASK)
    with patch_libraries(values), unittest.mock.patch.object(FakeTensor, "item"):
        assert fake.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
