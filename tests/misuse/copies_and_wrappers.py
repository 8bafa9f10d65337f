"""Copies, pickles and wrappers of a model that trains by a plan."""

import copy
import functools
import itertools
import pickle
import tempfile
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import budgetfit
from budgetfit import InputError, Run, Segment
from tests.applying.small_models import CHAIN, make
from tests.misuse.case import refused, right
from tests.misuse.training import (
    applied,
    assert_same_weights,
    assert_steps_as_plain,
    assert_trains_as_plain,
    batches,
    trains_as_plain,
)


def _assert_is_a_model(model: nn.Module, kind: str = "stack") -> None:
    """Assert that a copy computes with its own weights, and what a new model does."""
    (batch,) = batches(1, kind)
    plain = make(kind)
    for each in (model.train(), plain):
        torch.manual_seed(7)
        outputs = each(**batch)
        getattr(outputs, "loss", outputs).backward()
    wanted = dict(plain.named_parameters())
    for name, weight in model.named_parameters():
        assert weight.grad is not None, f"{name} got no gradient"
        torch.testing.assert_close(weight.grad, wanted[name].grad, msg=name)


@right()
def a_deep_copy_after_undo() -> None:
    """A deep copy of the run's model, used after undo()."""
    run = applied()
    copied = copy.deepcopy(run.model)
    run.step(batches(1)[0])
    run.undo()
    _assert_is_a_model(copied)


@right()
def an_average_of_the_weights() -> None:
    """torch.optim.swa_utils.AveragedModel(run.model), updated after each step."""
    run, data = applied(), batches(2)
    averaged = AveragedModel(run.model)
    losses = []
    for batch in data:
        losses.append(run.step(batch).item())
        averaged.update_parameters(run.model)
    assert_trains_as_plain(losses, run.model, [[batch] for batch in data])
    averaged.module.eval()
    assert averaged(**data[0]).isfinite()


@refused("neither pickled nor copied.*run.state_dict", InputError)
def a_pickle_of_the_run() -> None:
    """pickle.dumps(run), not run.state_dict()."""
    pickle.dumps(applied())


@right()
def saved_with_the_library() -> None:
    """model.save_pretrained(...) while a run trains it."""
    run = applied("llama")
    with tempfile.TemporaryDirectory() as folder:
        run.model.save_pretrained(folder)
        again = type(run.model).from_pretrained(folder)
    assert_same_weights(again, run.model)
    _assert_is_a_model(again, "llama")


@right()
def data_parallel() -> None:
    """run.model = nn.DataParallel(run.model) where there is no card."""
    run = applied()
    run.model = nn.DataParallel(run.model)
    assert_steps_as_plain(run, batches(1))


@trains_as_plain("llama")
def a_cache_in_generation(run: Run, batch: Any) -> None:
    """model.generate(...) between two steps."""
    run.model.eval()
    ids = batch["input_ids"][:1, :4]
    made = run.model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert made.shape[1] > 4


@refused("did something else when it ran again", InputError)
def a_hook_that_counts() -> None:
    """A hook scales a block by a counter that only a cache of functools has."""
    run = applied()
    calls = functools.cache(lambda: itertools.count(1))

    def scale(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0] * next(calls()),)

    run.model.layers[1].up.register_forward_pre_hook(scale)
    run.step(batches(1)[0])


@right()
def hooks_after_apply() -> None:
    """Forward hooks registered after apply, to log activations."""
    run = applied()
    seen: list[torch.Tensor] = []
    run.model.layers[1].register_forward_hook(
        lambda _module, _args, outputs: seen.append(outputs[0].detach())
    )
    assert_steps_as_plain(run, batches(1))
    assert seen


@right()
def blocks_of_another_order() -> None:
    """A recipe whose blocks do not stand in the order of the forward."""
    first, second, *_ = CHAIN["stack"]
    run = applied()
    segments = (Segment((second,)), Segment((first,)))
    run.adopt(budgetfit.Recipe(batch_size=4, optimizer="sgd", segments=segments))
    assert_steps_as_plain(run, batches(1))
