import pytest
import torch
import transformers
from torch import nn

from budgetfit.batches.batch_tree import batch_size_of, describe_batch, resize_batch
from budgetfit.errors import InputError
from budgetfit.example_batches.make_batch import make_batch
from tests.example_batches.tiny_transformers import (
    FUSED_CLAP,
    WITH_LOSS,
    WITHOUT_LOSS,
    tiny_model,
)


def on_meta(model_class: type, **fields: object) -> transformers.PreTrainedModel:
    with torch.device("meta"):
        return model_class(model_class.config_class(**fields))


@pytest.mark.parametrize("name", WITH_LOSS)
def test_a_head_answers_its_made_batch_with_a_loss_that_can_be_trained(
    name: str,
) -> None:
    model = tiny_model(name)
    made = make_batch(model)
    assert "returns no loss" not in " ".join(made.notes)
    assert batch_size_of(made.batch) == 2
    loss = model(**made.batch).loss
    assert loss.isfinite()
    loss.backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", WITHOUT_LOSS)
def test_a_bare_model_runs_on_its_made_batch_and_no_loss_is_promised(name: str) -> None:
    model = tiny_model(name)
    made = make_batch(model)
    assert "returns no loss" in " ".join(made.notes)
    assert getattr(model(**made.batch), "loss", None) is None


@pytest.mark.parametrize(
    "name",
    [
        "GPT2LMHeadModel",
        "BartForSequenceClassification",
        "CLIPModel",
        "ClapModel",
        "MusicgenForConditionalGeneration",
        "Wav2Vec2ForCTC",
        "Wav2Vec2ForPreTraining",
    ],
)
def test_a_made_batch_stays_valid_at_other_batch_sizes(name: str) -> None:
    model = tiny_model(name)
    batch = resize_batch(make_batch(model).batch, 3)
    assert batch_size_of(batch) == 3
    assert model(**batch).loss.isfinite()


def test_a_clap_that_fuses_views_of_a_sound_gets_four() -> None:
    model = transformers.ClapModel(transformers.ClapConfig(**FUSED_CLAP)).train()
    batch = make_batch(model).batch
    assert batch["input_features"].shape[:2] == (2, 4)
    assert not batch["is_longer"].any()
    assert model(**batch).loss.isfinite()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "ViTForImageClassification"])
def test_a_model_on_meta_gets_the_batch_of_a_real_one(name: str) -> None:
    real = tiny_model(name)
    meta = on_meta(type(real), **WITH_LOSS[name])
    wanted = describe_batch(make_batch(real).batch)
    made = make_batch(meta).batch
    assert describe_batch(made) == wanted
    assert not any(tensor.is_meta for tensor in made.values())


def test_making_a_batch_changes_neither_the_model_nor_the_random_state() -> None:
    model = tiny_model("GPT2LMHeadModel").eval()
    state = torch.random.get_rng_state()
    config, weights = model.config.to_dict(), model.state_dict()
    before = {key: value.clone() for key, value in weights.items()}
    first, second = make_batch(model).batch, make_batch(model).batch
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert not model.training
    assert all(torch.equal(before[key], weights[key]) for key in before)
    assert torch.equal(first["input_ids"], second["input_ids"])


def test_tokens_are_ordinary_ones_inside_the_vocabulary() -> None:
    model = tiny_model("BartForConditionalGeneration")
    ids = make_batch(model, batch_size=64, max_length=40).batch["input_ids"]
    assert 0 <= ids.min() <= ids.max() < 99
    # 0, 1 and 2 begin, pad and end a text; each row ends once, at its end.
    assert ids[:, :-1].min() == 3
    assert ids[:, -1].tolist() == [2] * 64


def test_the_vocabulary_is_never_larger_than_the_embedding() -> None:
    model = tiny_model("GPT2LMHeadModel")
    model.resize_token_embeddings(50)
    model.config.vocab_size = 99
    assert make_batch(model, batch_size=64).batch["input_ids"].max() < 50


def test_a_language_model_reads_and_predicts_1024_tokens_unless_told_otherwise() -> (
    None
):
    fields = WITH_LOSS["LlamaForCausalLM"] | {"max_position_embeddings": 8192}
    made = make_batch(on_meta(transformers.LlamaForCausalLM, **fields))
    assert made.batch["input_ids"].shape == (2, 1024)
    assert torch.equal(made.batch["input_ids"], made.batch["labels"])
    assert "text rows of 1024 tokens (a default); max_length= changes it" in made.notes
    assert "attention_mask" not in made.batch


def test_bert_reads_its_512_positions_and_roberta_its_514_less_two() -> None:
    bert = {"num_hidden_layers": 1}
    roberta = bert | {"max_position_embeddings": 514}
    short = make_batch(on_meta(transformers.BertForMaskedLM, **bert))
    assert short.batch["input_ids"].shape == (2, 512)
    # RoBERTa's positions start behind its padding token, 1.
    offset = make_batch(on_meta(transformers.RobertaForMaskedLM, **roberta))
    assert offset.batch["input_ids"].shape == (2, 512)


def test_a_wished_length_and_batch_size_are_kept() -> None:
    made = make_batch(tiny_model("LlamaForCausalLM"), batch_size=3, max_length=17)
    assert made.batch["input_ids"].shape == (3, 17)
    assert "17" not in " ".join(made.notes)


def test_more_tokens_than_a_learned_table_has_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"max_length 41.* is too long.*has 40 positions.*max_length=40 or less",
    ):
        make_batch(tiny_model("GPT2LMHeadModel"), max_length=41)


def test_more_tokens_than_rotary_positions_were_configured_for_get_a_note() -> None:
    made = make_batch(tiny_model("LlamaForCausalLM"), max_length=50)
    assert made.batch["input_ids"].shape == (2, 50)
    assert "beyond the 40 positions" in " ".join(made.notes)


def test_images_have_the_size_and_channels_of_the_config() -> None:
    made = make_batch(tiny_model("ViTForImageClassification"))
    assert made.batch["pixel_values"].shape == (2, 1, 32, 32)
    assert "images of 1 x 32 x 32 pixels" in made.notes
    oblong = WITH_LOSS["ViTForImageClassification"] | {"image_size": [32, 16]}
    model = on_meta(transformers.ViTForImageClassification, **oblong)
    assert make_batch(model).batch["pixel_values"].shape == (2, 1, 32, 16)


def test_labels_are_classes_or_numbers_as_the_config_says() -> None:
    fields = WITH_LOSS["BertForSequenceClassification"]
    kind = transformers.BertForSequenceClassification
    classes = make_batch(on_meta(kind, **fields), batch_size=64).batch["labels"]
    assert set(classes.tolist()) == {0, 1, 2}
    several = fields | {"problem_type": "multi_label_classification"}
    labels = make_batch(on_meta(kind, **several)).batch["labels"]
    assert (labels.shape, labels.dtype) == ((2, 3), torch.float32)
    number = make_batch(on_meta(kind, **fields | {"num_labels": 1})).batch["labels"]
    assert (number.shape, number.dtype) == ((2,), torch.float32)


def test_an_answer_never_ends_before_it_starts() -> None:
    batch = make_batch(tiny_model("BertForQuestionAnswering"), batch_size=64).batch
    assert (batch["start_positions"] <= batch["end_positions"]).all()
    assert (batch["start_positions"] < batch["end_positions"]).any()


def test_a_transcript_has_at_least_two_frames_for_each_token() -> None:
    # 10 s at 16 kHz, strides 10 x 8 x 4: 500 frames.
    model = tiny_model("Wav2Vec2ForCTC")
    assert make_batch(model, max_length=250).batch["labels"].shape == (2, 250)
    assert make_batch(model, max_length=40).batch["labels"].shape == (2, 40)
    with pytest.raises(InputError, match=r"hears at most 250.*Use max_length=250 or"):
        make_batch(model, max_length=9999)


@pytest.mark.parametrize(
    "name", ["WhisperForConditionalGeneration", "BartForConditionalGeneration"]
)
def test_more_tokens_than_a_decoder_has_positions_for_are_refused(name: str) -> None:
    model = tiny_model(name)
    most = model.get_decoder().embed_positions.weight.shape[0]
    most -= getattr(model.get_decoder().embed_positions, "offset", 0)  # BART's
    assert make_batch(model, max_length=most).batch["labels"].shape == (2, most)
    with pytest.raises(InputError, match=f"Use max_length={most} or less"):
        make_batch(model, max_length=100_000)


@pytest.mark.parametrize(
    "name", ["ViTForImageClassification", "WhisperForAudioClassification"]
)
def test_a_length_of_samples_without_one_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="changes nothing in a batch made for"):
        make_batch(tiny_model(name), max_length=77)


def test_a_pure_bf16_model_gets_bf16_images() -> None:
    model = tiny_model("ViTForImageClassification").to(torch.bfloat16)
    made = make_batch(model)
    assert made.batch["pixel_values"].dtype is torch.bfloat16
    assert model(**made.batch).loss.isfinite()


def test_encoder_decoders_without_a_start_token_get_their_targets_shifted() -> None:
    fields = dict(WITH_LOSS["T5ForConditionalGeneration"])
    del fields["decoder_start_token_id"]
    config = transformers.T5Config(**fields)
    model = transformers.T5ForConditionalGeneration(config)
    assert model(**make_batch(model, max_length=8).batch).loss.isfinite()


def test_a_class_of_ones_own_has_the_task_of_its_parent() -> None:
    class Mine(transformers.GPT2LMHeadModel):
        pass

    model = Mine(transformers.GPT2Config(**WITH_LOSS["GPT2LMHeadModel"]))
    assert "labels" in make_batch(model).batch


def test_a_wrapped_model_gets_the_batch_of_the_model_inside() -> None:
    class Adapter(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def get_base_model(self) -> nn.Module:
            return self.inner

    made = make_batch(Adapter(tiny_model("LlamaForCausalLM")))
    assert made.batch.keys() == {"input_ids", "labels"}


def test_a_generation_cache_that_is_on_is_mentioned() -> None:
    model = tiny_model("LlamaForCausalLM")
    assert "use_cache" in " ".join(make_batch(model).notes)
    model.config.use_cache = False
    assert "use_cache" not in " ".join(make_batch(model).notes)
    assert "use_cache" not in " ".join(make_batch(tiny_model("BertModel")).notes)


def test_an_image_language_model_gets_images_and_as_many_placeholders() -> None:
    fields = {
        "text_config": WITH_LOSS["LlamaForCausalLM"] | {"model_type": "llama"},
        "vision_config": WITH_LOSS["ViTForImageClassification"]
        | {"model_type": "clip_vision_model"},
        "image_token_index": 98,
    }
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(**fields)
    )
    batch = make_batch(model).batch
    is_image = batch["input_ids"] == 98
    assert set(batch) == {"input_ids", "pixel_values", "labels"}
    features = model.get_image_features(batch["pixel_values"]).pooler_output
    assert is_image.sum(dim=1).tolist() == [len(rows) for rows in features]
    assert (batch["labels"][is_image] == -100).all()
    count = int(is_image[0].sum())
    assert make_batch(model, max_length=count + 1).batch.keys() == batch.keys()
    with pytest.raises(
        InputError, match=f"takes {count} tokens. Use max_length={count + 1} or"
    ):
        make_batch(model, max_length=count)
    assert "pixel_values" not in make_batch(model, max_length=9, text_only=True).batch
    model(**resize_batch(batch, 3)).loss.backward()
    assert model.model.vision_tower.embeddings.patch_embedding.weight.grad.any()


def test_a_decoder_that_classifies_without_padding_token_is_refused_with_the_cure() -> (
    None
):
    fields = WITH_LOSS["GPT2ForSequenceClassification"] | {"pad_token_id": None}
    model = on_meta(transformers.GPT2ForSequenceClassification, **fields)
    with pytest.raises(InputError, match=r"model.config.pad_token_id = "):
        make_batch(model)
    assert "labels" in make_batch(model, batch_size=1).batch


def test_a_model_that_reads_something_else_is_refused_with_an_example() -> None:
    model = on_meta(transformers.Blip2QFormerModel, hidden_size=24, num_hidden_layers=1)
    with pytest.raises(
        InputError, match=r"Blip2QFormerModel: it needs query_embeds.*batch="
    ):
        make_batch(model)
