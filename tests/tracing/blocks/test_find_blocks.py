"""Which modules of a model are its blocks."""

import pytest
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSpeechSeq2Seq,
    ResNetConfig,
    WhisperConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from budgetfit.tracing.blocks.find_blocks import find_blocks
from tests.models import EXAMPLES


def numbered(path: str, count: int) -> tuple[str, ...]:
    return tuple(f"{path}.{index}" for index in range(count))


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("gpt2", numbered("transformer.h", 3)),
        ("llama", numbered("model.layers", 3)),
        ("mixtral", numbered("model.layers", 2)),
        ("bert", numbered("bert.encoder.layer", 3)),
        ("t5", numbered("encoder.block", 2) + numbered("decoder.block", 2)),
        ("vit", numbered("vit.layers", 3)),
        ("mebi", numbered("blocks", 3)),
        ("convolutions", ("0", "1", "2")),  # not Flatten, not the one Linear
        (
            "transformer",
            numbered("transformer.encoder.layers", 2)
            + numbered("transformer.decoder.layers", 2),
        ),
    ],
)
def test_a_models_repeated_blocks_are_found(name: str, blocks: tuple[str, ...]) -> None:
    assert find_blocks(EXAMPLES[name].model()) == blocks


class Cell(nn.Module):
    """A block: a module with children and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


class Holder(nn.Module):
    """A model around whatever modules it is given, by name."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def test_a_library_whose_blocks_carry_no_mark_is_searched_too() -> None:
    config = ResNetConfig(depths=[1, 1], hidden_sizes=[8, 16], embedding_size=8)
    model = AutoModelForImageClassification.from_config(config)
    assert find_blocks(model) == numbered("resnet.encoder.stages", 2)


def test_two_stacks_are_two_chains_in_order_of_registration() -> None:
    config = WhisperConfig(
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        vocab_size=32,
        pad_token_id=0,
    )
    model = AutoModelForSpeechSeq2Seq.from_config(config)
    encoder = numbered("model.encoder.layers", 2)
    assert find_blocks(model) == encoder + numbered("model.decoder.layers", 2)


def test_of_marked_layers_inside_each_other_the_outer_ones_count() -> None:
    class Marked(GradientCheckpointingLayer):
        def __init__(self, *inner: nn.Module) -> None:
            super().__init__()
            self.inner = nn.ModuleList(inner)

    layers = nn.ModuleList(Marked(Marked(), Marked()) for _ in range(2))
    assert find_blocks(Holder(layers=layers)) == numbered("layers", 2)


def test_the_outermost_repetition_wins() -> None:
    stages = nn.ModuleList(nn.Sequential(Cell(), Cell()) for _ in range(2))
    assert find_blocks(Holder(stages=stages)) == numbered("stages", 2)


def test_what_stands_alone_among_blocks_is_no_block() -> None:
    layers = nn.ModuleList([Cell(), Cell(), nn.Sequential(nn.Linear(4, 4)), nn.ReLU()])
    assert find_blocks(Holder(layers=layers)) == numbered("layers", 2)


def test_a_module_that_stands_twice_in_a_list_is_named_once() -> None:
    shared = Cell()
    layers = nn.ModuleList([shared, shared, Cell()])
    assert find_blocks(Holder(layers=layers)) == ("layers.0", "layers.2")


def test_layers_in_a_row_are_blocks_where_there_are_no_others() -> None:
    rows = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model = Holder(rows=rows, head=nn.Linear(4, 4))
    # The list itself has no forward that could run.
    assert find_blocks(model) == ("rows.0", "rows.1", "head")
    cells = Holder(rows=rows, cells=nn.ModuleList([Cell(), Cell()]))
    assert find_blocks(cells) == numbered("cells", 2)


def test_a_dictionary_of_modules_is_looked_into() -> None:
    towers = nn.ModuleDict({"text": Cell(), "image": Cell()})
    assert find_blocks(Holder(towers=towers)) == ("towers.text", "towers.image")


def test_a_flat_sequential_has_its_cells_as_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert find_blocks(model) == ("0", "1", "2")


def test_a_model_without_repetition_has_its_children_as_blocks() -> None:
    model = Holder(body=Cell(), act=nn.ReLU(), head=nn.Linear(4, 4))
    assert find_blocks(model) == ("body", "head")


@pytest.mark.parametrize("model", [nn.Linear(4, 4), Holder(body=Cell()), nn.ReLU()])
def test_one_block_is_no_chain(model: nn.Module) -> None:
    assert find_blocks(model) == ()
