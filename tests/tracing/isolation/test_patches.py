"""What a plan changes in the process is in the table, and is put back."""

import queue
import random
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers.utils.import_utils
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors

import budgetfit
from budgetfit.tracing.cuda.triton.launches import triton_is_loaded
from tests.tracing.isolation.patches_page import patches_page
from tests.tracing.isolation.test_other_threads import Net, in_another_thread, plan_net

WATCHED: dict[str, ModuleType | type] = {
    "torch": torch,
    "torch.autocast": torch.autocast,
    "torch.amp.autocast_mode": import_module("torch.amp.autocast_mode"),
    "torch.utils": torch.utils,
    "torch.random": torch.random,
    "torch.nn.functional": torch.nn.functional,
    "torch.nn.Module": nn.Module,
    "torch.Tensor": torch.Tensor,
    "torch._subclasses.fake_tensor": import_module("torch._subclasses.fake_tensor"),
    "torch._subclasses.fake_tensor.FakeTensor": FakeTensor,
    "transformers.utils.import_utils": transformers.utils.import_utils,
    "random": random,
    "numpy": np,
    "numpy.random": np.random,
    "gc": import_module("gc"),
    "threading": threading,
}
NOT_CODE = {"__warningregistry__"}


def names() -> dict[str, object]:
    """Return all functions and values of the watched modules and classes."""
    found = {
        f"{home}.{name}": value
        for home, owner in WATCHED.items()
        for name, value in vars(owner).items()
        if name not in NOT_CODE and not isinstance(value, ModuleType)
    }
    return {**found, "sys.meta_path": tuple(sys.meta_path)}


def changed(before: dict[str, object]) -> set[str]:
    after = names()
    return {
        name
        for name in before.keys() | after.keys()
        if before.get(name) is not after.get(name)
        and not (name == "sys.meta_path" and before[name] == after[name])
    }


@pytest.fixture(scope="module")
def before() -> dict[str, object]:
    plan_net()  # what is imported on first use
    return names()


def test_names_that_a_trace_changes_are_in_the_table(before: dict[str, object]) -> None:
    net, found = Net(), queue.SimpleQueue[str]()  # a set would be put back
    net.during = lambda: [found.put(name) for name in changed(before)]
    plan_net(net)
    seen = {found.get() for _ in range(found.qsize())}
    in_table = {
        name
        for patch in patches_page()
        if triton_is_loaded() or "cuda/triton" not in patch.file
        for name in patch.name.split(", ")
        if not name.endswith("*")
    }
    assert "random.random" in seen
    assert "torch.autocast.__enter__" in seen
    drawn = {name for name in seen if name.startswith(("random.", "numpy.random."))}
    assert seen - drawn <= in_table
    # And the other way: nothing is in the table that no trace changes.
    watched = {name for name in in_table if name.rpartition(".")[0] in WATCHED}
    assert watched - seen == set()
    assert changed(before) == set()


def raising() -> None:
    raise RuntimeError("in the middle")


@pytest.mark.parametrize("end", [raising, lambda: sys.exit(3)])
def test_names_are_as_before_after_an_error(
    before: dict[str, object], end: Callable[[], None]
) -> None:
    net = Net()
    net.during = end
    with pytest.raises((budgetfit.TraceError, SystemExit)):
        plan_net(net)
    assert changed(before) == set()


def test_names_are_as_before_with_a_second_thread_at_work(
    before: dict[str, object],
) -> None:
    with in_another_thread(lambda: plan_net() and None):
        plan_net()
    assert changed(before) == set()


def test_every_file_of_the_table_exists() -> None:
    package = Path(str(budgetfit.__file__)).parent
    for patch in patches_page():
        assert all((package / each).is_file() for each in patch.file.split(", "))


def zero_on_the_cpu() -> None:
    with torch.device("cpu"):
        torch.zeros(1)


def test_a_device_context_acts_on_what_it_did_before() -> None:
    _device_constructors.cache_clear()  # as in a process that has used none yet
    net = Net()
    net.during = zero_on_the_cpu
    plan_net(net)
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta
