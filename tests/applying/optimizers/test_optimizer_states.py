import pytest
import torch

from budgetfit.applying.optimizers.cpu_offload import NAME as OFFLOADED
from budgetfit.applying.optimizers.factory import OPTIMIZER_NAMES
from tests.applying.optimizers.optimizer_states import (
    LIBRARIES,
    READ_VALUES,
    SHAPES,
    predicted,
    real,
)

ELSEWHERE = {OFFLOADED, "muon", *READ_VALUES}  # test_torch_optimizers.py
# The library asks for managed memory on a CPU too, where there is none.
NOT_ON_A_CPU = ("paged_ademamix_32bit", "paged_ademamix_8bit")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", [each for each in OPTIMIZER_NAMES if each not in ELSEWHERE]
)
def test_states_are_predicted_to_the_byte_tensor_by_tensor(
    name: str, dtype: torch.dtype
) -> None:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is missing")
    if name in NOT_ON_A_CPU:
        pytest.skip("the library cannot step it on a CPU")
    ours, theirs = predicted(name, dtype), real(name, dtype)
    assert ours.total == theirs.total
    if not ours.managed:
        assert ours.by_tensor == theirs.by_tensor


@pytest.mark.parametrize("name", NOT_ON_A_CPU)
def test_paged_ademamix_keeps_what_the_plain_one_keeps(name: str) -> None:
    plain = {"paged_ademamix_8bit": "ademamix_8bit"}.get(name, "ademamix")
    ours = predicted(name, torch.float32)
    assert ours.total == predicted(plain, torch.float32).total
    assert ours.managed > 0


def test_managed_memory_is_that_of_tensors_from_100_000_elements_on() -> None:
    kept = predicted("paged_lion_32bit", torch.bfloat16)
    large = [each for each in SHAPES if torch.Size(each).numel() >= 100_000]
    assert len(large) == 3
    assert kept.managed == sum(4 * torch.Size(each).numel() for each in large)
