from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from budgetfit.errors import InputError
from budgetfit.integrations.model_sources.model_source import resolve_model
from tests.processes import python

GPT2 = Path(__file__).parents[2] / "examples" / "configs" / "gpt2"


def test_a_module_is_handed_through_untouched() -> None:
    model = nn.Linear(4, 2).eval()
    resolved = resolve_model(model)
    assert resolved.model is model
    assert not model.training
    assert resolved.name == "Linear"
    assert resolved.source == "the given module"
    assert resolved.materialize is None


def test_a_module_on_meta_is_said_to_be() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    assert resolve_model(model).source == "the given module, on meta"


def test_a_loaded_model_is_called_what_it_was_loaded_from() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32)
    config.name_or_path = "openai-community/gpt2"
    assert resolve_model(transformers.GPT2LMHeadModel(config)).name == "gpt2"


def test_a_config_a_folder_and_a_path_object_are_built_on_meta() -> None:
    config = transformers.GPT2Config(n_layer=1, architectures=["GPT2LMHeadModel"])
    for model in (config, str(GPT2), GPT2, f"  {GPT2}  "):
        resolved = resolve_model(model)
        assert isinstance(resolved.model, transformers.GPT2LMHeadModel)
        assert all(p.is_meta for p in resolved.model.parameters())
        assert resolved.materialize is not None


def test_a_factory_is_called() -> None:
    assert isinstance(resolve_model("torch.nn:Identity").model, nn.Identity)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (nn.Linear, r"the class Linear \(make one: Linear"),
        (
            transformers.AutoModelForCausalLM,
            r"the class AutoModelForCausalLM \(make one: AutoModel.*from_pretrained",
        ),
        (lambda: nn.Linear(1, 1), r"the function <lambda> \(call it\)"),
        (3, "a int"),
        ("", "empty text"),
        (None, "a NoneType"),
    ],
)
def test_anything_else_is_refused_with_the_right_forms(model: Any, what: str) -> None:
    with pytest.raises(InputError, match=f"not {what}.*package.module:build"):
        resolve_model(model)


def test_a_plain_module_does_not_import_transformers() -> None:
    code = (
        "import sys, torch\n"
        "from budgetfit.integrations.model_sources.model_source import resolve_model\n"
        "from budgetfit.example_batches.make_batch import make_batch\n"
        "make_batch(resolve_model(torch.nn.Linear(2, 2)).model)\n"
        "assert 'transformers' not in sys.modules\n"
    )
    python("-c", code, check=True)


@pytest.mark.parametrize("text", ["x" * 10_000, "x" * 300 + ".py:build"])
def test_a_text_that_no_file_can_have_as_its_name_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="names no model"):
        resolve_model(text)
