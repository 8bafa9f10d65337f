"""Exported scripts are run: they train as a plain loop and recompute as planned."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from budgetfit.applying.optimizers import bitsandbytes, cpu_offload, torchao
from budgetfit.applying.optimizers.factory import OPTIMIZER_NAMES, make_optimizer
from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.integrations.model_sources.model_source import resolve_model
from budgetfit.integrations.source_code.plain_torch import torch_script
from budgetfit.integrations.source_code.plain_torch_loop import loss_parts
from budgetfit.integrations.source_code.plain_torch_templates import Part
from tests.cli.real_cli import CONFIG
from tests.counted_ops import CountedOps
from tests.integrations.tiny_training import PRODUCTS, defined_by
from tests.processes import python
from tests.reporting.sample_plans import (
    sample_estimate,
    sample_model,
    sample_plan,
    sample_recipe,
)

GPT2 = CONFIG | {"n_layer": 4}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "num_layers": 2,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "vocab_size": 64,
    "decoder_start_token_id": 0,
}
BLOCKS = {
    "gpt2": [f"transformer.h.{number}" for number in range(4)],
    "llama": [f"model.layers.{number}" for number in range(4)],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
}
IDS = ((2, 8), "int64")
TEXT_BATCH = {"input_ids": IDS, "labels": IDS}


def tiny_plan(
    config: dict[str, Any],
    folder: Path,
    *groups: tuple[int, ...],
    precision: str = "fp32",
    optimizer: str = "adamw_torch",
    segments: tuple[Segment, ...] = (),
    loss_chunks: int = 1,
    compile: str = "none",  # noqa: A002 - as in a recipe
) -> Plan:
    """Four blocks; 2 micro-batches of 3 samples; ``groups`` number the segments."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    blocks = BLOCKS[config["model_type"]]
    recipe = sample_recipe(
        batch_size=3,
        gradient_accumulation_steps=2,
        precision=precision,
        optimizer=optimizer,
        segments=segments
        or tuple(
            Segment(tuple(blocks[number] for number in group)) for group in groups
        ),
        loss_chunks=loss_chunks,
        compile=compile,
    )
    model = sample_model(batch=TEXT_BATCH, blocks=tuple(blocks))
    return plan_of(str(path), model=model, estimate=sample_estimate(recipe))


def plan_of(text: str | None, **values: Any) -> Plan:
    """A plan that was made from this text, and saved."""
    return sample_plan(provenance={"asked": {"model": text}}, **values)


def opened(plan: Plan) -> SimpleNamespace:
    """The script's functions, in a module of their own."""
    return SimpleNamespace(**defined_by(torch_script(plan)))


def plain_losses(script: SimpleNamespace, autocast: torch.dtype | None) -> list[float]:
    """Train two steps without any checkpointing: what the script must equal."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[script.CONFIG["model_type"]]
    kind = getattr(transformers, script.CONFIG["architectures"][0])
    model = kind(config.from_dict(script.CONFIG)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    data = script.batches(model)
    losses = []
    for _ in range(2):
        total = 0.0
        for _ in range(2):
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = model(**next(data)).loss / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


RUN = ("--steps", "2", "--device", "cpu")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_has_the_planned_blocks_in_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda forward, **_: compiled(forward, backend=note)
    )
    kept = opened(tiny_plan(LLAMA, tmp_path, compile="model"))
    assert kept.main(RUN) == pytest.approx(plain_losses(kept, None), rel=1e-5)
    assert graphs
    torch._dynamo.reset()
    graphs.clear()
    opened(tiny_plan(LLAMA, tmp_path, (0,), (2,), compile="model")).main(RUN)
    tags = [
        node
        for graph in graphs[:1]
        for node in graph.graph.nodes
        if "checkpoint" in str(node.target)
    ]
    assert len(tags) == 2


LAYERS = BLOCKS["llama"]
COMPILED_SEGMENTS = {
    "kept": (),
    "single and long": (Segment((LAYERS[0],)), Segment((LAYERS[1], LAYERS[2]))),
    "nested": (Segment((LAYERS[0], LAYERS[1]), nested=True),),
    "selective": (
        Segment((LAYERS[0],)),
        Segment((LAYERS[2],), mode="selective", saved_ops=PRODUCTS),
    ),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", COMPILED_SEGMENTS)
def test_compiled_blocks_train_as_a_plain_loop_and_are_recomputed_as_planned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    compiled = torch.compile

    def compiled_and_counted(
        forward: Callable[..., Any], **options: object
    ) -> Callable[..., Any]:
        assert options == {"dynamic": False, "options": {"shape_padding": False}}
        fast = compiled(forward, dynamic=False, backend="aot_eager")

        def counted(*args: object, **kwargs: object) -> object:
            calls.append("")
            return fast(*args, **kwargs)

        return counted

    monkeypatch.setattr(torch, "compile", compiled_and_counted)
    segments = COMPILED_SEGMENTS[name]
    plan = tiny_plan(LLAMA, tmp_path, segments=segments, compile="blocks")
    script = opened(plan)
    with torch._dynamo.config.patch(recompile_limit=8):
        assert script.main(RUN) == pytest.approx(plain_losses(script, None), rel=1e-5)
    # 2 steps of 2 micro-batches. The last block of a nested segment runs twice, not
    # three times; one under selective checkpointing is not compiled.
    expected = {"kept": 4, "single and long": 7, "nested": 7, "selective": 4}
    assert len(calls) == 4 * expected[name]
    torch._dynamo.reset()


def counted(script: SimpleNamespace, names: list[str]) -> dict[str, int]:
    """Count how often each block really computes in one step of the script."""
    counts = dict.fromkeys(names, 0)
    build: Callable[[], torch.nn.Module] = script.build_model

    def build_counting() -> torch.nn.Module:
        model = build()
        for name in names:
            # A layer inside the block: hooks of the block itself stay outside of
            # transformers' own checkpoint.
            inside = model.get_submodule(name).modules()
            inner = next(each for each in inside if not list(each.children()))

            def count(*_: object, name: str = name) -> None:
                counts[name] += 1

            inner.register_forward_pre_hook(count)
        return model

    script.main.__globals__["build_model"] = build_counting
    script.main(("--steps", "1", "--device", "cpu"))
    return counts


def segments_of(config: dict[str, Any], kind: str) -> tuple[Segment, ...]:
    """Return what is done with the four blocks of a model."""
    first, second, third, fourth = BLOCKS[config["model_type"]]
    return {
        "kept": (),
        "single": (Segment((first,)), Segment((second,))),
        "long": (Segment((first, second)), Segment((third, fourth))),
        "long and single": (Segment((first, second)), Segment((fourth,))),
        "nested and selective": (
            Segment((first, second), nested=True),
            Segment((third,), mode="selective", saved_ops=PRODUCTS),
            Segment((fourth,), mode="selective", saved_ops=PRODUCTS[:1]),
        ),
    }[kind]


# How often blocks run in a micro-batch. The last block of a nested segment runs twice,
# not three times.
RUNS = {
    "kept": [1, 1, 1, 1],
    "single": [2, 2, 1, 1],
    "long": [2, 2, 2, 2],
    "long and single": [2, 2, 1, 2],
    "nested and selective": [3, 2, 2, 2],
}


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("config", [GPT2, LLAMA, T5], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("kind", RUNS)
def test_the_script_trains_exactly_as_a_plain_loop_and_recomputes_as_planned(
    config: dict[str, Any], kind: str, precision: str, tmp_path: Path
) -> None:
    segments = segments_of(config, kind)
    script = opened(tiny_plan(config, tmp_path, segments=segments, precision=precision))
    expected = plain_losses(script, None if precision == "fp32" else torch.bfloat16)
    assert script.main(RUN) == pytest.approx(expected, rel=1e-6)
    counts = counted(script, BLOCKS[config["model_type"]])
    assert list(counts.values()) == [2 * each for each in RUNS[kind]]  # micro-batches


def test_what_a_selective_block_saves_is_not_run_again(tmp_path: Path) -> None:
    counts = []
    block = (BLOCKS["gpt2"][0],)
    for segments in (
        (),
        (Segment(block, mode="selective", saved_ops=PRODUCTS),),
        (Segment(block, mode="selective", saved_ops=("aten.addmm.default:1",)),),
        (Segment(block),),
    ):
        script = opened(tiny_plan(GPT2, tmp_path, segments=segments))
        with CountedOps() as ops:
            script.main(("--steps", "1", "--device", "cpu"))
        counts.append(ops.products)
    kept, all_saved, one_saved, recomputed = counts
    # 2 micro-batches; a block calls addmm four times, dropout behind the last one, and
    # bmm twice.
    assert kept == all_saved
    assert recomputed == kept + 2 * 6
    assert one_saved == kept + 2 * 5


def test_draws_after_a_saved_one_are_saved_too(tmp_path: Path) -> None:
    segment = Segment(
        (BLOCKS["gpt2"][0],), mode="selective", saved_ops=("aten.rand_like.default:0",)
    )
    script = opened(tiny_plan(GPT2, tmp_path, segments=(segment,)))

    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(x * self.scale) * torch.rand_like(x)
            return x

    gradients = []
    for applied in (False, True):
        block = Noisy()
        if applied:
            calls = frozenset(segment.saved_ops)
            script.recompute_block(
                block, context_fn=lambda calls=calls: script.selective_contexts(calls)
            )
        torch.manual_seed(0)
        block(x=torch.ones(8)).sum().backward()
        gradients.append(block.scale.grad)
    assert torch.equal(gradients[0], gradients[1])


def test_tensors_behind_keywords_reach_checkpoint_by_position(tmp_path: Path) -> None:
    # It keeps the generators of the devices that it sees there, and of no others.
    script = opened(tiny_plan(GPT2, tmp_path, (0,)))
    seen = []

    def spy(function: Callable[..., Any], *args: object, **_: object) -> object:
        seen.append([type(item) for item in args])
        return function(*args)

    script.recompute_block.__globals__["checkpoint"] = spy
    block = torch.nn.Bilinear(2, 2, 2)
    script.recompute_block(block)
    x = torch.ones(2)
    assert torch.equal(block(x, input2=x), torch.nn.Bilinear.forward(block, x, x))
    assert seen == [[torch.Tensor, torch.Tensor]]


@pytest.mark.parametrize("config", [LLAMA, T5], ids=["llama", "t5"])
def test_a_scripts_model_generates_in_training_mode(
    config: dict[str, Any], tmp_path: Path
) -> None:
    script = opened(tiny_plan(config, tmp_path, (2,), (3,)))
    torch.manual_seed(0)
    model: Any = script.build_model().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)

    def generated() -> list[int]:
        torch.manual_seed(1)  # of the dropout
        ids = torch.arange(1, 7)[None]
        made = model.generate(
            ids, max_new_tokens=5, do_sample=False, pad_token_id=0, use_cache=True
        )
        return made[0].tolist()

    plain = generated()
    script.recompute(model)
    assert generated() == plain


def loss_names(batch: dict[str, Any], planned: Part | None = None) -> dict[str, Any]:
    """Return what a script's source of the loss defines."""
    names: dict[str, Any] = {"torch": torch}
    for part in loss_parts(batch, planned, own=False):
        exec("\n".join([*part.imports, part.code]), names)
    return names


def test_a_model_without_a_loss_is_not_trained_on_a_mean() -> None:
    names = loss_names({"x": ((2, 3), "float32")})
    with pytest.raises(SystemExit, match=r"REPLACE loss_of\(\) by your own loss"):
        names["loss_of"](torch.nn.Linear(3, 3), {"input": torch.ones(2, 3)})
    one = names["loss_of"](torch.nn.Linear(3, 1), {"input": torch.ones(1, 3)})
    assert one.numel() == 1


def test_a_loss_that_was_named_is_called_with_outputs_and_targets() -> None:
    part = Part("importlib.import_module('torch').nn.functional.mse_loss")
    batch = {"0": ((2, 3), "float32"), "1": ((2, 3), "float32")}
    names = loss_names(batch, part)
    names["planned_loss"] = lambda: lambda outputs, given: outputs.sum() + given[1]
    model = torch.nn.Linear(3, 3)
    x = torch.ones(2, 3)
    got = names["loss_of"](model, {"0": x, "1": torch.tensor(5.0)})
    assert torch.equal(got, model(x).sum() + 5)


@pytest.mark.parametrize("planned", [None, Part("None")], ids=["found", "planned"])
def test_a_model_of_one_dataclass_is_not_called_with_its_parts(
    planned: Part | None,
) -> None:
    names = loss_names({"x": ((2, 3), "float32"), "y": ((2,), "int64")}, planned)
    with pytest.raises(SystemExit, match=r"REPLACE batches.* the model takes other"):
        names["loss_of"](torch.nn.Linear(3, 3), {"x": torch.ones(2, 3), "y": None})


def test_what_waits_in_host_memory_is_not_exported(tmp_path: Path) -> None:
    blocks = BLOCKS["gpt2"]
    segments = (
        Segment((blocks[0],), mode="offload"),
        Segment(tuple(blocks[1:3]), input_on_host=True),
    )
    message = (
        r"cannot be exported for: transformer\.h\.0 \(offload\); transformer\.h\.1 to "
        r"transformer\.h\.2 \(input_on_host\); the loss in 4 chunks\. Train with "
        r"budgetfit\.apply"
    )
    with pytest.raises(InputError, match=message):
        torch_script(tiny_plan(GPT2, tmp_path, segments=segments, loss_chunks=4))


def test_a_segment_keeps_only_its_first_input(tmp_path: Path) -> None:
    script = opened(tiny_plan(LLAMA, tmp_path, (0, 1)))
    model = script.build_model().train()
    script.recompute(model)
    saved = []

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    ids = torch.randint(64, (3, 8))
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        model.model(input_ids=ids)
    everything = len(saved)
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        script.build_model().train().model(input_ids=ids)

    # inner hooks hold what is inside the segment: half of the four blocks
    assert everything < 0.6 * len(saved)


def test_fp16_scales_the_loss_and_unscales_before_clipping(tmp_path: Path) -> None:
    plan = tiny_plan(GPT2, tmp_path, (0,), precision="fp16-mixed")
    source = torch_script(plan)
    assert source.index("scaler.unscale_") < source.index("clip_grad_norm_")
    assert source.index("clip_grad_norm_") < source.index("scaler.step(")
    losses = opened(plan).main(RUN)
    assert all(2 < loss < 6 for loss in losses)  # around ln(64) = 4.16


def test_pure_bf16_casts_the_weights_once(tmp_path: Path) -> None:
    plan = tiny_plan(LLAMA, tmp_path, (0, 1), precision="bf16")
    assert "autocast(device.type" not in torch_script(plan)
    assert all(2 < loss < 6 for loss in opened(plan).main(RUN))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "as-is"])
def test_other_precisions_have_neither_autocast_nor_scaler(
    precision: str, tmp_path: Path
) -> None:
    source = torch_script(tiny_plan(GPT2, tmp_path, precision=precision))
    assert "torch.autocast(" not in source
    assert (
        "scaler"
        not in source.split("def main")[1].replace("model, optimizer", "")[600:]
    )
    assert ('set_float32_matmul_precision("high")' in source) == (precision == "tf32")


def test_training_continues_from_what_was_saved(tmp_path: Path) -> None:
    script = opened(tiny_plan(GPT2, tmp_path, (0,), precision="fp16-mixed"))
    path = str(tmp_path / "state.pt")
    script.main((*RUN, "--save", path))
    state = torch.load(path, weights_only=True)
    resumed = script.main((*RUN, "--resume", path))
    assert set(state) == {"model", "optimizer", "scaler"}
    assert state["scaler"]["scale"] > 0
    assert len(resumed) == 2


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_every_optimizer_is_the_one_that_apply_builds(
    name: str, tmp_path: Path
) -> None:
    if name in bitsandbytes.SPECS:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    if name in torchao.SPECS:
        pytest.importorskip("torchao", reason="torchao is not installed")
    if name == cpu_offload.NAME:
        pytest.skip("it needs a card")
    if name.startswith("schedule_free"):
        pytest.skip("left to fill in: it must be told when to train")
    script = opened(tiny_plan(GPT2, tmp_path, optimizer=name))
    parameters = [torch.nn.Parameter(torch.zeros(4, 4))]

    made = script.make_optimizer(parameters, 5e-5)
    applied = make_optimizer(name, parameters, device_type="cpu")

    assert type(made) is type(applied)
    assert made.defaults == applied.defaults


def test_a_callable_optimizer_is_imported_by_its_name(tmp_path: Path) -> None:
    script = opened(tiny_plan(GPT2, tmp_path, optimizer="torch.optim.adam.Adam"))
    made = script.make_optimizer([torch.nn.Parameter(torch.zeros(4))], 0.1)
    assert type(made) is torch.optim.Adam


def test_a_live_transformers_model_is_built_from_its_config(tmp_path: Path) -> None:
    config = transformers.GPT2Config(**GPT2, attn_implementation="eager")
    live = transformers.GPT2LMHeadModel(config)
    plan = tiny_plan(GPT2, tmp_path)
    plan = sample_plan(
        estimate=plan.estimate,
        model=sample_model(batch=TEXT_BATCH),
        source=SimpleNamespace(model=live),
    )
    made = opened(plan).build_model()
    assert type(made) is transformers.GPT2LMHeadModel
    assert made.config.n_embd == 32
    assert made.config._attn_implementation == "eager"


def test_infinite_numbers_of_a_config_are_written_as_such() -> None:
    config = transformers.Mamba2Config(
        num_hidden_layers=1, hidden_size=32, num_heads=2, head_dim=32, vocab_size=64
    )
    live = transformers.Mamba2ForCausalLM(config)
    made = opened(sample_plan(source=SimpleNamespace(model=live))).build_model()
    assert tuple(made.config.time_step_limit) == (0.0, math.inf)


def test_a_model_from_a_file_is_built_by_its_function(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n\n\nclass Net(torch.nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).mean()\n\n\ndef make():\n"
        "    return Net(*(torch.nn.Linear(4, 4) for _ in range(3)))\n"
    )
    recipe = sample_recipe(
        batch_size=2,
        precision="fp32",
        gradient_accumulation_steps=1,
        segments=(Segment(("0",)), Segment(("1", "2"))),
    )
    plan = plan_of(
        f"{path}:make",
        estimate=sample_estimate(recipe),
        model=sample_model(blocks=("0", "1", "2"), batch={"0": ((5, 4), "float32")}),
    )

    losses = opened(plan).main(RUN)

    assert len(losses) == 2
    assert not any(map(math.isnan, losses))


def test_a_model_from_a_package_is_imported() -> None:
    script = opened(plan_of("torch.nn:modules.Identity"))
    assert isinstance(script.build_model(), torch.nn.Identity)


def test_weights_of_a_hub_id_are_loaded_only_on_request() -> None:
    plan = plan_of("org/model-1.0")
    named = replace(plan.model, class_name="LlamaForCausalLM")
    source = torch_script(replace(plan, model=named))
    assert "kind = transformers.LlamaForCausalLM\n" in source
    assert 'MODEL = "org/model-1.0"' in source
    assert '"--pretrained", action="store_true", help="not random weights"' in source
    assert "build_model(pretrained=options.pretrained)" in source
    compile(source, "train.py", "exec")


FILL_IN: dict[str, tuple[Callable[[Path], Plan], str]] = {
    "optimizer": (
        lambda folder: tiny_plan(GPT2, folder, optimizer="__main__.<lambda>"),
        r"Fill in make_optimizer.*<lambda>",
    ),
    "hub id of no known class": (
        lambda _: plan_of("org/model-1.0", model=sample_model(class_name="")),
        "Fill in build_model",
    ),
    "hub id of another library": (
        lambda _: plan_of(
            "org/model-1.0",
            model=sample_model(class_name="diffusers.UNet2DConditionModel"),
        ),
        "Fill in build_model",
    ),
    "model from memory": (
        lambda _: plan_of(None),
        r"Fill in build_model.*1711376384 param",
    ),
}


@pytest.mark.parametrize(("make", "said"), FILL_IN.values(), ids=FILL_IN)
def test_what_a_script_cannot_know_is_left_to_fill_in(
    make: Callable[[Path], Plan], said: str, tmp_path: Path
) -> None:
    script = opened(make(tmp_path))
    with pytest.raises(SystemExit, match=said):
        script.main(RUN)


def test_names_cannot_break_the_script() -> None:
    name = 'a"""b\\N{x}\n\'c'
    plan = sample_plan(model=sample_model(name=name))
    script = opened(plan)
    with pytest.raises(SystemExit, match="with 1711376384 parameters"):
        script.build_model()


def test_masks_and_class_labels_have_values_that_a_model_takes(tmp_path: Path) -> None:
    plan = tiny_plan(GPT2, tmp_path)
    batch = {
        "input_ids": ((4, 8), "int64"),
        "attention_mask": ((4, 8), "torch.int64"),
        "token_type_ids": ((4, 8), "int64"),
        "labels": ((4,), "int64"),
        "scale": ((1,), "float32"),
    }
    plan = sample_plan(estimate=plan.estimate, model=sample_model(batch=batch))
    config = SimpleNamespace(vocab_size=50, num_labels=3, text_config=None)
    model: Any = torch.nn.Embedding(40, 2)
    model.config = config

    made = next(opened(plan).batches(model))

    # samples: 4 rows became BATCH_SIZE = 3; the tensor without them stays
    assert [tuple(tensor.shape) for tensor in made.values()] == [
        (3, 8),
        (3, 8),
        (3, 8),
        (3,),
        (1,),
    ]
    assert made["input_ids"].max() < 40  # the smaller of config and embedding
    assert made["attention_mask"].eq(1).all()
    assert made["token_type_ids"].eq(0).all()
    assert made["labels"].max() < 3

    # Classes of each position look like the next tokens of a language model.
    batch = dict.fromkeys(("input_ids", "labels"), ((4, 8), "int64"))
    for class_name, classes in (
        ("BertForTokenClassification", True),
        ("SegformerForSemanticSegmentation", True),
        ("GPT2LMHeadModel", False),
    ):
        named = sample_model(batch=batch, class_name=class_name)
        loop = opened(sample_plan(estimate=plan.estimate, model=named))
        made = next(loop.batches(model))
        assert (made["labels"].max() < 3) == classes
        assert torch.equal(made["labels"], made["input_ids"]) != classes


def test_it_runs_alone_and_prints_its_losses(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(torch_script(tiny_plan(LLAMA, tmp_path, (0, 1), (2,))))
    words = ("-I", str(path), "--steps", "1", "--device", "cpu")
    result = python(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("step 1  loss 4.")
    assert "budgetfit." not in path.read_text()


def test_a_model_planned_from_a_config_in_memory_is_built_from_it() -> None:
    resolved = resolve_model(transformers.LlamaConfig(**LLAMA))
    source = SimpleNamespace(model=None, materialize=resolved.materialize)
    made = opened(sample_plan(source=source)).build_model()
    assert type(made) is transformers.LlamaForCausalLM
    assert made.config.num_hidden_layers == 4


def test_as_is_keeps_the_dtype_that_the_config_asks_for(tmp_path: Path) -> None:
    script = opened(
        tiny_plan(LLAMA | {"dtype": "bfloat16"}, tmp_path, precision="as-is")
    )
    assert next(script.build_model().parameters()).dtype is torch.bfloat16
    assert all(2 < loss < 6 for loss in script.main(RUN))


def test_a_plan_file_cannot_write_code_into_the_script() -> None:
    batch = {"x": ((2, 4), "float32); import os; (0")}
    with pytest.raises(InputError, match="is not a dtype"):
        torch_script(plan_of(None, model=sample_model(batch=batch)))
