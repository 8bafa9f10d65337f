"""What is loaded for quantised layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from budgetfit.integrations.quantization import quantize_linear
from tests.processes import python


@pytest.mark.parametrize("imported_by", ["peft", "quantization.quantize_linear"])
def test_bitsandbytes_is_imported_without_inductor(imported_by: str) -> None:
    result = python(
        "-c",
        f"""
import sys, torch
from budgetfit.integrations.{imported_by} import library
before = torch.compile
library()
print(hasattr(sys.modules["bitsandbytes"].nn, "Linear4bit"), torch.compile is before)
print("torch._inductor.compile_fx" in sys.modules)
""",
    )
    assert result.stdout.split() == ["True", "True", "False"], result.stderr


@pytest.mark.parametrize("called_with_options", [False, True])
def test_what_a_library_compiles_is_compiled_when_it_is_called(
    monkeypatch: pytest.MonkeyPatch, called_with_options: bool
) -> None:
    compiled: list[object] = []
    made: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def import_library(*_: str) -> None:
        if called_with_options:
            made.append(torch.compile(backend=backend)(double))
        else:
            made.append(torch.compile(double, backend=backend))

    monkeypatch.setattr(quantize_linear, "import_library", import_library)
    quantize_linear.library()
    (function,) = made
    assert function.__name__ == "double"
    assert not compiled
    for _ in range(2):
        assert function(torch.ones(3)).tolist() == [2, 2, 2]
    assert len(compiled) == 1
