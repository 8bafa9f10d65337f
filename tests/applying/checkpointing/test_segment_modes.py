import copy
from typing import Any

import pytest
import torch
from torch import nn

from budgetfit.applying.checkpointing import activation_offload
from budgetfit.applying.checkpointing.apply_segments import apply_segments
from budgetfit.core.recipe import Segment
from tests.applying.checkpointing.test_checkpoint import (
    ALL_NESTED,
    NESTED,
    Counter,
    Parent,
    assert_same,
    assert_trains_alike,
    backward,
    kept_and_peak,
    segments_of,
)
from tests.applying.ranks.live_bytes import LiveBytes
from tests.applying.small_models import CHAIN, MAKERS, Block, batch_for, make
from tests.models import bert_classifier


@pytest.mark.parametrize("positions", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "sequential"])
def test_blocks_of_a_nested_segment_run_three_times_and_its_last_one_twice(
    name: str, positions: tuple[tuple[int, ...], ...]
) -> None:
    # Forward, for the others' inputs, for its own backward. Nobody waits for the last
    # one's output: the recomputation of the segment stops before it.
    model = make(name)
    counter = Counter(model, CHAIN[name])
    apply_segments(model, segments_of(name, positions, nested=True))
    backward(model, batch_for(name))
    expected = dict.fromkeys(CHAIN[name], 1)
    for part in positions:
        expected |= {CHAIN[name][i]: 3 for i in part}
        expected[CHAIN[name][part[-1]]] = 2
    assert counter.counts == expected


def test_a_nested_segment_peaks_lower_than_one_that_runs_again_at_once() -> None:
    peaks = []
    for is_nested in (True, False):
        model = make("stack")
        segments = [Segment(CHAIN["stack"], nested=is_nested)]
        apply_segments(model, segments, random_blocks=(), determinism_check="default")
        x = torch.randn(512, 16, requires_grad=True)
        labels = torch.zeros(512, dtype=torch.int64)
        peaks.append(kept_and_peak(lambda m=model, x=x, y=labels: m(x, y))[1])
    # Six blocks save 5 x each but their inputs (tanh 2, dropout's factors 2, its output
    # 2, less what is freed on the way); nested, at most one block at a time does.
    x_bytes = 512 * 16 * 4
    assert peaks[0] < peaks[1] - 4 * 4 * x_bytes


def test_what_one_block_hands_to_the_others_is_not_kept_by_a_nested_segment() -> None:
    # As T5's position bias: 64 x 16 floats that the first block makes for the others.
    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(16)

        def forward(
            self, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if bias is None:
                bias = self.block.up.weight.sum() * torch.ones(64, 16)
            return self.block(x + bias)[0], bias

    class Bias(Parent):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Giving() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = None
            for layer in self.layers:
                x, bias = layer(x, bias=bias)
            return x.sum()

    x = torch.randn(64, 16)
    torch.manual_seed(0)
    model = Bias().eval()
    plain = backward(copy.deepcopy(model), (x,))[1]
    apply_segments(model, ALL_NESTED, random_blocks=())
    with LiveBytes() as meter:
        loss = model(x)
        assert meter.live_bytes == 4  # the loss: the input is the caller's
        del loss
    assert_same(backward(model, (x,))[1], plain)


def test_a_graph_of_nested_blocks_can_be_used_twice() -> None:
    x = torch.randn(4, 16)

    def train(model: Any) -> None:
        loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward()

    assert_trains_alike(train, ALL_NESTED)


class Moved:
    """Notes what goes to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: list[int] = []
        plain = activation_offload.to_host

        def noting(x: torch.Tensor) -> torch.Tensor:
            self.bytes.append(x.untyped_storage().nbytes())
            return plain(x)

        monkeypatch.setattr(activation_offload, "to_host", noting)


@pytest.mark.parametrize(
    "groups",
    [((0,), (1,), (4,)), ((0, 1, 2), (3, 4)), ((5,),)],
    ids=["blocks", "segments", "last"],
)
@pytest.mark.parametrize("is_nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("name", MAKERS)
def test_inputs_on_the_host_are_the_hidden_states_of_each_segment_and_no_more(
    name: str,
    groups: tuple[tuple[int, ...], ...],
    is_nested: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = batch_for(name)
    plain = backward(make(name), batch)[1]
    moved = Moved(monkeypatch)
    model = make(name)
    segments = [
        Segment(
            tuple(CHAIN[name][i] for i in part),
            nested=is_nested and len(part) > 1,
            input_on_host=True,
        )
        for part in groups
    ]
    apply_segments(model, segments)
    assert_same(backward(model, batch)[1], plain)
    tokens = 17 if name == "vit" else 16  # patches and one class token
    width = 16 if name in {"stack", "sequential"} else 32
    samples = 4 if name in {"stack", "sequential"} else 4 * tokens
    assert moved.bytes == [samples * width * 4] * len(groups)


@pytest.mark.parametrize("name", MAKERS)
def test_offloaded_blocks_run_once_and_give_exact_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_for(name)
    plain = backward(make(name), batch)[1]
    moved = Moved(monkeypatch)
    model = make(name)
    keys = list(model.state_dict())
    counter = Counter(model, CHAIN[name])
    before = [dict(item.__dict__) for item in model.modules()]
    segments = [Segment((CHAIN[name][i],), mode="offload") for i in (0, 2)]
    undo = apply_segments(model, segments)
    assert list(model.state_dict()) == keys
    copied = copy.deepcopy(model)
    assert_same(backward(model, batch)[1], plain)
    assert set(counter.counts.values()) == {1}
    assert moved.bytes
    undo()
    assert [dict(item.__dict__) for item in model.modules()] == before
    assert_same(backward(copied, batch)[1], plain)


def test_all_modes_in_a_model_that_masks_padding_give_exact_gradients() -> None:
    # BERT: one mask for all blocks, dropout 0.1, attention that the CPU does not fuse.
    def bert() -> nn.Module:
        torch.manual_seed(0)
        return bert_classifier(num_hidden_layers=5).train()

    batch = {
        "input_ids": torch.arange(64).reshape(4, 16),
        "attention_mask": (torch.arange(16) < 12).long().expand(4, 16),
        "labels": torch.arange(4),
    }
    names = tuple(f"bert.encoder.layer.{number}" for number in range(5))
    segments = [
        Segment(
            names[:1],
            mode="selective",
            saved_ops=("aten.addmm.default:0", "aten.bmm.default:1"),
        ),
        Segment(names[1:3], nested=True, input_on_host=True),
        Segment(names[3:4], mode="offload"),
    ]
    for autocast in (False, True):
        plain = backward(bert(), batch, autocast=autocast)[1]
        model = bert()
        counter = Counter(model, names)
        apply_segments(model, segments)
        assert_same(backward(model, batch, autocast=autocast)[1], plain)
        assert list(counter.counts.values()) == [2, 3, 2, 1, 1]
