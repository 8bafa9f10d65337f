import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from budgetfit.errors import InputError
from budgetfit.example_batches.make_batch import make_batch
from budgetfit.integrations.model_sources.model_source import resolve_model

FIELDS = {
    "architecture": "resnet10t",
    "num_classes": 7,
    "model_args": {"in_chans": 1},
    "pretrained_cfg": {"input_size": [1, 96, 96]},
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(FIELDS))
    return str(file)


def test_a_timm_config_builds_its_architecture_without_pretrained_weights(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def create_model(name: str, **options: object) -> nn.Module:
        asked.append((name, dict(options)))
        device, dtype = options["device"], options["dtype"]
        model = nn.Conv2d(1, 2, 3, device=device, dtype=dtype)
        model.pretrained_cfg = options["pretrained_cfg"]
        return model

    library = SimpleNamespace(create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", library)
    resolved = resolve_model(config)
    assert asked[0] == (
        "resnet10t",
        {
            "pretrained": False,
            "pretrained_cfg": {"input_size": [1, 96, 96]},
            "num_classes": 7,
            "in_chans": 1,
            "device": "meta",
            "dtype": None,
        },
    )
    assert resolved.model.weight.is_meta
    assert make_batch(resolved.model).batch.shape == (2, 1, 96, 96)
    assert resolved.materialize is not None
    assert resolved.materialize("cpu", torch.float16).weight.dtype is torch.float16


def test_without_timm_its_config_is_refused_with_the_command_to_install_it(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        InputError, match=r"resnet10t is a timm model.*pip install timm"
    ):
        resolve_model(config)
