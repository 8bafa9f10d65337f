"""Parameters, layers and requires_grad that change after apply."""

import os
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, prune

from budgetfit import InputError, Run
from tests.applying.small_models import Block, make
from tests.misuse.case import refused, right, unharmed
from tests.misuse.training import applied, assert_trains_as_plain, batches

NEW = "not in the run's optimizer and would never change"
GONE = "no longer the model's"


def _next_step(run: Run, kind: str = "stack") -> None:
    with unharmed(run.model):
        run.step(batches(1, kind)[0])


@refused(NEW, InputError)
def adapters_after_apply() -> None:
    """get_peft_model(run.model) after apply."""
    import peft  # noqa: PLC0415 - slow

    run = applied("llama")
    peft.get_peft_model(
        run.model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    _next_step(run, "llama")


@refused(r"is float32 \[80, 32\] now.*resize_token_embeddings", InputError)
def resized_embeddings() -> None:
    """model.resize_token_embeddings(...) after apply."""
    run = applied("llama")
    run.model.resize_token_embeddings(80, mean_resizing=False)
    _next_step(run, "llama")


@refused(f"{NEW}|{GONE}", InputError)
def tied_weights() -> None:
    """The head tied to the embeddings after apply."""
    run = applied("llama")
    run.model.config.tie_word_embeddings = True
    run.model.lm_head.weight = run.model.get_input_embeddings().weight
    _next_step(run, "llama")


@refused(NEW, InputError)
def a_new_head() -> None:
    """model.head replaced after apply."""
    run = applied()
    run.model.head = nn.Linear(16, 4)
    _next_step(run)


@refused(NEW, InputError)
def a_new_block() -> None:
    """A planned block replaced after apply."""
    run = applied()
    run.model.layers[2] = Block(16)
    _next_step(run)


@refused(GONE, InputError)
def a_block_taken_out() -> None:
    """The last layers cut off after apply."""
    run = applied()
    run.model.layers = run.model.layers[:4]
    _next_step(run)


@refused(GONE, InputError)
def a_block_without_weights() -> None:
    """A planned block replaced by nn.Identity after apply."""
    run = applied("sequential")
    run.model[2] = nn.Identity()
    _next_step(run, "sequential")


@refused(NEW, InputError)
def unfrozen() -> None:
    """Layers unfrozen after apply, as for gradual unfreezing."""
    model = make("stack")
    run = applied(model=model)
    weight = nn.Parameter(torch.zeros(4), requires_grad=False)
    model.register_parameter("late", weight)
    weight.requires_grad_()
    _next_step(run)


@right()
def frozen_after_apply() -> None:
    """Layers frozen after apply: they stay as they are, the others train."""
    run, (batch,) = applied(), batches(1)
    run.model.layers.requires_grad_(requires_grad=False)
    before = run.model.layers[0].up.weight.detach().clone()
    head = run.model.head.weight.detach().clone()
    run.step(batch)
    assert run.model.layers[0].up.weight.equal(before)
    assert not run.model.head.weight.equal(head)


@refused("does not depend on any trainable parameter", InputError)
def all_frozen() -> None:
    """model.requires_grad_(False) after apply, for an evaluation."""
    run = applied()
    run.model.requires_grad_(requires_grad=False)
    _next_step(run)


@right()
def frozen_and_unfrozen() -> None:
    """model.requires_grad_(False) for an evaluation, and back."""
    run, data = applied(), batches(2)
    losses = [run.step(data[0]).item()]
    run.model.requires_grad_(requires_grad=False)
    run.model.requires_grad_()
    losses.append(run.step(data[1]).item())
    assert_trains_as_plain(losses, run.model, [[batch] for batch in data])


@refused(f"{NEW}|{GONE}", InputError)
def weight_norm() -> None:
    """torch.nn.utils.parametrizations.weight_norm after apply."""
    run = applied()
    parametrizations.weight_norm(run.model.head)
    _next_step(run)


@right()
def pruned() -> None:
    """torch.nn.utils.prune after apply: the same weight trains, through its mask."""
    run, (batch,) = applied(), batches(1)
    prune.l1_unstructured(run.model.head, "weight", amount=0.5)
    run.step(batch)
    zeros = run.model.head.weight_mask == 0
    assert run.model.head.weight[zeros].eq(0).all()


def _process_group() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)  # noqa: PTH118
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@refused(f"{NEW}|{GONE}", InputError)
def sharded_after_apply() -> None:
    """fully_shard(model) after apply."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow

    for _ in _process_group():
        run = applied()
        fully_shard(run.model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        run.step(batches(1)[0])


@right()
def wrapped_in_ddp() -> None:
    """run.model = DistributedDataParallel(run.model), as the docs say."""
    for _ in _process_group():
        run, data = applied(), batches(2)
        model = run.model
        run.model = nn.parallel.DistributedDataParallel(model)
        losses = [run.step(batch).item() for batch in data]
    assert_trains_as_plain(losses, model, [[batch] for batch in data])


@right()
def ddp_beside_the_run() -> None:
    """A DistributedDataParallel of the run's model that run.step does not call."""
    for _ in _process_group():
        run, data = applied(), batches(2)
        nn.parallel.DistributedDataParallel(run.model)
        losses = [run.step(batch).item() for batch in data]
    assert_trains_as_plain(losses, run.model, [[batch] for batch in data])


@refused("optimizer", InputError)
def another_model_put_in() -> None:
    """run.model = another model of the same class."""
    run = applied()
    run.model = make("stack")
    _next_step(run)


@right()
def values_replaced() -> None:
    """parameter.data replaced by a copy, as by an EMA that swaps weights."""
    run, data = applied(), batches(2)
    losses = [run.step(data[0]).item()]
    for weight in run.model.parameters():
        weight.data = weight.data.clone()
    losses.append(run.step(data[1]).item())
    assert_trains_as_plain(losses, run.model, [[batch] for batch in data])


@refused(r"float32 \[8, 16\] now and was float32 \[4, 16\]", InputError)
def shapes_replaced() -> None:
    """parameter.data replaced by a larger tensor after apply."""
    run = applied()
    run.model.head.weight.data = torch.zeros(8, 16)
    run.model.head.bias.data = torch.zeros(8)
    _next_step(run)
