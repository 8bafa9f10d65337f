"""Append an evaluation step to a training trace: evaluation after training.

Training decides where optimizer state lies and what the allocator has cached;
evaluation allocates from what is left. They are traced separately, because evaluation
depends on the precision alone and training on the whole recipe.
"""

from dataclasses import replace

import numpy as np

from budgetfit.core.step_trace import CATEGORIES, Phase, StepTrace

_BATCH = CATEGORIES.index("batch")


def append_evaluation(
    training: StepTrace, evaluation: StepTrace, held: tuple[int, ...] = ()
) -> StepTrace:
    """Return ``training`` with the last step of ``evaluation`` as one more step.

    The weights are those of training. What evaluation allocates and never frees
    (workspaces) exists after training and is left out, so that the last step can be
    repeated, also at other batch sizes (``memory.replay``). Ops, layers and notes are
    those of training alone: the evaluation may be that of a shortened model.

    Args:
        training: Replayed at its own batch size; need not be affine.
        evaluation: Of the same model; its last step is the evaluation.
        held: Bytes of tensors that are alive meanwhile, whatever the batch size.
    """
    last = evaluation.phases[-1]
    begins = next(phase.start for phase in evaluation.phases if phase.step == last.step)
    events = evaluation.events[begins : last.end]
    freed = np.intersect1d(events[events > 0], -events[events < 0])
    events = events[np.isin(np.abs(events), freed)]
    storages = freed - 1
    number = np.zeros(len(evaluation.fixed_bytes) + 1, np.int32)
    first = len(training.fixed_bytes)
    number[freed] = np.arange(first + 1, first + 1 + len(freed), dtype=np.int32)
    moved = (np.sign(events) * number[np.abs(events)]).astype(np.int32)
    others = first + len(freed) + 1 + np.arange(len(held), dtype=np.int32)
    moved = np.concatenate([others, moved, -others])
    scratch = evaluation.scratch_index[storages]
    start = len(training.events)
    step = training.phases[-1].step + 1
    return replace(
        training,
        batch_sizes=evaluation.batch_sizes,
        fixed_bytes=_joined(
            training.fixed_bytes, evaluation.fixed_bytes[storages], np.array(held)
        ),
        bytes_per_sample=_joined(
            training.bytes_per_sample,
            evaluation.bytes_per_sample[storages],
            np.zeros(len(held)),
        ),
        category=_joined(
            training.category, evaluation.category[storages], np.full(len(held), _BATCH)
        ),
        layer=_joined(training.layer, np.full(len(storages) + len(held), -1)),
        scratch_index=_joined(
            training.scratch_index,
            np.where(scratch < 0, -1, scratch + len(training.scratch)),
            np.full(len(held), -1),
        ),
        scratch=(*training.scratch, *evaluation.scratch),
        events=_joined(training.events, moved),
        phases=(*training.phases, Phase("forward", step, 0, start, start + len(moved))),
    )


def batch_tensor_bytes(training: StepTrace, batch_size: int) -> tuple[int, ...]:
    """Return the bytes of each input tensor of one micro-batch."""
    last = training.phases[-1]
    events = [
        training.events[phase.start : phase.end]
        for phase in training.phases
        if (phase.step, phase.micro_step) == (last.step, last.micro_step)
    ]
    allocated = np.concatenate(events)
    allocated = allocated[allocated > 0] - 1
    inputs = allocated[training.category[allocated] == _BATCH]
    sizes = training.fixed_bytes + training.bytes_per_sample * batch_size
    return tuple(int(size) for size in sizes[inputs])


def _joined(one: np.ndarray, *others: np.ndarray) -> np.ndarray:
    return np.concatenate([one, *(each.astype(one.dtype) for each in others)])
