"""On several GPUs the solver's times are the judge's: with what the network adds."""

import pytest

from budgetfit.core.budget import Budget
from budgetfit.core.parallelism import Parallelism
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.profiling.block_chain import checkpoint_every_block
from budgetfit.planning.search.solver_choice import solver_ns
from budgetfit.planning.session import PlanningSession, Request, open_sessions
from budgetfit.workload.workload import Workload
from tests.models import Mebi
from tests.planning.profiling.test_depth_extrapolation import MIB_BATCH

ENGINES = {
    "ddp": Parallelism(engine="ddp", gpus=4),
    "fsdp2": Parallelism(engine="fsdp2", gpus=4),
    "each micro-batch reduced": Parallelism(
        engine="fsdp2", gpus=4, sync_each_batch=True
    ),
}
SAMPLES = 16  # of each rank


def open_session(parallelism: Parallelism) -> PlanningSession:
    workload = Workload(
        model=Mebi(8), batch=MIB_BATCH, gpu=find_gpu("t4")
    ).with_found_blocks()
    (found,) = open_sessions(
        workload,
        Request(budget=Budget(total_bytes=2**34, context_bytes=0, headroom_bytes=0)),
        effective_batch_size=SAMPLES,
        precisions=["fp32"],
        optimizer="sgd",
        parallelisms=[parallelism],
    )
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch_size", [2, 8])
def test_what_the_solver_counts_for_a_plan_is_what_the_judge_predicts(
    engine: str, batch_size: int
) -> None:
    session = open_session(ENGINES[engine])
    estimate = session.judge(session.settings.recipe(batch_size))
    assert estimate.network_ms > 0
    chain = session.block_chain.profile_at(batch_size)
    count = estimate.recipe.gradient_accumulation_steps
    plain_ns = sum(block.forward_ns + block.backward_ns for block in chain.blocks)
    counted_ns = chain.step_ns(plain_ns, count) / SAMPLES
    assert counted_ns == pytest.approx(solver_ns(estimate), rel=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_that_recomputes_is_counted_as_no_longer_than_it_takes(
    engine: str,
) -> None:
    session = open_session(ENGINES[engine])
    segments = checkpoint_every_block(session.workload.blocks)
    estimate = session.judge(session.settings.recipe(4, segments))
    chain = session.block_chain.profile_at(4)
    recomputed = [block.option("recompute") for block in chain.blocks]
    longer_ns = sum(
        block.forward_ns + block.backward_ns + (option.extra_ns if option else 0)
        for block, option in zip(chain.blocks, recomputed, strict=True)
    )
    counted_ns = chain.step_ns(longer_ns, SAMPLES // 4) / SAMPLES
    taken_ns = solver_ns(estimate)
    assert 0.7 * taken_ns < counted_ns <= taken_ns * (1 + 1e-3)
