"""Models of diffusers: named by folder, given a batch, planned, exported."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from torch.nn import functional

import budgetfit
from budgetfit.applying.loss.prediction_loss import prediction_loss
from budgetfit.errors import InputError
from budgetfit.inputs.arguments import Arguments
from budgetfit.integrations.exports import accelerate
from budgetfit.integrations.exports.diffusers_options import script_lines
from budgetfit.integrations.model_sources import diffusers as source
from budgetfit.integrations.model_sources.model_name import config_file, denoiser_of
from budgetfit.planning.alternatives.lora_estimate import lora_workload
from tests.models import alone
from tests.reporting.sample_plans import (
    sample_estimate,
    sample_model,
    sample_plan,
    sample_recipe,
)

SMALL_DIT = {
    "_class_name": "Transformer2DModel",  # as facebook/DiT-XL-2-256 says
    "norm_type": "ada_norm_zero",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "norm_elementwise_affine": False,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 2,
    "in_channels": 4,
    "out_channels": 8,
    "patch_size": 2,
    "sample_size": 8,
    "num_embeds_ada_norm": 10,
}
SMALL_VIDEO = {
    "_class_name": "WanTransformer3DModel",
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 8,
    "freq_dim": 8,
    "ffn_dim": 16,
    "num_layers": 2,
}


def folder_of(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def test_a_pipeline_is_planned_by_the_model_that_it_trains(tmp_path: Path) -> None:
    index = {
        "_class_name": "StableDiffusionXLPipeline",
        "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "unet": ["diffusers", "UNet2DConditionModel"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    folder_of(tmp_path / "unet", SMALL_DIT)
    assert denoiser_of(index) == "unet"
    assert config_file(str(tmp_path)) == tmp_path / "unet" / "config.json"


def test_a_pipeline_without_a_config_says_what_to_give(tmp_path: Path) -> None:
    index = {"transformer": ["diffusers", "FluxTransformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(InputError, match=r"config\.json of transformer"):
        config_file(str(tmp_path))


def test_a_hub_pipeline_is_read_from_its_subfolder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = {"unet": ["diffusers", "UNet2DConditionModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    folder_of(tmp_path / "unet", SMALL_DIT)

    def download(hub_id: str, name: str, **_: object) -> str:
        assert hub_id == "org/pipeline"
        return str(tmp_path / name)

    monkeypatch.setattr(source, "hf_hub_download", download)
    fields = source.hub_fields("org/pipeline", local_files_only=False)
    assert fields == (SMALL_DIT, "unet")


def test_a_hub_out_of_reach_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(_: str, name: str, **__: object) -> str:
        asked.append(name)
        raise LocalEntryNotFoundError("no connection, and not in the cache")

    monkeypatch.setattr(source, "hf_hub_download", download)
    assert source.hub_fields("org/pipeline", local_files_only=False) == ({}, "")
    assert len(asked) == 1  # each is retried for 24 s
    assert source.hub_fields("org/pipeline", local_files_only=True) == ({}, "")
    assert len(asked) == 3


def test_the_loss_is_the_error_of_the_first_channels() -> None:
    prediction, target = torch.randn(2, 8, 4, 4), torch.randn(2, 4, 4, 4)
    found = prediction_loss((prediction,), {"target": target})
    assert found == functional.mse_loss(prediction[:, :4], target)
    listed = prediction_loss({"sample": list(target)}, {"target": target})
    assert listed == 0


def test_class_ids_as_a_target_mean_cross_entropy() -> None:
    logits, codes = torch.randn(2, 5, 3, 3), torch.randint(5, (2, 3, 3))
    found = prediction_loss(logits, {"target": codes})
    torch.testing.assert_close(found, functional.cross_entropy(logits, codes))


def test_a_batch_without_a_target_is_refused() -> None:
    with pytest.raises(InputError, match=r'batch\["target"\]'):
        prediction_loss(torch.zeros(1), {"sample": torch.zeros(1)})


class TestWithDiffusers:
    """What needs the library."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("diffusers")

    def test_a_folder_is_planned_saved_and_verified(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path / "dit", SMALL_DIT)
        plan = budgetfit.plan(str(folder), gpu="rtx-4090", batch_size=2)
        batch = plan.model.batch
        assert batch["hidden_states"] == ((2, 4, 8, 8), "float32")
        assert batch["target"] == ((2, 4, 8, 8), "float32")
        assert batch["class_labels"] == ((2,), "int64")
        assert plan.model.type_name == "DiTTransformer2DModel"
        assert plan.model.blocks == ("transformer_blocks.0", "transformer_blocks.1")
        alone(plan).save(tmp_path / "plan.json")
        loaded = budgetfit.Plan.load(tmp_path / "plan.json")
        assert budgetfit.verify(loaded, device="cpu").passed

    def test_pixels_and_frames_decide_the_latents(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path / "wan", SMALL_VIDEO)
        rows = budgetfit.estimate(
            str(folder), gpu="t4", image_size="64x96", frames=9, max_length=4
        )
        notes = " ".join(rows.notes)
        assert "videos of 9 frames" in notes
        assert "64 x 96 pixels are latents of 8 x 12" in notes

    @pytest.mark.parametrize(
        ("asked", "answer"),
        [
            (
                {"image_size": "70x96"},
                "multiples of 16 pixels, not 70x96. Use the nearest, 64x96",
            ),
            (
                {"image_size": 64, "frames": 8},
                "4 frames and one more, not 8. Use 5 or 9",
            ),
        ],
    )
    def test_sizes_that_the_model_cannot_take_name_the_nearest(
        self, tmp_path: Path, asked: dict[str, Any], answer: str
    ) -> None:
        folder = folder_of(tmp_path / "wan", SMALL_VIDEO)
        with pytest.raises(InputError, match=answer):
            budgetfit.estimate(str(folder), gpu="t4", **asked)

    def test_frames_are_refused_where_there_are_none(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path / "dit", SMALL_DIT)
        with pytest.raises(InputError, match="holds no videos"):
            budgetfit.estimate(str(folder), gpu="t4", frames=9)

    def test_lora_is_put_on_attention_of_a_16_bit_base(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path / "dit", SMALL_DIT)
        plan = budgetfit.plan(
            str(folder), gpu="rtx-4090", batch_size=2, method="lora", lora_r=4
        )
        assert plan.adapter is not None
        assert plan.adapter.target_modules == ("to_q", "to_k", "to_v", "to_out.0")
        assert plan.source is not None
        made = plan.source.materialize("cpu")
        frozen = {p.dtype for p in made.parameters() if not p.requires_grad}
        trained = {p.dtype for p in made.parameters() if p.requires_grad}
        assert (frozen, trained) == ({torch.bfloat16}, {torch.float32})
        assert budgetfit.verify(plan, device="cpu").passed

        text = accelerate.export_text(plan, "plan.json")
        assert "DiTTransformer2DModel.from_pretrained(MODEL, torch_dtype=" in text
        assert f'MODEL = "{folder}"' in text
        assert "--train_batch_size=2 --gradient_accumulation_steps=1" in text
        assert "--rank=4" in text

    def test_the_row_with_lora_trains_what_method_lora_trains(
        self, tmp_path: Path
    ) -> None:
        folder = str(folder_of(tmp_path / "dit", SMALL_DIT))
        full, asked = (
            Arguments(model=folder, gpu="rtx-4090", method=method)
            .parsed(["bf16-mixed"])
            .workload
            for method in (None, "lora")
        )
        row = lora_workload(full, torch.bfloat16)
        assert row is not None
        own, theirs = (
            Counter((p.shape, p.dtype, p.requires_grad) for p in each.parameters())
            for each in (row.model, asked.model)
        )
        assert own == theirs

    def test_a_class_that_diffusers_lacks_says_so(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path / "new", {"_class_name": "NoSuchTransformer"})
        with pytest.raises(InputError, match="has no model NoSuchTransformer"):
            budgetfit.estimate(str(folder), gpu="t4")


def test_optimizers_without_an_option_are_said() -> None:
    model = sample_model(class_name="diffusers.UNet2DConditionModel")

    def said(optimizer: str) -> str:
        estimate = sample_estimate(sample_recipe(optimizer=optimizer))
        return "\n".join(script_lines(sample_plan(model=model, estimate=estimate)))

    assert "no option for adafactor" in said("adafactor")
    assert "no option" not in said("adamw_torch_fused") + said("adamw_bnb_8bit")
