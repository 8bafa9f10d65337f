"""A plan for several GPUs, carried out by two processes with gloo."""

import contextlib
import functools
import gc
import importlib
import warnings
import weakref
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import budgetfit
from budgetfit import InputError, Parallelism, Segment
from budgetfit.applying.checkpointing import recipe_application
from budgetfit.applying.loss import chunked_loss, gradient_sum
from budgetfit.applying.run.run import Run
from tests.gloo_ranks import on_ranks
from tests.integrations.tiny_training import (
    blocks_of,
    mixed_segments,
    plan_for,
    tiny_model,
)

RANKS = 2
UPDATES = 2
EQUAL = 1e-6
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp", "gradient_as_bucket_view": True},
    "ddp, each batch": {"engine": "ddp", "sync_each_batch": True},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2, kept": {"engine": "fsdp2", "reshard_after_forward": False},
    "fsdp2, each batch": {"engine": "fsdp2", "sync_each_batch": True},
    "fsdp2, on the CPU": {"engine": "fsdp2", "cpu_offload": True},
    "fsdp2, on the CPU, each batch": {
        "engine": "fsdp2",
        "cpu_offload": True,
        "sync_each_batch": True,
    },
}


def batches(count: int, samples: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        ids = torch.randint(64, (samples, 8), generator=generator)
        made.append({"input_ids": ids, "labels": ids})
    return made


def segments_for(name: str) -> tuple[Segment, ...]:
    model = tiny_model("llama")
    blocks = blocks_of(model)
    return {
        "none": (),
        "chunks": (),
        "sums": (),
        "mixed": mixed_segments(model),
        "one": (Segment(tuple(blocks)),),
        "host": tuple(Segment((each,), input_on_host=True) for each in blocks),
    }[name]


def start(
    parallelism: dict[str, Any] | None, treated: str = "none", **recipe: Any
) -> Run:
    model = tiny_model("llama")
    one = parallelism is None
    settings = {
        "optimizer": "sgd",
        "gradient_accumulation_steps": 2 * RANKS if one else 2,
        "parallelism": None if one else Parallelism(**{"gpus": RANKS, **parallelism}),
        **recipe,
    }
    plan = plan_for(model, segments_for(treated), **settings)
    return budgetfit.apply(plan, model, learning_rate=0.5)


def weights(run: Run) -> dict[str, torch.Tensor]:
    """The whole weights, also of a sharded model."""
    return {
        name: (item.full_tensor() if isinstance(item, DTensor) else item)
        .detach()
        .clone()
        for name, item in run.model.named_parameters()
    }


def train(
    parallelism: dict[str, Any] | None, treated: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of micro-batches, and weights after them; a rank has every second one."""
    run = start(
        parallelism, treated, loss_chunks=3 if treated in {"chunks", "sums"} else 1
    )
    own = batches(2 * RANKS * UPDATES)
    if parallelism is not None:
        own = own[torch.distributed.get_rank() :: RANKS]
    with contextlib.ExitStack() as stack:
        if treated == "sums":  # as of many parts in 16 bits
            stack.enter_context(
                mock.patch.object(chunked_loss, "MOST_ADDED_IN_16_BITS", 1)
            )
            stack.enter_context(
                mock.patch.object(
                    gradient_sum, "_is_used_in_16_bits", return_value=True
                )
            )
        losses = [float(run.step(batch, max_grad_norm=0.5)) for batch in own]
    assert run.steps_done == UPDATES
    return losses, weights(run)


def one_process(treated: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses are means over what the ranks do at the same time."""
    losses, final = train(None, treated)
    return torch.tensor(losses).view(-1, RANKS).mean(1).tolist(), final


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=EQUAL)
    for name, value in expected[1].items():
        assert (found[1][name] - value).abs().max() <= EQUAL, name


def _train_all() -> dict[tuple[str, str], Any]:
    cases = [(name, "none") for name in SETTINGS]
    cases += [("ddp", "mixed"), ("fsdp2", "mixed"), ("fsdp2", "one"), ("fsdp2", "host")]
    cases += [(name, "chunks") for name in ("ddp", "ddp, each batch", "fsdp2")]
    cases += [(name, "chunks") for name in ("fsdp2, kept", "fsdp2, each batch")]
    cases += [(name, "sums") for name in ("ddp", "fsdp2", "fsdp2, kept")]
    cases += [("fsdp2, on the CPU", each) for each in ("mixed", "chunks")]
    return {case: train(SETTINGS[case[0]], case[1]) for case in cases}


def test_ranks_train_as_one_process_with_all_their_samples() -> None:
    first, second = on_ranks(_train_all, RANKS)
    expected = {treated: one_process(treated) for treated in ("none", "mixed")}
    assert len(first) == 21
    for case, found in first.items():
        # Recomputation changes nothing: the model has no dropout.
        assert_same(found, expected["mixed" if case[1] == "mixed" else "none"])
        assert_same(found, second[case])


def _evaluate() -> None:
    """Evaluations between updates, with weights that the blocks keep or half keep."""
    for kept in (False, 2):
        settings = {"engine": "fsdp2", "gpus": 4, "reshard_after_forward": kept}
        found = []
        for evaluates in (True, False):
            run = start(settings, gradient_accumulation_steps=1)
            losses = []
            for batch in batches(4 * UPDATES)[torch.distributed.get_rank() :: 4]:
                losses.append(float(run.step(batch)))
                if evaluates:
                    run.model.eval()
                    with torch.no_grad(), run.autocast():
                        run.model(**batch)
            found.append((losses, weights(run)))
        assert_same(found[0], found[1])


def test_an_evaluation_leaves_no_gathered_weights_to_the_next_step() -> None:
    on_ranks(_evaluate, 4)


def masked(number: int) -> dict[str, torch.Tensor]:
    """A micro-batch with other numbers of tokens that count."""
    batch = batches(2 * RANKS)[number]
    labels = batch["labels"].clone()
    labels[:, : number + 1] = -100
    return {**batch, "labels": labels}


def token_count(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def _uneven(parallelism: dict[str, Any] | None) -> dict[str, Any]:
    """Updates of unequal parts: each rank runs its own, one process runs all."""
    run = start(parallelism)
    ours = range(RANKS)
    if parallelism is not None:
        ours = range(torch.distributed.get_rank(), torch.distributed.get_rank() + 1)
    found: dict[str, Any] = {}

    # A group that ends early: its gradients have not been reduced yet.
    for rank in ours:
        run.step(batches(RANKS)[rank])
    assert run.flush(max_grad_norm=0.5)
    assert not run.flush()
    found["flushed"] = [], weights(run)

    first, second = batches(RANKS), batches(2 * RANKS, 2)[RANKS:]
    first = [
        {name: each[: 3 - 2 * rank] for name, each in first[rank].items()}
        for rank in ours
    ]
    losses = [float(run.step(batch)) for batch in first]
    losses += [float(run.step(second[rank])) for rank in ours]
    found["samples"] = losses, weights(run)

    own = [masked(number) for number in range(2 * RANKS) if number % RANKS in ours]
    items = sum(map(token_count, own))
    losses = [float(run.step(each, num_items_in_batch=items)) for each in own]
    found["items"] = losses, weights(run)
    items = torch.tensor(items)
    losses = [float(run.step(each, num_items_in_batch=items)) for each in own]
    found["items in a tensor"] = losses, weights(run)
    losses = [float(run.step(each, weight=token_count(each))) for each in own]
    found["weights"] = losses, weights(run)

    # An evaluation leaves gathered weights behind; an error ends a group.
    with torch.no_grad():
        run.model.eval()(**batches(1)[0])
    run.step(batches(1)[0])
    with pytest.raises(IndexError):
        run.step({name: each + 64 for name, each in batches(1)[0].items()})
    assert run.group.count == 0
    for number in range(2 * RANKS):
        if number % RANKS in ours:
            run.step(batches(2 * RANKS)[number])
    found["after an error"] = [], weights(run)
    return found


def _all_uneven() -> dict[str, Any]:
    return {name: _uneven(SETTINGS[name]) for name in ("ddp", "fsdp2")}


def test_unequal_micro_batches_count_by_their_samples_or_tokens() -> None:
    first, second = on_ranks(_all_uneven, RANKS)
    expected = _uneven(None)
    for engine in first:
        for name, (losses, _) in expected.items():
            pairs = torch.tensor(losses).view(-1, RANKS)
            if name == "samples":  # 3 samples and 1, then 2 and 2
                pairs[0] *= torch.tensor([1.5, 0.5])
            means = pairs.sum(1) if "items" in name else pairs.mean(1)
            if name == "weights":
                counts = torch.tensor([float(token_count(masked(k))) for k in range(4)])
                share = counts.view(-1, RANKS)
                means = (pairs * share).sum(1) / share.sum(1)
            assert_same(first[engine][name], (means.tolist(), expected[name][1]))
            assert first[engine][name][0] == second[engine][name][0]


def _refusals() -> None:
    rank = torch.distributed
    model = tiny_model("llama")
    with pytest.raises(
        InputError,
        match=r"for 4 GPUs.* and 2 processes train.*--nproc-per-node 4 .*gpus=2",
    ):
        start({"engine": "ddp", "gpus": 4})
    torch.manual_seed(rank.get_rank())
    for item in model.parameters():
        torch.nn.init.normal_(item)
    plan = plan_for(model, (), parallelism=Parallelism(engine="fsdp2", gpus=2))
    with pytest.raises(InputError, match="Rank 1 has other weights than rank 0"):
        budgetfit.apply(plan, model)

    # Weights in host memory, with what only a GPU can do.
    offloaded = {"engine": "fsdp2", "cpu_offload": True}
    with (
        mock.patch.object(rank, "get_backend_config", return_value="cuda:nccl"),
        pytest.raises(InputError, match=r'Use init_process_group\("cpu:gloo'),
    ):
        start(offloaded)
    with pytest.raises(InputError, match="'adamw_bnb_8bit' has no kernels"):
        start(offloaded, optimizer="adamw_bnb_8bit")

    # Data that is not divided.
    run = start({"engine": "ddp"}, gradient_accumulation_steps=3)
    for _ in range(2):  # once
        with contextlib.ExitStack() as stack:
            if run.group.count == 0:
                said = (
                    r"All 2 ranks have the same first micro-batch.*DistributedSampler"
                )
                stack.enter_context(pytest.warns(UserWarning, match=said))
            run.step(batches(1)[0])

    # DDP is undone: nothing of it is left.
    run.undo()
    other = batches(RANKS)[rank.get_rank()]
    run.model(**other).loss.backward()
    alone = tiny_model("llama").train()
    alone(**other).loss.backward()
    for name, item in alone.named_parameters():
        assert torch.equal(item.grad, run.model.get_parameter(name).grad), name

    # One rank goes on alone, as after an error that its program has caught.
    run = start({"engine": "ddp"})
    if rank.get_rank():
        run.adopt(replace(run.recipe, gradient_accumulation_steps=4))
    with pytest.raises(InputError, match="ranks are not at the same micro-batch"):
        run.step(other)
    run.undo()

    # What fully_shard did stays, and nothing keeps the whole weights alive.
    sharded: dict[str, Any] = {"parallelism": Parallelism(engine="fsdp2", gpus=2)}
    plan = plan_for(alone, (), precision="bf16", **sharded)
    whole = [weakref.ref(item) for item in alone.parameters()]
    run = budgetfit.apply(plan, alone)
    del item
    gc.collect()
    assert not any(each() is not None for each in whole)
    with pytest.warns(UserWarning, match="stays sharded over 2 ranks"):
        run.undo()
    with pytest.raises(InputError, match="This run is undone"):
        run.step(batches(1)[0])
    plan = plan_for(run.model, (), parallelism=run.recipe.parallelism)
    with pytest.raises(
        InputError, match="fsdp2 on 2 GPUs, and the model is wrapped or sharded already"
    ):
        budgetfit.apply(plan, run.model)


def _on_parameters() -> None:
    """What a user has put on parameters, which ``fully_shard`` replaces."""
    sharded: dict[str, Any] = {"parallelism": Parallelism(engine="fsdp2", gpus=2)}
    plan = plan_for(tiny_model("llama"), (), **sharded)
    said = r"model.norm.weight has hooks for its gradient, .* never run: fully_shard"
    for add in ("register_hook", "register_post_accumulate_grad_hook"):
        model: Any = tiny_model("llama")
        getattr(model.model.norm.weight, add)(lambda _: None)
        with pytest.raises(InputError, match=said):
            budgetfit.apply(plan, model)

    model = tiny_model("llama")
    model.model.norm.weight.no_weight_decay = True
    run = budgetfit.apply(plan, model)
    marked = [hasattr(each, "no_weight_decay") for each in run.trained]
    assert sum(marked) == 1

    seen: list[torch.Tensor] = []
    weight: Any = model.model.norm.weight
    weight.register_post_accumulate_grad_hook(lambda item: seen.append(item.grad))
    own = batches(4)[torch.distributed.get_rank() :: RANKS]
    for batch in own:
        run.step(batch)
    assert len(seen) == 1  # of the update
    weight.register_hook(lambda _: None)
    with pytest.raises(InputError, match=said):
        run.step(own[0])


def test_hooks_of_parameters_that_are_replaced_are_refused_and_attributes_kept() -> (
    None
):
    on_ranks(_on_parameters, RANKS)


def test_what_several_ranks_refuse_and_what_is_undone() -> None:
    on_ranks(_refusals, RANKS)


def test_one_process_is_told_how_to_start_as_many_as_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        InputError, match=r"for 32 GPUs.* --nnodes 4 .* HOST:29400 --nproc-per-node 8 "
    ):
        start({"engine": "fsdp2", "gpus": 32, "gpus_per_node": 8})
    run = start(None)
    other = replace(run.recipe, parallelism=Parallelism(engine="ddp", gpus=2))
    with pytest.raises(InputError, match="cannot change its parallelism"):
        run.adopt(other)


def _longest_first(engine: str) -> list[tuple[Any, ...]]:
    """Batches of rank 0 are as long as planned, those of rank 1 shorter."""
    found = []
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else None
    for first in (True, False):
        torch.manual_seed(0)
        run = start({"engine": engine}, "mixed", longest_batch_first=first)
        if rank is None:
            rank = torch.distributed.get_rank()
        seen: list[int] = []
        held = functools.cache(lambda seen=seen: seen)  # what a run does not restore
        run.model.register_forward_pre_hook(
            lambda _, __, given, held=held: held().append(given["input_ids"].shape[1]),
            with_kwargs=True,
        )
        own = batches(2 * RANKS * UPDATES)[rank::RANKS]
        if rank:
            own = [{k: x[:, :6] for k, x in batch.items()} for batch in own]
        losses = [float(run.step(batch)) for batch in own]
        found.append((seen, losses, weights(run)))
    return found


def _longest_first_of_all() -> dict[str, list[tuple[Any, ...]]]:
    return {engine: _longest_first(engine) for engine in ("ddp", "fsdp2")}


def test_all_ranks_begin_with_the_longest_batch_and_train_as_without() -> None:
    of_ranks = on_ranks(_longest_first_of_all, RANKS)
    for rank, engines in enumerate(of_ranks):
        for first, without in engines.values():
            own = 6 if rank else 8
            assert without[0] == [own] * 2 * UPDATES
            assert first[0] == [8, 8, *without[0]]  # two, as gradients accumulate
            assert_same(first[1:], without[1:])


def _compiled_alike() -> dict[tuple[str, str], Any]:
    """Blocks compiled, by dynamo and autograd without code for a device."""
    calls: list[str] = []
    dynamo: Any = importlib.import_module("torch._dynamo")
    warnings.simplefilter("ignore")  # dynamo's own

    def noting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        calls.append("compiled")
        assert dynamo.config.optimize_ddp is (engine == "fsdp2")
        return dynamo.lookup_backend("aot_eager")(graph, inputs)

    def compiled(block: torch.nn.Module) -> Any:
        return torch.compile(block.forward, backend=noting, dynamic=False)

    found = {}
    with mock.patch.object(recipe_application, "compiled_forward", compiled):
        for engine in ("ddp", "fsdp2"):
            for treated in ("none", "mixed"):
                dynamo.reset()
                before = len(calls)
                run = start({"engine": engine}, treated, compile="blocks")
                own = batches(2 * RANKS * UPDATES)[
                    torch.distributed.get_rank() :: RANKS
                ]
                losses = [float(run.step(batch, max_grad_norm=0.5)) for batch in own]
                assert len(calls) > before
                found[engine, treated] = losses, weights(run)
                run.undo()
                assert dynamo.config.optimize_ddp
    return found


def test_compiled_blocks_train_on_ranks_as_eager_ones_in_one_process() -> None:
    expected = {treated: one_process(treated) for treated in ("none", "mixed")}
    for found in on_ranks(_compiled_alike, RANKS):
        for (_, treated), result in found.items():
            assert_same(result, expected[treated])
