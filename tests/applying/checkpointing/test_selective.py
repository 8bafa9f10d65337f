import copy
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from budgetfit.applying.checkpointing.apply_segments import apply_segments
from budgetfit.applying.checkpointing.selective import (
    draws_random_numbers,
    mutated_saved_call,
)
from budgetfit.applying.loss.call_model import compute_loss
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError
from tests.applying.checkpointing.test_checkpoint import (
    Gradients,
    assert_same,
    segments_of,
)
from tests.applying.ranks.live_bytes import LiveBytes
from tests.applying.small_models import CHAIN, MAKERS, batch_for, make
from tests.counted_ops import CountedOps
from tests.models import Chain, mean, without_loss

aten = torch.ops.aten

# One product of each kind that the small models' blocks call, by what they are.
FIRST_PRODUCTS = tuple(f"aten.{op}.default:0" for op in ("mm", "addmm", "bmm"))
ALL_PRODUCTS = tuple(
    f"aten.{op}.default:{call}" for op in ("mm", "addmm", "bmm") for call in range(12)
)


def selective(name: str, *saved_ops: str) -> Segment:
    return Segment((name,), mode="selective", saved_ops=saved_ops)


def every_block(name: str, saved_ops: tuple[str, ...]) -> list[Segment]:
    return [selective(block, *saved_ops) for block in CHAIN[name]]


def backward(
    model: nn.Module, batch: object, *, autocast: bool = False, cache: bool = True
) -> tuple[Gradients, CountedOps]:
    """Gradients, and the ops of the backward pass."""
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, autocast, cache_enabled=cache):
        loss = compute_loss(model, batch, None, on_missing_loss=without_loss)
    with CountedOps() as ops:
        loss.backward()
    return {name: item.grad for name, item in model.named_parameters()}, ops


@pytest.mark.filterwarnings("ignore:Block .* saves nothing")  # of dropout alone
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16 autocast"])
@pytest.mark.parametrize("saved_ops", [FIRST_PRODUCTS, ALL_PRODUCTS])
@pytest.mark.parametrize("name", MAKERS)
def test_gradients_equal_the_plain_models_bit_for_bit(
    name: str, saved_ops: tuple[str, ...], autocast: bool
) -> None:
    batch = batch_for(name)
    plain, _ = backward(make(name), batch, autocast=autocast)
    model = make(name)
    apply_segments(model, every_block(name, saved_ops))
    planned, _ = backward(model, batch, autocast=autocast)
    assert_same(planned, plain)


@pytest.mark.filterwarnings("ignore:Block .* saves nothing")
@pytest.mark.parametrize("evaluation", [False, True], ids=["own flag", "new forward"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "stack"])
def test_saved_products_are_not_run_again(name: str, evaluation: bool) -> None:
    # transformers' flag works in training mode only: else the forward is replaced.
    batch = batch_for(name)
    products = []
    for saved_ops in (None, FIRST_PRODUCTS, ALL_PRODUCTS, ("aten.mm.default:99",)):
        model = make(name)
        for block in CHAIN[name] if evaluation else ():
            model.get_submodule(block).eval()
        if saved_ops is not None:
            apply_segments(model, every_block(name, saved_ops))
        products.append(backward(model, batch)[1].products)
    plain, first, all_saved, none_saved = products
    assert plain == all_saved
    # A block of the stack has two products; the last is not run again in any case.
    assert plain <= first < none_saved
    assert (plain < first) == (name != "stack")


@pytest.mark.parametrize(
    "asked",
    [
        "aten._scaled_dot_product_flash_attention.default:0",
        "aten._scaled_dot_product_efficient_attention.default:0",
        "aten._scaled_dot_product_cudnn_attention.default:0",
        "aten._scaled_dot_product_flash_attention_for_cpu.default:0",
    ],
)
def test_attention_planned_for_a_card_is_saved_on_the_cpu_too(asked: str) -> None:
    model = make("vit")  # its attention has no dropout, so the CPU fuses it
    apply_segments(model, every_block("vit", (asked,)))
    planned, ops = backward(model, batch_for("vit"))
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert ops.counts[name] == 0
    assert ops.counts["aten.addmm.default"] > 0  # the products do run again
    assert_same(planned, backward(make("vit"), batch_for("vit"))[0])


def test_what_is_saved_and_nothing_else_is_kept() -> None:
    # Rows x (1 input + 2 saved from the first product) x 16 floats of 4 bytes, and the
    # loss's 4. The block's output is nobody's: a sum saves nothing.
    model = make("stack").layers[0].eval()
    holder = nn.Sequential(model)
    apply_segments(holder, [selective("0", "aten.addmm.default:0")])
    with LiveBytes() as meter:
        x = torch.ones(64, 16)
        loss = holder(x)[0].sum()
        del x
        assert meter.live_bytes == 64 * 3 * 16 * 4 + 4
        loss.backward()
        del loss
        holder.zero_grad()
        assert meter.live_bytes == 0


THREES = ((0, 1, 2), (3, 4, 5))


@pytest.mark.parametrize("treatment", ["selective", "recomputed", "nested"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "stack"])
def test_nothing_is_left_after_backward_nor_without_one(
    name: str, treatment: str
) -> None:
    # T5's position bias comes out of one block and goes into the next: a recording that
    # held it would hold its graph, and so itself, for ever.
    model = make(name)
    apply_segments(
        model,
        every_block(name, ALL_PRODUCTS)
        if treatment == "selective"
        else segments_of(name, THREES, nested=treatment == "nested"),
    )
    batch = batch_for(name)
    with LiveBytes() as meter:
        before = meter.live_bytes
        loss = compute_loss(model, batch, None, on_missing_loss=without_loss)
        assert meter.live_bytes > before
        del loss
        assert meter.live_bytes == before
        compute_loss(model, batch, None, on_missing_loss=without_loss).backward()
        model.zero_grad(set_to_none=True)
        assert meter.live_bytes == before


class Noisy(nn.Module):
    """A block that draws three times, out of place, between products."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.down = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rand_like(x)
        x = torch.tanh(self.up(x)) * torch.rand_like(x)
        return torch.tanh(self.down(x)) * torch.rand_like(x)


def noisy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Noisy(), Noisy())


def test_a_policy_that_saves_some_draws_alone_gives_wrong_gradients() -> None:
    # The fault that the next test shows to be prevented.
    calls: Counter[Any] = Counter()

    def second_draw(
        _: object, op: object, *__: object, **___: object
    ) -> CheckpointPolicy:
        calls[op] += 1
        if op is aten.rand_like.default and calls[op] % 3 == 2:  # in every pass
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(4, 16)
    plain, _ = backward(noisy(), (x,))
    model = noisy()
    inner = model[0].forward

    def naive(x: torch.Tensor) -> Any:
        calls.clear()
        return checkpoint(
            inner,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(second_draw),
        )

    model[0].forward = naive
    planned, _ = backward(model, (x,))
    with pytest.raises(AssertionError):
        assert_same(planned, plain)


@pytest.mark.parametrize("draw", [0, 1, 2])
def test_a_saved_draw_saves_the_later_ones_too_and_gradients_are_exact(
    draw: int,
) -> None:
    x = torch.randn(4, 16)
    plain, _ = backward(noisy(), (x,))
    model = noisy()
    apply_segments(model, [selective("0", f"aten.rand_like.default:{draw}")])
    planned, ops = backward(model, (x,))
    assert_same(planned, plain)
    # Those before the saved one are drawn again, from the state that was kept.
    assert ops.counts["aten.rand_like.default"] == draw


def test_in_place_draws_after_a_saved_one_are_refused() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * torch.rand_like(x)
            return x * torch.empty_like(x).bernoulli_(0.5)  # CPU dropout does this

    model = nn.Sequential(nn.Linear(4, 4), Mixed())
    apply_segments(model, [selective("1", "aten.rand_like.default:0")])
    with pytest.raises(
        InputError,
        match=r"Block '1' saves .*'aten\.rand_like\.default:0'.*bernoulli_.*Leave",
    ):
        model(torch.ones(2, 4))
    apply_segments(model, [selective("1", "aten.mul.Tensor:0")])
    model(torch.ones(2, 4)).sum().backward()  # all draws run again


def test_attention_without_dropout_counts_as_no_draw() -> None:
    attention = aten._scaled_dot_product_flash_attention.default
    q = torch.ones(1)
    assert not draws_random_numbers(attention, (q, q, q), {})
    assert not draws_random_numbers(attention, (q, q, q, 0.0), {})
    assert draws_random_numbers(attention, (q, q, q, 0.1), {})
    assert draws_random_numbers(attention, (q, q, q), {"dropout_p": 0.1})
    assert draws_random_numbers(aten.native_dropout.default, (q, 0.1, True), {})
    assert not draws_random_numbers(aten.mm.default, (q, q), {})


def test_a_write_to_a_saved_tensor_is_found() -> None:
    x, other = torch.ones(4), torch.ones(4)
    saved = {x.untyped_storage()._cdata: "aten.mm.default:0"}
    found = [
        mutated_saved_call(aten.relu_.default, (x[:2],), {}, saved),
        mutated_saved_call(aten.relu_.default, (other,), {}, saved),
        mutated_saved_call(aten.add_.Tensor, (other, x), {}, saved),
        mutated_saved_call(aten.relu.default, (x,), {}, saved),
        mutated_saved_call(aten.mm.out, (other, other), {"out": x}, saved),
        mutated_saved_call(aten._foreach_add_.Scalar, ([other, x], 1), {}, saved),
    ]
    name = "aten.mm.default:0"
    assert found == [name, None, None, None, name, name]


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.up(x)).square()


def test_a_saved_tensor_that_is_overwritten_is_refused_with_block_and_op() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Overwriting())
    apply_segments(model, [selective("1", "aten.addmm.default:0")])
    # Torch up to 2.12 finds it in backward, and cannot say which op.
    with pytest.raises(InputError, match=r"Block '1' saves .*to in place.*saved_ops"):
        model(torch.ones(2, 4)).sum().backward()


def test_a_saved_tensor_that_the_parent_overwrites_is_refused_with_the_block() -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            inner = self.up(x)
            return inner, (inner * 2).square()

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = TwoOutputs()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner, out = self.block(x)
            inner.zero_()
            return out

    model = Parent()
    apply_segments(model, [selective("block", "aten.addmm.default:0")])
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(InputError, match=r"Block 'block' saves a tensor.*in place"):
        loss.backward()


@pytest.mark.parametrize(
    ("saved_op", "message"),
    [
        ("aten.relu_.default:0", r"'0' cannot save .*relu_.*writes to its arguments"),
        ("aten.no_such.default:1", r"'0' cannot save .*no_such.*has no such op"),
        ("aten.mm.no_such:1", "has no such op"),
    ],
)
def test_ops_that_cannot_be_saved_are_refused(saved_op: str, message: str) -> None:
    model = noisy()
    before = [dict(item.__dict__) for item in model.modules()]
    with pytest.raises(InputError, match=message):
        apply_segments(model, [selective("0", saved_op)])
    assert [dict(item.__dict__) for item in model.modules()] == before


def test_a_second_backward_over_the_same_graph_is_refused_by_name() -> None:
    model = noisy()
    apply_segments(model, [selective("0", "aten.addmm.default:0")])
    loss = model(torch.ones(2, 16)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match=r"'0' under selective .* ran backward twice"):
        loss.backward()


def test_a_run_says_what_to_do_about_a_second_backward() -> None:
    def slope(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(outputs.sum(), batch, create_graph=True)
        return found.square().mean()

    segment = selective("0", "aten.addmm.default:0")
    run = Run(noisy(), Recipe(batch_size=2, segments=(segment,)), loss=slope)
    with pytest.raises(InputError, match=r"Use segments of mode='recompute'"):
        run.step(torch.ones(2, 16, requires_grad=True))


def test_weights_shared_between_blocks_are_cast_alike_in_both_passes() -> None:
    # Autocast casts a shared weight in the first block only, but in both blocks when
    # they run again: the second block's casts would be counted differently.
    results = []
    casts = tuple(f"aten._to_copy.default:{call}" for call in range(4))
    # A cast of its own for each use adds the gradients up in fp32, not in bf16.
    for segments in ([], [selective(str(i), *casts) for i in range(3)]):
        torch.manual_seed(0)
        shared = nn.Linear(16, 16)
        blocks = [nn.Sequential(shared, nn.Tanh(), nn.Linear(16, 16)) for _ in "abc"]
        model = nn.Sequential(*blocks)
        apply_segments(model, segments)
        x = torch.ones(2, 16)
        results.append(backward(model, (x,), autocast=True, cache=bool(segments))[0])
    assert_same(results[1], results[0])


@pytest.mark.parametrize("first", [torch.enable_grad, torch.no_grad])
def test_a_block_called_several_times_is_cast_alike_in_both_passes(first: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with first():
                x = self.block(x)
            for _ in range(2):
                x = self.block(x)
            return x.float().square().sum()

    results = []
    casts = tuple(f"aten._to_copy.default:{call}" for call in range(4))
    # A cast of its own for each use adds the gradients up in fp32, not in bf16.
    for segments in ([], [selective("block", *casts, "aten.addmm.default:1")]):
        torch.manual_seed(0)
        model = Twice()
        apply_segments(model, segments)
        x = torch.ones(2, 16)
        results.append(backward(model, (x,), autocast=True, cache=bool(segments))[0])
    assert_same(results[1], results[0])


@pytest.mark.parametrize("name", ["gpt2", "stack"])
def test_undo_and_deep_copies_work(name: str) -> None:
    model = make(name)
    plain, _ = backward(make(name), batch_for(name))
    before = [dict(item.__dict__) for item in model.modules()]
    keys = list(model.state_dict())
    undo = apply_segments(model, every_block(name, ALL_PRODUCTS))
    copied = copy.deepcopy(model)
    assert list(model.state_dict()) == keys
    undo()
    assert [dict(item.__dict__) for item in model.modules()] == before
    planned, _ = backward(copied, batch_for(name))
    assert_same(planned, plain)
    assert all(item.grad is None for item in model.parameters())


def test_two_forwards_before_one_backward_keep_their_own_tensors() -> None:
    first, second = torch.randn(4, 16), torch.randn(2, 16)
    results = []
    for segments in ([], [selective(str(i), "aten.addmm.default:0") for i in range(2)]):
        model = noisy()
        apply_segments(model, segments)
        torch.manual_seed(1)
        (model(first).sum() + 2 * model(second).sum()).backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(results[1], results[0])


@pytest.mark.parametrize("name", MAKERS)
def test_all_modes_in_one_model_give_exact_gradients(name: str) -> None:
    chain = CHAIN[name]
    segments = [
        selective(chain[0], *FIRST_PRODUCTS),
        Segment(chain[1:3], nested=True, input_on_host=True),
        Segment(chain[3:4], input_on_host=True),
        Segment(chain[4:5], mode="offload"),
    ]
    plain, _ = backward(make(name), batch_for(name))
    model = make(name)
    apply_segments(model, segments)
    assert_same(backward(model, batch_for(name))[0], plain)


def test_a_block_that_makes_none_of_its_calls_is_warned_about_once() -> None:
    """A mistyped number would turn into recomputation without a word."""
    model, block = make("stack"), CHAIN["stack"][0]
    apply_segments(model, [selective(block, "aten.addmm.default:99")])
    words = f"Block '{block}' saves nothing .* aten.addmm.default:0 to "
    with pytest.warns(UserWarning, match=words):
        compute_loss(model, batch_for("stack"), None).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute_loss(model, batch_for("stack"), None).backward()


def test_a_block_that_makes_one_of_its_calls_is_not_warned_about() -> None:
    model, block = make("stack"), CHAIN["stack"][0]
    one = selective(block, "aten.addmm.default:0", "aten.addmm.default:99")
    apply_segments(model, [one])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute_loss(model, batch_for("stack"), None).backward()


class Noting(nn.Module):
    """Two buffers, one of which it writes to, and calls of its own that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.SyncBatchNorm(6)
        self.register_buffer("count", torch.zeros(6))
        self.register_buffer("table", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y = torch.tanh(self.norm(self.linear(x)) * self.count).clone()
        return x + (2 * x).clone() * torch.sin(y).clone() * self.table


@pytest.mark.parametrize("call", range(3))
def test_copies_of_buffers_are_no_calls_of_the_block(call: int) -> None:
    """A forward copies other ones than its recomputation, which would find others'."""
    segments = tuple(
        selective(f"blocks.{n}", f"aten.clone.default:{call}") for n in (0, 1)
    )
    found = []
    for chosen in ((), segments):
        torch.manual_seed(0)
        model = Chain(Noting(), Noting())
        with Run(model, Recipe(batch_size=4, segments=chosen), loss=mean) as run:
            losses = [float(run.step(torch.randn(4, 6))) for _ in range(7)]
        found.append((losses, *model.state_dict().values()))
    torch.testing.assert_close(found[1], found[0])
