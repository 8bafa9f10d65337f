"""Plans for samples of many lengths: what is traced, replayed and recommended."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import budgetfit
from budgetfit import Parallelism
from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.core.loop import Loop
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.samples.sample_lengths import LengthSummary, summarize_lengths
from budgetfit.core.step_trace import StepTrace
from budgetfit.errors import InputError
from budgetfit.gpus.table import find_gpu
from budgetfit.inputs.arguments import Arguments
from budgetfit.memory import replay_sequence
from budgetfit.memory.replay import device_properties, replay, storage_bytes
from budgetfit.memory.replay_sequence import StepSequence
from budgetfit.planning.search import varying_lengths
from budgetfit.planning.search.loss_chunking import search_with_loss_chunks
from budgetfit.planning.search.smaller_budget import with_less_memory
from budgetfit.planning.search.traced_sessions import traced_sessions
from budgetfit.planning.search.varying_lengths import LengthsJudge, estimate_all_lengths
from budgetfit.traces.length_traces import LengthsNotTracedError, LengthTraces
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.models import alone, counting_hook, gpt2_config

pytestmark = pytest.mark.usefixtures("kept_traces")
GPU = find_gpu("rtx-4090")
BATCH = 8
LENGTHS = summarize_lengths(dict.fromkeys(range(40, 201), 1))
RECIPE = Recipe(batch_size=BATCH, precision="bf16-mixed")


def _config() -> transformers.GPT2Config:
    return gpt2_config(n_embd=128, n_positions=1024, vocab_size=8192, use_cache=False)


@cache
def _workload() -> Workload:
    lengths = dict(LENGTHS.counts)
    return Arguments(model=_config(), gpu="rtx-4090", lengths=lengths).parsed().workload


@cache
def _trace(length: int, recipe: Recipe = RECIPE) -> StepTrace:
    return TraceSession(_workload().at_length(length)).exact(recipe)


@cache
def _traces(recipe: Recipe = RECIPE) -> LengthTraces:
    return LengthTraces(
        lambda length: _trace(length, recipe), recipe.batch_size, LENGTHS
    )


def _sizes(trace: StepTrace) -> np.ndarray:
    sizes = storage_bytes(trace, BATCH, device_properties(GPU))
    return (sizes + 511) // 512


def _sequence(recipe: Recipe, allocator: str = "") -> StepSequence:
    return StepSequence(
        _traces(recipe).program_at,
        GPU,
        micro_steps=recipe.gradient_accumulation_steps,
        settings=AllocatorSettings.parse(allocator),
    )


def test_made_batches_of_many_lengths_end_in_padding_but_for_the_first() -> None:
    mask = _workload().batch["attention_mask"]
    assert mask.shape == (2, 200)
    assert mask.sum(1).tolist() == [200, 175]
    equal = Arguments(model=_config(), gpu="rtx-4090", lengths=[64, 64]).parsed()
    assert "attention_mask" not in equal.workload.batch


@pytest.mark.parametrize("length", [48, 61, 136, 143, 197])
def test_a_length_that_was_not_traced_has_the_bytes_of_its_own_trace(
    length: int,
) -> None:
    actual, told = _trace(length), _traces().program_at(length).at(length)
    assert length not in _traces().traced
    assert told.events.tolist() == actual.events.tolist()
    # Kernels round some buffers of theirs: not of degree two.
    beyond = np.abs(_sizes(told) - _sizes(actual))
    assert (beyond <= 8 + _sizes(actual) // 100).all()
    assert beyond.sum() <= 0.001 * _sizes(actual).sum()


def test_another_program_begins_where_a_window_is_exceeded() -> None:
    def beyond_window(length: int) -> StepTrace:
        trace = _trace(length)
        return trace if length <= 101 else replace(trace, notes=("sliding",), phases=())

    found = LengthTraces(beyond_window, BATCH, LENGTHS)
    programs = {
        length: found.program_at(length).first.notes
        for length in range(LENGTHS.shortest, LENGTHS.planned + 1)
    }
    assert all(
        notes == (("sliding",) if length > 101 else ())
        for length, notes in programs.items()
    )
    assert len(found.traced) < 30


def test_lengths_that_all_run_other_programs_are_refused() -> None:
    def other(length: int) -> StepTrace:
        trace = _trace(LENGTHS.planned)
        return replace(trace, events=trace.events[:-length])

    with pytest.raises(LengthsNotTracedError, match="too many different programs"):
        LengthTraces(other, BATCH, LENGTHS)


def test_bytes_that_grow_otherwise_with_the_length_are_refused() -> None:
    def other(length: int) -> StepTrace:
        trace = _trace(length)
        return replace(trace, fixed_bytes=trace.fixed_bytes * length**2 // 100)

    with pytest.raises(LengthsNotTracedError, match="do not follow from those"):
        LengthTraces(other, BATCH, LENGTHS)


@pytest.mark.parametrize(
    ("steps", "parallelism"),
    [
        (1, None),
        (2, None),
        (1, Parallelism(engine="fsdp2", gpus=2, param_dtype="bf16")),
        (2, Parallelism(engine="ddp", gpus=2)),
    ],
)
def test_one_length_again_and_again_takes_what_one_trace_says(
    steps: int, parallelism: Parallelism | None
) -> None:
    recipe = replace(RECIPE, gradient_accumulation_steps=steps, parallelism=parallelism)
    longest = LENGTHS.planned
    alone = replay(_trace(longest, recipe), BATCH, GPU, micro_steps=steps)
    found = _sequence(recipe).peaks([(longest,) * steps] * 4)
    assert found.reserved_bytes == alone.reserved_bytes
    assert found.allocated_bytes == alone.allocated_bytes
    # A first backward whose results are dropped leaves all later steps as they are, but
    # for DDP's: it makes its buckets anew before the optimizer has made its states.
    first = _sequence(recipe).peaks([(longest,) * steps] * 4, longest_first=longest)
    earlier = alone.allocated_bytes - first.allocated_bytes
    assert (earlier > 0) is (recipe.engine == "ddp")
    states = sum(8 * weight.numel() for weight in _workload().model.parameters())
    assert 0 <= earlier < states


def test_many_lengths_fragment_and_the_longest_first_less() -> None:
    updates = LENGTHS.draw(BATCH, 1, 100, seed=0)
    longest = LENGTHS.planned
    alone = replay(_trace(longest), BATCH, GPU).reserved_bytes
    plain = _sequence(RECIPE).peaks(updates).reserved_bytes
    first = _sequence(RECIPE).peaks(updates, longest_first=longest).reserved_bytes
    expanding = _sequence(RECIPE, "expandable_segments:True").peaks(updates)
    assert plain > first >= alone
    assert expanding.reserved_bytes < plain


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_a_replay_that_goes_on_from_known_states_is_the_same(
    allocator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short batches come again after longer ones have split what they had."""
    lengths = (60, 61, 60, 130, 60, 131, 60, 200, 60, 61, 130)
    parts = [[(length,) for length in lengths[:end]] for end in range(1, 12)]
    known = _sequence(RECIPE, allocator)
    found = [known.peaks(updates) for updates in [*parts, *parts]]
    monkeypatch.setattr(replay_sequence, "MOST_KNOWN", 0)
    assert found == [_sequence(RECIPE, allocator).peaks(each) for each in parts] * 2


def test_a_replay_ends_with_the_update_that_takes_too_much() -> None:
    found = _sequence(RECIPE).peaks(LENGTHS.draw(BATCH, 1, 100, seed=0), most_bytes=1)
    assert found.updates == 1


@cache
def _plan(**settings: Any) -> budgetfit.Plan:
    return budgetfit.plan(
        _config(),
        gpu="rtx-4090",
        lengths=dict(LENGTHS.counts),
        precision="bf16-mixed",
        effective_batch_size=BATCH,
        **settings,
    )


def test_a_plan_holds_over_its_lengths_and_says_what_it_does_for_that() -> None:
    roomy = _plan()
    over = roomy.varying_lengths
    assert over is not None
    assert (over.measure, over.fits) == ("longest first", True)
    assert over.reserved_bytes == roomy.estimate.reserved_bytes
    assert 0 < over.samples_per_s < over.grouped_samples_per_s
    replays, longest = _sequence(roomy.recipe), LENGTHS.planned
    reserved = max(
        replays.peaks(
            LENGTHS.draw(BATCH, 1, 200, seed), longest_first=longest
        ).reserved_bytes
        for seed in range(3)
    )
    # One more of the largest block, the logits in fp32, is left for other orders.
    logits = BATCH * longest * _config().vocab_size * 4
    assert replays.largest_block_bytes(longest) == logits
    least = roomy.budget.context_bytes + reserved + logits
    settings = {"headroom": 0, "batch_size": BATCH, "checkpointing": "none"}
    tight = _plan(vram=least + 1, **settings)
    assert tight.varying_lengths is not None
    assert tight.varying_lengths.measure == "longest first"
    assert tight.recipe.longest_batch_first
    tighter = _plan(vram=least - 2**20, **settings)
    assert tighter.varying_lengths is not None
    assert tighter.varying_lengths.measure == "expandable segments"
    assert not tighter.recipe.longest_batch_first
    assert tight.estimate.reserved_bytes <= tight.budget.usable_bytes
    assert "the first run.step() also runs the longest" in " ".join(str(tight).split())
    loaded = budgetfit.Plan.from_json(alone(tight).to_json())
    assert loaded.varying_lengths == tight.varying_lengths


def test_where_only_the_longest_fits_all_are_padded_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not slower settings, and no plan that may run out of memory."""
    # That is without expandable segments, with which the others fit, too.
    monkeypatch.setattr(LengthsJudge, "_measures", ("longest first",))
    alone = replay(_trace(LENGTHS.planned), BATCH, GPU).reserved_bytes
    vram = _plan().budget.context_bytes + alone
    settings: dict[str, Any] = {"batch_size": BATCH, "checkpointing": "none"}
    tight = _plan(vram=vram, headroom=0, **settings)
    over = tight.varying_lengths
    assert over is not None
    assert (over.pad_to_multiple_of, over.fits) == (LENGTHS.planned, True)
    assert tight.estimate.reserved_bytes == alone
    assert over.samples_per_s == pytest.approx(tight.estimate.samples_per_s)
    assert not any("may run out of memory" in each for each in tight.warnings)


def test_another_batch_is_chosen_where_it_is_faster_over_the_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # At the longest length alone the batch of eight is, which is what is searched for.
    rates = {8: 50.0, 4: 100.0, 2: 200.0}
    monkeypatch.setattr(
        LengthsJudge,
        "samples_per_s",
        lambda judge, *_: rates[judge._estimate.recipe.batch_size],
    )

    def planned(**settings: Any) -> tuple[int, float]:
        plan = _plan.__wrapped__(**settings)
        over = plan.varying_lengths
        assert over is not None
        assert plan.recipe.effective_batch_size == BATCH
        assert over.plain_samples_per_s == over.samples_per_s
        return plan.recipe.batch_size, over.samples_per_s

    monkeypatch.setattr(varying_lengths, "SIMILAR_RATE", 0)
    assert planned() == (4, 100)
    assert planned(batch_size=BATCH) == (BATCH, 50)
    monkeypatch.setattr(varying_lengths, "SIMILAR_RATE", 2)
    assert planned() == (BATCH, 50)
    monkeypatch.setattr(varying_lengths, "SIMILAR_RATE", 0)
    monkeypatch.setattr(varying_lengths, "warnings_after_last_batch", lambda *_: ("",))
    assert planned() == (BATCH, 50)

    def refuse(*_: object) -> None:
        raise InputError("one sample is too few")

    monkeypatch.setattr(varying_lengths, "search_with_loss_chunks", refuse)
    assert planned() == (BATCH, 50)


def test_less_memory_is_less_than_known_settings_take_not_than_the_budget() -> None:
    """Else settings that fragment are found again where more of the budget is free."""
    asked = Arguments(
        model=_config(), gpu="rtx-4090", precision="bf16-mixed", batch_size=BATCH
    ).parsed()
    (session,) = traced_sessions(asked.workload, asked.request, **asked.settings)
    known = search_with_loss_chunks(session).estimate
    assert known is not None
    assert known.reserved_bytes < session.budget.usable_bytes // 2
    found = with_less_memory(session, known, excess_bytes=0)
    assert found is not None
    smaller, _, less = found
    assert less.reserved_bytes <= smaller.budget.usable_bytes < known.reserved_bytes
    assert less.recipe != known.recipe


def test_an_estimate_of_compiled_blocks_is_of_the_longest_alone() -> None:
    """Each of the lengths would be compiled, in minutes, and take bytes of its own."""
    session = TraceSession(_workload())
    budget = Arguments(model=_config(), gpu="rtx-4090").parsed().budget
    recipe = replace(RECIPE, compile="blocks")
    plain = budgetfit.estimate(_config(), RECIPE, gpu="rtx-4090", max_length=200)
    found = estimate_all_lengths(
        session,
        budget,
        replace(plain, recipe=recipe),
        keep_own_checkpointing=False,
        loop=Loop(),
    )
    assert found.reserved_bytes == plain.reserved_bytes
    assert "only the largest batch was judged" in found.notes[-1]


def test_a_backward_that_updates_cannot_be_run_before_the_first() -> None:
    over = _plan(optimizer_in_backward=True).varying_lengths
    assert over is not None
    assert over.measure == "expandable segments"


def test_an_estimate_of_a_recipe_is_over_its_lengths() -> None:
    lengths = dict(LENGTHS.counts)
    longest = budgetfit.estimate(
        _config(), RECIPE, gpu="rtx-4090", max_length=LENGTHS.planned
    )
    plain = budgetfit.estimate(_config(), RECIPE, gpu="rtx-4090", lengths=lengths)
    first = budgetfit.estimate(
        _config(),
        replace(RECIPE, longest_batch_first=True),
        gpu="rtx-4090",
        lengths=lengths,
    )
    assert plain.reserved_bytes > first.reserved_bytes >= longest.reserved_bytes
    assert any("(samples of 40 to 200 tokens)" in note for note in plain.notes)
    assert longest.data_samples_per_s is None
    assert plain.samples_per_s_of_data == plain.data_samples_per_s
    assert any("some orders reserve twice as much" in note for note in plain.notes)
    assert not any("some orders" in note for note in first.notes)


def test_the_rate_of_a_plan_is_that_of_its_recipe() -> None:
    """Although the plan holds for accumulation, of which the recipe has none."""
    asked: dict[str, Any] = {"gpu": "rtx-4090", "lengths": {64: 3, 128: 1}}
    plan = budgetfit.plan(_config(), precision="fp32", batch_size=2, **asked)
    assert plan.recipe.gradient_accumulation_steps == 1
    own = budgetfit.estimate(_config(), plan.recipe, **asked)
    rate = plan.estimate.samples_per_s_of_data
    assert own.samples_per_s_of_data == pytest.approx(rate)


def test_what_lengths_add_comes_on_top_of_what_evaluations_take() -> None:
    """An upper bound: their replay has no evaluations between its steps."""

    def reserved(loop: Loop, **batch: Any) -> int:
        recipe = replace(RECIPE, longest_batch_first="lengths" in batch)
        made = budgetfit.estimate(_config(), recipe, gpu="rtx-4090", loop=loop, **batch)
        return made.reserved_bytes

    one: dict[str, Any] = {"max_length": LENGTHS.planned}
    many: dict[str, Any] = {"lengths": dict(LENGTHS.counts)}
    evaluating = Loop(evaluation_batch_size=64)
    added = reserved(Loop(), **many) - reserved(Loop(), **one)
    assert added > 0
    assert reserved(evaluating, **one) > reserved(Loop(), **many)
    assert reserved(evaluating, **many) == reserved(evaluating, **one) + added


def test_a_given_batch_is_shortened_where_it_is_as_long_as_the_longest() -> None:
    ids = torch.arange(400).view(2, 200) % 300
    batch = {"input_ids": ids, "labels": ids}
    lengths = dict(LENGTHS.counts)
    model = transformers.AutoModelForCausalLM.from_config(_config())
    asked = Arguments(model=model, gpu="rtx-4090", batch=batch, lengths=lengths)
    shorter = asked.parsed().workload.at_length(50).batch
    assert {name: tuple(each.shape) for name, each in shorter.items()} == {
        "input_ids": (2, 50),
        "labels": (2, 50),
    }
    assert shorter["input_ids"][0].tolist() == ids[0, ::4].tolist()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(_config())


def _short_batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(BATCH * 50).view(BATCH, 50) % 300
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _shapes_into(lengths: list[torch.Size]) -> Callable[..., None]:
    """Return a hook that keeps shapes, also of a batch that is dropped."""
    held = cache(lambda: lengths)  # what a hook leads to otherwise is put back
    return lambda _, __, given: held().append(given["input_ids"].shape)


@pytest.mark.parametrize("segments", [(), (Segment(("transformer.h.0",)),)])
def test_a_run_begins_with_the_longest_batch_and_trains_as_without(
    segments: tuple[Segment, ...],
) -> None:
    plan = _plan()
    recipe = replace(plan.recipe, segments=segments, precision="fp32")
    results = []
    for first in (False, True):
        model = _model()
        lengths: list[torch.Size] = []
        model.register_forward_pre_hook(_shapes_into(lengths), with_kwargs=True)
        used = replace(recipe, longest_batch_first=first)
        run = budgetfit.apply(plan.changed(recipe=used), model)
        torch.manual_seed(1)  # dropout
        losses = [run.step(_short_batch()).item() for _ in range(2)]
        results.append((losses, [p.clone() for p in model.parameters()]))
        assert lengths == [(BATCH, 200)] * first + [(BATCH, 50)] * 2
    assert results[0][0] == results[1][0]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_batch_that_is_longest_is_not_run_twice() -> None:
    plan, model = _plan(), _model()
    calls = Counter[str]()
    model.register_forward_pre_hook(counting_hook(calls, "model"))
    recipe = replace(plan.recipe, longest_batch_first=True, precision="fp32")
    run = budgetfit.apply(plan.changed(recipe=recipe), model)
    ids = torch.zeros(BATCH, 200, dtype=torch.long)
    run.step({"input_ids": ids, "attention_mask": ids + 1, "labels": ids})
    assert calls["model"] == 1


def test_the_longest_batch_first_does_not_go_with_updates_in_backward() -> None:
    with pytest.raises(budgetfit.InputError, match="Leave one out"):
        Recipe(batch_size=1, optimizer_in_backward=True, longest_batch_first=True)


def test_a_summary_of_lengths_is_hashable_and_plain() -> None:
    assert LengthSummary(((1, 2),)) == summarize_lengths([1, 1])


@pytest.mark.parametrize("longest", [200, 1001, 1024, 1152])
def test_padding_to_a_multiple_pads_nothing_beyond_the_longest(longest: int) -> None:
    """A collator pads 1001 tokens to 1024, which was not planned."""
    tried = LengthSummary(((1, 1), (longest, 1))).multiples
    smaller = {1024: (64, 128, 256, 512), 1152: (64, 128)}.get(longest, ())
    assert tried == (*smaller, longest)


def test_pinned_buffers_of_other_lengths_are_said_where_they_may_not_fit() -> None:
    """The host's allocator uses those of one power of two for no other."""
    recipe = replace(RECIPE, segments=(Segment(("transformer.h.0",), mode="offload"),))

    def notes(host_ram: int | str) -> tuple[str, ...]:
        found = budgetfit.estimate(
            _config(),
            recipe,
            gpu="rtx-4090",
            lengths=dict(LENGTHS.counts),
            host_ram=host_ram,
        )
        assert found.fits
        pinned.append(found.host_bytes)
        return tuple(text for text in found.notes if "may pin up to" in text)

    pinned: list[int] = []
    assert notes("16GiB") == ()
    assert notes(2 * pinned[0]) == ()
    (text,) = notes(2 * pinned[0] - 1)
    assert "buffers of one size are not used for another" in text
