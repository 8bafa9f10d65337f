"""Inputs and labels by task: the model's own loss takes them and can be trained."""

from typing import Any

import pytest
import torch
import transformers

from budgetfit.batches.batch_tree import batch_size_of, resize_batch
from budgetfit.example_batches.make_batch import make_batch
from tests.zoo.entry import zoo

TRAINABLE = {
    "PatchTSTForPrediction": {"past_values", "past_observed_mask", "future_values"},
    "PatchTSTForClassification": {"past_values", "target_values"},
    "LayoutLMForTokenClassification": {"input_ids", "bbox", "labels"},
    "BrosForTokenClassification": {"input_ids", "bbox", "labels"},
    "GitForCausalLM": {"input_ids", "pixel_values", "labels"},
    "ViltForQuestionAnswering": {"input_ids", "pixel_values", "labels"},
    "CLIPModel": {"input_ids", "pixel_values", "return_loss"},
    "MusicgenForCausalLM": {"labels"},
    "ParakeetForCTC": {"input_features", "attention_mask", "labels"},
}


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_task_gets_the_inputs_and_labels_of_its_loss(name: str) -> None:
    torch.manual_seed(0)
    model = zoo()[name].build()
    made = make_batch(model)
    assert set(made.batch) == TRAINABLE[name]
    for batch in (made.batch, resize_batch(made.batch, 3)):
        loss = model(**batch).loss
        assert loss.isfinite()
    loss.backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


def test_packed_patches_move_with_their_sample() -> None:
    pixels = torch.arange(6.0).view(6, 1)
    grid = torch.tensor([[1, 1, 2], [1, 2, 2]])
    ids = torch.zeros(2, 5, dtype=torch.int64)
    batch = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid}
    more = resize_batch(batch, 3)
    assert more["pixel_values"].flatten().tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert more["image_grid_thw"].tolist() == [[1, 1, 2], [1, 1, 2], [1, 2, 2]]
    fewer = resize_batch(batch, 1)
    assert fewer["pixel_values"].flatten().tolist() == [0, 1]
    assert batch_size_of(more) == 3


def test_a_prompt_holds_the_tokens_of_packed_images() -> None:
    torch.manual_seed(0)
    model = zoo()["Qwen2VLForConditionalGeneration"].build()
    batch = make_batch(model).batch
    is_image = batch["input_ids"] == model.config.image_token_id
    merged = model.config.vision_config.spatial_merge_size**2
    assert is_image.sum() == len(batch["pixel_values"]) // merged
    assert (batch["mm_token_type_ids"] == is_image).all()
    model(**resize_batch(batch, 3)).loss.backward()
    assert model.model.visual.patch_embed.proj.weight.grad.any()


def test_boxes_of_words_lie_on_the_page_and_are_never_empty() -> None:
    boxes = make_batch(zoo()["LayoutLMForTokenClassification"].build()).batch["bbox"]
    assert boxes.min() >= 0
    assert boxes.max() <= 1000
    assert (boxes[..., 2:] > boxes[..., :2]).all()


def test_boxes_of_objects_are_made_where_their_loss_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = zoo()["YolosForObjectDetection"].build()
    loss = transformers.loss.loss_for_object_detection
    corners = transformers.image_transforms.center_to_corners_format
    monkeypatch.setattr(loss, "center_to_corners_format", corners, raising=False)
    for found in (True, False):
        monkeypatch.setattr(
            transformers.utils.import_utils,
            "is_vision_available",
            lambda found=found: found,
        )
        made = make_batch(model)
        assert ("labels" in made.batch) == found
        assert ("needs Pillow" in " ".join(made.notes)) != found
        if found:
            sample: dict[str, Any] = made.batch["labels"][0]
            assert sample["boxes"].shape == (7, 4)
            assert len(resize_batch(made.batch, 3)["labels"]) == 3
            assert model(**made.batch).loss.isfinite()
