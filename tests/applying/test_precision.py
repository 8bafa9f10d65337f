import functools
from typing import Any

import pytest
import torch
from torch import nn

from budgetfit.applying.precision import (
    apply_precision,
    autocast_context,
    cast_batch,
    fresh_scaler,
    make_scaler,
    tensors_in_apply_order,
    warn_if_emulated,
)
from budgetfit.applying.run.run import Run
from budgetfit.core.precision import (
    PRECISIONS,
    Precision,
    automatic_precision,
    find_precision,
)
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError
from budgetfit.gpus.table import find_gpu

BF16 = find_precision("bf16")
CPU = torch.device("cpu")


class Model(nn.Module):
    """Tied and frozen parameters, float, integer and complex buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.full((3,), 1 / 3), requires_grad=False)
        self.register_buffer("frequencies", torch.full((3,), 1 / 3))
        self.register_buffer("hidden", torch.full((3,), 1 / 3), persistent=False)
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("waves", torch.ones(3, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(4)


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.dtype for name, tensor in tensors}


def objects(model: nn.Module) -> list[int]:
    return [id(item) for item in (*model.parameters(), *model.buffers())]


def test_bf16_casts_floats_in_place_and_nothing_else() -> None:
    model = Model()
    before = objects(model)
    apply_precision(model, BF16, "cpu")
    found = dtypes(model)
    assert found.pop("counts") == torch.int64
    assert found.pop("norm.num_batches_tracked") == torch.int64
    assert found.pop("waves") == torch.complex64
    assert set(found.values()) == {torch.bfloat16}
    assert objects(model) == before
    assert model.tied.weight is model.first.weight


def test_buffers_that_are_not_saved_stay_as_a_library_has_loaded_them() -> None:
    """As rotary frequencies do in ``from_pretrained(dtype=torch.bfloat16)``."""
    loaded = nn.Linear(4, 4).to(torch.bfloat16)
    loaded.register_buffer("inv_freq", torch.rand(4), persistent=False)
    loaded.register_buffer("mean", torch.rand(4))
    cast = nn.Linear(4, 4)
    cast.register_buffer("inv_freq", torch.rand(4), persistent=False)
    for model in (loaded, cast):
        apply_precision(model, find_precision("bf16"), "cpu")
    assert loaded.inv_freq.dtype == torch.float32
    assert loaded.mean.dtype == torch.bfloat16
    assert cast.inv_freq.dtype == torch.bfloat16


def test_undo_gives_dtypes_back_and_keeps_what_was_trained() -> None:
    model = Model()
    before, ids = dtypes(model), objects(model)
    undo = apply_precision(model, BF16, "cpu")
    with torch.no_grad():
        model.first.weight.fill_(0.5)
    model.norm(torch.ones(2, 4, dtype=torch.bfloat16))  # moves its running statistics
    undo()
    assert dtypes(model) == before
    assert objects(model) == ids
    assert torch.equal(model.first.weight, torch.full((4, 4), 0.5))
    # Not written to: exact. 1/3 rounded to bf16 and back would be 0.333984375.
    assert torch.equal(model.frequencies, torch.full((3,), 1 / 3))
    assert torch.equal(model.hidden, torch.full((3,), 1 / 3))
    # Momentum 0.1 of a mean of 1.
    assert model.norm.running_mean[0].item() == pytest.approx(0.1, rel=2**-8)


def test_gradients_are_cast_with_their_parameters() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    undo = apply_precision(model, BF16, "cpu")
    assert model.weight.grad.dtype == torch.bfloat16
    undo()
    assert model.weight.grad.dtype == torch.float32


def test_mixed_policies_make_the_weights_fp32_and_as_is_leaves_them() -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    apply_precision(model, find_precision("as-is"), "cpu")
    assert model.weight.dtype == torch.bfloat16
    undo = apply_precision(model, find_precision("bf16-mixed"), "cpu")
    assert model.weight.dtype == torch.float32
    undo()
    assert model.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("weights", ["fp32", "as-is"])
def test_fp16_weights_with_a_scaler_are_refused_with_the_reason(weights: str) -> None:
    model = nn.Linear(2, 2, dtype=torch.float16)
    policy = Precision(
        name="fp16-mixed", weights=weights, autocast="fp16", grad_scaler=True
    )
    with pytest.raises(InputError, match="Attempting to unscale FP16 gradients"):
        apply_precision(model, policy, "cpu")
    assert model.weight.dtype == torch.float16
    model.requires_grad_(requires_grad=False)
    apply_precision(model, policy, "cpu")  # frozen weights have no gradients


def test_tf32_is_switched_on_cuda_alone_and_back() -> None:
    before = torch.get_float32_matmul_precision()
    model = nn.Linear(1, 1)
    apply_precision(model, find_precision("tf32"), "cpu")
    assert torch.get_float32_matmul_precision() == before
    undo = apply_precision(model, find_precision("tf32"), "cuda")
    assert torch.get_float32_matmul_precision() == "high"
    inner = apply_precision(model, find_precision("fp32"), "cuda")
    assert torch.get_float32_matmul_precision() == "highest"
    inner()
    assert torch.get_float32_matmul_precision() == "high"
    undo()
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("name", PRECISIONS)
def test_autocast_and_scaler_follow_the_policy(name: str) -> None:
    policy = find_precision(name)
    expected = {"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(name)
    with autocast_context(policy, "cpu"):
        assert torch.is_autocast_enabled("cpu") == (expected is not None)
        if expected is not None:
            assert torch.get_autocast_dtype("cpu") == expected
    assert (make_scaler(policy, "cpu") is not None) == (name == "fp16-mixed")


def test_batches_get_the_weights_dtype_where_they_are_floats() -> None:
    batch = {"x": [torch.ones(2), torch.ones(2, dtype=torch.int64)], "n": 3}
    moved = cast_batch(batch, BF16, CPU)
    assert [item.dtype for item in moved["x"]] == [torch.bfloat16, torch.int64]
    assert moved["n"] == 3
    kept = cast_batch(torch.ones(2).double(), find_precision("as-is"), CPU)
    assert kept.dtype == torch.float64
    assert cast_batch(torch.ones(2).double(), PRECISIONS["fp32"], CPU).dtype == (
        torch.float32
    )


class OwnParameter(nn.Module):
    """A parameter and a buffer beside a child that has both too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))
        self.register_buffer("shift", torch.zeros(3))
        self.inside = nn.BatchNorm1d(4)


def test_weights_are_cast_in_the_order_of_torch() -> None:
    model = OwnParameter()
    by_torch: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        by_torch.append(tensor)
        return tensor

    model._apply(note)
    ours = list(tensors_in_apply_order(model))
    assert len(ours) == len(by_torch) == 2 + 5  # two of its own, five of the norm
    assert all(a is b for a, b in zip(ours, by_torch, strict=True))


def test_the_choice_follows_the_cards_capability() -> None:
    chosen = {
        name: automatic_precision(find_gpu(name).compute_capability).name
        for name in ("t4", "a100-80gb", "l4", "rtx-4090", "h100-80gb")
    }
    assert chosen == {
        "t4": "fp16-mixed",
        "a100-80gb": "bf16-mixed",
        "l4": "bf16-mixed",
        "rtx-4090": "bf16-mixed",
        "h100-80gb": "bf16-mixed",
    }


@pytest.mark.parametrize("name", ["bf16-mixed", "bf16", "tf32"])
def test_a_card_that_would_emulate_the_policy_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    policy, card = find_precision(name), torch.device("cuda", 0)
    with pytest.warns(
        UserWarning, match=r"capability 8\.0, and this Tesla T4 has 7\.5"
    ):
        warn_if_emulated(policy, card)
    warn_if_emulated(find_precision("fp16-mixed"), card)
    warn_if_emulated(policy, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    warn_if_emulated(policy, card)


def test_a_renewed_scaler_has_state_and_settings_and_may_unscale_again() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)
    fresh = fresh_scaler(scaler, "cpu")
    assert fresh.state_dict() == scaler.state_dict()
    fresh.scale(torch.ones(1))
    fresh.unscale_(optimizer)  # the old one refuses to do so twice
    disabled = fresh_scaler(torch.amp.GradScaler("cpu", enabled=False), "cpu")
    assert not disabled.is_enabled()


class Island(nn.Module):
    """A block with a part that its author keeps in fp32; notes what it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(4, 4), nn.Linear(4, 4)
        # In a cache: a recomputation would take what it appends out again.
        seen: list[tuple[torch.dtype, torch.dtype]] = []
        self.seen = functools.cache(lambda: seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outside = self.outside(x)
        with torch.autocast("cpu", enabled=False):
            inside = self.inside(x.float())
        self.seen().append((inside.dtype, outside.dtype))
        return torch.tanh(inside + outside)  # a recomputation gets as far as here


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)],
)
@pytest.mark.parametrize("mode", ["keep", "recompute", "offload", "selective"])
def test_a_users_own_islands_without_autocast_survive_forward_and_recomputation(
    precision: str, dtype: torch.dtype, mode: Any
) -> None:
    saved = ("aten.addmm.default:0",) if mode == "selective" else ()
    segments = () if mode == "keep" else (Segment(("1",), mode, saved),)
    gradients = []
    for chosen in ((), segments):
        torch.manual_seed(0)
        model = nn.Sequential(Island(), Island(), Island())
        run = Run(
            model,
            Recipe(batch_size=2, precision=precision, segments=chosen),
            loss=lambda outputs, _: outputs.float().square().mean(),
        )
        if run.scaler is not None:
            run.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        run.step(torch.ones(2, 4))
        for island in model:
            assert set(island.seen()) == {(torch.float32, dtype)}
        gradients.append([item.clone() for item in model.parameters()])
        times = len(model[1].seen())
    assert times == (2 if mode in {"recompute", "selective"} else 1)
    assert all(map(torch.equal, *gradients))


class Mixed(nn.Module):
    """Runs one of its blocks without autocast, as some models do around theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            with torch.autocast("cpu", torch.bfloat16, enabled=number != 1):
                x = block(x.float() if number == 1 else x)
        return x.float().square().mean()


@pytest.mark.parametrize("nested", [False, True])
def test_each_block_of_a_segment_is_recomputed_in_its_own_autocast(
    nested: bool,
) -> None:
    names = tuple(f"blocks.{number}" for number in range(3))
    gradients = []
    for segments in ((), (Segment(names, nested=nested),)):
        torch.manual_seed(0)
        model = Mixed()
        recipe = Recipe(batch_size=2, precision="bf16-mixed", segments=segments)
        with Run(model, recipe) as run:
            run.step(torch.ones(2, 8))
            gradients.append([item.clone() for item in model.parameters()])
    assert all(map(torch.equal, *gradients))
