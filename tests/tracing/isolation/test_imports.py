"""What a traced program imports is loaded as it would be without the trace."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from budgetfit.core.recipe import Recipe
from budgetfit.gpus.table import find_gpu
from budgetfit.traces.session import TraceSession
from budgetfit.tracing.isolation.python_state import imports_outside_modes
from budgetfit.workload.workload import Workload

LIBRARY = "library_with_a_table"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that makes a constant while it is imported, not imported yet."""
    (tmp_path / f"{LIBRARY}.py").write_text("import torch\nTABLE = torch.ones(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, LIBRARY, raising=False)
    yield LIBRARY
    sys.modules.pop(LIBRARY, None)


class Lazy(nn.Module):
    """Imports what it needs in its first forward, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        __import__(LIBRARY)
        return self.linear(x)


def trace(model: nn.Module) -> Any:
    batch = torch.ones(2, 7)
    workload = Workload(model=model, batch=batch, gpu=find_gpu("rtx-4090"))
    return TraceSession(workload).exact(Recipe(batch_size=2))


def test_a_library_s_constants_are_real_after_the_trace_that_imported_it(
    library: str,
) -> None:
    trace(Lazy())
    table = sys.modules[library].TABLE
    assert not isinstance(table, FakeTensor)
    assert table.tolist() == [1.0] * 7


def test_the_first_trace_in_a_process_is_like_the_second(library: str) -> None:
    first, second = trace(Lazy()), trace(Lazy())
    assert library in sys.modules
    assert first.events.tolist() == second.events.tolist()
    assert first.fixed_bytes.tolist() == second.fixed_bytes.tolist()


def test_modules_keep_nothing_of_the_guard(library: str) -> None:
    before = list(sys.meta_path)
    with FakeTensorMode(), imports_outside_modes():
        module = __import__(library)
        assert isinstance(torch.ones(1), FakeTensor)  # the modes are back on
    assert sys.meta_path == before
    assert "exec_module" not in vars(module.__spec__.loader)


def test_a_module_that_fails_says_so_and_leaves_the_modes_on(tmp_path: Path) -> None:
    broken = tmp_path / "broken_library.py"
    broken.write_text("raise RuntimeError('not on this machine')\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with FakeTensorMode(), imports_outside_modes():
            with pytest.raises(RuntimeError, match="not on this machine"):
                __import__("broken_library")
            assert isinstance(torch.ones(1), FakeTensor)
    finally:
        sys.path.remove(str(tmp_path))
