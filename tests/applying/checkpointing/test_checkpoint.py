import copy
import importlib
import inspect
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import DynamicCache

from budgetfit.applying.checkpointing import block_checkpoint as under_test
from budgetfit.applying.checkpointing.apply_segments import apply_segments
from budgetfit.applying.loss.call_model import compute_loss
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError, RecomputationError
from tests.applying.ranks.live_bytes import LiveBytes
from tests.applying.small_models import BLOCKS, CHAIN, MAKERS, Block, batch_for, make
from tests.models import counting_hook

SINGLES = tuple((i,) for i in range(BLOCKS))
SEGMENTATIONS = {
    "every block": SINGLES,
    "some blocks": ((1,), (4,)),
    "pairs and threes": ((0, 1), (2, 3, 4)),
    "one over all": (tuple(range(BLOCKS)),),
    "mixed lengths": ((0,), (1, 2, 3), (5,)),
}
NESTED = {
    "one over all": (tuple(range(BLOCKS)),),
    "two and four": ((0, 1), (2, 3, 4, 5)),
    "in the middle": ((1, 2, 3),),
}
Gradients = dict[str, torch.Tensor | None]


def segments_of(
    name: str, positions: tuple[tuple[int, ...], ...], *, nested: bool = False
) -> list[Segment]:
    parts = [tuple(CHAIN[name][i] for i in part) for part in positions]
    return [Segment(part, nested=nested) for part in parts]


def backward(
    model: nn.Module, batch: object, *, autocast: bool = False, seed: int = 1
) -> tuple[float, Gradients]:
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = compute_loss(model, batch, None)
    loss.backward()
    return loss.item(), {name: item.grad for name, item in model.named_parameters()}


def assert_same(planned: Gradients, plain: Gradients) -> None:
    for name, expected in plain.items():
        got = planned[name]
        if expected is None:
            assert got is None, name
        else:
            assert got is not None
            assert torch.equal(got, expected), name


class Counter:
    """Counts how often each block's inside runs, in forward and recomputation."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self.counts = dict.fromkeys(names, 0)
        for name in names:
            block = model.get_submodule(name)
            inside = next(item for item in block.modules() if not any(item.children()))
            inside.register_forward_pre_hook(counting_hook(self.counts, name))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16 autocast"])
@pytest.mark.parametrize(
    ("nested", "positions"),
    [
        *((False, positions) for positions in SEGMENTATIONS.values()),
        *((True, positions) for positions in NESTED.values()),
    ],
    ids=[*SEGMENTATIONS, *(f"nested, {name}" for name in NESTED)],
)
@pytest.mark.parametrize("name", MAKERS)
def test_gradients_equal_the_plain_models_bit_for_bit(
    name: str, nested: bool, positions: tuple[tuple[int, ...], ...], autocast: bool
) -> None:
    batch = batch_for(name)
    plain_loss, plain = backward(make(name), batch, autocast=autocast)
    generators = torch.get_rng_state()
    model = make(name)
    apply_segments(model, segments_of(name, positions, nested=nested))
    loss, planned = backward(model, batch, autocast=autocast)
    assert loss == plain_loss
    assert_same(planned, plain)
    assert torch.equal(torch.get_rng_state(), generators)


@pytest.mark.parametrize("positions", SEGMENTATIONS.values(), ids=SEGMENTATIONS)
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "sequential"])
def test_blocks_in_segments_run_twice_and_others_once(
    name: str, positions: tuple[tuple[int, ...], ...]
) -> None:
    model = make(name)
    counter = Counter(model, CHAIN[name])
    apply_segments(model, segments_of(name, positions))
    backward(model, batch_for(name))
    inside = {CHAIN[name][i] for part in positions for i in part}
    assert counter.counts == {
        block: 2 if block in inside else 1 for block in CHAIN[name]
    }


@pytest.mark.parametrize("name", MAKERS)
def test_keys_hooks_signatures_and_modules_stay(name: str) -> None:
    model = make(name)
    hooked = []
    for block in CHAIN[name]:
        model.get_submodule(block).register_forward_hook(
            lambda *_: hooked.append(1)  # once per forward, not in recomputation
        )
    keys = list(model.state_dict())
    modules = list(model.named_modules())
    signatures = [str(inspect.signature(item.forward)) for _, item in modules]
    apply_segments(model, segments_of(name, ((0,), (1, 2, 3))))
    assert list(model.state_dict()) == keys
    assert list(model.named_modules()) == modules
    assert [str(inspect.signature(item.forward)) for _, item in modules] == signatures
    backward(model, batch_for(name))
    assert len(hooked) == BLOCKS


@pytest.mark.parametrize("name", MAKERS)
def test_undo_gives_back_every_attribute(name: str) -> None:
    model = make(name)
    before = [dict(item.__dict__) for item in model.modules()]
    use_cache = getattr(getattr(model, "config", None), "use_cache", None)
    undo = apply_segments(model, segments_of(name, ((0,), (1, 2, 3))))
    assert [dict(item.__dict__) for item in model.modules()] != before
    undo()
    undo()  # a second time does nothing
    assert [dict(item.__dict__) for item in model.modules()] == before
    assert getattr(getattr(model, "config", None), "use_cache", None) == use_cache


def test_a_model_taken_as_it_is_keeps_its_generation_cache() -> None:
    model: Any = make("gpt2")
    with apply_segments(model, [], keep_own_checkpointing=True):
        assert model.config.use_cache
    first = segments_of("gpt2", ((0,),))
    apply_segments(model, first, keep_own_checkpointing=True)
    assert not model.config.use_cache  # a recomputation would fill it twice


def test_generation_caches_are_off_until_undone_and_on_where_saved(
    tmp_path: Path,
) -> None:
    model: Any = make("gpt2")
    assert model.config.use_cache
    undo = apply_segments(model, [])
    assert not model.config.use_cache
    assert model(**batch_for("gpt2")).past_key_values is None
    for saved in (model, copy.deepcopy(model)):
        saved.save_pretrained(tmp_path)
        assert type(model.config).from_pretrained(tmp_path).use_cache
        assert not saved.config.use_cache
    undo()
    assert model.config.use_cache
    assert "save_pretrained" not in vars(model)


def test_a_cache_asked_for_in_the_batch_is_kept_from_recomputed_blocks() -> None:
    model = make("llama")
    batch = batch_for("llama")
    plain = backward(make("llama"), batch)[1]
    apply_segments(model, segments_of("llama", ((0, 1), (2, 3, 4, 5))))
    with pytest.warns(UserWarning, match="write no keys and values to a generation"):
        found = backward(model, {**batch, "use_cache": True})[1]
    assert_same(found, plain)


@pytest.mark.parametrize("groups", [((0,),), ((0, 1),)])
def test_a_cache_of_earlier_tokens_is_not_dropped_without_a_word(
    groups: tuple[tuple[int, ...], ...],
) -> None:
    model, batch = make("llama"), batch_for("llama")
    with torch.no_grad():
        earlier = model.model(batch["input_ids"], use_cache=True).past_key_values
    apply_segments(model, segments_of("llama", groups))
    with pytest.raises(InputError, match="keys and values of earlier tokens"):
        model(**batch, past_key_values=earlier)


@pytest.mark.filterwarnings("ignore:Blocks that are recomputed write")
@pytest.mark.parametrize("groups", [((0,),), ((0, 1),), ((3,),)])
def test_a_cache_that_recomputed_blocks_left_empty_is_not_read_by_them(
    groups: tuple[tuple[int, ...], ...],
) -> None:
    """Else a model would train without the tokens of its first forward."""
    model, ids = make("llama"), batch_for("llama")["input_ids"]
    undo = apply_segments(model, segments_of("llama", groups))
    for _ in range(2):  # another cache is another forward
        cache = model(ids[:, :4], use_cache=True).past_key_values
    with pytest.raises(InputError, match="keys and values of earlier tokens"):
        model(ids[:, 4:], past_key_values=cache)
    undo()


class Attending(nn.Module):
    """A block of no library that writes into a cache as XLM's attention does."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.linear = layer, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: DynamicCache | None) -> torch.Tensor:
        keys = self.linear(x)[:, None]
        if cache is not None:
            keys, _ = cache.update(keys, keys, self.layer)
        return x + keys.tanh().sum((1, 2))[:, None]


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending(i) for i in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = DynamicCache()
        for block in self.blocks:
            x = block(x, cache=cache)
        return x.sum()


@pytest.mark.filterwarnings("ignore:Blocks that are recomputed write")
def test_a_cache_that_a_model_always_fills_is_not_filled_twice() -> None:
    torch.manual_seed(0)
    model, batch = WithCache(), torch.ones(2, 3, 4)
    plain = backward(copy.deepcopy(model), batch)[1]
    apply_segments(model, [Segment((f"blocks.{i}",)) for i in range(2)])
    assert_same(backward(model, batch)[1], plain)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("groups", [((0,), (1,), (2,)), ((0, 1, 2),)])
def test_generation_in_training_mode_keeps_its_cache(
    name: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    model: Any = make(name)
    ids = batch_for(name)["input_ids"][:1]

    def generated() -> list[int]:
        torch.manual_seed(2)  # of the dropout
        made = model.generate(
            ids, max_new_tokens=5, do_sample=False, pad_token_id=0, use_cache=True
        )
        return made[0].tolist()

    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    plain = generated()
    assert model.training
    assert len(set(plain)) > 2, "says nothing if all tokens are the same"
    apply_segments(model, segments_of(name, groups))
    assert generated() == plain


def test_a_cache_given_in_evaluation_mode_is_read() -> None:
    # Here transformers' own layers do not heed their flag either.
    model: Any = make("llama").eval()
    ids = batch_for("llama")["input_ids"]
    with torch.no_grad():
        model(ids, past_key_values=(cache := DynamicCache(config=model.config)))
    plain = model(ids, past_key_values=copy.deepcopy(cache)).logits
    apply_segments(model, segments_of("llama", SINGLES))
    logits = model(ids, past_key_values=cache).logits
    logits.sum().backward()
    assert torch.equal(logits, plain)


def test_a_block_kept_in_evaluation_mode_is_recomputed_all_the_same() -> None:
    # transformers heeds its flag only in training mode.
    name = "gpt2"
    plain_model, model = make(name), make(name)
    for item in (plain_model, model):
        item.get_submodule(CHAIN[name][1]).eval()
    counter = Counter(model, CHAIN[name])
    apply_segments(model, segments_of(name, ((1,),)))
    planned = backward(model, batch_for(name))[1]
    assert counter.counts[CHAIN[name][1]] == 2
    assert_same(planned, backward(plain_model, batch_for(name))[1])


def test_a_users_own_checkpointing_is_off_outside_the_segments_until_undone() -> None:
    model: Any = make("gpt2")
    model.activation_checkpointing_enable({"use_reentrant": False})
    own = model.transformer.h[0]._gradient_checkpointing_func
    counter = Counter(model, CHAIN["gpt2"])
    undo = apply_segments(model, segments_of("gpt2", ((2,), (3, 4))))
    backward(model, batch_for("gpt2"))
    assert list(counter.counts.values()) == [1, 1, 2, 2, 2, 1]
    undo()
    assert all(block.gradient_checkpointing for block in model.transformer.h)
    assert model.transformer.gradient_checkpointing
    assert model.transformer.h[2]._gradient_checkpointing_func is own


def test_a_users_own_checkpointing_can_be_kept() -> None:
    model: Any = make("gpt2")
    model.activation_checkpointing_enable({"use_reentrant": False})
    counter = Counter(model, CHAIN["gpt2"])
    apply_segments(model, [], keep_own_checkpointing=True)
    backward(model, batch_for("gpt2"))
    assert list(counter.counts.values()) == [2] * BLOCKS


def test_a_plan_over_an_applied_plan_replaces_it_until_undone() -> None:
    model = make("stack")
    apply_segments(model, segments_of("stack", SINGLES))
    counter = Counter(model, CHAIN["stack"])
    inner = apply_segments(model, segments_of("stack", ((0, 1),)))
    backward(model, batch_for("stack"))
    assert list(counter.counts.values()) == [2, 2, 1, 1, 1, 1]
    inner()
    backward(model, batch_for("stack"))
    assert list(counter.counts.values()) == [4, 4, 3, 3, 3, 3]


def test_unknown_blocks_are_refused_with_the_nearest_names() -> None:
    model = make("stack")
    before = [dict(item.__dict__) for item in model.modules()]
    with pytest.raises(InputError, match=r"no block 'layer\.1'.*Did you mean.*layers"):
        apply_segments(model, [Segment(("layers.0",)), Segment(("layer.1",))])
    assert [dict(item.__dict__) for item in model.modules()] == before


def test_a_module_under_two_names_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.append(model[0])
    with pytest.raises(InputError, match="'0' and '1' are one and the same module"):
        apply_segments(model, [Segment(("0", "1"))])


def test_without_gradients_blocks_run_once_and_nothing_is_held() -> None:
    model = make("stack")
    counter = Counter(model, CHAIN["stack"])
    apply_segments(model, segments_of("stack", ((0, 1), (2,))))
    with torch.no_grad():
        loss_free = model(**batch_for("stack"))
    assert not loss_free.requires_grad
    assert list(counter.counts.values()) == [1] * BLOCKS


def test_blocks_that_draw_numbers_lose_them_when_said_not_to() -> None:
    # The fault that random_blocks exists to prevent: shows that it does something.
    unseen: dict[str, Any] = {"random_blocks": (), "determinism_check": "default"}
    name = "stack"
    plain = backward(make(name), batch_for(name))[1]
    for positions in (SINGLES, ((0, 1, 2),)):
        model = make(name)
        apply_segments(model, segments_of(name, positions), **unseen)
        planned = backward(model, batch_for(name))[1]
        with pytest.raises(AssertionError):
            assert_same(planned, plain)
        model = make(name)
        apply_segments(model, segments_of(name, positions), random_blocks=())
        with pytest.raises(RecomputationError, match=r"^Block 'layers\.\d' did"):
            backward(model, batch_for(name))
        model = make(name)
        apply_segments(model, segments_of(name, positions), random_blocks=CHAIN[name])
        assert_same(backward(model, batch_for(name))[1], plain)


def test_tensors_behind_keywords_reach_torch_by_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Torch keeps only the generators of devices among the positional tensors.
    seen: list[bool] = []

    def spy(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seen.append(any(isinstance(item, torch.Tensor) for item in args))
        return checkpoint(function, *args, **kwargs)

    monkeypatch.setattr(under_test, "checkpoint", spy)
    model = make("stack")  # its parent passes everything by keyword
    apply_segments(model, segments_of("stack", SINGLES))
    backward(model, batch_for("stack"))
    llama: Any = make("llama")
    apply_segments(llama, segments_of("llama", SINGLES))
    hidden = torch.randn(2, 3, 32)
    embeddings = llama.model.rotary_emb(hidden, torch.arange(3)[None])
    llama.model.layers[0](hidden_states=hidden, position_embeddings=embeddings)
    assert seen == [True] * (BLOCKS + 1)


class Parent(nn.Module):
    """Calls three blocks with whatever happens between them."""

    def __init__(self, between: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(16) for _ in range(3))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x, _ = layer(x)
            if self.between is not None:
                x = self.between(number, x)
        return x.square().sum()


def three(between: Callable[..., Any] | None = None) -> Parent:
    torch.manual_seed(0)
    return Parent(between)


ALL_THREE = [Segment(("layers.0", "layers.1", "layers.2"))]
ALL_NESTED = [Segment(("layers.0", "layers.1", "layers.2"), nested=True)]
flat_and_nested = pytest.mark.parametrize(
    "segments", [ALL_THREE, ALL_NESTED], ids=["flat", "nested"]
)


def assert_trains_alike(train: Callable[[Any], None], segments: list[Segment]) -> None:
    """Assert that three blocks get the same gradients as without the segments."""
    results: list[Gradients] = []
    for each in ([], segments):
        model = three()
        apply_segments(model, each)
        torch.manual_seed(1)
        train(model)
        results.append({name: item.grad for name, item in model.named_parameters()})
    assert_same(results[1], results[0])


def draw(_: int, x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)  # the parent's own use of the generator
    return x


BETWEEN = {
    "another tensor": lambda _, x: x * 2,
    "written in place": lambda _, x: x.add_(1),
    "a view": lambda _, x: x[:],
    "random numbers": draw,
    "a skip": lambda number, x: x + 1 if number == 1 else x,
}


@flat_and_nested
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_a_parent_that_does_something_between_blocks_gets_exact_gradients(
    between: Callable[..., Any], segments: list[Segment]
) -> None:
    x = torch.randn(4, 16)
    plain = backward(three(between), (x,))[1]
    model = three(between)
    apply_segments(model, segments)
    assert_same(backward(model, (x,))[1], plain)


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_parent_that_leaves_a_block_out_gets_exact_gradients(skipped: int) -> None:
    def train(model: Any) -> None:
        x = torch.ones(2, 16)
        for number, layer in enumerate(model.layers):
            if number != skipped:
                x, _ = layer(x)
        x.square().sum().backward()

    assert_trains_alike(train, ALL_THREE)


def test_an_exception_between_blocks_leaves_nothing_behind() -> None:
    interrupt = [True]

    def between(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 1 and interrupt[0]:
            raise KeyboardInterrupt
        return x

    model = three(between)
    apply_segments(model, ALL_THREE)
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    weight = torch.ones(3, requires_grad=True)
    assert (weight * weight).grad_fn._saved_self is weight  # no hook is on
    alive = weakref.ref(x)
    del x
    assert alive() is None
    interrupt[0] = False
    x = torch.randn(4, 16)
    planned = backward(model, (x,))[1]
    assert_same(planned, backward(three(), (x,))[1])


def test_an_exception_inside_a_block_leaves_nothing_behind() -> None:
    model = three()
    handle = model.layers[1].down.register_forward_hook(lambda *_: 1 / 0)
    apply_segments(model, ALL_THREE)
    x = torch.randn(4, 16)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    assert_same(backward(model, (x,))[1], backward(three(), (x,))[1])


def test_two_forwards_before_one_backward_keep_their_own_recordings() -> None:
    first, second = torch.randn(4, 16), torch.randn(2, 16)
    assert_trains_alike(
        lambda model: (model(first) + 2 * model(second)).backward(), ALL_THREE
    )


def test_a_graph_that_is_kept_can_be_used_twice_and_differentiated_again() -> None:
    x = torch.randn(4, 16)

    def train(model: Any) -> None:
        loss = model(x)
        loss.backward(retain_graph=True)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()

    assert_trains_alike(train, ALL_THREE)


@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_torch_func_are_the_plain_models_with_a_warning(
    mode: Any, size: int
) -> None:
    model, plain = make("sequential").eval(), make("sequential").eval()
    names = tuple(name for name, _ in model.named_children())[:size]
    if mode == "recompute":
        segments = [Segment(names)]
    else:
        segments = [Segment((name,), mode=mode) for name in names]
    apply_segments(model, segments)

    def gradients(model: nn.Module) -> Any:
        def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = torch.func.functional_call(model, weights, (x,))
            return made

        weights = {name: item.detach() for name, item in model.named_parameters()}
        return torch.func.grad(loss)(weights, batch_for("sequential")["input"])

    expected = gradients(plain)
    with pytest.warns(UserWarning, match="allows no hooks for saved tensors"):
        found = gradients(model)
    assert all(torch.equal(found[name], item) for name, item in expected.items())


@flat_and_nested
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_segment_inside_a_checkpoint_of_the_user_gives_exact_gradients(
    early_stop: bool, segments: list[Segment]
) -> None:
    x = torch.randn(4, 16, requires_grad=True)
    plain = backward(three(), (x,))[1]
    model = three()
    apply_segments(model, segments)
    torch.manual_seed(1)
    checkpoint(model, x, use_reentrant=False, early_stop=early_stop).backward()
    assert_same({name: p.grad for name, p in model.named_parameters()}, plain)


def test_a_checkpoint_of_the_user_inside_a_segment_gives_exact_gradients() -> None:
    x = torch.randn(4, 16)
    plain = backward(three(), (x,))[1]
    model = three()
    up = model.layers[1].up
    inner = up.forward
    up.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    apply_segments(model, ALL_THREE)
    assert_same(backward(model, (x,))[1], plain)


@pytest.mark.parametrize(
    ("check", "error", "words"),
    [
        # A block saves 2 tensors in each Linear, 1 in tanh, 1 in dropout; the very
        # first Linear 1, as its input needs no gradient: 5 + 6. The product 2, sin 1.
        ("default", CheckpointError, "saved 13 tensors, the forward 14"),
        ("values", RecomputationError, "^Block 'layers.2' did something else"),
    ],
)
def test_a_block_that_does_less_the_second_time_is_refused(
    check: str, error: type[Exception], words: str
) -> None:
    model = three()
    calls = []

    def changing(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        calls.append(1)
        x = x.sin() if len(calls) == 1 else x + 1
        return x * x, 1.0

    model.layers[2].forward = changing
    apply_segments(model, ALL_THREE, determinism_check=check)
    loss = model(torch.randn(4, 16))
    with pytest.raises(error, match=words):
        loss.backward()


@pytest.mark.parametrize(("check", "raises"), [("default", True), ("none", False)])
def test_a_recomputation_of_another_shape_is_refused_unless_unchecked(
    check: str, raises: bool
) -> None:
    model = three()
    calls = []

    def changing(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        calls.append(1)
        other = torch.ones(1, 16) if len(calls) == 1 else torch.ones(16)
        return x * other, 1.0

    model.layers[2].forward = changing
    apply_segments(model, ALL_THREE, determinism_check=check)
    loss = model(torch.randn(4, 16))
    if raises:
        with pytest.raises(CheckpointError, match="must do the same"):
            loss.backward()
    else:
        loss.backward()


def test_an_input_overwritten_after_the_segment_is_refused_by_autograd() -> None:
    model = three()
    apply_segments(model, ALL_THREE)
    x = torch.randn(4, 16, requires_grad=True) * 1
    loss = model(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_applied_model_is_a_model_of_its_own(how: str) -> None:
    x = torch.randn(4, 16)
    saving = Segment(
        ("layers.1",), mode="selective", saved_ops=("aten.addmm.default:0",)
    )
    for segments in (ALL_THREE, [Segment(("layers.1",))], [saving]):
        model = three()
        apply_segments(model, segments)
        backward(model, (x,))  # while it trains
        model.zero_grad()
        copied = COPIES[how](model)
        counter = Counter(copied, ("layers.1",))
        gradients = backward(copied, (x,))[1]
        assert all(item.grad is None for item in model.parameters())
        assert counter.counts == {"layers.1": 2}
        assert_same(gradients, backward(three(), (x,))[1])


def kept_and_peak(run: Any) -> tuple[int, int, int]:
    """Bytes kept after the forward, at the peak, and after everything is dropped."""
    with LiveBytes() as meter:
        loss = run()
        kept = meter.live_bytes
        loss.backward()
        peak = meter.peak_bytes
        del loss
        left = meter.live_bytes
    return kept, peak, left


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_segment_keeps_what_torchs_checkpoints_over_the_same_blocks_keep(
    autocast: bool, nested: bool
) -> None:
    # With autocast a block saves no boundary itself, only the boundary's bf16 copy.
    x = torch.randn(64, 16)
    own, reference = three(), three()
    apply_segments(own, ALL_NESTED if nested else ALL_THREE, random_blocks=())
    for item in (own, reference):
        item.eval()
        for parameter in item.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def again(function: Callable[..., Any], x: torch.Tensor) -> Any:
        return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)

    def layers(x: torch.Tensor) -> torch.Tensor:
        for layer in reference.layers:
            x, _ = again(layer, x) if nested else layer(x)
        return x

    def run_reference() -> torch.Tensor:
        loss: torch.Tensor = again(layers, x).square().sum()
        return loss

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        expected = kept_and_peak(run_reference)
        assert kept_and_peak(lambda: own(x)) == expected
    # One boundary of 64 x 16 floats, and the loss's 4 bytes.
    assert expected[0] == 64 * 16 * 4 + 4


@pytest.mark.parametrize("between", [None, *BETWEEN.values()], ids=[None, *BETWEEN])
def test_a_graph_without_backward_is_freed_whatever_the_parent_does(
    between: Callable[..., Any],
) -> None:
    model = three(between)
    apply_segments(model, ALL_THREE)
    with LiveBytes() as meter:
        loss = model(torch.randn(4, 16))
        assert meter.live_bytes > 0
        del loss
        assert meter.live_bytes == 0


def test_a_graph_without_backward_is_freed_where_dynamo_is_loaded() -> None:
    # Then torch's decorators make wrappers, which must not hold what was saved.
    importlib.import_module("torch._dynamo")
    test_a_graph_without_backward_is_freed_whatever_the_parent_does(None)


def test_an_op_that_fills_what_it_saved_is_run_to_its_end() -> None:
    # RReLU's noise is saved before it is drawn: torch's early stop leaves it empty.
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.RReLU()) for _ in "ab"))
    x = torch.linspace(-1, 1, 32).view(4, 8)
    gradients = []
    for names in ((), ("0", "1")):
        undo = apply_segments(model, [Segment((name,)) for name in names])
        torch.manual_seed(0)
        model(x).square().sum().backward()
        gradients.append(
            [p.grad.clone() for p in model.parameters() if p.grad is not None]
        )
        model.zero_grad()
        undo()
    assert all(map(torch.equal, *gradients))
