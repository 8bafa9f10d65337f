"""Ranks that do not run the same modules under DDP, and small micro-batches."""

import pytest
import torch
from torch import Tensor, distributed, nn

from budgetfit import InputError, Parallelism
from budgetfit.applying.run.run import Run
from budgetfit.core.parallelism import Engine
from tests.applying.ranks.test_many_ranks import batches, start
from tests.gloo_ranks import on_ranks
from tests.reporting.sample_plans import sample_recipe


class Experts(nn.Module):
    """Runs one expert; the others get empty inputs, or do not run."""

    def __init__(self, *, run_all: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.run_all = run_all

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for number, expert in enumerate(self.experts):
            rows = x if number == distributed.get_rank() else x[:0]
            if len(rows) or self.run_all:
                total = total + expert(rows).sum()
        return total


def _run(run_all: bool, steps: int, engine: Engine = "ddp") -> Run:
    torch.manual_seed(0)
    recipe = sample_recipe(
        batch_size=2,
        gradient_accumulation_steps=steps,
        precision="fp32",
        optimizer="sgd",
        segments=(),
        parallelism=Parallelism(engine=engine, gpus=2),
    )
    return Run(Experts(run_all=run_all), recipe, loss=lambda out, _: out, device="cpu")


def _train(run_all: bool, steps: int) -> list[str]:
    run = _run(run_all, steps)
    said = []
    for _ in range(2 * steps):
        try:
            run.step(torch.ones(2, 4))
        except InputError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("steps", [1, 2])
def test_a_module_without_a_gradient_under_ddp_is_named(steps: int) -> None:
    for rank, said in enumerate(on_ranks(_train, 2, False, steps)):
        unused = [f"experts.{k}.{n}" for k in range(3) for n in ("weight", "bias")]
        del unused[2 * rank : 2 * rank + 2]
        assert f"gave 4 of 6 trainable parameters ({', '.join(unused[:3])}, " in said[0]
        assert "Use every module in each step" in said[0]
        assert "find_unused_parameters" not in said[0]
        # A caller who goes on is told again, not by DDP.
        assert "gave some trainable parameters no gradient" in said[1]


def test_experts_that_run_on_empty_inputs_train() -> None:
    assert on_ranks(_train, 2, True, 1) == [[], []]


def _reduce_others() -> list[str]:
    """Other parameters of each rank in flushes and in an update; then the same."""
    said = []
    for engine, steps in (("ddp", 2), ("fsdp2", 2), ("fsdp2", 1)):
        run = _run(run_all=False, steps=steps, engine=engine)
        reduce = run.step if steps == 1 else lambda _, run=run: run.flush()
        if steps > 1:
            run.step(torch.ones(2, 4))
        with pytest.raises(InputError) as refused:
            reduce(torch.ones(2, 4))
        said.append(str(refused.value))
        assert run.group.count == 0
        assert not run.updated
        run.model.run_all = True
        run.step(torch.ones(2, 4))
        assert run.flush() is (steps == 2)
        assert run.steps_done == 1
    return said


def test_ranks_that_would_add_up_gradients_of_different_modules_are_told() -> None:
    first, second = on_ranks(_reduce_others, 2)
    assert first == second
    assert "gave some trainable parameters no gradient on a rank or more" in first[0]
    assert "DDP reduces all of them on all ranks" in first[0]
    for each in first[1:]:
        assert "gave 4 of 6 trainable parameters (experts.0.weight, experts.0" in each
        assert "fully_shard reduces the same ones on all ranks" in each


def _small_micro_batch() -> str:
    run = start({"engine": "ddp"}, batch_size=2, gradient_accumulation_steps=1)
    with pytest.warns(UserWarning, match="The first micro-batch") as caught:
        run.step(batches(2, samples=1)[run.ranks.rank])
    return str(caught[0].message)


def test_a_small_micro_batch_is_counted_over_all_ranks() -> None:
    said = on_ranks(_small_micro_batch, 2)
    assert all(
        "has 1 sample, the plan's 2. With all like it an effective batch would have "
        "2 samples, not 4. Let" in each
        for each in said
    )
