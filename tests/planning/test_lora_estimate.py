import torch
from torch import nn

from budgetfit.core.recipe import Recipe
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.alternatives.lora_estimate import (
    LORA_RANK,
    LoraLinear,
    lora_workload,
)
from budgetfit.planning.profiling.block_chain import checkpoint_every_block
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.models import EXAMPLES, VOCABULARY, WIDTH

GPU = find_gpu("rtx-4090")


def workload(name: str) -> Workload:
    example = EXAMPLES[name]
    found = Workload(model=example.model(), batch=example.batch, gpu=GPU)
    return found.with_found_blocks()


def workload_of(name: str, dtype: torch.dtype | None = torch.bfloat16) -> Workload:
    found = lora_workload(workload(name), dtype)
    assert found is not None
    return found


def test_every_linear_layer_of_the_blocks_gets_two_fp32_matrices() -> None:
    model = workload_of("llama").model
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    # Per block: query and output 32 x 32, key and value 32 x 16, three of 32 x 64.
    pairs = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64)
    assert sum(p.numel() for p in trained.values()) == 3 * LORA_RANK * pairs
    assert {p.dtype for p in trained.values()} == {torch.float32}
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert not isinstance(model.get_submodule("lm_head"), LoraLinear)


def test_the_model_itself_stays_as_it_was() -> None:
    plain = workload("gpt2")
    before = {name: p.clone() for name, p in plain.model.named_parameters()}
    found = lora_workload(plain, torch.bfloat16)
    assert found is not None
    after = dict(plain.model.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in after.items())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in after.values())
    assert {p.device.type for p in found.model.parameters()} == {"meta"}


def test_transposed_linear_layers_and_tied_weights_are_understood() -> None:
    model = workload_of("gpt2").model
    attention = model.get_submodule("transformer.h.0.attn.c_attn")
    assert isinstance(attention, LoraLinear)
    assert attention.lora_A.weight.shape == (LORA_RANK, WIDTH)
    assert attention.lora_B.weight.shape == (3 * WIDTH, LORA_RANK)
    head = model.get_submodule("lm_head").weight
    assert head is model.get_submodule("transformer.wte").weight
    assert head.shape == (VOCABULARY, WIDTH)


def test_models_that_ask_for_a_weights_dtype_and_float_batches_run() -> None:
    for name in ("t5", "vit", "transformer"):
        found = workload_of(name)
        for segments in ((), checkpoint_every_block(found.blocks)):
            recipe = Recipe(batch_size=2, precision="as-is", segments=segments)
            trace = TraceSession(found).exact(recipe)
            assert trace.blocks


def test_without_a_linear_layer_in_its_blocks_no_adapter_can_be_added() -> None:
    assert lora_workload(workload("convolutions"), None) is None


def test_an_adapter_adds_to_its_layer() -> None:
    base = nn.Linear(4, 3)
    with torch.device("meta"):
        adapted = LoraLinear(base, 4, 3)
    adapted.to_empty(device="cpu")
    x = torch.ones(2, 4)
    for tensor in adapted.parameters():
        nn.init.ones_(tensor)
    # base: 4 + 1; A: 4 in each of 16; B: their sum.
    assert torch.equal(adapted(x), torch.full((2, 3), 5.0 + 16 * 4))
