"""Births and deaths of storages, on real and on fake tensors alike."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from budgetfit.core.step_trace import CATEGORIES, RATES, KernelScratch
from budgetfit.tracing.fake.model_copy import fake_mode
from budgetfit.tracing.op_costs import op_cost
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.records import Free, OpMemory, Output, Workspace

KIB = 1024  # of 256 floats


@pytest.fixture(params=["real", "fake"])
def log(request: pytest.FixtureRequest) -> Iterator[StorageLog]:
    """An open log; all tensors here are 256 floats, 1 KiB."""
    if request.param == "real":
        with StorageLog() as log:
            yield log
    else:
        with fake_mode(), StorageLog() as log:
            yield log


def floats() -> torch.Tensor:
    return torch.ones(16, 16)


def test_an_output_is_born_and_dies_with_its_last_tensor(log: StorageLog) -> None:
    x = floats()
    y = x + x
    assert log.events == [1, 2]
    assert log.sizes == [KIB, KIB]
    del x
    assert log.events == [1, 2, -1]
    again = y
    del y
    assert log.events == [1, 2, -1]
    del again
    assert log.events == [1, 2, -1, -2]


def test_a_view_is_its_base_and_keeps_it_alive(log: StorageLog) -> None:
    x = floats()
    row = x.t()[3:4]
    assert log.events == [1]
    assert log.index_of(row) == log.index_of(x) == 0
    del x
    assert log.events == [1]
    del row
    assert log.events == [1, -1]


def test_work_in_place_gives_birth_to_nothing(log: StorageLog) -> None:
    x = floats()
    x.add_(1.0).relu_()
    x[0] = 0.0
    assert log.index_of(x) == 0
    births = [event for event in log.events if event > 0]
    assert births[0] == 1
    assert all(log.sizes[event - 1] <= 8 for event in births[1:])  # the 0.0 itself


def test_a_storage_that_grows_is_copied_to_a_new_one(log: StorageLog) -> None:
    x, out = floats(), torch.empty(0)
    torch.mul(x, 2.0, out=out)
    assert log.events == [1, 2, 3, -2]
    assert log.sizes == [KIB, 0, KIB]
    out.resize_(16, 64)
    assert log.events == [1, 2, 3, -2, 4, -3]
    out.resize_(16, 16)  # a smaller one keeps its memory
    assert log.index_of(out) == 3
    del out
    assert log.events == [1, 2, 3, -2, 4, -3, -4]
    assert log.live_bytes == KIB
    assert log.peak_bytes == 6 * KIB


def test_an_op_with_several_outputs_bears_them_in_order(log: StorageLog) -> None:
    values, indices = floats().sort()
    assert log.index_of(values) == 1
    assert log.index_of(indices) == 2
    assert log.sizes == [KIB, KIB, 2 * KIB]  # whole numbers of 8 bytes


def test_a_new_storage_at_an_old_address_is_a_new_one(log: StorageLog) -> None:
    for _ in range(3):
        floats()
    assert log.events == [1, -1, 2, -2, 3, -3]


def test_live_and_peak_bytes_follow_the_events(log: StorageLog) -> None:
    x = floats()
    y = x + x
    assert (log.live_bytes, log.peak_bytes) == (2 * KIB, 2 * KIB)
    del y
    assert (log.live_bytes, log.peak_bytes) == (KIB, 2 * KIB)
    log.reset_peak()
    assert (log.live_bytes, log.peak_bytes) == (KIB, KIB)


def test_a_storage_counts_whole_where_a_slice_of_it_is_logged(log: StorageLog) -> None:
    with log.default_category("batch"):
        part = floats()[:2].clone()
    assert log.sizes == [KIB, KIB // 8]
    assert log.log_storage(part[0]) == 1


def test_storages_can_be_registered_named_and_ignored(log: StorageLog) -> None:
    before = CATEGORIES.index("temporaries")
    x, y = floats(), floats()
    assert log.categories == [before, before]
    log.set_category(x, "gradients")
    log.set_category(y[0], "optimizer_state")
    assert [CATEGORIES[c] for c in log.categories] == ["gradients", "optimizer_state"]
    with log.default_category("batch"):
        z = floats()
    assert log.categories[log.index_of(z)] == CATEGORIES.index("batch")
    log.exclude_host_storage(x)
    assert log.sizes == [0, KIB, KIB]
    assert log.live_bytes == 2 * KIB
    del x
    assert log.live_bytes == 2 * KIB


def test_what_was_there_before_is_known_once_it_is_registered() -> None:
    model = nn.Linear(16, 16, bias=False)
    with StorageLog() as log:
        assert log.index_of(model.weight) == -1
        assert log.log_storage(model.weight, "parameters") == 0
        assert log.log_storage(model.weight.t()) == 0
    assert log.categories == [CATEGORIES.index("parameters")]
    assert log.events == [1]


def test_a_sparse_tensor_has_no_storage_to_log() -> None:
    with StorageLog() as log:
        assert log.log_storage(torch.eye(4).to_sparse()) == -1


def test_each_storage_belongs_to_the_layer_that_runs(log: StorageLog) -> None:
    layers = iter([7, 5])
    log.current_layer = lambda: next(layers)
    x = floats()
    x + x
    assert log.layers == [7, 5]


def test_a_closed_log_hears_of_no_death(log: StorageLog) -> None:
    x = floats()
    log.close()
    del x
    assert log.events == [1]


def test_an_op_that_is_watched_is_announced_before_it_bears(log: StorageLog) -> None:
    seen: list[int] = []
    log.on_op = lambda: seen.append(len(log.events))
    x = floats()
    x + x
    assert seen == [0, 1]


def test_gradients_are_taken_and_not_cloned() -> None:
    # A log that held on to tensors would make autograd clone every gradient.
    layer = nn.Linear(16, 16, bias=False)
    x = floats()
    with StorageLog() as log:
        loss = layer(x).sum()
        log.events.clear()
        loss.backward()
        births = [log.sizes[event - 1] for event in log.events if event > 0]
    # d loss / d loss is a scalar, which is expanded; then the gradient itself.
    assert sorted(births) == [4, KIB]
    assert log.index_of(layer.weight.grad) >= 0


def test_real_and_fake_tensors_leave_the_same_log() -> None:
    def train() -> StorageLog:
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with StorageLog() as log:
            for parameter in model.parameters():
                log.log_storage(parameter)
            for _ in range(2):
                model(torch.ones(8, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return log

    real = train()
    with fake_mode():
        fake = train()
    assert real.events == fake.events
    assert real.sizes == fake.sizes
    assert real.peak_bytes == fake.peak_bytes


class Kernel:
    """Semantics of a device that takes a workspace, and scratch before and after."""

    def __init__(self) -> None:
        self.replaced: Callable[..., Any] | None = None

    def run(self, run: Any, func: Any, args: Any, kwargs: Any) -> Any:
        return self.replaced() if self.replaced else run(func, args, kwargs)

    def memory(self, func: Any, args: Any, kwargs: Any, out: Any, _: Any) -> OpMemory:
        cost = op_cost(func, args, kwargs, out)
        if func is not torch.ops.aten.mm.default:
            return OpMemory(cost=cost)
        before = [KernelScratch("before", (1,), part) for part in range(2)]
        workspace = Workspace(KernelScratch("workspace", (), 0))
        after = KernelScratch("after", (2,), 0)
        return OpMemory((*before, Output(), workspace, after), cost=cost)


@pytest.mark.parametrize("of_cuda", [True, False])
def test_scalars_that_optimizers_make_are_on_a_cards_host(of_cuda: bool) -> None:
    with StorageLog(Kernel() if of_cuda else None) as log:
        log.in_optimizer = True
        torch.tensor(1.0)
        log.in_optimizer = False
        torch.tensor(1.0)
    assert log.sizes == [0 if of_cuda else 4, 4]


def test_scratch_surrounds_an_ops_outputs_and_goes_with_the_op() -> None:
    with StorageLog(Kernel()) as log:
        x = floats()
        y = x @ x
    assert [log.scratch.get(index) for index in range(len(log.sizes))] == [
        None,  # x
        KernelScratch("before", (1,), 0),
        KernelScratch("before", (1,), 1),
        None,  # y
        KernelScratch("workspace", (), 0),
        KernelScratch("after", (2,), 0),
    ]
    assert log.index_of(y) == 3
    assert log.events == [1, 2, 3, 4, 5, 6, -6, -3, -2]
    assert [CATEGORIES[c] for c in log.categories[4:]] == ["workspace", "temporaries"]
    assert log.sizes == [KIB, 0, 0, KIB, 0, 0]  # a rule sizes them, later


class Joining(Kernel):
    """A device that slices its input, multiplies and joins before the output is."""

    def memory(self, func: object, *_: object) -> OpMemory:
        if func is not torch.ops.aten.mm.default:
            return OpMemory()
        slice_, part = (KernelScratch(name, (), 0) for name in ("slice", "part"))
        return OpMemory((slice_, part, Free(slice_), Output(0)))


def test_the_steps_of_an_op_keep_their_order() -> None:
    with StorageLog(Joining()) as log:
        x = floats()
        y = x @ x
    # x, slice, part, the slice goes, y, the part goes with the op.
    assert log.events == [1, 2, 3, -2, 4, -3]
    assert log.index_of(y) == 3


def test_views_take_no_scratch_and_no_time() -> None:
    with StorageLog(Kernel()) as log:
        x = floats()
        ops = len(log.ops)
        x.view(-1).t()
    assert len(log.ops) == ops


def test_an_op_stands_where_its_outputs_have_been_born() -> None:
    with StorageLog(Kernel()) as log:
        x = floats()
        x @ x
    ones, product = log.ops
    assert ones.event == 1
    assert product.event == 9  # before the product itself dies
    assert product.cost.flops == 2 * 16**3
    assert product.cost.moved_bytes == 3 * KIB
    assert RATES[product.cost.rate] == "fp32"


def test_semantics_may_run_something_else() -> None:
    kernel = Kernel()
    with StorageLog(kernel):
        x = floats()
        kernel.replaced = lambda: x
        assert x + x is x
