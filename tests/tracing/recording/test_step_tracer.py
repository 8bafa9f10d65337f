"""A traced step by hand, and what kinds of models and batches it works on."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.errors import TraceError
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.recording.raw_trace import RawTrace
from tests.models import EXAMPLES, MIB
from tests.traced import raw_trace, trace_module

ADA = CudaTarget(compute_capability=(8, 9), torch_version=(2, 13))
SGD = Recipe(batch_size=4, optimizer="sgd")


def trace(
    model: nn.Module,
    batch: object,
    recipe: Recipe = SGD,
    *,
    target: CudaTarget | None = ADA,
    **options: Any,
) -> RawTrace:
    """Trace one step of any model, without blocks."""
    return trace_module(model, batch, recipe, target=target, **options)


def bytes_of(raw: RawTrace, category: str) -> int:
    """Sum all storages of a category, those that came and went included."""
    number = CATEGORIES.index(category)
    pairs = zip(raw.log.sizes, raw.log.categories, strict=True)
    return sum(size for size, kind in pairs if kind == number)


def large(raw: RawTrace, phase: str) -> list[tuple[int, str]]:
    """Return mallocs and frees of whole MiB in a phase: (MiB, layer)."""
    found = next(row for row in raw.phases if row.name == phase)
    rows = []
    for event in raw.log.events[found.start : found.end]:
        mib, rest = divmod(raw.log.sizes[abs(event) - 1], MIB)
        layer = raw.log.layers[abs(event) - 1]
        if mib and not rest:
            name = raw.layers[layer] if layer >= 0 else ""
            rows.append((mib if event > 0 else -mib, name))
    return rows


@pytest.fixture(scope="module")
def by_hand() -> RawTrace:
    """Three blocks of x + tanh(x W), a batch of 4 MiB, on a CPU."""
    return raw_trace("mebi", SGD, target=None)


def test_weights_come_first_in_the_models_order(by_hand: RawTrace) -> None:
    assert large(by_hand, "setup") == [
        (1, "blocks.0.inner"),
        (1, "blocks.1.inner"),
        (1, "blocks.2.inner"),
    ]


class OwnParameter(nn.Module):
    """A weight of 2 MiB of its own, a layer of 1 MiB inside, a buffer of 3 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2 * MIB // 4))
        self.register_buffer("shift", torch.zeros(3 * MIB // 4))
        self.inside = nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x).sum() * self.scale.sum() + self.shift.sum()


def test_weights_come_in_the_order_in_which_a_model_is_moved() -> None:
    model = OwnParameter()
    moved: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.nbytes // MIB)
        return tensor

    model._apply(note)
    raw = trace(model, torch.zeros(2, 512))
    setup = raw.log.events[: raw.phases[0].end]
    assert [raw.log.sizes[event - 1] // MIB for event in setup] == moved == [1, 2, 3]


def test_a_forward_bears_what_it_saves_and_drops_the_rest(by_hand: RawTrace) -> None:
    block = [
        (4, "blocks.0.inner"),  # x W
        (4, "blocks.0"),  # tanh, saved
        (-4, "blocks.0.inner"),
        (4, "blocks.0"),  # the sum, which is the next one's x
    ]
    assert large(by_hand, "forward")[:5] == [(4, ""), *block]
    # The last sum is needed for the loss alone.
    assert large(by_hand, "forward")[-1] == (-4, "blocks.2")


def test_a_backward_runs_through_the_blocks_in_reverse(by_hand: RawTrace) -> None:
    rows = large(by_hand, "backward")
    gradients = [row for row in rows if row[0] == 1]
    assert gradients == [
        (1, "blocks.2.inner"),
        (1, "blocks.1.inner"),
        (1, "blocks.0.inner"),
    ]
    # What the forward has saved dies where it was last needed: tanh, then x.
    saved = [name for mib, name in rows if mib == -4 and ".inner" not in name and name]
    assert saved[:3] == ["blocks.2", "blocks.2", "blocks.1"]


def test_a_step_with_sgd_leaves_only_weights_behind(by_hand: RawTrace) -> None:
    log = by_hand.log
    alive = Counter(log.events) - Counter(-event for event in log.events)
    assert {event for event in alive if event > 0} == {1, 2, 3}
    assert large(by_hand, "optimizer")[:3] == [
        (-1, "blocks.0.inner"),
        (-1, "blocks.1.inner"),
        (-1, "blocks.2.inner"),
    ]


def test_every_storage_is_named_for_what_it_is(by_hand: RawTrace) -> None:
    assert bytes_of(by_hand, "parameters") == 3 * MIB
    assert bytes_of(by_hand, "gradients") == 3 * MIB
    assert bytes_of(by_hand, "batch") == 4 * MIB
    # x of the second and third block, and three times tanh.
    assert bytes_of(by_hand, "activations") // MIB == 5 * 4
    assert bytes_of(by_hand, "optimizer_state") == bytes_of(by_hand, "buffers") == 0


def test_adamw_has_two_states_of_each_weight() -> None:
    raw = raw_trace("mebi", Recipe(batch_size=4), target=None)
    states = bytes_of(raw, "optimizer_state")
    assert states // MIB == 2 * 3
    assert states % MIB == 3 * 4  # fused: a step count on the card for each


def test_a_recomputed_block_saves_its_input_alone() -> None:
    recipe = Recipe(batch_size=4, optimizer="sgd", segments=(Segment(("blocks.1",)),))
    raw = raw_trace("mebi", recipe, target=None)
    assert large(raw, "forward").count((-4, "blocks.1")) == 1  # its tanh
    again = [row for row in large(raw, "backward") if row == (4, "blocks.1")]
    assert len(again) == 2  # the tanh again, and a gradient of it


def test_ops_that_run_again_are_known() -> None:
    def again(*segments: Segment) -> list[str]:
        recipe = Recipe(batch_size=4, optimizer="sgd", segments=segments)
        ops = raw_trace("mebi", recipe, target=ADA).log.ops
        return [op.name for op in ops if op.recomputed]

    assert again() == []
    assert again(Segment(("blocks.1",))) == ["aten.mm.default", "aten.tanh.default"]


def test_each_phase_of_each_micro_step_is_a_stretch_of_its_own() -> None:
    recipe = Recipe(batch_size=2, optimizer="sgd", gradient_accumulation_steps=2)
    raw = raw_trace("mebi", recipe, target=None, steps=2)
    names = [(row.name, row.step, row.micro_step) for row in raw.phases]
    assert names == [
        ("setup", -1, 0),
        *(
            row
            for step in (0, 1)
            for row in (
                ("forward", step, 0),
                ("backward", step, 0),
                ("forward", step, 1),
                ("backward", step, 1),
                ("optimizer", step, 1),
            )
        ),
    ]
    edges = [(row.start, row.end) for row in raw.phases]
    assert edges[0][0] == 0
    assert [end for _, end in edges[:-1]] == [start for start, _ in edges[1:]]
    assert edges[-1][1] == len(raw.log.events)


def test_cuda_takes_one_workspace_for_each_of_two_threads() -> None:
    raw = raw_trace("mebi", SGD, target=ADA)
    rows = [row for row in raw.log.scratch.values() if row.rule == "cublas_workspace"]
    assert len(rows) == 2
    assert bytes_of(raw, "workspace") == 0  # the card's rule says how much


def test_cuda_adds_gradients_in_place_where_a_cpu_makes_a_sum() -> None:
    on_cpu = large(raw_trace("mebi", SGD, target=None), "backward")
    on_cuda = large(raw_trace("mebi", SGD, target=ADA), "backward")
    # Where the residual branches meet: in front of the last two blocks.
    assert on_cpu.count((4, "blocks.2.inner")) == 2
    assert on_cuda.count((4, "blocks.2.inner")) == 1


@pytest.mark.parametrize("name", ["gpt2", "t5", "convolutions"])
def test_a_model_on_meta_leaves_the_same_trace(name: str) -> None:
    example = EXAMPLES[name]
    with torch.device("meta"):
        on_meta = example.make()
    # A seeded CPU model, and one whose weights were never made.
    here, there = (trace(model, example.batch) for model in (example.model(), on_meta))
    assert here.log.events == there.log.events
    assert here.log.sizes == there.log.sizes
    assert here.log.categories == there.log.categories


def test_a_batch_on_meta_leaves_the_same_trace() -> None:
    example = EXAMPLES["gpt2"]
    shapes = {name: value.to("meta") for name, value in example.batch.items()}
    here, there = (trace(example.model(), batch) for batch in (example.batch, shapes))
    assert here.log.sizes == there.log.sizes


class Tied(nn.Module):
    """One [1024, 256] weight of 1 MiB, as embedding and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, 256)
        self.head = nn.Linear(256, 1024, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


IDS = torch.zeros(2, 4, dtype=torch.long)


def test_a_tied_weight_is_one_weight_with_one_gradient_and_one_state() -> None:
    raw = trace(Tied(), IDS, Recipe(batch_size=4))
    assert bytes_of(raw, "parameters") == MIB
    assert bytes_of(raw, "gradients") == MIB
    assert bytes_of(raw, "optimizer_state") // MIB == 2


def test_what_is_frozen_has_neither_gradient_nor_state() -> None:
    model = EXAMPLES["mebi"].model()
    model.blocks[0].requires_grad_(requires_grad=False)
    model.blocks[1].requires_grad_(requires_grad=False)
    raw = trace(model, EXAMPLES["mebi"].batch, Recipe(batch_size=4))
    assert bytes_of(raw, "parameters") == 3 * MIB
    assert bytes_of(raw, "gradients") == MIB
    assert bytes_of(raw, "optimizer_state") // MIB == 2
    # Nothing is saved in front of the first weight that learns: its x and its tanh.
    assert bytes_of(raw, "activations") // MIB == 2 * 4


def test_buffers_are_counted_as_buffers() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256))
    raw = trace(model, torch.zeros(2, 256))
    # Running mean and variance in fp32, and a count of 8 bytes.
    assert bytes_of(raw, "buffers") == 2 * 256 * 4 + 8


def test_moving_an_expanded_buffer_copies_it_for_every_row() -> None:
    model = nn.Sequential(nn.Linear(256, 256))
    model.register_buffer("mask", torch.ones(1, 256).expand(1024, -1))
    assert bytes_of(trace(model, torch.zeros(2, 256)), "buffers") == MIB


def needs_values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / gradient.norm().item()


@pytest.mark.parametrize("hook", [torch.neg, needs_values])
def test_a_parameters_hook_makes_a_gradient_of_its_own(
    hook: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    model[0].weight.register_hook(hook)
    raw = trace(model, torch.zeros(1, 512), replace(SGD, batch_size=1))
    # The gradient goes once the hook's is there.
    assert [mib for mib, _ in large(raw, "backward")] == [1, 1, -1]
    assert raw.gradients is not None
    assert not raw.gradients.complete  # it may hold more


def drops(parameter: torch.Tensor) -> None:
    parameter.grad = None


def asks(parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.norm().item() > 1:
        parameter.grad = None


@pytest.mark.parametrize(("hook", "left"), [(drops, []), (asks, [1])])
def test_a_hook_runs_after_a_gradient_is_accumulated(
    hook: Callable[[torch.Tensor], None], left: list[int]
) -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    model[0].weight.register_post_accumulate_grad_hook(hook)
    raw = trace(model, torch.zeros(1, 512), replace(SGD, batch_size=1))
    allocated = [mib for mib, _ in large(raw, "backward")]
    assert allocated == [1, *([-1] if not left else [])]
    assert raw.gradients is not None
    assert not raw.gradients.complete
    assert model[0].weight.grad is None


class Tangent(nn.Module):
    """A derivative along the input: its weights of 1 MiB have zeros as tangents."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(self.layer, (x,), (torch.ones_like(x),))[1]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_tangents_that_are_zero_take_no_memory() -> None:
    raw = trace(Tangent(), torch.zeros(1, 512), replace(SGD, batch_size=1))
    assert large(raw, "forward") == []


def test_a_loss_without_parameters_gets_the_batch() -> None:
    raw = trace(
        nn.Linear(256, 1024),
        (torch.zeros(2, 256), torch.zeros(2, dtype=torch.long)),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
    )
    # 4 samples: 256 floats and a class.
    assert bytes_of(raw, "batch") == 4 * (256 * 4 + 8)


def test_a_users_own_checkpointing_is_off_unless_it_is_to_be_kept() -> None:
    example = EXAMPLES["gpt2"]

    def events(*, own: bool, keep: bool) -> int:
        model = example.model()
        if own:
            for block in model.transformer.h:
                block.gradient_checkpointing = True
                block._gradient_checkpointing_func = _checkpoint
        raw = trace(model, example.batch, keep_own_checkpointing=keep)
        return len(raw.log.events)

    assert events(own=True, keep=False) == events(own=False, keep=False)
    assert events(own=True, keep=True) > events(own=True, keep=False)


def _checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def test_a_mask_in_the_batch_is_looked_at() -> None:
    example = EXAMPLES["gpt2"]

    def saved(**mask: torch.Tensor) -> int:
        return bytes_of(
            trace(example.model(), {**example.batch, **mask}), "activations"
        )

    ones = torch.ones(2, 16, dtype=torch.long)
    padded = ones.clone()
    padded[0, 10:] = 0
    # transformers drops a mask without a zero; another takes part in every attention.
    assert saved(attention_mask=ones) == saved()
    assert saved(attention_mask=padded) > saved()


def test_a_model_that_writes_into_its_batch_sees_it_fresh_every_time() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            ids.add_(1)
            assert int(ids.max()) == 1
            return self.embedding(ids)

    ids = torch.zeros(2, 4, dtype=torch.long)
    recipe = Recipe(batch_size=2, optimizer="sgd", gradient_accumulation_steps=2)
    trace(Shift(), ids, recipe)
    assert int(ids.max()) == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_are_no_buffers_are_found_too(device: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(256, 256)
            self.scale = torch.ones(256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    with torch.device(device):
        model = Scaled()
    assert bytes_of(trace(model, torch.zeros(2, 256)), "gradients") == 257 * 1024


def test_recurrent_layers_and_attention_of_torch_itself_run() -> None:
    x = torch.zeros(2, 8, 16)
    for model in (
        nn.LSTM(16, 16, batch_first=True),
        nn.GRU(16, 16, bidirectional=True, batch_first=True),
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    ):
        raw = trace(model, x, Recipe(batch_size=4, precision="bf16-mixed"))
        count = sum(p.numel() for p in model.parameters())
        assert bytes_of(raw, "gradients") == 4 * count


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch"])
def test_a_step_of_a_scaler_is_taken_though_it_knows_no_values(optimizer: str) -> None:
    raw = trace(
        EXAMPLES["mebi"].model(),
        EXAMPLES["mebi"].batch,
        Recipe(batch_size=4, precision="fp16-mixed", optimizer=optimizer),
    )
    assert bytes_of(raw, "optimizer_state") // MIB == 2 * 3


def test_a_model_in_evaluation_mode_is_traced_as_it_trains() -> None:
    example = EXAMPLES["gpt2"]
    here, there = (
        trace(m, example.batch) for m in (example.model(), example.model().eval())
    )
    assert here.log.sizes == there.log.sizes


def test_a_model_that_cannot_be_copied_is_named_with_what_to_do() -> None:
    model: Any = nn.Linear(4, 4)
    model.lines = (line for line in "ab")
    with pytest.raises(TraceError, match=r"'lines' is a generator.*a path, or a"):
        trace(model, torch.zeros(2, 4))


def test_a_model_with_a_lock_is_traced() -> None:
    model: Any = nn.Linear(4, 4)
    model.lock = threading.Lock()
    assert trace(model, torch.zeros(2, 4)).log.sizes


class ConvertsToTheSame(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear.to(x.dtype)(x).square().mean()


def test_a_forward_may_convert_a_layer_to_the_dtype_that_it_has() -> None:
    raw = trace(ConvertsToTheSame(), torch.zeros(2, 4))
    assert bytes_of(raw, "parameters") == 4 * (4 * 4 + 4)
