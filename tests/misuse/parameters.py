"""Parameters, layers and requires_grad that change after apply."""

import tempfile
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune

from budgetfit import InputError, Run
from tests.misuse.case import refused, right
from tests.misuse.training import (
    applied,
    assert_steps_as_plain,
    batches,
    next_step_refused,
    trains_as_plain,
)

NEW = "not in the run's optimizer and would never change"
GONE = "no longer the model's"


@next_step_refused(NEW, "llama")
def adapters_after_apply(run: Run) -> None:
    """get_peft_model(run.model) after apply."""
    import peft

    peft.get_peft_model(
        run.model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    )


@next_step_refused(r"is float32 \[80, 32\] now.*resize_token_embeddings", "llama")
def resized_embeddings(run: Run) -> None:
    """model.resize_token_embeddings(...) after apply."""
    run.model.resize_token_embeddings(80, mean_resizing=False)


@next_step_refused(f"{NEW}|{GONE}", "llama")
def tied_weights(run: Run) -> None:
    """The head tied to the embeddings after apply."""
    run.model.config.tie_word_embeddings = True
    run.model.lm_head.weight = run.model.get_input_embeddings().weight


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


@next_step_refused("does not depend on any trainable parameter")
def all_frozen(run: Run) -> None:
    """model.requires_grad_(False) after apply, for an evaluation."""
    run.model.requires_grad_(requires_grad=False)


@trains_as_plain()
def frozen_and_unfrozen(run: Run, _: object) -> None:
    """model.requires_grad_(False) for an evaluation, and back."""
    run.model.requires_grad_(requires_grad=False)
    run.model.requires_grad_()


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
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@refused(f"{NEW}|{GONE}", InputError)
def sharded_after_apply() -> None:
    """fully_shard(model) after apply."""
    for _ in _process_group():
        run = applied()
        fully_shard(run.model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        run.step(batches(1)[0])


@right()
def wrapped_in_ddp() -> None:
    """run.model = DistributedDataParallel(run.model), as the docs say."""
    for _ in _process_group():
        run = applied()
        run.model = nn.parallel.DistributedDataParallel(run.model)
        assert_steps_as_plain(run, batches(2))


@right()
def ddp_beside_the_run() -> None:
    """A DistributedDataParallel of the run's model that run.step does not call."""
    for _ in _process_group():
        run = applied()
        nn.parallel.DistributedDataParallel(run.model)
        assert_steps_as_plain(run, batches(2))


@trains_as_plain()
def values_replaced(run: Run, _: object) -> None:
    """parameter.data replaced by a copy, as by an EMA that swaps weights."""
    for weight in run.model.parameters():
        weight.data = weight.data.clone()


@refused("a parameter that it writes to .make it a buffer", InputError)
def written_by_the_forward() -> None:
    """A weight that its layer scales in each forward."""
    run = applied()
    run.model.layers[1].up.register_forward_pre_hook(_decay)
    run.step(batches(1)[0])


def _decay(layer: nn.Linear, _: object) -> None:
    layer.weight.data.mul_(0.9)
