"""What is made behind the last block is the loss, not "outside every layer"."""

import numpy as np

from budgetfit.memory.loss_storages import LOGITS_AND_LOSS, LOSS, loss_storages
from budgetfit.memory.replay import replay
from tests.memory.made_traces import MIB, TraceMaker
from tests.memory.test_replay import ADA, LARGE

# The whole model, a block, the head behind it, and holders of other modules and of it.
LAYERS = ("", "blocks.0", "head", "side", "blocks")


def step(*, loss_layer: int, head_layer: int = 2) -> TraceMaker:
    made = TraceMaker("blocks.0", layers=LAYERS)
    with made.phase("forward", 0):
        made.malloc("mask", 2 * MIB, layer=0)
        with made.block(0, "forward", 0, gives="x"):
            made.malloc("x", 4 * MIB, layer=1)
        made.malloc("logits", 8 * MIB, layer=head_layer)
        made.malloc("loss", per_sample=LARGE, layer=loss_layer)
    with made.phase("backward", 0):
        made.malloc("gloss", per_sample=LARGE, layer=loss_layer)
        with made.block(0, "backward", 0):
            made.malloc("gx", 2 * MIB, layer=0)
        made.free("x", "logits", "loss", "gloss", "gx", "mask")
    return made


def largest(made: TraceMaker, samples: int) -> dict[str, int]:
    timeline = replay(made.trace(), samples, ADA)
    return {name: size // MIB for name, size in timeline.at_peak_layers}


def test_what_the_model_itself_makes_behind_its_blocks_is_logits_and_loss() -> None:
    found = largest(step(loss_layer=0), 3)
    assert found.pop(LOGITS_AND_LOSS) == 2 * 3 * LARGE // MIB
    # The head is a layer; what ran before the block and in its backward is the model's.
    assert found == {"head": 8, "blocks.0": 4, "": 4}


def test_a_loss_that_no_module_makes_is_a_loss() -> None:
    assert largest(step(loss_layer=-1), 3)[LOSS] == 2 * 3 * LARGE // MIB


def test_a_module_that_holds_no_block_keeps_its_name() -> None:
    assert LOGITS_AND_LOSS not in largest(step(loss_layer=3), 3)


def test_a_module_that_holds_a_block_makes_logits_and_loss_too() -> None:
    assert largest(step(loss_layer=4), 3)[LOGITS_AND_LOSS] == 2 * 3 * LARGE // MIB


def test_without_blocks_nothing_is_known_to_be_a_loss() -> None:
    made = TraceMaker(layers=LAYERS)
    with made.phase("forward", 0):
        made.malloc("x", 4 * MIB, layer=0)
    with made.phase("backward", 0):
        made.free("x")
    assert not np.any(loss_storages(made.trace()))
