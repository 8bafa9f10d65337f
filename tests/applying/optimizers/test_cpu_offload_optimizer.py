from typing import Any

import pytest
import torch

import budgetfit
from budgetfit.applying.optimizers.cpu_offload import NAME, _ResyncsGradients
from budgetfit.applying.optimizers.factory import make_optimizer, optimizer_notes
from budgetfit.applying.run.run import Run
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.errors import InputError
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import replay
from budgetfit.planning.judge import judge
from tests.traced import ADA, ROOMY, session


def bytes_of(trace: Any, category: str) -> int:
    return int(trace.fixed_bytes[trace.category == CATEGORIES.index(category)].sum())


def test_the_card_keeps_no_states_and_the_host_weights_and_gradients() -> None:
    # Weights of 1 MiB; pinned memory comes in powers of two, as these are.
    traces = session("mebi")
    recipe = Recipe(batch_size=2, optimizer=NAME)
    trace = traces.affine(recipe)
    assert bytes_of(trace, "optimizer_state") == 0
    found = judge(trace, recipe, traces.workload.gpu, ROOMY, context_bytes=0)
    assert found.host_bytes == 2 * bytes_of(trace, "parameters")
    assert any("ordinary host memory" in note for note in found.notes)


def test_gradients_stay_on_the_card_until_the_step_is_over() -> None:
    offloaded, plain = (
        session("mebi").affine(Recipe(batch_size=2, optimizer=name))
        for name in (NAME, "sgd")
    )
    peaks = [
        replay(each, 2, find_gpu(ADA)).phase_peaks_bytes for each in (offloaded, plain)
    ]
    assert peaks[0] == peaks[1]


def test_small_tensors_have_their_states_on_the_card() -> None:
    trace = session("gpt2").affine(Recipe(batch_size=2, optimizer=NAME))
    model = session("gpt2").workload.model
    small = [each.numel() for each in model.parameters() if each.numel() < 4096]
    assert small
    assert bytes_of(trace, "optimizer_state") == sum(8 * each + 4 for each in small)


def test_what_it_does_not_go_with_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(InputError, match="needs parameters on CUDA, these are on cpu"):
        make_optimizer(NAME, [weight], device_type="cpu")
    with pytest.raises(InputError, match="GradScaler does not unscale them"):
        Run(
            torch.nn.Linear(2, 2),
            Recipe(batch_size=1, optimizer=NAME, precision="fp16-mixed"),
        )
    with pytest.raises(InputError, match="hooks of its own in the backward"):
        Run(
            torch.nn.Linear(2, 2),
            Recipe(batch_size=1, optimizer=NAME, optimizer_in_backward=True),
        )
    # It would step with gradients that DDP is still reducing.
    several = Parallelism(engine="ddp", gpus=2)
    recipe = Recipe(batch_size=1, optimizer=NAME, parallelism=several)
    with pytest.raises(InputError, match=r"for one GPU: .* before .* reduced them"):
        budgetfit.estimate(
            torch.nn.Linear(2, 2), recipe, vram="9GB", batch=torch.zeros(1, 2)
        )


class _Copied:
    """Stands for a CUDA event."""

    def synchronize(self) -> None:
        pass


class _Library:
    """torchao's class as far as its CPU half goes: it asserts that there is CUDA."""

    def __init__(self, parameters: list[Any], kind: Any, **options: Any) -> None:
        self.param_d2h_map: dict[Any, Any] = {}
        self.optim_dict: dict[Any, Any] = {}
        self.queue: dict[Any, Any] = {}
        self.d_opt = None
        for parameter in parameters:
            host = parameter.detach().clone()
            host.grad = torch.empty_like(host)
            self.param_d2h_map[parameter] = host
            parameter.register_post_accumulate_grad_hook(self._copy)
            self.optim_dict[parameter] = kind([host], **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [
            group for each in self.optim_dict.values() for group in each.param_groups
        ]

    def _copy(self, parameter: Any) -> None:
        self.param_d2h_map[parameter].grad.copy_(parameter.grad)
        self.queue[parameter] = _Copied()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None
        for parameter in self.queue:
            self.optim_dict[parameter].step()
            parameter.copy_(self.param_d2h_map[parameter])
        self.queue.clear()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        assert set_to_none
        for parameter in self.param_d2h_map:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"offloaded": [each.state_dict() for each in self.optim_dict.values()]}


class Offloaded(_ResyncsGradients, _Library):
    """What ``make`` builds from torchao's class."""


def test_gradients_that_are_clipped_after_the_copy_are_copied_again() -> None:
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = Offloaded(weights, torch.optim.SGD, lr=1.0)
    (10 * weights[0].sum() + 0.1 * weights[1].sum()).backward()
    torch.nn.utils.clip_grad_norm_(weights[:1], 1.0)
    optimizer.step()
    clipped = 1 / 3**0.5
    torch.testing.assert_close(weights[0].detach(), torch.ones(3) - clipped)
    torch.testing.assert_close(weights[1].detach(), torch.ones(3) - 0.1)
    assert optimizer.trained == weights
    assert [len(each["params"]) for each in optimizer.state_dict()["param_groups"]] == [
        1,
        1,
    ]


def test_hooks_go_and_those_of_others_stay() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    seen = []
    weight.register_post_accumulate_grad_hook(seen.append)
    optimizer = Offloaded([weight], torch.optim.AdamW, lr=1.0)
    weight.sum().backward()
    optimizer.step()
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.zero_grad()
    optimizer.remove_hooks()
    weight.sum().backward()
    assert not optimizer.queue
    assert len(seen) == 2


def test_an_interrupted_step_leaves_nothing_to_do() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Offloaded([weight], torch.optim.SGD, lr=1.0)
    weight.sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(3))


def test_a_prediction_says_what_is_not_in_it() -> None:
    assert "step on the CPU is not counted" in optimizer_notes(NAME)[0]
