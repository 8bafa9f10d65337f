"""What deepcopy refuses: copied, shared or refused by name."""

import io
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from budgetfit.errors import TraceError
from budgetfit.tracing.blocks.block_signature import block_signatures
from budgetfit.tracing.blocks.repeated_runs import KEPT_PERIODS, BlockRun
from budgetfit.tracing.fake.model_copy import fake_copy, fake_mode
from budgetfit.tracing.fake.shortened_model import shortening


def numbers() -> Iterator[int]:
    yield from range(9)


def copy_of(model: nn.Module) -> nn.Module:
    with fake_mode() as mode:
        return fake_copy(model, mode)


def holding(value: object) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].held = value
    return model


def test_a_lock_is_shared_and_all_else_is_copied() -> None:
    lock, beside = threading.Lock(), [1]
    model = holding({"lock": lock, "beside": beside})
    held = copy_of(model)[1].held
    assert held["lock"] is lock
    assert held["beside"] == beside
    assert held["beside"] is not beside


def test_a_lock_deep_inside_an_object_is_found() -> None:
    tasks: queue.Queue[int] = queue.Queue()
    held = copy_of(holding(tasks))[1].held
    assert held is not tasks
    assert held.mutex is tasks.mutex


def test_a_random_generator_is_copied_in_its_state() -> None:
    generator = torch.Generator().manual_seed(3)
    held = copy_of(holding(generator))[1].held
    assert held is not generator
    assert torch.equal(held.get_state(), generator.get_state())
    held.manual_seed(4)
    assert generator.initial_seed() == 3


@pytest.mark.parametrize("value", [numbers(), io.StringIO("text")], ids=["it", "file"])
def test_what_can_be_read_once_is_refused_by_name(value: object) -> None:
    if isinstance(value, io.StringIO):
        value = Path(__file__).open(encoding="utf-8")  # noqa: SIM115 - StringIO can
    text = r"its '1\.held' is a (generator|TextIOWrapper), and reading from it"
    try:
        with pytest.raises(TraceError, match=text):
            copy_of(holding(value))
    finally:
        value.close()


def test_slots_are_copied_too() -> None:
    class Slots(nn.Linear):
        __slots__ = ("scale",)

    model = nn.Sequential(Slots(2, 2))
    model[0].scale = [0.5]
    twin = copy_of(model)
    assert twin[0].scale == [0.5]
    assert twin[0].scale is not model[0].scale


class Counting(nn.Module):
    """Leaves out of a copy what it counts; ``number`` is its hash."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.count = 3, 5

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "count": 0}

    def __hash__(self) -> int:
        return self.number


def test_a_copy_leads_to_copies_alone() -> None:
    first, last = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Counting())
    model = nn.Sequential(first, last)
    last[0].above, last[0].beside = [model], {"first": first, last[1]: last.forward}
    twin = copy_of(model)
    assert twin[1][0].above == [twin]
    assert twin[1][0].beside == {"first": twin[0], twin[1][1]: twin[1].forward}
    assert {*twin.modules()}.isdisjoint(model.modules())


def test_a_module_that_says_how_it_is_copied_is_asked() -> None:
    itself = nn.Linear(2, 2)
    vars(itself)["__deepcopy__"] = lambda _: itself
    model = nn.Sequential(Counting(), itself)
    twin = copy_of(model)
    assert (twin[0].count, model[0].count) == (0, 5)
    assert twin[1] is itself


def test_a_copied_weight_keeps_its_hooks_where_blocks_are_left_out() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    for layer in model:
        layer.weight.register_hook(torch.neg)
    names = tuple(map(str, range(6)))
    runs = (BlockRun("", tuple((name,) for name in names)),)
    with fake_mode() as mode:
        twin = fake_copy(model, mode, shortening(model, names, runs, KEPT_PERIODS))
    hooks = [layer.weight._backward_hooks for layer in twin]
    assert list(map(len, hooks)) == [1] * KEPT_PERIODS


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    text = r"'1' is TorchScript \(Linear\), which cannot be traced.*plain module"
    with pytest.raises(TraceError, match=text) as error:
        copy_of(model)
    assert error.value.module == "1"
    # Blocks are compared before the model is copied.
    scripts = (torch.jit.script(nn.Sequential(nn.Linear(2, 2))) for _ in range(2))
    blocks = nn.Sequential(*map(nn.Sequential, scripts))
    assert len(block_signatures(blocks, ("0", "1"))) == len(blocks)


class Linked:
    """Knows others of its kind; ``copies`` counts how often one was copied."""

    copies = 0

    def __init__(self) -> None:
        self.others: list[Linked] = []
        self.lock: object = None

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        Linked.copies += 1
        return (Linked, (), vars(self))


def circle(number: int, *, all_of_them: bool) -> list[Linked]:
    rows = [Linked() for _ in range(number)]
    for at, each in enumerate(rows):
        each.others = (
            list(rows) if all_of_them else [rows[(at + 1) % number], rows[at - 1]]
        )
    return rows


@pytest.mark.parametrize("number", [5, 50, 300])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_objects_linked_in_circles_are_copied_in_few_looks(
    number: int, all_of_them: bool
) -> None:
    rows = circle(number, all_of_them=all_of_them)
    rows[number // 2].lock = threading.Lock()
    Linked.copies = 0
    limit = sys.getrecursionlimit()
    held = copy_of(holding(rows))[1].held
    # Once until the lock is met, once by itself, and once with the lock shared.
    assert Linked.copies <= 3 * number
    assert [each.lock for each in held] == [each.lock for each in rows]
    assert not {id(each) for each in held} & {id(each) for each in rows}
    assert sys.getrecursionlimit() == limit
