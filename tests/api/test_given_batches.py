"""Batches and losses out of files, sizes of images, and text alone."""

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import budgetfit
from budgetfit import InputError, Recipe
from budgetfit.api.estimate import estimate_settings, layers
from tests import models
from tests.core.test_sample_count import bags, boxes, graphs, without
from tests.models import alone

pytestmark = pytest.mark.usefixtures("kept_traces")
FILE = """
import torch
from torch import nn


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(4, 8)

    def forward(self, image, when):
        return self.first(image) * self.second(when)


def model():
    return Pair()


def make_batch():
    return {"image": torch.rand(3, 6), "when": torch.rand(3, 4)}


def loss(outputs, batch):
    return outputs.square().mean()


def model_and_batch():
    return Pair(), make_batch()


def everything():
    return Pair(), make_batch, loss


def empty():
    return {}


def no_loss():
    return Pair(), make_batch(), 3


ready = {"image": torch.rand(2, 6), "when": torch.rand(2, 4)}
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = list(sys.path)
    written = tmp_path / "mine.py"
    written.write_text(FILE)
    yield written
    sys.path[:] = path
    sys.modules.pop("budgetfit_factory_mine", None)


def planned(model: Any, **asked: Any) -> budgetfit.Plan:
    settings: dict[str, Any] = {"batch_size": 2, "checkpointing": "full", **asked}
    return alone(budgetfit.plan(model, gpu="t4", precision="fp32", **settings))


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("model", {"batch": "make_batch", "loss": "loss"}),
        ("model", {"batch": "ready", "loss": "loss"}),
        ("model_and_batch", {"loss": "loss"}),
        ("everything", {}),
    ],
)
def test_a_batch_and_a_loss_come_from_a_file(
    file: Path, model: str, asked: dict[str, str]
) -> None:
    named = {name: f"{file}:{text}" for name, text in asked.items()}
    plan = planned(f"{file}:{model}", **named)
    assert [shape[1:] for shape, _ in plan.model.batch.values()] == [(6,), (4,)]
    assert not any("returns no loss" in text for text in plan.warnings)
    assert budgetfit.verify(plan, device="cpu").passed


def test_a_saved_plan_wants_the_batch_and_the_loss_again(
    file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    planned(f"{file}:everything").save(path)
    plan = budgetfit.Plan.load(path)
    with pytest.raises(budgetfit.InputError, match=r"--loss file.py:function"):
        budgetfit.verify(plan, f"{file}:model", device="cpu")
    assert budgetfit.verify(plan, f"{file}:everything", device="cpu").passed
    other = budgetfit.verify(
        plan,
        f"{file}:model",
        batch=f"{file}:make_batch",
        loss=f"{file}:loss",
        device="cpu",
    )
    assert other.passed


@pytest.mark.parametrize(
    ("model", "asked", "message"),
    [
        ("no_loss", {}, "returned a int as its loss; it must be a function"),
        (
            "model",
            {"batch": "empty"},
            "empty gave no batch. The batch, a dict, holds no",
        ),
        ("model", {"batch": "nothing"}, "has no nothing. It defines Pair, empty"),
        ("model", {"batch": "make_batch", "loss": "ready"}, "a loss must be a functio"),
    ],
)
def test_what_is_no_batch_and_no_loss_is_refused(
    file: Path, model: str, asked: dict[str, str], message: str
) -> None:
    named = {name: f"{file}:{text}" for name, text in asked.items()}
    with pytest.raises(budgetfit.InputError, match=message) as error:
        planned(f"{file}:{model}", **named)
    assert "\n" not in str(error.value)


def test_text_that_names_no_function_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    for asked in ({"batch": "batch.py"}, {"loss": "mse"}):
        with pytest.raises(budgetfit.InputError, match="names nothing in Python code"):
            planned(model, **asked)


def test_estimate_and_layers_take_them_too(file: Path) -> None:
    asked: dict[str, Any] = {"batch": f"{file}:make_batch", "loss": f"{file}:loss"}
    whole = budgetfit.estimate(f"{file}:model", gpu="t4", **asked)
    named, _ = estimate_settings(f"{file}:model", gpu="t4", **asked)
    assert whole.recipe.batch_size == 3
    assert named.allocated_bytes == whole.allocated_bytes
    assert layers(f"{file}:model", **asked)


def test_a_plan_records_the_names_of_its_batch_and_loss(file: Path) -> None:
    asked = {"batch": f"{file}:make_batch", "loss": f"{file}:loss"}
    given: dict[str, Any] = {"batch_size": 3, "checkpointing": "none", **asked}
    plan = planned(f"{file}:model", **given, trust_remote_code=True)
    loaded = budgetfit.Plan.from_json(plan.to_json())
    recorded = loaded.provenance["asked"]
    assert {name: recorded[name] for name in asked} == asked
    assert recorded["trust_remote_code"]


def vit() -> torch.nn.Module:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4}
    return models.vit(**sizes, image_size=32, patch_size=8, hidden_dropout_prob=0.0)


def gemma() -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    vision = {"num_attention_heads": 4, "image_size": 56, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config={**sizes, **text, "vocab_size": 256},
        vision_config={**sizes, **vision},
        mm_tokens_per_image=4,
        image_token_index=255,
        boi_token_index=254,
        eoi_token_index=253,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def test_images_are_as_large_as_asked_also_for_a_saved_plan(tmp_path: Path) -> None:
    model = vit()
    usual, large = planned(model), planned(model, image_size=64)
    assert large.model.batch["pixel_values"][0][1:] == (3, 64, 64)
    assert large.estimate.allocated_bytes > usual.estimate.allocated_bytes
    large.save(tmp_path / "plan.json")
    loaded = budgetfit.Plan.load(tmp_path / "plan.json")
    check = budgetfit.verify(loaded, model, device="cpu")
    assert check.passed
    assert check.allocated_error is not None
    assert abs(check.allocated_error) < 0.02


def test_a_model_with_towers_is_planned_on_text_alone(tmp_path: Path) -> None:
    model = gemma()
    both = planned(model, max_length=64)
    text = planned(model, max_length=64, text_only=True)
    assert "pixel_values" in both.model.batch
    assert "pixel_values" not in text.model.batch
    assert text.estimate.allocated_bytes < both.estimate.allocated_bytes
    # The tower does not run, so that nothing of it can be recomputed.
    assert all("vision" not in name for name in text.model.blocks)
    assert any("text only" in note for note in text.warnings)
    text.save(tmp_path / "plan.json")
    loaded = budgetfit.Plan.load(tmp_path / "plan.json")
    assert budgetfit.verify(loaded, model, device="cpu").passed


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"image_size": 0}, "image_size must be pixels, for example 448"),
        ({"image_size": "64x"}, "image_size must be pixels"),
        ({"image_size": True}, "image_size must be pixels"),
        ({"image_size": 2**20}, "image_size must be pixels"),
        ({"text_only": True}, "needs pixel_values. Leave it out"),
        (
            {"image_size": 64, "batch": torch.zeros(2, 3, 64, 64)},
            "are for a batch that is made",
        ),
    ],
)
def test_wishes_that_cannot_be_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(budgetfit.InputError, match=message):
        planned(vit(), **asked)


def test_a_wish_that_would_change_nothing_is_refused() -> None:
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, **sizes)
    )
    with pytest.raises(budgetfit.InputError, match="image_size= changes nothing"):
        planned(model, image_size=64)
    with pytest.raises(budgetfit.InputError, match=r"reads no images of 112 x 112.*56"):
        planned(gemma(), image_size=112)


def test_a_damaged_wish_in_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned(vit(), image_size=64).save(path)
    for name, value in (("image_size", 64), ("text_only", 1), ("max_length", True)):
        document = json.loads(path.read_text())
        document["provenance"]["asked"][name] = value
        with pytest.raises(budgetfit.InputError, match=f"provenance.asked.{name}"):
            budgetfit.Plan.from_json(json.dumps(document))


class Detector(nn.Module):
    """Boxes of all images stand in one tensor, told apart by an index."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(3, 4, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        images = batch["img"]
        for block in self.blocks:
            images = torch.relu(block(images))
        found = self.head(images).mean((2, 3))[batch["batch_idx"].long()]
        return nn.functional.mse_loss(found, batch["bboxes"])


def test_boxes_of_all_images_are_no_samples() -> None:
    batch = ({**boxes(3, 2), "img": torch.zeros(2, 3, 64, 64)},)
    estimates = [
        budgetfit.estimate(
            Detector(),
            Recipe(batch_size=size, precision="fp32", optimizer="sgd"),
            batch=batch,
            gpu="t4",
        ).allocated_bytes
        for size in (4, 16)
    ]
    assert estimates[1] > 3 * estimates[0]
    plan = budgetfit.plan(
        Detector(), gpu="t4", batch=batch, batch_size=3, checkpointing="full"
    )
    assert plan.model.batch["0.img"][0][0] == 2
    assert budgetfit.verify(plan, device="cpu").passed


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(12, 8, mode="sum")
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.bags(ids, offsets)
        for block in self.blocks:
            hidden = torch.relu(block(hidden))
        return (hidden.mean(1) - y).square().mean()


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(
        self,
        x: torch.Tensor,
        edge_index: torch.Tensor,
        batch: torch.Tensor,
        y: torch.Tensor,
    ) -> torch.Tensor:
        for block in self.blocks:
            x = x.index_add(0, edge_index[1], torch.tanh(block(x)[edge_index[0]]))
        found = x.new_zeros(len(y), 3).index_add(0, batch, x)
        return (found.mean(1) - y).square().mean()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.lstm(packed)[1][0].square().mean()


RAGGED: list[tuple[type[nn.Module], dict[str, torch.Tensor]]] = [
    (Bags, without(bags(3, 2, 4, 3), "per_sample_weights")),
    (Graphs, without(graphs(4, 2, 5, 3), "edge_attr", "ptr")),
    (Packed, {"x": torch.ones(4, 9, 3), "lengths": torch.tensor([9, 5, 5, 1])}),
]


@pytest.mark.parametrize(("kind", "batch"), RAGGED)
def test_ragged_batches_are_planned_cut_and_verified(
    kind: type[nn.Module], batch: dict[str, torch.Tensor]
) -> None:
    torch.manual_seed(0)
    model = kind()
    plain = copy.deepcopy(model)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(**batch).backward()
    sgd.step()
    for size in (4, 9):  # its own, and one that repeats samples
        assert planned(model, batch=batch, batch_size=size).recipe.batch_size == size
    plan = planned(model, batch=batch, effective_batch_size=4, optimizer="sgd")
    assert budgetfit.verify(plan, model, device="cpu").passed
    with budgetfit.apply(plan, model, learning_rate=0.1) as run:
        for part in run.parts(batch):
            run.step(part)
        assert run.steps_done == 1
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name])


def test_sizes_that_are_traced_each_for_itself_are_few() -> None:
    said: list[str] = []
    batch = without(bags(3, 2, 4, 3), "per_sample_weights")
    budgetfit.plan(
        Bags(), gpu="t4", batch=batch, precision="fp32", progress=said.append
    )
    assert sum(text.startswith("tracing batch") for text in said) < 60


def test_offsets_without_their_name_are_refused() -> None:
    batch = tuple(without(bags(3, 2, 4, 3), "per_sample_weights").values())
    with pytest.raises(InputError, match=r"'1' \[4\] looks like the offsets.* Use a b"):
        planned(Bags(), batch=batch)


def test_graphs_without_names_are_told_which_to_use() -> None:
    batch = tuple(without(graphs(4, 2, 5, 3), "edge_attr", "ptr").values())
    with pytest.raises(budgetfit.BudgetfitError, match=r"Use a mapping.*edge_index"):
        planned(Graphs(), batch=batch)


def test_a_model_that_saves_nothing_but_its_batch_grows_with_it() -> None:
    plan = budgetfit.plan(nn.Linear(4, 4), gpu="t4", batch=torch.zeros(2, 4))
    assert plan.recipe.batch_size > 2


def test_an_lstms_live_bytes_are_predicted_on_the_cpu() -> None:
    """OneDNN's LSTM saves a workspace of a size that a trace cannot know."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 16, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0].square().mean()

    options: dict[str, Any] = {"batch_size": 16, "precision": "fp32"}
    batch = {"x": torch.randn(16, 20, 16)}
    plan = budgetfit.plan(Net(), gpu="t4", batch=batch, **options)
    enabled = torch.backends.mkldnn.enabled
    check = budgetfit.verify(plan, device="cpu", steps=3)
    assert check.allocated_error is not None
    assert abs(check.allocated_error) < 0.02
    assert torch.backends.mkldnn.enabled == enabled
