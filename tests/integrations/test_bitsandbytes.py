from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit.applying.quantized_layers.int8_linear import Int8Linear
from budgetfit.applying.quantized_layers.nf4_linear import Nf4Linear, parameter_count
from budgetfit.core.adapter import Adapter
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.errors import InputError
from budgetfit.gpus.table import find_gpu
from budgetfit.inputs.adapter import loading_notes
from budgetfit.integrations import optional_imports
from budgetfit.integrations.peft import adapted_meta_copy, attach_adapters
from budgetfit.integrations.quantization.quantize_linear import quantize
from budgetfit.integrations.quantization.traceable_layers import (
    is_quantized,
    with_traceable_layers,
)
from budgetfit.traces.quantized_loading import has_quantized_layers
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.integrations.adapters import QUIET, adapter, base, batch, config, trained
from tests.quantized_bytes import stored_bytes

bnb = pytest.importorskip("bitsandbytes")
pytestmark = QUIET

# Widths whose products are no multiples of 64, 256 or even 2, and a few usual ones.
SHAPES = (
    (1, 1),
    (3, 5),
    (7, 9),
    (8, 8),
    (33, 7),
    (64, 64),
    (65, 63),
    (100, 30),
    (127, 129),
    (256, 256),
    (256, 257),
    (300, 200),
    (512, 1024),
    (1000, 1001),
)
FOUR_BITS = adapter("qlora")
FLAT = adapter("qlora", double_quantization=False)
EIGHT_BITS = adapter("lora", quantization="int8")
WAYS, IDS = (FOUR_BITS, FLAT, EIGHT_BITS), ("nf4", "nf4, flat", "int8")


class One(nn.Module):
    """A linear layer, as transformers' models have it: as a child."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs, dtype=dtype)


def real_bytes(shape: tuple[int, int], how: Adapter, dtype: torch.dtype) -> Any:
    """Quantise real numbers with the library itself, on the CPU."""
    weight = torch.randn(shape, dtype=dtype)
    if how.quantization == "nf4":
        nested = how.double_quantization
        made = bnb.nn.Params4bit(weight, compress_statistics=nested, quant_type="nf4")
    else:
        made = bnb.nn.Int8Params(weight, requires_grad=False)
    return stored_bytes(made.to("cpu"))


def stand_in_bytes(layer: Any) -> dict[str, int]:
    found = {name: tensor.nbytes for name, tensor in layer.named_buffers()}
    return {"weight": layer.weight.nbytes, **found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "how", [FOUR_BITS, FLAT, EIGHT_BITS], ids=["nf4", "nf4, flat", "int8"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_of_the_librarys_own_weights(
    shape: tuple[int, int], how: Adapter, dtype: torch.dtype
) -> None:
    with torch.device("meta"):
        model = One(*shape, dtype)
    quantize(model, how)
    on_meta = stored_bytes(model.layer.weight)
    assert on_meta == real_bytes(shape, how, dtype)
    assert stand_in_bytes(with_traceable_layers(model).layer) == on_meta
    # And so does a model whose weights are quantised already.
    weights = One(*shape, dtype)
    quantize(weights, how)
    assert stored_bytes(weights.layer.weight) == on_meta
    assert stand_in_bytes(with_traceable_layers(weights).layer) == on_meta


@pytest.mark.parametrize(
    "how", [FOUR_BITS, FLAT, EIGHT_BITS], ids=["nf4", "nf4, flat", "int8"]
)
@pytest.mark.parametrize("prepared", [True, False])
def test_a_whole_adapter_model_weighs_what_the_real_one_does(
    how: Adapter, prepared: bool
) -> None:
    wanted = adapter(
        how.method,
        quantization=how.quantization,
        double_quantization=how.double_quantization,
        prepare_for_kbit=prepared,
    )
    planned, notes = adapted_meta_copy(base("meta"), wanted)
    real = attach_adapters(base(), wanted)
    assert is_quantized(real)
    assert {n: (p.dtype, p.nbytes) for n, p in planned.named_parameters()} == {
        n: (p.dtype, p.nbytes) for n, p in real.named_parameters()
    }
    assert trained(planned) == trained(real)
    assert parameter_count(planned) == parameter_count(real)
    # The real model itself handed in is planned with the same stand-ins.
    again = with_traceable_layers(real)
    assert {n: b.nbytes for n, b in again.named_buffers()} == {
        n: b.nbytes for n, b in planned.named_buffers()
    }
    assert bool(notes) == prepared
    if prepared:
        assert notes[0].startswith("fp32 copies of embeddings, head and norms: ")


def test_the_users_quantised_model_is_not_changed_by_planning() -> None:
    model = attach_adapters(base(), FOUR_BITS)
    before = {n: (p, p.data_ptr()) for n, p in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    plan = budgetfit.plan(
        model, gpu="rtx-4090", batch=batch(), batch_size=2, checkpointing="none"
    )
    after = {n: (p, p.data_ptr()) for n, p in model.named_parameters()}
    assert [type(module) for module in model.modules()] == classes
    assert before.keys() == after.keys()
    assert all(
        a is b and x == y
        for (a, x), (b, y) in zip(before.values(), after.values(), strict=True)
    )
    # Numbers are counted as the people do who named the model.
    plain = sum(p.numel() for p in base("meta").parameters())
    lora = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert plan.model.parameter_count == plain + lora


@pytest.mark.parametrize("how", [FOUR_BITS, EIGHT_BITS], ids=["nf4", "int8"])
def test_gradients_go_to_the_adapters_alone(how: Adapter) -> None:
    model, _ = adapted_meta_copy(base("meta"), how)
    workload = Workload(model=model, batch=batch(), gpu=find_gpu("rtx-4090"))
    trace = TraceSession(workload.with_found_blocks()).exact(
        Recipe(batch_size=2, precision="bf16-mixed", optimizer="sgd")
    )
    gradients = trace.category == CATEGORIES.index("gradients")
    adapters = [p.nbytes for p in model.parameters() if p.requires_grad]
    # Two steps are traced, and each makes them anew.
    assert trace.fixed_bytes[gradients].sum() == 2 * sum(adapters)


def test_qlora_has_a_line_for_what_peft_turns_into_fp32() -> None:
    """QLoRA that takes more memory than bf16."""
    found = {
        prepared: budgetfit.estimate(
            config(),
            Recipe(batch_size=2, precision="bf16-mixed"),
            gpu="rtx-4090",
            max_length=16,
            method="qlora",
            prepare_for_kbit=prepared,
        )
        for prepared in (True, False)
    }
    # Embedding and head: 128 x 96; seven norms of 96: two bytes more each, rounded to
    # 512 for each of nine tensors.
    more = 2 * (2 * 128 * 96 + 7 * 96)
    weights = {key: row.at_peak_bytes["parameters"] for key, row in found.items()}
    assert abs(weights[True] - weights[False] - more) < 9 * 512
    (line,) = (note for note in found[True].notes if "fp32 copies" in note)
    assert "skip it: saves 49.3 KiB (prepare_for_kbit=False" in line
    assert not any("fp32 copies" in note for note in found[False].notes)


def test_the_head_and_tied_weights_stay_as_they_are() -> None:
    model = base("meta")
    quantize(model, FOUR_BITS)
    kinds = {n: type(m).__name__ for n, m in model.named_modules()}
    assert kinds["lm_head"] == "Linear"
    assert kinds["model.layers.0.mlp.up_proj"] == "Linear4bit"
    stand_in = with_traceable_layers(model).get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(stand_in, Nf4Linear)


def test_a_model_without_such_layers_comes_back_itself() -> None:
    model = base("meta")
    assert with_traceable_layers(model) is model
    assert not is_quantized(model)
    assert not has_quantized_layers(model)


def test_a_note_says_where_loading_takes_more_than_training() -> None:
    with torch.device("meta"):
        model = One(512, 1024, torch.bfloat16)
    quantize(model, FLAT)
    model = with_traceable_layers(model)
    peaks: Any = SimpleNamespace(
        allocated_bytes=3 << 30, phase_peaks_bytes={"forward": 1 << 30}
    )
    (note,) = loading_notes(model, peaks)
    assert note.startswith("loading takes more than training: 3.00 GiB")
    peaks.phase_peaks_bytes["backward"] = 3 << 30
    assert loading_notes(model, peaks) == ()


@pytest.mark.parametrize(("installed", "told"), [("5.3.0", True), ("5.4.0", False)])
def test_a_note_says_that_threads_load_ahead(
    installed: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    with torch.device("meta"):
        model = One(512, 1024, torch.bfloat16)
    peaks: Any = SimpleNamespace(
        allocated_bytes=1 << 30, phase_peaks_bytes={"forward": 1 << 30}
    )
    assert loading_notes(model, peaks) == ()
    quantize(model, FLAT)
    notes = loading_notes(with_traceable_layers(model), peaks)
    assert len(notes) == told
    assert all("HF_DEACTIVATE_ASYNC_LOAD=1" in note for note in notes)


def test_layers_that_quantise_in_every_step_are_refused() -> None:
    model = nn.Sequential(bnb.nn.Linear8bitLt(8, 8))
    with pytest.raises(InputError, match="has_fp16_weights=True cannot be planned"):
        with_traceable_layers(model)


def test_int8_layers_get_their_stand_in() -> None:
    model = nn.Sequential(
        bnb.nn.Linear8bitLt(8, 12, has_fp16_weights=False, threshold=6.0)
    ).to("cpu")
    stand_in, *_ = with_traceable_layers(model).children()
    assert isinstance(stand_in, Int8Linear)
    assert (stand_in.in_features, stand_in.out_features) == (8, 12)
    assert stand_in.threshold == 6.0


def test_without_bitsandbytes_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_: str) -> None:
        raise ImportError

    model = base("meta")
    monkeypatch.setattr(optional_imports, "import_module", missing)
    with pytest.raises(InputError, match="pip install bitsandbytes"):
        quantize(model, FOUR_BITS)


def test_a_model_without_linear_layers_cannot_be_quantised() -> None:
    with pytest.raises(InputError, match="has no linear layer to quantise"):
        quantize(nn.Sequential(nn.Conv2d(3, 3, 3)), FOUR_BITS)
