"""Tensors that cross blocks: U-shaped skips, and an encoder's output in a decoder."""

import itertools

import pytest
import torch
from torch import nn

from budgetfit.core.recipe import Segment
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.chain.peak import chain_peak_bytes
from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.traced import ADA

WIDTH, POSITIONS, BATCH = 64, 1024, 32
MIB = 1 << 20
SKIP_BYTES = BATCH * POSITIONS * WIDTH * 4  # 8 MiB


class Stage(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.wide(x)))


class UNet(nn.Module):
    """Three stages down, three up; each one up also reads what one down made."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Stage(WIDTH) for _ in range(3))
        self.up = nn.ModuleList(Stage(2 * WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
        for stage in self.up:
            x = stage(torch.cat([x, skips.pop()], -1))
        return x


@pytest.fixture(scope="module")
def chain() -> BlockChain:
    workload = Workload(
        model=UNet(),
        batch=torch.zeros(2, POSITIONS, WIDTH),
        loss=lambda out, _: out.square().mean(),
        gpu=find_gpu(ADA),
    )
    settings = TrainingSettings(precision="fp32", optimizer="adamw_torch_fused")
    return BlockChain(TraceSession(workload.with_found_blocks()), settings)


def judged(chain: BlockChain, segments: tuple[Segment, ...]) -> int:
    trace = chain.traces.affine(chain.settings.recipe(BATCH, segments))
    gpu = find_gpu(ADA)
    return replay(trace, BATCH, gpu, limit_bytes=UNLIMITED_BYTES).allocated_bytes


def test_a_skip_is_charged_where_it_lives(chain: BlockChain) -> None:
    blocks = {block.name: block for block in chain.profile_at(BATCH).blocks}
    again = blocks["down.1"].option("recompute")
    assert again is not None
    # Its input is the output of the stage before, which also waits for its skip.
    assert again.saved_bytes == pytest.approx(SKIP_BYTES, rel=0.1)


def test_the_formula_knows_skips_in_every_mix_of_kept_and_recomputed(
    chain: BlockChain,
) -> None:
    names = chain.traces.workload.blocks
    assert len(names) == 6
    for chosen in itertools.product((False, True), repeat=len(names)):
        plan = tuple(Segment((n,)) for n, on in zip(names, chosen, strict=True) if on)
        formula, truth = (
            chain_peak_bytes(chain.profile_at(BATCH), plan),
            judged(chain, plan),
        )
        assert formula >= truth * 0.99, plan
        assert formula <= truth + 2 * SKIP_BYTES, plan
