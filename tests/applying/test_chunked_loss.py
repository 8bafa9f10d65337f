import copy
import inspect
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.func import functional_call
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from budgetfit.applying.loss.chunked_loss import can_chunk_loss
from budgetfit.applying.loss.deferred_logits import CannotChunkLossError, DeferredLogits
from budgetfit.applying.loss.gradient_sum import weights_of_parts
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError
from budgetfit.tracing.recording.storage_log import StorageLog
from tests import models
from tests.models import still

VOCABULARY, WIDTH, LENGTH, SAMPLES = 96, 32, 13, 3
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
IGNORED = -100


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH}
    words = {"bos_token_id": 1, "eos_token_id": 2}
    return still(models.gpt2(**sizes, **words, n_layer=2))


MODELS: dict[str, Any] = {
    "gpt2": gpt2,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**LLAMA)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA, tie_word_embeddings=True)),
    # Between head and loss: / cap, tanh, * cap; and * scale.
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**LLAMA, head_dim=8, final_logit_softcapping=0.5)
    ),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**LLAMA, logit_scale=4.0)),
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().train()


def batch(**more: Any) -> dict[str, Any]:
    """A batch with padding behind one sample and a prompt that does not count."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :5] = IGNORED
    labels[2, 9:], mask[2, 9:] = IGNORED, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **more}


def gradients(
    model: nn.Module, data: dict[str, Any], micro_steps: int = 1, **settings: Any
) -> tuple[list[float], dict[str, torch.Tensor | None]]:
    """Return the losses and gradients of some micro-batches before the update."""
    recipe = Recipe(
        batch_size=SAMPLES, gradient_accumulation_steps=micro_steps + 1, **settings
    )
    with Run(copy.deepcopy(model), recipe) as run:
        losses = [run.step(data).item() for _ in range(micro_steps)]
        return losses, {n: p.grad for n, p in run.model.named_parameters()}


def assert_close(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    assert one[0] == pytest.approx(other[0], rel=tolerance)
    for name, gradient in other[1].items():
        if gradient is None:
            assert one[1][name] is None
        else:
            error = (one[1][name] - gradient).norm()
            assert error <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("parts", [2, 4, LENGTH + 5])  # 13 is divided by none
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_whole_loss(name: str, parts: int) -> None:
    model = make(name)
    chunked = gradients(model, batch(), loss_chunks=parts)
    assert_close(chunked, gradients(model, batch()))
    assert any(g is not None and g.any() for g in chunked[1].values())


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": 50},
        {"num_items_in_batch": torch.tensor(50)},
        {"shift_labels": batch()["input_ids"].flip(1)},
    ],
    ids=str,
)
def test_what_the_loss_function_is_told_counts(more: dict[str, Any]) -> None:
    model = make("llama")
    plain = gradients(model, batch(**more))
    assert plain[0] != pytest.approx(gradients(model, batch())[0], rel=1e-3)
    assert_close(gradients(model, batch(**more), loss_chunks=4), plain)


def test_accumulated_micro_batches_add_up_as_before() -> None:
    model = make("qwen2")
    assert_close(
        gradients(model, batch(), 3, loss_chunks=4), gradients(model, batch(), 3)
    )


def test_recomputed_blocks_and_a_chunked_loss_go_together() -> None:
    model = make("llama")
    segments = (Segment(("model.layers.0", "model.layers.1")),)
    assert_close(
        gradients(model, batch(), loss_chunks=4, segments=segments),
        gradients(model, batch()),
    )


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_under_autocast_the_head_is_bf16_and_the_loss_fp32(precision: str) -> None:
    # The head's gradient is added up in bf16, 8 bits: 2^-8 an addition.
    model = make("llama")
    plain = gradients(model, batch(), precision=precision)
    assert_close(
        gradients(model, batch(), loss_chunks=4, precision=precision), plain, 4 * 2**-8
    )
    # The sum of 13 x 3 terms in bf16 would be off by far more than this.
    losses = gradients(model, batch(), loss_chunks=4, precision=precision)[0]
    assert losses == pytest.approx(plain[0], rel=1e-5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
@pytest.mark.parametrize("name", ["qwen2", "llama", "adapted"])
def test_gradients_of_many_parts_are_added_up_in_fp32(
    precision: str, name: str
) -> None:
    # Added up in bf16, the head's gradient would be 5 to 14 % off.
    config = LlamaConfig(**{**LLAMA, "tie_word_embeddings": name == "qwen2"})
    model: nn.Module = LlamaForCausalLM(config)
    if name == "adapted":
        adapter = LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
        model = get_peft_model(model, adapter)
    data = batch()
    data = {key: value.repeat(1, 30) for key, value in data.items()}
    assert_close(
        gradients(model.train(), data, loss_chunks=256, precision=precision),
        gradients(model, data, precision=precision),
        2**-7,
    )


def test_a_weight_gets_the_sum_of_its_parts_once_in_every_backward() -> None:
    head = nn.Linear(8, 5).bfloat16()
    losses = [
        functional_call(head, weights, torch.ones(2, 8, dtype=torch.bfloat16)).sum()
        for weights in weights_of_parts(head, 3)
    ]
    seen: list[torch.Tensor] = []
    head.weight.register_hook(seen.append)
    for backward in (1, 2):
        torch.stack(losses).sum().backward(retain_graph=True)
        assert len(seen) == backward
        assert bool((head.weight.grad == 6 * backward).all())


def test_weights_used_in_fp32_are_left_to_autograd() -> None:
    (weights,) = weights_of_parts(nn.Linear(8, 5), 1)
    assert not weights


def test_a_loss_without_labels_that_count_is_not_a_number_as_before() -> None:
    model, data = make("llama"), batch()
    data["labels"].fill_(IGNORED)
    for parts in (1, 4):
        assert gradients(model, data, loss_chunks=parts)[0][0] != pytest.approx(0.0)


def largest_storage(parts: int) -> int:
    """Return the largest storage that a step makes, in bytes."""
    model = make("llama")
    with StorageLog() as log:
        for parameter in model.parameters():
            log.log_storage(parameter)
        run = Run(model, Recipe(batch_size=SAMPLES, loss_chunks=parts))
        first = len(log.sizes)
        run.step(batch())
    return max(log.sizes[first:])


def test_logits_of_all_positions_never_exist() -> None:
    # fp32: 3 samples x 13 positions x 96 words x 4 bytes; of 7 parts the largest has 2.
    per_position = SAMPLES * VOCABULARY * 4
    assert largest_storage(1) == LENGTH * per_position
    assert largest_storage(7) < LENGTH * per_position
    assert largest_storage(7) == max(
        2 * per_position, VOCABULARY * WIDTH * 4, SAMPLES * LENGTH * 2 * WIDTH * 4
    )


def test_evaluation_returns_true_logits() -> None:
    model = make("gemma2")
    expected = copy.deepcopy(model).eval()(**batch())
    run = Run(model, Recipe(batch_size=SAMPLES, loss_chunks=4))
    run.model.eval()
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            found = run.model(**batch())
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.loss, expected.loss)
    run.model.train()
    unlabelled = run.model(input_ids=batch()["input_ids"])
    assert isinstance(unlabelled.logits, torch.Tensor)


def test_what_stands_in_for_logits_in_training_cannot_be_mistaken_for_them() -> None:
    model = make("llama")
    seen: list[Any] = []
    model.register_forward_hook(lambda *call: seen.append(call[-1].logits))
    Run(model, Recipe(batch_size=SAMPLES, loss_chunks=4)).step(batch())
    (logits,) = seen
    assert isinstance(logits, DeferredLogits)
    for look in (
        lambda: logits.argmax(-1),
        lambda: logits.shape,
        lambda: logits[0],
        lambda: torch.softmax(logits, -1),
        lambda: logits * torch.ones(VOCABULARY),
        lambda: torch.mul(logits, logits),
    ):
        with pytest.raises(CannotChunkLossError, match="a Recipe with loss_chunks=1"):
            look()


def state(model: nn.Module) -> list[Any]:
    return [
        (dict(module.__dict__), str(inspect.signature(module.forward)))
        for module in model.modules()
    ]


def test_undo_gives_head_and_loss_function_back() -> None:
    model = make("qwen2")
    before = state(model)
    loss_function = model.loss_function
    run = Run(model, Recipe(batch_size=SAMPLES, loss_chunks=4))
    assert model.loss_function is not loss_function
    run.step(batch())
    run.undo()
    assert state(model) == before
    assert model.loss_function is loss_function


def test_a_model_that_was_pickled_while_it_trained_is_chunked_again() -> None:
    recipe = Recipe(batch_size=SAMPLES, loss_chunks=3, optimizer="sgd")
    with Run(make("llama"), recipe) as run:
        copied = pickle.loads(pickle.dumps(run.model))
        expected = run.step(batch())
        with Run(copied, replace(recipe, loss_chunks=2)) as again:
            torch.testing.assert_close(again.step(batch()), expected)


def test_a_deep_copy_of_a_model_that_trains_is_a_model_of_its_own() -> None:
    model = make("llama")
    run = Run(model, Recipe(batch_size=SAMPLES, loss_chunks=4))
    copied = copy.deepcopy(model)
    run.undo()
    for parameter in model.parameters():
        parameter.data.zero_()
    expected = make("llama")(**batch()).logits
    assert torch.equal(copied(**batch()).logits, expected)
    assert list(copied.state_dict()) == list(model.state_dict())


class Adapted(nn.Module):
    """A head with an adapter that has dropout, as PEFT's LoRA puts in its place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.adapter = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(nn.functional.dropout(x, 0.5))


class Wrapper(nn.Module):
    """A model that holds the language model, as PEFT's does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **data: Any) -> Any:
        return self.inner(**data)


def test_an_adapters_dropout_draws_the_same_numbers_again() -> None:
    # A small step along the gradient changes the loss by the step times its square, if
    # it was taken with the dropout that the loss was computed with.
    inner = make("llama")
    inner.lm_head = Adapted(inner.lm_head)
    model = Wrapper(inner)
    assert can_chunk_loss(model)
    name, step = "inner.lm_head.adapter.weight", 1e-2

    def seeded() -> tuple[float, torch.Tensor]:
        torch.manual_seed(1)
        (loss,), found = gradients(model, batch(), loss_chunks=4)
        gradient = found[name]
        assert gradient is not None
        return loss, gradient

    before, gradient = seeded()
    with torch.no_grad():
        model.get_parameter(name).add_(step * gradient)
    after, _ = seeded()
    # The gradient is of half the loss: the first of two micro-batches.
    expected = step * 2 * gradient.square().sum().item()
    assert after - before == pytest.approx(expected, rel=0.02)


def test_what_can_be_cut_is_told_beforehand() -> None:
    assert can_chunk_loss(make("gpt2"))
    assert not can_chunk_loss(make("gpt2"), loss=lambda outputs, _: outputs.loss)
    assert not can_chunk_loss(nn.Linear(2, 2))
    assert not can_chunk_loss(make("llama").model)
    small = {"vocab_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    bert = BertForMaskedLM(BertConfig(hidden_size=8, intermediate_size=8, **small))
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=8, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    )
    assert not can_chunk_loss(bert)
    assert not can_chunk_loss(t5)


@pytest.mark.parametrize(
    ("model", "loss", "text"),
    [
        (nn.Linear(2, 2), None, "causal language model of transformers, and Linear"),
        (None, lambda outputs, _: outputs.loss, "Leave loss= out"),
    ],
)
def test_a_loss_that_is_not_the_models_own_is_refused(
    model: Any, loss: Any, text: str
) -> None:
    model = model or make("llama")
    before = state(model)
    with pytest.raises(InputError, match=text):
        Run(model, Recipe(batch_size=1, loss_chunks=2), loss=loss)
    assert state(model) == before


class Sorting(LlamaForCausalLM):
    """Does to its logits what cannot be done part by part."""

    def forward(self, input_ids: object, labels: object = None, **_: object) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits = logits.sort(dim=1).values
        return {"loss": self.loss_function(logits, labels, self.vocab_size)}


class Numpy(LlamaForCausalLM):
    """Meets something that is no tensor where it wants one."""

    def forward(self, input_ids: object, labels: object = None, **_: object) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits = logits @ torch.eye(VOCABULARY)
        return {"loss": self.loss_function(logits, labels, self.vocab_size)}


class Elsewhere(LlamaForCausalLM):
    """Computes its loss from a second head."""

    def forward(self, input_ids: object, labels: object = None, **_: object) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = nn.functional.linear(hidden, self.lm_head.weight)
        return {"loss": self.loss_function(logits, labels, self.vocab_size)}


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Sorting, "logits.sort"), (Numpy, "__matmul__"), (Elsewhere, "never got")],
)
def test_what_happens_between_head_and_loss_is_seen_when_it_runs(
    kind: Any, text: str
) -> None:
    model = kind(LlamaConfig(**LLAMA))
    assert can_chunk_loss(model)
    run = Run(model, Recipe(batch_size=SAMPLES, loss_chunks=4))
    with pytest.raises(CannotChunkLossError, match=text):
        run.step(batch())
    run.undo()
    assert torch.isfinite(Run(model, Recipe(batch_size=SAMPLES)).step(batch()))


def test_a_head_with_hooks_is_not_cut() -> None:
    """They would scale the logits twice: as a whole and part by part."""
    model, recipe = make("llama"), Recipe(batch_size=SAMPLES, loss_chunks=4)
    assert can_chunk_loss(model)
    run = Run(model, recipe)
    model.lm_head.register_forward_hook(lambda _m, _a, logits: logits / 2)
    with pytest.raises(InputError, match="The output head has a forward hook"):
        run.step(batch())
    run.undo()
    assert not can_chunk_loss(model)
    with pytest.raises(InputError, match="loss_chunks=1"):
        Run(model, recipe)


def test_a_head_that_moves_its_buffers_on_is_refused() -> None:
    """Each part would move the power iteration on, and again when it is recomputed."""
    model = make("llama")
    nn.utils.parametrizations.spectral_norm(model.lm_head)
    run = Run(model, Recipe(batch_size=SAMPLES, loss_chunks=4))
    with pytest.raises(CannotChunkLossError, match="writes to its buffers"):
        run.step(batch())


def test_a_batch_without_labels_has_no_loss_to_cut() -> None:
    run = Run(make("llama"), Recipe(batch_size=SAMPLES, loss_chunks=4))
    with pytest.raises(CannotChunkLossError, match="without labels has no loss"):
        run.step({"input_ids": batch()["input_ids"]})


def test_an_error_in_a_part_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> Any:
        raise torch.OutOfMemoryError

    run = Run(make("llama"), Recipe(batch_size=SAMPLES, loss_chunks=4))
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "cross_entropy", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            run.step(batch())
    run.step(batch())
