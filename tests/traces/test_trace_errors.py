"""What a user is told where a model cannot be traced."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit import Parallelism, Recipe
from budgetfit.errors import InputError, TraceError
from budgetfit.traces import errors
from budgetfit.traces.errors import trace_error
from budgetfit.tracing.values.known_values import UnknownValueError

ADVICE: dict[str, tuple[Exception, str]] = {
    "values": (
        UnknownValueError("aten.bincount.default", "it needs values"),
        "its own values decide what it does: .* Pass a real batch",
    ),
    "memory": (
        RuntimeError("Cannot access data pointer of Tensor (e.g. FakeTensor)."),
        "A custom kernel or numpy reads memory .*register_fake",
    ),
    "half precision": (
        RuntimeError("\"lerp_cpu\" not implemented for 'Half'"),
        'takes no half precision: pass precision="fp32"',
    ),
    "a graph's edges": (
        IndexError("index 7 is out of bounds for dimension 0 with size 4"),
        "Use a mapping with x, edge_index",
    ),
    "a class that is none": (
        IndexError("index 7 is out of bounds for dimension 1 with size 4"),
        "below the sizes that they index .vocabulary, classes, positions",
    ),
    "an empty list": (IndexError("pop from empty list"), "Pass an example batch"),
    "a short list": (IndexError("list index out of range"), "Pass an example batch"),
    "a missing dimension": (
        IndexError("Dimension out of range (expected to be in [-3, 2], but got 3)"),
        "Pass an example batch",
    ),
    "a class for inference": (
        ValueError("PPDocLayoutV3ForObjectDetection does not support training"),
        "has no loss in this transformers: pass loss=, and a batch without labels",
    ),
    "flex attention": (
        NotImplementedError("FlexAttention does not support backward on CPU."),
        'Plan with another: .* set_attn_implementation\\("eager"\\)',
    ),
    "two backwards of a selective block": (
        RuntimeError("Trying to backward an extra time. You are only allowed to"),
        "runs backward once, .*create_graph=True.* Use segments of mode='recompute'",
    ),
    "nested tensors": (
        AssertionError("self.shape_env must not be None"),
        "Nested tensors are not traced. Use padded samples with a mask",
    ),
    "an optimizer on shards": (
        RuntimeError("aten.mul.Tensor: got mixed torch.Tensor and DTensor"),
        'fully_shard makes weights DTensors, .* or engine="ddp"',
    ),
    "a temperature under FSDP2": (
        ValueError("fully_shard doesn't support scalar parameters. Change scale"),
        'make it a tensor of one element, .* or use engine="ddp"',
    ),
    "a temperature under DeepSpeed": (
        RuntimeError("self.dim() cannot be 0 to view Float as Byte (different"),
        'DeepSpeed takes no scalar parameters: .* or use engine="ddp"',
    ),
    "anything else": (KeyError("labels"), "Pass an example batch .* and a loss="),
}


@pytest.mark.parametrize("kind", ADVICE)
def test_an_error_says_what_to_pass_or_change(kind: str) -> None:
    error, text = ADVICE[kind]
    told = trace_error(nn.Linear(2, 2), error)
    assert told.module == "Linear"
    with pytest.raises(type(told), match=text):
        raise told


def test_an_error_in_a_loss_says_what_the_loss_got() -> None:
    text = r"The loss of Linear cannot .* returns, here a tensor of shape \(2, 3\)"
    with pytest.raises(TraceError, match=text):
        budgetfit.plan(
            nn.Linear(4, 3),
            gpu="t4",
            batch=torch.zeros(2, 4),
            loss=lambda outputs, _: outputs.view(7).sum(),
        )


def test_a_model_too_large_for_real_values_is_told_how_large_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "MAX_WEIGHTS_BYTES", 8)
    error = UnknownValueError("aten.bincount.default", "it needs values")
    told = str(trace_error(nn.Linear(2, 2), error))
    assert "weights of 8 B or less it is computed for real; these have 24 B" in told


class Conditional(nn.Linear):
    """It runs with real values, which what is compiled does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 1.5 if float(y.detach().sum()) > 0 else y


def test_a_block_that_cannot_be_compiled_is_told_how_to_do_without() -> None:
    model = nn.Sequential(*(Conditional(4, 4) for _ in range(3)))
    recipe = Recipe(batch_size=2, precision="fp32", compile="blocks")
    settings: dict[str, Any] = {"gpu": "rtx-4090", "batch": torch.ones(2, 4)}
    settings["loss"] = lambda y, _: y.mean()
    with pytest.raises(
        TraceError, match=r'cannot be traced compiled, in .* Use compile="none", or "au'
    ):
        budgetfit.estimate(model, recipe, **settings)
    assert budgetfit.estimate(model, replace(recipe, compile="none"), **settings)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(adjacency, self.layer(x)).mean()


def test_a_sparse_graph_is_told_what_is_planned_instead() -> None:
    batch = {"x": torch.ones(30, 8), "adjacency": torch.eye(30).to_sparse()}
    with pytest.raises(TraceError, match=r"Sparse tensors in a batch.* Use edge_index"):
        budgetfit.plan(Graph(), gpu="rtx-4090", batch=batch)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_batch_is_refused_before_it_is_traced(layout: torch.layout) -> None:
    rows = [torch.ones(3, 8), torch.ones(5, 8)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    for batch, place in ((nested, "The batch is"), ({"x": nested}, "batch at 'x' is")):
        with pytest.raises(InputError, match=f"{place} a nested tensor.* Use padded"):
            budgetfit.plan(nn.Linear(8, 8), gpu="rtx-4090", batch=batch)


class _OneUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.extra = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used: torch.Tensor = self.used(x)
        return used


ZERO_3 = {"engine": "deepspeed", "zero_stage": 3, "bucket_elements": 1000}


class _SlopeOfInput(nn.Module):
    """Its loss is the gradient of a gradient, as a gradient penalty is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = out = x.detach().requires_grad_()
        for block in self.blocks:
            out = block(out)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out + slope).square().mean()


class _SumOfSquares(_SlopeOfInput):
    """It reads its weights while their modules do not run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            squares = [each.square().sum() for each in self.parameters()]
        return x.square().mean() * torch.stack(squares).sum()


@pytest.mark.parametrize(
    ("model", "engine", "said"),
    [
        (_SlopeOfInput, {"engine": "fsdp2"}, "fully_shard has freed"),
        (_SlopeOfInput, ZERO_3, "ZeRO-3 has freed"),
        (_SumOfSquares, ZERO_3, "ZeRO-3 has freed"),
    ],
)
def test_weights_that_are_read_where_they_are_freed_are_refused(
    model: type[nn.Module], engine: dict[str, Any], said: str
) -> None:
    recipe = Recipe(batch_size=2, parallelism=Parallelism(gpus=2, **engine))
    advice = rf"{said}\. .*\(create_graph=True\), .* Use engine=\"ddp\""
    with pytest.raises(TraceError, match=advice):
        budgetfit.estimate(
            model(),
            recipe,
            batch=torch.zeros(2, 4),
            loss=lambda out, _: out,
            vram="8GB",
        )


@pytest.mark.parametrize("effective_batch_size", [4, 8])
def test_a_module_that_ddp_would_wait_for_is_named_while_planning(
    effective_batch_size: int,
) -> None:
    settings: dict[str, Any] = {
        "batch": torch.zeros(2, 4),
        "loss": lambda out, _: out.mean(),
        "batch_size": 2,
        "effective_batch_size": effective_batch_size,
        "vram": "4GB",
        "gpus": 2,
    }
    said = (
        r"gave 2 of 4 trainable parameters \(extra\.weight, extra\.bias\) no gradient "
        'in the traced step, .* Use every module .* Or use engine="fsdp2"'
    )
    with pytest.raises(TraceError, match=said):
        budgetfit.plan(_OneUnused(), engine="ddp", **settings)
    plan = budgetfit.plan(_OneUnused(), **settings)
    assert plan.recipe.engine == "fsdp2"
    assert any("engine ddp is left out: The backward" in x for x in plan.warnings)
