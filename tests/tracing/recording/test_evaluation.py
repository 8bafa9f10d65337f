import numpy as np

from budgetfit.core.step_trace import Phase
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import replay
from budgetfit.tracing.recording.evaluation import append_evaluation, batch_tensor_bytes
from tests.traced import ADA, line, session


def test_evaluation_comes_after_training_and_leaves_nothing_behind() -> None:
    training = line("gpt2")
    evaluation = session("gpt2").evaluation("fp32")
    both = append_evaluation(training, evaluation)
    count = len(training.events)
    assert (both.events[:count] == training.events).all()
    added = both.events[count:]
    assert len(added) > 0
    assert (np.sort(added[added > 0]) == np.sort(-added[added < 0])).all()
    # Storages of its own, behind those of the training.
    assert added[added > 0].min() == len(training.fixed_bytes) + 1
    assert both.phases[-1] == Phase("forward", 2, 0, count, len(both.events))


def test_the_training_in_front_of_it_plays_as_before() -> None:
    training = line("bert")
    evaluation = session("bert").evaluation("fp32")
    gpu = find_gpu(ADA)
    alone = replay(training, 8, gpu)
    both = replay(append_evaluation(training, evaluation), 8, gpu)
    steps = [point for point in both.points if point.step < 2]
    traced = [point for point in alone.points if point.step < 2]
    assert steps == traced
    assert {point.phase for point in both.points if point.step >= 2} == {"forward"}


def test_what_is_held_meanwhile_is_there_at_any_batch_size() -> None:
    training = line("vit")
    evaluation = session("vit").evaluation("fp32")
    pixels, labels = 4 * 3 * 16 * 16, 8
    held = batch_tensor_bytes(training, 5)
    assert sorted(held) == [5 * labels, 5 * pixels]
    gpu = find_gpu(ADA)
    plain, beside = (
        replay(
            append_evaluation(training, evaluation, more),
            8,
            gpu,
            then_batch_sizes=(64, 128),
        )
        for more in ((), (512 << 20,) * 3)
    )
    # All further steps are evaluations, of 64 and then of 128 samples.
    for before, after in zip(plain.points[-2:], beside.points[-2:], strict=True):
        assert after.allocated_bytes - before.allocated_bytes == 3 * 512 << 20
