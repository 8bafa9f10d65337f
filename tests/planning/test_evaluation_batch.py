from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from budgetfit.core.budget import Budget
from budgetfit.core.loop import Loop
from budgetfit.core.recipe import Recipe
from budgetfit.core.samples.sample_dims import SampleDims
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import replay
from budgetfit.memory.replay_schedule import append_next_step
from budgetfit.planning.judge import judge
from budgetfit.planning.planner import make_estimate
from budgetfit.planning.search.evaluation_batch import evaluation_batch_size
from budgetfit.solvers.batch_size_grid import largest_fitting
from budgetfit.traces.session import TraceSession
from budgetfit.tracing.recording.evaluation import append_evaluation, batch_tensor_bytes
from budgetfit.workload.workload import Workload
from tests.memory.made_traces import TraceMaker
from tests.models import EXAMPLES, MIB, Mebi, gpt2
from tests.traced import ADA, session

SGD = "sgd"


def traces(model: nn.Module, batch: object, **options: Any) -> TraceSession:
    workload = Workload(model=model, batch=batch, gpu=find_gpu(ADA), **options)
    return TraceSession(workload.with_found_blocks())


def within(limit_mib: int) -> Budget:
    return Budget(total_bytes=limit_mib * MIB, context_bytes=0, headroom_bytes=0)


def size_in(limit_mib: int, session: TraceSession, recipe: Recipe) -> int | None:
    return evaluation_batch_size(session, recipe, within(limit_mib))


def test_the_batch_is_what_weights_inputs_and_two_outputs_leave_room_for() -> None:
    # Three weights of 1 MiB, no optimizer state; cuBLAS takes 8.125 MiB once. A sample
    # is 1 MiB. In a block are alive: the batch, the outputs of the batch before, the
    # block's input, its product and the tanh of it: 5 MiB, later the sum in place of
    # the product. In large blocks the allocator hands out multiples of 2 MiB.
    mebi = traces(Mebi(), EXAMPLES["mebi"].batch)
    recipe = Recipe(batch_size=2, optimizer=SGD)
    sizes = [size_in(limit, mebi, recipe) for limit in (256, 512, 1024)]
    assert sizes == sorted(filter(None, sizes))
    for limit, size in zip((256, 512, 1024), sizes, strict=True):
        assert size is not None
        live_mib = 3 + 9 + 5 * size
        assert 0.85 * limit <= live_mib <= limit


@pytest.mark.parametrize("limit_mib", [128, 256])
def test_an_estimate_says_of_a_batch_what_the_plan_says(limit_mib: int) -> None:
    """Both let the allocator empty its cache where training and evaluation meet."""
    mebi = traces(Mebi(), EXAMPLES["mebi"].batch)
    recipe = Recipe(batch_size=8, optimizer=SGD)
    most = size_in(limit_mib, mebi, recipe)
    assert most is not None
    for size, fits in ((most, True), (most + 2, False)):
        found = make_estimate(
            mebi.workload,
            recipe,
            within(limit_mib),
            context_bytes=0,
            loop=Loop(kind="run", evaluation_batch_size=size),
        )
        assert found.fits == fits
        assert any("num_alloc_retries" in note for note in found.notes) == fits


def test_evaluations_do_not_let_training_itself_empty_the_cache() -> None:
    made = TraceMaker()
    for step in (0, 1):
        with made.phase("forward", step):
            made.malloc("x", 60 * MIB)
            made.free("x")
            made.malloc("y", 100 * MIB)
            made.free("y")
    trace, recipe = made.trace(), Recipe(batch_size=2)
    judged = partial(judge, trace, recipe, find_gpu(ADA), context_bytes=0)
    limited = replay(trace, 2, find_gpu(ADA), limit_bytes=150 * MIB)
    assert (limited.retries, limited.failed_bytes) == (1, None)
    for limit_mib, fits in ((160, True), (150, False)):
        found = judged(within(limit_mib), replayed=trace, most_retries=4)
        assert found.fits == fits


def test_no_gradients_and_no_graph_means_more_samples_than_training() -> None:
    # Training keeps 2 MiB a sample and block, here of twelve blocks.
    mebi = traces(Mebi(blocks=12), EXAMPLES["mebi"].batch)
    recipe = Recipe(batch_size=8, optimizer=SGD)
    evaluated = size_in(512, mebi, recipe)
    assert evaluated is not None
    assert evaluated > 4 * recipe.batch_size


def test_optimizer_states_stay_where_they_are() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False))  # 64 MiB of weights
    session = traces(model, torch.zeros(2, 4096))
    plain = size_in(512, session, Recipe(batch_size=2, optimizer=SGD))
    adam = size_in(512, session, Recipe(batch_size=2, optimizer="adamw_torch"))
    assert plain is not None
    assert adam is not None
    # Two states are 128 MiB; a sample is input and outputs twice: 3 x 16 KiB.
    assert (plain - adam) * 3 * 16 / 1024 == pytest.approx(128, rel=0.1)


def test_the_micro_batches_of_an_update_are_there_meanwhile() -> None:
    """transformers' Trainer moves all of them to the device, then evaluates."""
    mebi = traces(Mebi(), EXAMPLES["mebi"].batch)
    one, many = (
        size_in(
            512,
            mebi,
            Recipe(batch_size=8, gradient_accumulation_steps=steps, optimizer=SGD),
        )
        for steps in (1, 16)
    )
    assert one is not None
    assert many is not None
    assert 15 * 8 <= 5 * (one - many) < 1.25 * 15 * 8  # MiB, as above


def test_it_fits_and_one_sample_more_does_not() -> None:
    session_ = session("gpt2")
    recipe = Recipe(batch_size=4)
    size = evaluation_batch_size(session_, recipe, within(64))
    assert size is not None
    for samples, expected in ((size, True), (size + 1, False)):
        assert fits_between_steps(session_, recipe, samples, 64) is expected


def fits_between_steps(
    session: TraceSession, recipe: Recipe, samples: int, limit_mib: int
) -> bool:
    """Whether settled training, then evaluations of so many samples, fits."""
    training = session.exact(recipe)
    evaluation = session.evaluation(recipe.precision).at_samples(samples)
    held = batch_tensor_bytes(training, recipe.batch_size)
    trace = append_next_step(training, training.phases[-1].step, 1)
    for _ in range(2):
        trace = append_evaluation(trace, evaluation, held)
    line = replay(
        replace(trace, batch_sizes=training.batch_sizes),
        recipe.batch_size,
        session.workload.gpu,
        limit_bytes=limit_mib * MIB,
    )
    return line.failed_bytes is None and line.retries <= 1


def test_a_batch_smaller_than_the_training_s_is_found() -> None:
    """With the loss in parts training never holds all logits, and evaluation does."""
    session_ = traces(gpt2(vocab_size=8192), EXAMPLES["gpt2"].batch)
    recipe = Recipe(batch_size=64, loss_chunks=8)
    line = replay(session_.exact(recipe), 64, session_.workload.gpu)
    limit_mib = -(-line.reserved_bytes // MIB)
    size = evaluation_batch_size(session_, recipe, within(limit_mib))
    assert size is not None
    assert 0 < size < 64
    assert fits_between_steps(session_, recipe, size, limit_mib)
    assert not fits_between_steps(session_, recipe, size + 1, limit_mib)


@pytest.mark.parametrize("name", ["t5", "vit", "bert", "transformer"])
def test_models_of_every_kind_are_evaluated(name: str) -> None:
    found = evaluation_batch_size(session(name), Recipe(batch_size=2), within(256))
    assert found is not None
    assert found > 2


def test_labels_make_a_loss_which_takes_memory() -> None:
    class Classifier(nn.Linear):
        def forward(
            self, x: torch.Tensor, labels: torch.Tensor | None = None
        ) -> dict[str, torch.Tensor]:
            logits = super().forward(x)
            if labels is None:
                return {"logits": logits}
            loss = nn.functional.cross_entropy(logits, labels)
            return {"loss": loss, "logits": logits}

    # Logits of 1 MiB a sample, those of the batch before, and their log_softmax.
    model, recipe = Classifier(8, 2**18), Recipe(batch_size=2, optimizer=SGD)
    x, labels = torch.zeros(2, 8), torch.zeros(2, dtype=torch.long)
    with_loss = size_in(512, traces(model, {"x": x, "labels": labels}), recipe)
    without = size_in(512, traces(model, {"x": x}), recipe)
    assert with_loss is not None
    assert without is not None
    assert without / with_loss == pytest.approx(3 / 2, rel=0.1)
    mixed = replace(recipe, precision="bf16-mixed")
    in_fp32 = size_in(512, traces(model, {"x": x}), mixed)
    assert in_fp32 is not None
    # Before 2 + 2 bytes; now 2, made into 4 beside the 4 of the batch before.
    assert without / in_fp32 == pytest.approx(10 / 8, rel=0.1)


def test_what_goes_with_every_sample_does_not_grow_in_an_evaluation_either() -> None:
    class Held(nn.Linear):
        def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ shared[0].T

    batch = (torch.rand(4, 3), torch.rand(9, 3), torch.rand(9))
    held = traces(Held(3, 3), batch, batch_dims=SampleDims(0, {"0": 0}))
    trace = held.evaluation("fp32")
    of_batch = trace.category == CATEGORIES.index("batch")
    assert set(trace.bytes_per_sample[of_batch]) == {0, 3 * 4}


def test_what_cannot_be_told_is_none() -> None:
    class OnlyTrains(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                raise RuntimeError("no evaluation")
            return super().forward(x)

    unable = traces(OnlyTrains(8, 8), torch.zeros(2, 8))
    assert size_in(256, unable, Recipe(batch_size=2)) is None
    assert "no evaluation" in unable.log[-1]
    mebi = traces(Mebi(), EXAMPLES["mebi"].batch)
    too_large = Recipe(batch_size=400, optimizer=SGD)
    assert size_in(256, mebi, too_large) is None  # the training itself does not fit


def test_a_model_that_is_evaluated_stays_in_training_mode() -> None:
    model = Mebi().train()
    traces(model, EXAMPLES["mebi"].batch).evaluation("fp32")
    assert model.training


@pytest.mark.parametrize("answer", [0, 1, 7, 99, 100])
def test_the_largest_number_is_found_from_above(answer: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= answer

    assert largest_fitting(fits, 100) == answer
    assert len(asked) < 20
