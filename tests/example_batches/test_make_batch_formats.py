"""Batches in the formats of processors that hand over more than pixels or tokens."""

from typing import Any

import pytest
import torch
import transformers

import budgetfit
from budgetfit.batches.batch_tree import resize_batch
from budgetfit.errors import InputError, TraceError
from budgetfit.example_batches.images import configured_image_size
from budgetfit.example_batches.make_batch import make_batch
from budgetfit.integrations.model_sources.transformers import model_from_config
from tests.zoo.shrink import shrink

Sizes = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

# Class, changes to its small config, options, and shapes of arguments.
TRAINED: list[tuple[str, Sizes, Sizes, Shapes]] = [
    (
        "Siglip2ForImageClassification",
        {"vision_config.num_patches": 16},
        {},
        {"pixel_values": (2, 16, 768), "spatial_shapes": (2, 2)},
    ),
    (
        "PaddleOCRVLForConditionalGeneration",
        {},
        {"image_size": 56, "max_length": 16},
        {"pixel_values": (32, 3, 14, 14), "image_grid_thw": (2, 3)},
    ),
    (
        "SmolVLMForConditionalGeneration",  # drops images of zeros, which are padding
        {},
        {},
        {"pixel_values": (2, 5, 3, 64, 64), "labels": (2, 128)},
    ),
    (
        "InstructBlipVideoForConditionalGeneration",
        {"video_token_index": 1000, "num_query_tokens": 2},
        {"frames": 3, "max_length": 16},
        {"pixel_values": (2, 3, 3, 56, 56), "labels": (2, 6 + 32)},
    ),
    (
        "VoxtralRealtimeForConditionalGeneration",
        {},
        {"max_length": 8},
        {"input_features": (2, 128, 64), "labels": (2, 8)},
    ),
    ("TimesFm2_5ModelForPrediction", {}, {}, {"future_values": (2, 128)}),
    (
        "Kosmos2ForConditionalGeneration",
        {"latent_query_num": 8},
        {"max_length": 16},
        {"image_embeds_position_mask": (2, 16)},
    ),
    (
        "Pix2StructForConditionalGeneration",
        {},
        {"image_size": 32, "max_length": 8},
        {"flattened_patches": (2, 16, 194), "attention_mask": (2, 16)},
    ),
    (
        "SpeechT5ForTextToSpeech",
        {},
        {"max_length": 8},
        {"labels": (2, 1000, 80), "speaker_embeddings": (2, 256)},
    ),
    (
        "FastSpeech2ConformerModel",
        {},
        {"max_length": 300},
        {"spectrogram_labels": (2, 900, 80), "duration_labels": (2, 300)},
    ),
    (
        "VisualBertForPreTraining",
        {},
        {},
        {"labels": (2, 52), "attention_mask": (2, 16), "sentence_image_labels": (2,)},
    ),
    (
        "DiaForConditionalGeneration",
        {},
        {"max_length": 8},
        {"decoder_input_ids": (2, 8, 9), "labels": (2, 9, 8)},
    ),
    (
        "VoxtralForConditionalGeneration",  # its head hands all on to the base
        {"audio_token_id": 9, "audio_config.max_source_positions": 64},
        {"max_length": 32},
        {"input_features": (2, 128, 128), "labels": (2, 16 + 32)},
    ),
    (
        "GlmAsrForConditionalGeneration",  # mel bins first, of any length
        {},
        {"max_length": 132},
        {"input_features": (2, 128, 1000), "labels": (2, 125 + 32)},
    ),
    (
        "MossTranscribeDiarizeForConditionalGeneration",
        {"audio_config.max_source_positions": 64},
        {"max_length": 32},
        {"input_features": (2, 80, 128), "padding_mask": (2, 128)},
    ),
    (
        "Mistral3ForConditionalGeneration",  # counting its tokens takes values
        {},
        {"max_length": 40},
        {"image_sizes": (2, 2), "labels": (2, 40)},
    ),
    (
        "GraniteSpeech5ForCTC",  # its first layer reads four columns at once
        {},
        {"max_length": 8},
        {"input_features": (2, 1000, 320), "labels": (2, 8)},
    ),
    (
        "Pop2PianoForConditionalGeneration",
        {},
        {"max_length": 8},
        {"input_features": (2, 1000, 64), "labels": (2, 8)},
    ),
]
MADE: list[tuple[str, Sizes, Shapes]] = [
    (
        "IdeficsForVisionText2Text",
        {},
        {"pixel_values": (2, 1, 3, 56, 56), "image_attention_mask": (2, 128, 1)},
    ),
    (
        "VideoLlama3ForConditionalGeneration",
        {},
        {"image_merge_sizes": (2,), "image_grid_thw": (2, 3)},
    ),
    (
        "OneFormerForUniversalSegmentation",
        {"num_queries": 20},
        {"task_inputs": (2, 77), "text_inputs": (2, 4, 77)},
    ),
    ("CanaryForConditionalGeneration", {}, {"labels": (2, 128)}),
    (
        "Qwen3ASRForConditionalGeneration",  # its convolutions are listed last
        {"audio_config.output_dim": 64, "text_config.hidden_size": 64},
        {"input_features": (2, 128, 1000)},
    ),
    (
        "ShieldGemma2ForImageClassification",  # its head has no name for its images
        {},
        {"pixel_values": (2, 3, 64, 64), "input_ids": (2, 128)},
    ),
    ("SeamlessM4TForTextToSpeech", {}, {"labels": (2, 16)}),
    ("ParakeetForTDT", {}, {"labels": (2, 62), "decoder_input_ids": (2, 63)}),
    ("ParakeetForRNNT", {}, {"decoder_input_ids": (2, 63)}),
    (
        "VideoPrismClipModel",
        {},
        {"input_ids": (2, 64), "pixel_values_videos": (2, 4, 3, 64, 64)},
    ),
    (
        "VideomtForUniversalSegmentation",  # its labels are refused
        {},
        {"pixel_values_videos": (2, 16, 3, 64, 64)},
    ),
    ("SuperGlueForKeypointMatching", {}, {"pixel_values": (2, 2, 3, 224, 224)}),
    (
        "CsmForConditionalGeneration",
        {"/": 1},
        {
            "input_values": (2, 1, 240_000),
            "input_values_cutoffs": (2, 1),
            "input_ids": (2, 32 + 125 + 1),
            "labels": (2, 32 + 125 + 1),
        },
    ),
]


def small(name: str, changes: Sizes, *, device: str = "cpu") -> Any:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    with torch.device(device):
        return kind(shrink(kind.config_class(), changes)).train()


@pytest.mark.parametrize(("name", "changes", "options", "shapes"), TRAINED)
def test_a_batch_in_a_processors_format_has_a_loss_that_trains_most_of_the_model(
    name: str, changes: Sizes, options: Sizes, shapes: Shapes
) -> None:
    model = small(name, changes)
    batch = make_batch(model, **options).batch
    assert {key: tuple(batch[key].shape) for key in shapes} == shapes
    loss = model(**resize_batch(batch, 3)).loss
    assert loss.isfinite()
    loss.backward()
    trained = [p for p in model.parameters() if p.grad is not None and p.grad.any()]
    assert len(trained) > 0.6 * len(list(model.parameters()))


@pytest.mark.parametrize(("name", "changes", "shapes"), MADE)
def test_a_batch_has_the_format_of_the_models_processor(
    name: str, changes: Sizes, shapes: Shapes
) -> None:
    batch = make_batch(small(name, changes, device="meta")).batch
    assert {key: tuple(batch[key].shape) for key in shapes} == shapes


@pytest.mark.parametrize(("max_length", "tiles"), [(6, 5), (5, 1)])
def test_an_image_has_as_many_tiles_as_a_row_has_tokens_for(
    max_length: int, tiles: int
) -> None:
    model = small("Idefics3ForConditionalGeneration", {}, device="meta")
    made = make_batch(model, max_length=max_length)
    assert made.batch["pixel_values"].shape[:2] == (2, tiles)
    assert f"{tiles} of them in a sample, as of an image in tiles" in made.notes


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("Blip2ForConditionalGeneration", "image_token_index"),
        ("InstructBlipVideoForConditionalGeneration", "video_token_index"),
    ],
)
def test_a_config_that_does_not_say_what_stands_for_an_image_is_refused(
    name: str, token: str
) -> None:
    model = small(name, {}, device="meta")
    with pytest.raises(InputError, match=rf"{token} is None. Set it to"):
        make_batch(model)


def test_a_container_of_models_is_refused_with_the_names_of_its_parts() -> None:
    class Speaker(transformers.PreTrainedModel):
        config_class = transformers.BertConfig

        def __init__(self, config: transformers.BertConfig) -> None:
            super().__init__(config)
            self.thinker = transformers.BertForMaskedLM(config)
            self.loudness = torch.nn.Linear(1, 1)

    model = Speaker(shrink(transformers.BertConfig()))
    with pytest.raises(
        InputError, match=r"no forward.*: thinker \(BertForMaskedLM\)\."
    ):
        make_batch(model)


def test_sizes_that_a_model_keeps_as_buffers_have_values_on_meta() -> None:
    config = transformers.EncodecConfig(num_filters=2, hidden_size=8)
    model = model_from_config(config).model
    assert next(model.parameters()).is_meta
    assert model.encoder.layers[0].kernel_size == 7


def test_a_config_without_architectures_gets_any_head_of_its_type() -> None:
    config = transformers.BrosConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=99
    )
    found = model_from_config(config)
    assert type(found.model).__name__ == "BrosForTokenClassification"
    config = transformers.BrosConfig()
    config.model_type = "unheard_of"
    with pytest.raises(InputError, match=r"No auto class.*'unheard_of'.*architectures"):
        model_from_config(config)


def test_a_library_that_is_missing_is_no_fault_of_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(*_: object, **__: object) -> None:
        raise ImportError("BertModel requires the timm library: `pip install timm`.")

    monkeypatch.setattr(transformers.BertForMaskedLM, "_from_config", build)
    with pytest.raises(InputError, match=r"built here: .*timm`\. Install that"):
        model_from_config(transformers.BertConfig(architectures=["BertForMaskedLM"]))


def test_a_made_batch_that_a_model_refuses_is_described() -> None:
    class Reads(transformers.BertForMaskedLM):
        def forward(self, input_ids: torch.Tensor, **_: object) -> None:
            del input_ids
            raise ValueError("where is the sound?")

    model = Reads(shrink(transformers.BertConfig()))
    said = r"sound\?\. The batch was made from the config: input_ids \[\d+, 16\]"
    with pytest.raises(TraceError, match=said):
        budgetfit.estimate(model, budgetfit.Recipe(batch_size=2), gpu="t4")


@pytest.mark.parametrize(
    ("config", "side"),
    [
        (transformers.DepthProConfig, 1536),  # the quarter of it is a patch of 384
        (transformers.RfDetrConfig, 504),  # 9 windows of 4 patches of 14
    ],
)
def test_an_image_is_as_large_as_scales_and_windows_need(
    config: type[transformers.PreTrainedConfig], side: int
) -> None:
    assert configured_image_size(config()) == (side, side)
