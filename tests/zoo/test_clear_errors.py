"""What cannot be planned says which part, and what to do instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit.errors import BudgetfitError, InputError, TraceError
from tests.zoo.networks import (
    user_attributes,
    user_compute,
    user_outputs,
    user_structure,
)
from tests.zoo.tables.torch_modules import Lazy

_GRAPH = {"nodes": torch.zeros(4, 8), "edges": torch.tensor([[0, 3], [1, 2]])}
REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], type, str]] = [
    (
        user_attributes.WithPythonGenerator,
        {},
        TraceError,
        r"its 'scales' is a generator.*Hold what opens it instead",
    ),
    (
        user_compute.Scripted,
        {},
        TraceError,
        r"'scripted' is TorchScript \(Sequential\).*Plan and train the plain module",
    ),
    (
        user_structure.NoParameters,
        {"batch": torch.zeros(2, 8)},
        InputError,
        "NoParameters has no trainable parameter, so there is nothing to train",
    ),
    (
        user_structure.Parameters,
        {},
        InputError,
        r"biases \(ParameterDict\), fixes no input shape.*batch=",
    ),
    (Lazy, {}, InputError, r"first.weight of Lazy has no shape yet: .*Call the model"),
    (user_structure.Siamese, {}, InputError, r"needs left, right.*batch=\{\"left\""),
    (
        user_compute.ComplexNet,
        {"batch": torch.zeros(2, 8)},
        InputError,
        r"takes real numbers only. Pass optimizer=\"adamw_torch\"",
    ),
    # Half of the nodes, and edges to the others: a graph has no samples to cut.
    (user_outputs.GraphBatch, {"batch": _GRAPH}, BudgetfitError, "batch"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize(
    ("build", "given", "kind", "text"), REFUSED, ids=lambda value: str(value)[:40]
)
def test_the_error_names_the_part_and_the_way_out(
    build: Callable[[], nn.Module],
    given: dict[str, Any],
    kind: type[BudgetfitError],
    text: str,
) -> None:
    with pytest.raises(kind, match=f"(?s){text}"):
        budgetfit.plan(build(), gpu="rtx-4090", batch_size=2, **given)
