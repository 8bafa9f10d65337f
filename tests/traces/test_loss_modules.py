import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.gpus.table import find_gpu
from budgetfit.traces.loss_modules import FakedLoss, warn_of_trainable_loss
from budgetfit.traces.session import TraceSession
from budgetfit.traces.swap_modules import modules_in, replace_modules
from budgetfit.tracing.recording.step_tracer import trace_step
from budgetfit.workload.workload import Workload
from tests.models import MIB, Mebi

BATCH = torch.zeros(2, 512, 512)
GLOBAL_TEACHER = nn.Linear(4, 4)


def teacher() -> Mebi:
    """Four weights of 1 MiB."""
    return Mebi(blocks=4).requires_grad_(False)


def distilled_from(taught: nn.Module) -> Callable[[Any, Any], torch.Tensor]:
    def loss(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = taught(batch)
        return nn.functional.mse_loss(outputs, wanted)

    return loss


def with_global(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return _helper(outputs)


def _helper(outputs: torch.Tensor) -> torch.Tensor:
    return GLOBAL_TEACHER(outputs).mean()


class Holder:
    def __init__(self, taught: nn.Module) -> None:
        self.parts = {"teachers": [taught]}

    def loss(self, outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.parts["teachers"][0](outputs).mean()

    __call__ = loss


def bytes_of(loss: Callable[..., Any] | None, category: str) -> int:
    """Return the bytes of a category that a trace has, at any time."""
    workload = Workload(
        model=Mebi(), batch=BATCH, loss=loss, gpu=find_gpu("rtx-4090")
    ).with_found_blocks()
    trace = TraceSession(workload).exact(Recipe(batch_size=2, optimizer="sgd"))
    chosen = trace.category == CATEGORIES.index(category)
    return int(trace.fixed_bytes[chosen].sum())


def test_a_teacher_that_only_the_loss_reaches_is_counted() -> None:
    def plain(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return outputs.mean()

    assert bytes_of(plain, "parameters") == 3 * MIB
    assert bytes_of(distilled_from(teacher()), "parameters") == 7 * MIB
    # It is frozen: no gradients and no states come with it.
    gradients = bytes_of(distilled_from(teacher()), "gradients")
    assert gradients == bytes_of(plain, "gradients")


def test_it_is_found_wherever_a_loss_may_hold_it() -> None:
    taught = teacher()
    holder = Holder(taught)

    def by_default(outputs: object, _: object, net: nn.Module = taught) -> Any:
        return net(outputs)

    def by_argument(net: nn.Module, outputs: object, _: object) -> Any:
        return net(outputs)

    found = [
        modules_in(distilled_from(taught)),
        modules_in(holder.loss),
        modules_in(holder),
        modules_in(by_default),
        modules_in(functools.partial(by_argument, taught)),
        modules_in(taught),
    ]
    assert found == [(taught,)] * 6
    assert modules_in(with_global) == (GLOBAL_TEACHER,)


def test_trainable_tensors_of_a_loss_are_warned_of() -> None:
    """Weights of several losses, as in multi-task training, are often no module."""
    model = nn.Linear(4, 4)
    weights = torch.zeros(2, requires_grad=True)

    def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        losses = torch.stack([outputs.mean(), outputs.square().mean()])
        return (torch.exp(-weights) * losses + weights).sum() + model.weight.sum()

    with pytest.warns(UserWarning, match="has 2 trainable parameters in tensors that"):
        warn_of_trainable_loss(loss, model)
    with pytest.warns(UserWarning, match="has 20 trainable parameters in a Linear"):
        warn_of_trainable_loss(distilled_from(GLOBAL_TEACHER), model)
    weights.requires_grad_(requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_trainable_loss(loss, model)


def test_each_trainable_module_of_a_loss_is_warned_of() -> None:
    heads = [nn.Linear(4, 1), nn.Linear(4, 2)]

    def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return sum(head(outputs).sum() for head in heads)

    with pytest.warns(UserWarning, match="trainable parameters in a Linear") as warned:
        warn_of_trainable_loss(loss, nn.Linear(4, 4))
    counts = [str(each.message).split()[3] for each in warned]
    assert counts == ["5", "10"]


def test_a_loss_without_modules_stays_the_same_object() -> None:
    def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return outputs.mean()

    kept: list[Any] = [loss, functools.partial(loss), nn.MSELoss(), None]
    kept.append(kept)
    assert all(replace_modules(item, lambda module: module) is item for item in kept)


def test_the_users_teacher_and_loss_are_not_touched() -> None:
    taught = teacher()
    before = dict(taught.named_parameters())
    holder = Holder(taught)
    bytes_of(holder.loss, "parameters")
    assert holder.parts["teachers"][0] is taught
    assert all(p is before[name] for name, p in taught.named_parameters())
    assert {type(p) for p in taught.parameters()} == {nn.Parameter}


def test_a_loss_that_looks_at_the_models_weights_sees_the_traced_ones() -> None:
    model = Mebi()

    def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return outputs.mean() + model.blocks[0].inner.weight.pow(2).sum()

    faked: Any = FakedLoss(loss, model)
    seen: list[torch.Tensor] = []

    def program(fake: nn.Module, on_phase: Callable[[str], None]) -> Run:
        weight = faked.loss.__closure__[0].cell_contents.blocks[0].inner.weight
        seen.append(weight)
        assert weight is fake.get_submodule("blocks.0.inner").weight
        return Run(fake, Recipe(batch_size=2), loss=faked.loss, on_phase=on_phase)

    trace_step(
        model,
        program,
        BATCH,
        batch_size=2,
        blocks=(),
        target=None,
        copy_modules=faked.fake,
    )
    assert len(seen) == 1


def test_a_module_around_the_model_does_not_count_it_twice() -> None:
    model, taught = Mebi(), teacher()

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = model
            self.teacher = taught

        def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted = self.teacher(batch)
            return nn.functional.mse_loss(outputs, wanted)

    workload = Workload(
        model=model, batch=BATCH, loss=Wrapper().loss, gpu=find_gpu("rtx-4090")
    )
    recipe = Recipe(batch_size=2, optimizer="sgd")
    trace = TraceSession(workload.with_found_blocks()).exact(recipe)
    chosen = trace.category == CATEGORIES.index("parameters")
    assert trace.fixed_bytes[chosen].sum() == 7 * MIB


class Linked:
    """Knows every other of its kind; ``looks`` counts how often that is asked."""

    looks = 0

    def __init__(self, number: int) -> None:
        self.number = number
        self.others: list[Linked] = []
        self.module: nn.Module | None = None

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            Linked.looks += 1
        return super().__getattribute__(name)

    def loss(self, outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return outputs.mean()


def linked(number: int, *, ring: bool = False) -> list[Linked]:
    rows = [Linked(each) for each in range(number)]
    for at, each in enumerate(rows):
        each.others = [rows[(at + 1) % number]] if ring else rows
    return rows


@pytest.mark.parametrize("number", [5, 50, 500])
@pytest.mark.parametrize("ring", [False, True])
def test_objects_linked_in_circles_are_each_looked_at_once(
    number: int, ring: bool
) -> None:
    rows = linked(number, ring=ring)
    rows[number // 2].module = taught = teacher()
    Linked.looks = 0
    assert modules_in(rows[0].loss) == (taught,)
    assert Linked.looks == number
    other = teacher()
    new = replace_modules(rows[0].loss, lambda _: other).__self__
    reached = new.others[0] if ring else new.others[number // 2]
    while reached.module is None:
        reached = reached.others[0]
    assert reached.module is other
    assert rows[number // 2].module is taught
    # The circle is closed among the copies, none of which is the user's own.
    copies = [new, *(new.others if not ring else ())]
    if ring:
        while copies[-1].others[0] is not new:
            copies.append(copies[-1].others[0])
    assert {each.number for each in copies} == set(range(number))
    assert not {id(each) for each in copies} & {id(each) for each in rows}


def test_functions_that_name_each_other_are_swapped_together() -> None:
    taught, other = teacher(), teacher()

    def even(number: int, nets: Any = (taught,)) -> Any:
        return nets[0] if number == 0 else odd(number - 1)

    def odd(number: int) -> Any:
        return even(number - 1)

    new = replace_modules(odd, lambda _: other)
    assert new(7) is other
    assert odd(7) is taught
