"""The printed lines load a model with its adapters as it was planned."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from budgetfit.core.adapter import Adapter
from budgetfit.core.plan import Plan
from budgetfit.integrations.peft import adapted_meta_copy, attach_adapters, loading_code
from budgetfit.integrations.source_code.model_loading import (
    load_model_text,
    lora_config,
    quantization_config,
    weights_of,
)
from budgetfit.integrations.source_code.python_source import import_block
from tests.integrations.adapters import CONFIG, QUIET, adapter, base, stored, trained
from tests.integrations.tiny_training import defined_by
from tests.reporting.sample_plans import (
    sample_estimate,
    sample_model,
    sample_plan,
    sample_recipe,
)

peft = pytest.importorskip("peft")


ADAPTERS = [
    adapter("lora"),
    adapter("lora", lora_r=4, lora_alpha=9, lora_dropout=0.125),
    adapter("lora", target_modules=["q_proj", "v_proj"]),
    adapter("lora", target_modules=r".*\.(up|down)_proj"),
    adapter("lora", quantization="int8", prepare_for_kbit=False),
    adapter("qlora", double_quantization=False, compute_dtype="fp16"),
    adapter("qlora", prepare_for_kbit=False),
]


def plan_of(
    text: str | None,
    found: Adapter | None = None,
    precision: str = "bf16-mixed",
    class_name: str = "LlamaForCausalLM",
) -> Plan:
    return sample_plan(
        adapter=found,
        model=sample_model(class_name=class_name),
        estimate=sample_estimate(sample_recipe(precision=precision)),
        provenance={"asked": {"model": text}},
    )


def source_of(plan: Plan) -> str:
    found = load_model_text(plan)
    imports = import_block(found.modules, found.names)
    return f"{imports}\n{found.constants}\n\n{found.code}"


@pytest.mark.parametrize("wanted", ADAPTERS, ids=lambda each: each.describe())
def test_the_printed_lora_config_is_what_was_planned(wanted: Adapter) -> None:
    found = eval(lora_config(wanted, "LlamaForCausalLM"), vars(peft))
    assert (found.r, found.lora_alpha) == (wanted.r, wanted.alpha)
    assert found.lora_dropout == wanted.dropout
    assert found.task_type == "CAUSAL_LM"
    targets = wanted.target_modules
    if isinstance(targets, tuple):
        assert set(found.target_modules) == set(targets)
    else:
        assert found.target_modules == targets


@pytest.mark.parametrize("wanted", ADAPTERS, ids=lambda each: each.describe())
def test_the_printed_quantisation_is_what_was_planned(wanted: Adapter) -> None:
    text = quantization_config(wanted)
    if wanted.quantization is None:
        assert text == ""
        return
    names = {"BitsAndBytesConfig": transformers.BitsAndBytesConfig, "torch": torch}
    found = eval(text, names)
    four = wanted.quantization == "nf4"
    assert (found.load_in_4bit, found.load_in_8bit) == (four, not four)
    if four:
        assert found.bnb_4bit_quant_type == "nf4"
        assert found.bnb_4bit_use_double_quant is wanted.double_quantization
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[wanted.compute_dtype]
        assert found.bnb_4bit_compute_dtype == dtype


@QUIET
@pytest.mark.parametrize("wanted", ADAPTERS[:4], ids=lambda each: each.describe())
def test_the_printed_function_loads_and_adapts_a_model(
    wanted: Adapter, tmp_path: Path
) -> None:
    base().save_pretrained(tmp_path)
    config = peft.LoraConfig(
        r=wanted.r, target_modules=_list(wanted), task_type="CAUSAL_LM"
    )
    expected = trained(peft.get_peft_model(base(), config))
    model = defined_by(source_of(plan_of(str(tmp_path), wanted)))["load_model"]()
    assert trained(model) == expected
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}  # as the config says


@QUIET
@pytest.mark.parametrize("wanted", ADAPTERS[5:], ids=lambda each: each.describe())
def test_the_printed_function_quantises_as_planned(
    wanted: Adapter, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    base().save_pretrained(tmp_path)
    expected = attach_adapters(base(), wanted)
    model = defined_by(source_of(plan_of(str(tmp_path), wanted)))["load_model"]()
    assert trained(model) == trained(expected)
    assert stored(model) == stored(expected)


@QUIET
@pytest.mark.parametrize("wanted", [adapter("lora"), *ADAPTERS[5:7]], ids=str)
@pytest.mark.parametrize(
    ("class_name", "heads"),
    [
        ("RobertaForSequenceClassification", {"classifier"}),  # of two layers
        ("DistilBertForSequenceClassification", {"classifier", "pre_classifier"}),
        ("BertForTokenClassification", {"classifier"}),
        ("BertForQuestionAnswering", {"qa_outputs"}),
        ("LlamaForTokenClassification", {"score"}),
    ],
)
def test_heads_are_trained_as_a_whole_and_not_quantised(
    class_name: str, heads: set[str], wanted: Adapter, tmp_path: Path
) -> None:
    if wanted.quantization is not None:
        pytest.importorskip("bitsandbytes")
    model_class = getattr(transformers, class_name)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    config = model_class.config_class(
        num_hidden_layers=1, num_attention_heads=2, **sizes
    )
    model = model_class._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    on_meta, _ = adapted_meta_copy(model.to("meta"), wanted)
    names = [name for name, item in on_meta.named_parameters() if item.requires_grad]
    whole = {name.split(".")[2] for name in names if "lora_" not in name}
    assert whole == heads
    assert not any(name.split(".")[2] in heads for name in names if "lora_" in name)
    plan = plan_of(str(tmp_path), wanted, class_name=class_name)
    loaded = defined_by(source_of(plan))["load_model"]()
    assert trained(loaded) == trained(on_meta)
    quantised = [
        name
        for name, each in loaded.named_modules()
        if type(each).__module__.startswith("bitsandbytes")
    ]
    assert bool(quantised) == (wanted.quantization is not None)
    assert not any(head in name for name in quantised for head in heads)


def _list(wanted: Adapter) -> str | list[str]:
    targets = wanted.target_modules
    return targets if isinstance(targets, str) else list(targets)


@QUIET
@pytest.mark.parametrize(
    ("precision", "found", "dtypes"),
    [
        ("bf16-mixed", None, {torch.float32}),
        ("fp16-mixed", None, {torch.float32}),
        ("tf32", None, {torch.float32}),
        ("bf16", None, {torch.bfloat16}),
        ("as-is", None, {torch.bfloat16}),
        ("bf16-mixed", adapter("lora"), {torch.float32}),
        ("bf16", adapter("lora"), {torch.bfloat16}),
    ],
)
def test_what_is_trained_is_loaded_in_the_planned_dtype(
    precision: str, found: Adapter | None, dtypes: set[torch.dtype], tmp_path: Path
) -> None:
    base().save_pretrained(tmp_path)
    model = defined_by(source_of(plan_of(str(tmp_path), found, precision)))[
        "load_model"
    ]()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == dtypes


@pytest.mark.parametrize("wanted", ADAPTERS, ids=lambda each: each.describe())
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16", "as-is"])
@pytest.mark.parametrize("text", ["org/name", None, "models.py:build"])
def test_every_printed_function_is_python(
    wanted: Adapter, precision: str, text: str | None
) -> None:
    source = source_of(plan_of(text, wanted, precision))
    compile(source, "loading.py", "exec")
    assert "get_peft_model(" in source
    assert max(map(len, source.splitlines())) <= 88
    prepared = "prepare_model_for_kbit_training(" in source
    assert prepared == wanted.prepared


def test_where_weights_come_from(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert weights_of(plan_of("org/name")) == "org/name"
    assert weights_of(plan_of(str(tmp_path))) == str(tmp_path)
    assert weights_of(plan_of(str(config))) == str(tmp_path)
    assert weights_of(plan_of(None)).startswith("REPLACE by the hub id or folder of")
    names = defined_by(source_of(plan_of("org/name")))
    assert names["MODEL"] == "org/name"


def test_a_factory_is_called(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import torch\n\ndef build():\n    return torch.nn.Linear(2, 2)\n")
    plan = plan_of(f"{file}:build", precision="bf16")
    model = defined_by(source_of(plan))["load_model"]()
    assert isinstance(model, nn.Linear)
    assert model.weight.dtype == torch.bfloat16


def test_a_model_that_nobody_can_name_is_left_to_fill_in() -> None:
    plan = plan_of(None)
    plan = replace(plan, model=replace(plan.model, class_name=""))
    with pytest.raises(SystemExit, match=r"Fill in build_model\(\): return SmolLM2"):
        defined_by(source_of(plan))["load_model"]()


def test_a_name_writes_no_code() -> None:
    """A plan file is data, whoever wrote it."""
    odd = "x\n\"); raise SystemExit('ran') #"
    plan = plan_of(odd)
    for model in (
        replace(plan.model, name=odd),
        replace(plan.model, name=odd, class_name=odd),
    ):
        defined_by(source_of(replace(plan, model=model)))


@QUIET
def test_the_lines_of_an_error_do_what_they_say(tmp_path: Path) -> None:
    """The same lines as the exports', for a script at its top level."""
    base().save_pretrained(tmp_path)
    names: dict[str, Any] = {
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "name": str(tmp_path),
    }
    exec(loading_code(adapter("lora", lora_r=4)), names)
    assert len(trained(names["model"])) == 2 * 7 * CONFIG["num_hidden_layers"]
