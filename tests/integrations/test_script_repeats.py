"""Blocks of an exported torch script that change something whenever they run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from budgetfit.core.recipe import Segment
from tests.hazards.kinds import Block, CounterBuffer, PythonScale, start
from tests.integrations.test_torch_script import GPT2, opened, tiny_plan
from tests.models import seed


class Normed(Block):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(8)

    def between(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


class NormedByFunction(Normed):
    def between(self, x: Tensor) -> Tensor:
        norm = self.norm
        return nn.functional.batch_norm(
            x, norm.running_mean, norm.running_var, training=True
        )


class GrowingTable(Block):
    """Its table is made anew for the first batch of each size."""

    def prepare(self) -> None:
        self.register_buffer("table", torch.ones(1, 1))

    def between(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.table = torch.ones(len(x), 1)
        return x * self.table[: len(x)]


def trained(kind: type[Block], script: Any = None) -> dict[str, Tensor]:
    """Return all states after three steps, with the script's checkpoints or without."""
    model = start(kind)
    if script is not None:
        script.recompute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed(1)
    for _ in range(3):
        model(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), "random numbers": torch.get_rng_state()}


def script_of(folder: Path, *segments: Segment) -> Any:
    """Return a script whose blocks are those of ``start``'s model."""
    own = opened(tiny_plan(GPT2, folder, segments=segments))
    names = own.recompute.__globals__
    for constant in ("SEGMENTS", "NESTED", "SELECTIVE"):
        if constant in names:
            text = repr(names[constant]).replace("transformer.h.", "blocks.")
            names[constant] = eval(text)
    return own


H = tuple(f"transformer.h.{number}" for number in range(4))
WAYS = {
    "each and a pair": (Segment(H[:1]), Segment(H[1:3]), Segment(H[3:])),
    "nested": (Segment(H[:3], nested=True), Segment(H[3:])),
    "selective": tuple(
        Segment((name,), mode="selective", saved_ops=("aten.addmm.default:0",))
        for name in H
    ),
}


@pytest.mark.parametrize("kind", [Normed, PythonScale, GrowingTable])
@pytest.mark.parametrize("segments", WAYS.values(), ids=list(WAYS))
def test_what_runs_again_counts_once_and_draws_again(
    kind: type[Block], segments: tuple[Segment, ...], tmp_path: Path
) -> None:
    expected = trained(kind)
    found = trained(kind, script_of(tmp_path, *segments))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", [CounterBuffer, NormedByFunction])
def test_a_block_that_changes_a_buffer_is_refused(
    kind: type[Block], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=f"of a {kind.__name__} changes in its for"):
        trained(kind, script_of(tmp_path, Segment(H[:1])))
