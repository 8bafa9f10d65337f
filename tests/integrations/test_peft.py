import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertForTokenClassification, LlamaConfig, LlamaForCausalLM

import budgetfit
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError, TraceError
from budgetfit.gpus.table import find_gpu
from budgetfit.integrations import optional_imports
from budgetfit.integrations.peft import (
    adapted_meta_copy,
    ensure_adapters,
    loading_code,
    traceable_model,
)
from budgetfit.planning.alternatives.lora_estimate import lora_workload
from budgetfit.planning.alternatives.training_changes import training_changes
from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
from budgetfit.planning.session import PlanningSession, Request
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.integrations.adapters import (
    QUIET,
    adapter,
    base,
    batch,
    config,
    stored,
    trained,
)
from tests.models import EXAMPLES, alone
from tests.traced import ROOMY

peft = pytest.importorskip("peft")
pytestmark = QUIET


def real(**more: Any) -> nn.Module:
    settings = {"r": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(base(), peft.LoraConfig(**{**settings, **more}))


@pytest.mark.parametrize(
    ("planned", "made"),
    [
        ({}, {}),
        ({"lora_r": 4, "lora_dropout": 0.1}, {"r": 4, "lora_dropout": 0.1}),
        (
            {"target_modules": ["q_proj", "v_proj"]},
            {"target_modules": ["q_proj", "v_proj"]},
        ),
    ],
)
def test_names_shapes_dtypes_and_bytes_are_those_of_pefts_own_model(
    planned: dict[str, Any], made: dict[str, Any]
) -> None:
    on_meta, notes = adapted_meta_copy(base("meta"), adapter(**planned))
    model = real(**made)
    assert stored(on_meta) == stored(model)
    assert trained(on_meta) == trained(model)
    assert all(parameter.is_meta for parameter in on_meta.parameters())
    assert notes == ()


def test_llama_8b_trains_the_parameters_that_are_known_of_it() -> None:
    settings = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    big_config = LlamaConfig(num_hidden_layers=32, **settings, **heads)
    with torch.device("meta"):
        big = LlamaForCausalLM(big_config)
    model, _ = adapted_meta_copy(big, adapter(lora_r=16))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 41_943_040


@pytest.mark.parametrize("trains", [False, True])
def test_a_base_loaded_for_evaluation_trains_as_a_whole(*, trains: bool) -> None:
    model = base().train(trains)
    adapted, give_back = ensure_adapters(model, adapter())
    modes = {module.training for module in adapted.modules()}
    assert modes == {trains}
    with Run(adapted, Recipe(batch_size=2)) as run:
        assert all(module.training for module in run.model.modules())
    give_back()
    assert {module.training for module in model.modules()} == {trains}


def test_the_base_is_not_changed_by_planning() -> None:
    model = base()
    before = {n: (p, p.requires_grad) for n, p in model.named_parameters()}
    plan = budgetfit.plan(
        model,
        gpu="t4",
        batch=batch(),
        batch_size=2,
        method="lora",
        checkpointing="none",
    )
    after = {n: (p, p.requires_grad) for n, p in model.named_parameters()}
    assert before.keys() == after.keys()
    assert all(before[name][0] is after[name][0] for name in before)
    assert all(flag for _, flag in after.values())
    # Saved and loaded, the plan still knows what to put on the model.
    assert budgetfit.Plan.from_json(alone(plan).to_json()).adapter == plan.adapter
    assert plan.model.source.endswith("LoRA r=16 on all-linear")


def test_a_loaded_plan_adapts_a_plain_model_trains_it_and_takes_adapters_off() -> None:
    plan = budgetfit.plan(
        config(),
        gpu="rtx-4090",
        max_length=16,
        batch_size=2,
        method="lora",
        checkpointing="full",
    )
    model = base()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    run = budgetfit.apply(budgetfit.Plan.from_json(alone(plan).to_json()), model)
    names = trained(run.model)
    assert names
    assert all("lora_" in name for name in names)
    start = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    for _ in range(2):
        run.step(batch())
    moved = {n for n, p in run.model.named_parameters() if not torch.equal(p, start[n])}
    assert moved == set(names)
    run.undo()
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert after.keys() == before.keys()
    assert all(parameter.requires_grad for parameter in after.values())
    assert not hasattr(model, "peft_config")


def test_a_peft_model_handed_in_is_planned_and_trained_as_it_is() -> None:
    model = real()
    plan = budgetfit.plan(
        model, gpu="rtx-4090", batch=batch(), batch_size=2, checkpointing="none"
    )
    assert plan.adapter is None
    assert plan.model.trainable_count == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    # The frozen base keeps its two bytes a number under autocast.
    stored_bytes = sum(p.nbytes for p in model.parameters())
    assert plan.estimate.at_peak_bytes["parameters"] < 1.1 * stored_bytes
    run = budgetfit.apply(plan)
    assert run.model is model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}


def test_equal_blocks_with_adapters_are_seen_to_be_equal() -> None:
    """peft notes each layer's name in it; a shortened model needs equal ones."""
    model = real()
    noted = [m.kwargs["target_name"] for m in model.modules() if hasattr(m, "lora_A")]
    copied = traceable_model(model)
    assert len(set(noted)) == len(noted) == 21
    assert not any("target_name" in vars(m).get("kwargs", ()) for m in copied.modules())
    kept = [m.kwargs["target_name"] for m in model.modules() if hasattr(m, "lora_A")]
    assert kept == noted


def test_under_autocast_adapters_do_not_copy_their_inputs_to_fp32() -> None:
    model, _ = adapted_meta_copy(base("meta"), adapter())
    workload = Workload(model=model, batch=batch(), gpu=find_gpu("rtx-4090"))
    traces = TraceSession(workload.with_found_blocks())
    mixed = traces.exact(Recipe(batch_size=2, precision="bf16-mixed"))
    as_is = traces.exact(Recipe(batch_size=2, precision="as-is"))
    # As is, the input of each of 21 adapters becomes fp32; 2 x 16 tokens.
    assert len(as_is.fixed_bytes) != len(mixed.fixed_bytes)
    assert torch.is_autocast_enabled() is False


@pytest.mark.parametrize(
    "model",
    [
        base("meta"),
        EXAMPLES["bert"].model(),  # linear layers behind its blocks
        EXAMPLES["vit"].model(),
        BertForTokenClassification(EXAMPLES["bert"].model().config),
        nn.Sequential(  # no model of transformers: its head has an adapter, too
            *(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)),
            nn.Linear(8, 4),
        ),
    ],
    ids=lambda model: type(model).__name__,
)
def test_the_stand_in_of_the_alternatives_row_trains_what_peft_trains(
    model: nn.Module,
) -> None:
    workload = Workload(model=model, batch=batch(), gpu=find_gpu("rtx-4090"))
    twin = lora_workload(workload.with_found_blocks(), None)
    assert twin is not None
    theirs, _ = adapted_meta_copy(model, adapter(lora_r=16))
    shapes = [
        Counter((p.shape, p.dtype, p.requires_grad) for p in each.parameters())
        for each in (twin.model, theirs)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_row_with_lora_says_what_method_lora_says(dtype: torch.dtype) -> None:
    model, card = base("meta").to(dtype), find_gpu("rtx-4090")
    workload = Workload(model=model, batch=batch(), gpu=card).with_found_blocks()
    setting = TrainingSettings(precision="bf16-mixed", optimizer="sgd")
    chain = BlockChain(TraceSession(workload), setting)
    session = PlanningSession(chain, Request(budget=ROOMY))
    changes = {row.label: row for row in training_changes(session)}
    there = changes["with LoRA r=16"].session()
    assert there is not None
    row = there.judge(setting.recipe(2))
    asked = budgetfit.estimate(
        model, row.recipe, method="lora", gpu="rtx-4090", batch=batch()
    )
    assert row.at_peak_bytes == asked.at_peak_bytes
    assert row.step_ms == asked.step_ms


def test_adapters_on_adapters_and_modules_that_are_not_there_are_refused() -> None:
    with pytest.raises(InputError, match="has adapters already"):
        adapted_meta_copy(real(), adapter())
    with pytest.raises(InputError, match="peft cannot adapt the model: Target modules"):
        adapted_meta_copy(base("meta"), adapter(target_modules=["nothing"]))


class Sized(nn.Module):
    """A size of a layer, and one that forward reads, are tensors (Inkling)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(torch.tensor(8, device="cpu"), 4, bias=False)  # type: ignore[arg-type]
        self.rows: torch.Tensor
        self.register_buffer("rows", torch.tensor(2, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).view(int(self.rows), -1).mean()


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_sizes_that_are_tensors_keep_their_values(method: str) -> None:
    with torch.device("meta"):
        model = Sized()
    recipe = Recipe(batch_size=2, precision="fp32")
    asked: dict[str, Any] = {"gpu": "t4", "batch": torch.ones(2, 8), "method": method}
    estimate = budgetfit.estimate(model, recipe, loss=lambda out, _: out, **asked)
    assert estimate.allocated_bytes > 0


class CastsToItsWeight(nn.Module):
    """As the patch embeddings of SigLIP 2 and Ernie 4.5 VL."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(64, 64, bias=False))
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.to(self.embed[0].weight.dtype))
        return self.head(x).mean()


def test_inputs_cast_to_quantised_weights_are_refused_with_what_to_load() -> None:
    with torch.device("meta"):
        model = CastsToItsWeight()
    recipe = Recipe(batch_size=2, precision="bf16-mixed")
    asked: dict[str, Any] = {"gpu": "l4", "batch": torch.ones(2, 64)}
    asked["loss"] = lambda out, _: out
    wanted = r"BitsAndBytesConfig\(\.\.\., llm_int8_skip_modules=\[\"embed.0\"\]\)"
    with pytest.raises(TraceError, match=wanted):
        budgetfit.estimate(model, recipe, method="qlora", **asked)
    assert budgetfit.estimate(model, recipe, method="lora", **asked)


def test_one_name_of_several_that_matches_nothing_is_refused() -> None:
    names = ["self_attn.q_proj", "v_porj"]
    with pytest.raises(InputError, match="is called v_porj, and only self_"):
        adapted_meta_copy(base("meta"), adapter(target_modules=names))
    # As peft does: ends of names, whole paths and patterns.
    some = next(name for name, _ in base("meta").named_modules() if "q_proj" in name)
    for given in (
        ["self_attn.q_proj", "v_proj"],
        [some, "v_proj"],
        r".*(q|nothing)_proj",
    ):
        adapted_meta_copy(base("meta"), adapter(target_modules=given))


def test_a_model_with_adapters_is_trained_without_more_of_them() -> None:
    model = real()
    found, give_back = ensure_adapters(model, adapter())
    give_back()
    assert found is model


def test_a_quantised_plan_says_how_to_load_the_model() -> None:
    wanted = adapter("qlora")
    with pytest.raises(InputError) as refused:
        ensure_adapters(base(), wanted)
    assert "this model is not quantised" in str(refused.value)
    assert loading_code(wanted) in str(refused.value)
    assert "bnb_4bit_use_double_quant=True" in loading_code(wanted)
    compile(loading_code(wanted), "code", "exec")
    compile(loading_code(adapter("lora", quantization="int8")), "code", "exec")
    compile(loading_code(adapter()), "code", "exec")


def test_without_peft_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ImportError

    model = copy.deepcopy(base("meta"))
    monkeypatch.setattr(optional_imports, "import_module", missing)
    with pytest.raises(InputError, match="pip install peft"):
        adapted_meta_copy(model, adapter())


def test_an_estimate_of_given_settings_takes_adapters_too() -> None:
    found = budgetfit.estimate(
        config(), Recipe(batch_size=2), gpu="rtx-4090", max_length=16, method="lora"
    )
    whole = budgetfit.estimate(
        config(), Recipe(batch_size=2), gpu="rtx-4090", max_length=16
    )
    assert (
        found.at_peak_bytes["optimizer_state"] < whole.at_peak_bytes["optimizer_state"]
    )
