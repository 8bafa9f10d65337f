"""Memory by category over time: what the replay counts, taken apart."""

import pytest

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.category_bytes import category_bytes
from budgetfit.memory.replay import replay
from tests.memory.made_traces import MIB
from tests.memory.test_replay import two_blocks
from tests.traced import ADA, line

GPU = find_gpu(ADA)


def test_a_step_by_hand() -> None:
    """Weights of 40 MiB; activations of 20 MiB a sample for each of two blocks."""
    rows = category_bytes(two_blocks(), 1, GPU)
    forward = [
        {name: size // MIB for name, size in row.items() if size} for row in rows[:4]
    ]
    weights = {"parameters": 40}
    assert forward == [
        weights,
        {**weights, "batch": 20},
        {**weights, "batch": 20, "activations": 20},
        {**weights, "batch": 20, "activations": 40},
    ]


@pytest.mark.parametrize("micro_steps", [1, 4])
@pytest.mark.parametrize(
    "settings", [AllocatorSettings(), AllocatorSettings(expandable_segments=True)]
)
def test_the_categories_of_each_moment_add_up_to_its_peak(
    settings: AllocatorSettings, micro_steps: int
) -> None:
    trace = line("gpt2")
    known = replay(trace, 3, GPU, settings=settings, micro_steps=micro_steps)
    rows = category_bytes(trace, 3, GPU, settings=settings, micro_steps=micro_steps)
    assert [sum(row.values()) for row in rows] == [
        point.allocated_bytes for point in known.points
    ]
    assert rows[known.peak] == known.at_peak_bytes
