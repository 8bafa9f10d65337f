"""Options are tried once for each type of block, in as few programs as possible."""

import itertools
import random

import pytest
import torch
from torch import nn

from budgetfit.core.recipe import Segment
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.memory.chain.profile import block_types
from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.planning.judge import step_time
from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
from budgetfit.planning.profiling.option_recipes import option_segments
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests import models
from tests.traced import ADA, PAIRS, chains

SETS = [("aten.mm.default:0",), ("aten.mm.default:0", "aten.mm.default:1")]
OFFLOAD = ("offload", (), False)
ON_HOST = ("recompute", (), True)


def tried(recipes: list[tuple[Segment, ...]]) -> list[tuple[object, ...]]:
    return [
        (segment.mode, segment.saved_ops, segment.input_on_host)
        for recipe in recipes
        for segment in recipe
        if segment != Segment(segment.blocks)
    ]


def test_blocks_of_one_type_share_the_options() -> None:
    types = {f"layers.{n}": 0 for n in range(6)}
    (recipe,) = option_segments(types, {0: SETS})
    assert [segment.blocks for segment in recipe] == [(name,) for name in types]
    assert sorted(map(str, tried([recipe]))) == sorted(
        map(str, [*(("selective", s, False) for s in SETS), OFFLOAD, ON_HOST])
    )
    # The first and the last are the odd ones: they have other neighbours.
    assert recipe[0] == Segment(("layers.0",))
    assert recipe[-1] == Segment(("layers.5",))


def test_a_type_with_few_blocks_needs_several_programs() -> None:
    recipes = option_segments({"a": 0, "b": 0, "c": 1}, {0: SETS, 1: SETS[:1]})
    assert len(recipes) == 3  # c has three options and is alone
    assert len(tried(recipes)) == 4 + 3


def test_nothing_to_try_is_no_program() -> None:
    assert option_segments({"a": 0}, {}, option_kinds=()) == []
    assert option_segments({}, {}) == []


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert", "vit"])
def test_blocks_that_run_the_same_ops_are_of_one_type(name: str) -> None:
    chain = chains(name, *PAIRS[name])
    assert set(block_types(chain.all_kept(2)).values()) == {0}


def test_the_decoder_of_a_translator_is_another_type_than_its_encoder() -> None:
    chain = chains("t5", *PAIRS["t5"])
    types = block_types(chain.all_kept(2))
    encoder = {kind for name, kind in types.items() if name.startswith("encoder")}
    decoder = {kind for name, kind in types.items() if name.startswith("decoder")}
    assert not encoder & decoder


def llama(layers: int = 8) -> nn.Module:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 512}
    with torch.device("meta"):
        return models.llama(num_hidden_layers=layers, **sizes)


@pytest.fixture(scope="module", params=["bf16", "bf16-mixed"])
def deep(request: pytest.FixtureRequest) -> BlockChain:
    ids = torch.zeros(2, 256, dtype=torch.int64)
    workload = Workload(
        model=llama(), batch={"input_ids": ids, "labels": ids}, gpu=find_gpu(ADA)
    )
    return BlockChain(
        TraceSession(workload.with_found_blocks()),
        TrainingSettings(precision=request.param, optimizer="adamw_torch_fused"),
    )


def mixes(chain: BlockChain, batch_size: int, count: int) -> list[tuple[Segment, ...]]:
    """Return random plans of every option."""
    draw = random.Random(0)
    blocks = [
        block for block in chain.profile_at(batch_size).blocks if len(block.options) > 1
    ]
    found = []
    for _ in range(count):
        plan = []
        for block in blocks:
            option = draw.choice(block.options)
            if option.mode != "keep":
                plan.append(
                    Segment(
                        (block.name,),
                        option.mode,
                        saved_ops=option.saved_ops,
                        input_on_host=option.input_on_host,
                    )
                )
        found.append(tuple(plan))
    return found


def test_every_option_is_there(deep: BlockChain) -> None:
    modes = [option.mode for option in deep.profile_at(16).blocks[3].options]
    assert modes.count("selective") >= 2
    assert modes.count("offload") == 1
    assert modes.count("recompute") == 2


def test_the_formula_is_near_the_judge_for_random_mixes_of_all_options(
    deep: BlockChain,
) -> None:
    gpu = find_gpu(ADA)
    for plan in mixes(deep, 16, 6):
        recipe = deep.settings.recipe(16, plan)
        trace = deep.traces.affine(recipe)
        truth = replay(trace, 16, gpu, limit_bytes=UNLIMITED_BYTES).allocated_bytes
        assert chain_peak_bytes(deep.profile_at(16), plan) == pytest.approx(
            truth, rel=0.01
        )
        chain = deep.profile_at(16)
        ns = chain_time_ns(chain, plan) + chain.optimizer_ns
        expected = step_time(trace, recipe, gpu).total_ns()
        assert ns == pytest.approx(expected, rel=0.02)


def test_options_lie_between_keeping_and_recomputing(deep: BlockChain) -> None:
    block = deep.profile_at(16).blocks[3]
    keep, recompute = block.keep, block.option("recompute")
    assert recompute is not None
    selective = [option for option in block.options if option.mode == "selective"]
    for option in selective:
        assert recompute.saved_bytes < option.saved_bytes
        assert recompute.extra_ns > 0
        assert keep.extra_ns == 0
    for less, more in itertools.pairwise(selective):
        assert less.saved_bytes < more.saved_bytes
    offload = block.option("offload")
    assert offload is not None
    # What the bus does not carry: tensors that blocks share.
    assert offload.saved_bytes < recompute.saved_bytes / 2
