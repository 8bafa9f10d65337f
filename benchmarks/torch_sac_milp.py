"""torch's sac_milp and the plan, for the same model and budget, by torch's own tracker.

    python -m benchmarks.torch_sac_milp

sac_milp (torch.distributed._tools) picks modules to checkpoint for a budget in GiB. Its
plan is applied, and torch's own MemTracker says what the training step then takes; so
is ours. Everything that sac_milp asks to discard in part is recomputed whole, which
takes less memory: its numbers are lower bounds. What it overshoots by is nearly all
Adam's state, which it does not count: its budget is no VRAM. The budget of our plan is
all that the allocator may reserve. The second table gives our plan as much as
sac_milp's really takes in our replay, and compares the predicted times of both.
"""

import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Final
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import Graph
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

from benchmarks.shared import GIB, quiet, side_by_side, table
from budgetfit import Estimate, Plan

NEEDED: Final = ("pulp", "pwlf", "tabulate")
LAYERS, WIDTH, HEADS, VOCABULARY = 24, 1024, 16, 8192
BATCH_SIZE, TOKENS = 8, 1024
BUDGETS_GIB: Final = (27, 20, 15, 10, 6)
GPU: Final = "h100-80gb"
BUDGET_HEADERS: Final = (
    "budget GiB",
    "sac_milp: blocks",
    "tracked GiB",
    "over by",
    "plan: blocks",
    "tracked GiB",
    "replay, reserved",
)
SAME_HEADERS: Final = (
    "sac_milp: blocks",
    "reserved GiB",
    "ms",
    "plan: blocks",
    "reserved GiB",
    "ms",
    "faster by",
)


class Block(nn.Module):
    """A transformer block whose attention is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the next hidden state."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(hidden)).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        hidden = hidden + self.merge(mixed)
        return hidden + self.mlp(self.norm(hidden))


class Transformer(nn.Module):
    """An embedding, 24 blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam as torch runs it on a card."""
    return torch.optim.Adam(parameters, foreach=True)


def loss(logits: torch.Tensor, _: object) -> torch.Tensor:
    """Return the sum, as in torch's own tests of these tools."""
    return logits.sum()


def batch() -> torch.Tensor:
    """Return tokens; on the device and in the mode that are on."""
    return torch.zeros(BATCH_SIZE, TOKENS, dtype=torch.int64)


@contextmanager
def as_if_on_a_card() -> Iterator[None]:
    """Give torch's estimators the card that they insist on."""
    rates = "torch.utils._runtime_estimation"
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch(f"{rates}.get_device_tflops", return_value=400),
        mock.patch(f"{rates}.get_gpu_dram_gbps", return_value=2000),
    ):
        yield


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run one step of plain training."""
    loss(model(batch()), None).backward()
    optimizer.step()
    optimizer.zero_grad()


def graph_of_the_model() -> Graph:
    """Return what sac_milp reads: memory, times and trade-offs of every module."""
    from torch.distributed._tools import ilp_utils
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    with FakeTensorMode(), as_if_on_a_card():
        model = Transformer()
        optimizer = adam(model.parameters())
        tracker, times, trade = MemTracker(), RuntimeEstimator(), SACEstimator()
        tracker.track_external(model, optimizer)
        with tracker:
            train_step(model, optimizer)
            tracker.reset_mod_stats()  # the first step has no optimizer state yet
            train_step(model, optimizer)
        with times("operator-level-cost-model"):
            train_step(model, optimizer)
        with trade("operator-level-cost-model"):
            loss(model(batch()), None)
        info = ilp_utils.aggregate_stats(
            model, tracker, times, trade, torch.device("cpu")
        )
    return ilp_utils.parse_module_info(info)


def tracked_gib(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object]
) -> float:
    """Return the peak that torch's MemTracker sees in two steps."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
        tracker.reset_mod_stats()
        step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return peak["Total"] / GIB


def theirs(wrapped: tuple[str, ...]) -> float:
    """Return what training takes with these modules checkpointed."""
    with FakeTensorMode():
        model = Transformer()
        for name in wrapped:
            parent, _, child = name.rpartition(".")
            module = model.get_submodule(name)
            setattr(model.get_submodule(parent), child, checkpoint_wrapper(module))
        optimizer = adam(model.parameters())
        return tracked_gib(model, optimizer, lambda: train_step(model, optimizer))


def replayed(wrapped: tuple[str, ...]) -> Estimate:
    """Return the judge's word on recomputing these blocks, one by one."""
    from budgetfit import Recipe, Segment, estimate
    from budgetfit.inputs.arguments import optimizer_name

    with torch.device("meta"):
        model = Transformer()
    recipe = Recipe(
        batch_size=BATCH_SIZE,
        precision="fp32",
        optimizer=optimizer_name(adam),
        segments=tuple(Segment((name,)) for name in wrapped),
    )
    tokens = torch.zeros(BATCH_SIZE, TOKENS, dtype=torch.int64)
    return estimate(model, recipe, gpu=GPU, batch=tokens, loss=loss, optimizer=adam)


def planned(budget_bytes: int) -> Plan | str:
    """Return our plan for so much allocator memory, or why there is none."""
    from budgetfit import DoesNotFitError, plan
    from budgetfit.inputs.target_gpu import find_target_gpu

    with torch.device("meta"):
        model = Transformer()
    try:
        return plan(
            model,
            budget_bytes + find_target_gpu(None, GPU).context_bytes,
            gpu=GPU,
            headroom=0,
            batch=torch.zeros(BATCH_SIZE, TOKENS, dtype=torch.int64),
            loss=loss,
            batch_size=BATCH_SIZE,
            precision="fp32",
            optimizer=adam,
        )
    except DoesNotFitError as error:
        return f"needs {error.needed_bytes / GIB:.2f}"


def ours(budget_gib: int) -> tuple[str, str, str]:
    """Return our plan's recomputed blocks, and its peak as tracked and as replayed."""
    from budgetfit import apply

    made = planned(budget_gib * GIB)
    if isinstance(made, str):
        return "-", made, made
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Transformer()
        run = apply(made, model, loss=loss, optimizer=adam)
        tokens = batch()
        gib = tracked_gib(model, run.optimizer, lambda: run.step(tokens))
    return (
        f"{len(made.recipe.wrapped_blocks)} of {LAYERS}",
        f"{gib:.2f}",
        f"{made.estimate.reserved_bytes / GIB:.2f}",
    )


def same_memory(wrapped: tuple[str, ...]) -> tuple[str, ...]:
    """Return a line on sac_milp's blocks and the plan for the memory they take."""
    theirs = replayed(wrapped)
    made = planned(theirs.reserved_bytes)
    blocks, gib = f"{len(wrapped)} of {LAYERS}", f"{theirs.reserved_bytes / GIB:.2f}"
    if isinstance(made, str):
        return blocks, gib, f"{theirs.step_ms:.0f}", "-", made, "-", "-"
    found = made.estimate
    return (
        blocks,
        gib,
        f"{theirs.step_ms:.0f}",
        f"{len(made.recipe.wrapped_blocks)} of {LAYERS}",
        f"{found.reserved_bytes / GIB:.2f}",
        f"{found.step_ms:.0f}",
        f"{theirs.step_ms / found.step_ms - 1:+.1%}",
    )


def main() -> int:
    """Print a line per budget."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"Skipped: torch's sac_milp needs {', '.join(missing)}. "
            'pip install -e ".[bench]"'
        )
        return 0
    quiet()
    from torch.distributed._tools.sac_ilp import sac_milp

    with redirect_stdout(io.StringIO()):  # its estimators print
        graph = graph_of_the_model()
    units = [f"Transformer.layers.{number}" for number in range(LAYERS)]
    chosen, seconds = [], []
    for budget in BUDGETS_GIB:
        started = time.perf_counter()
        decisions, _, _ = sac_milp(graph, memory_budget=budget, ac_units=units)
        seconds.append(time.perf_counter() - started)
        names = (name.removeprefix("Transformer.") for name in decisions)
        chosen.append(tuple(names))
    wrapped = [(each,) for each in chosen]
    measured = side_by_side(theirs, wrapped)
    plans = side_by_side(ours, [(each,) for each in BUDGETS_GIB])
    pairs = zip(BUDGETS_GIB, chosen, measured, plans, strict=True)
    rows = [
        (
            f"{budget}",
            f"{len(names)} of {LAYERS}",
            f"{gib:.2f}",
            f"{gib - budget:+.2f}",
            *plan,
        )
        for budget, names, gib, plan in pairs
    ]
    print(table(BUDGET_HEADERS, rows, left=0))
    print()
    print(table(SAME_HEADERS, side_by_side(same_memory, wrapped), left=0))
    print(f"\nsac_milp solved in {min(seconds):.2f} to {max(seconds):.2f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
