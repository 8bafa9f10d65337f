from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from budgetfit.applying.optimizers.factory import make_optimizer, optimizer_notes
from budgetfit.applying.optimizers.torchao import (
    SPECS,
    FakeTorchaoOptimizer,
    temporary_sizes,
)
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.errors import TraceError
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import replay
from tests.applying.optimizers.optimizer_states import predicted, real
from tests.gloo_ranks import on_ranks
from tests.traced import ADA, session

EIGHT, FOUR, FP8 = "adamw_torch_8bit", "adamw_torch_4bit", "adamw_torch_fp8"
FSDP2 = Parallelism(engine="fsdp2", gpus=8)

# What torch 2.13's compiled step of torchao 0.18.0 allocated on the null driver in a
# second step, on an RTX 4090 and, for four of them, on an H100: the same.
MEASURED = [
    (EIGHT, (64, 64), 2 * 64 + 2 * 16384),
    (EIGHT, (4096,), 0),
    (EIGHT, (1, 8192), 0),
    (EIGHT, (8192, 1), 0),
    (EIGHT, (4096, 2), 2 * 128 + 2 * 32768),
    (EIGHT, (32, 16, 256), 0),
    (EIGHT, (1000, 384), 2 * 6000 + 2 * 1536000),
    (EIGHT, (1000, 768), 2 * 12000 + 2 * 3072000),
    (EIGHT, (2048, 4096), 2 * 131072 + 2 * 33554432),
    (FOUR, (2048, 2048), 2 * 65536 + 2 * 16777216 + 2 * 33554432),
    (FOUR, (4194304,), 2 * 65536 + 2 * 16777216 + 2 * 33554432),
    (FOUR, (10240, 768), 2 * 122880 + 2 * 31457280 + 2 * 62914560),
    (FP8, (64, 64), 2 * 64 + 2 * 4096),
    (FP8, (4096,), 2 * 64),
    (FP8, (16, 256), 0),
    (FP8, (64, 3, 8, 8), 2 * 192 + 2 * 12288),
    (FP8, (1000, 384), 2 * 6000),
    (FP8, (2048, 4096), 2 * 131072),
    *((name, (4100,), 0) for name in (EIGHT, FOUR, FP8)),
    *((name, (), 0) for name in (EIGHT, FOUR, FP8)),
]


@pytest.mark.parametrize(("name", "shape", "measured_bytes"), MEASURED)
def test_a_compiled_step_holds_what_was_measured(
    name: str, shape: tuple[int, ...], measured_bytes: int
) -> None:
    weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    held = temporary_sizes(SPECS[name], weight)
    assert sum(count * dtype.itemsize for count, dtype in held) == measured_bytes


def test_states_are_codes_scales_and_a_table_of_their_own() -> None:
    weight = torch.nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    with FakeTensorMode() as mode:
        fake: Any = mode.from_tensor(weight)
        fake.grad = torch.empty_like(fake)
        optimizer = make_optimizer(FOUR, [fake], device_type="cpu")
        assert isinstance(optimizer, FakeTorchaoOptimizer)
        optimizer.step()
    state = optimizer.state[fake]
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    for name in ("exp_avg", "exp_avg_sq"):
        made = {
            key: (tuple(value.shape), value.dtype) for key, value in state[name].items()
        }
        assert made == {
            "codes": ((4096,), torch.uint8),
            "scale": ((32,), torch.float32),
            "qmap": ((16,), torch.float32),
        }


def test_a_callable_of_the_library_is_traced_by_its_own_settings() -> None:
    optim = pytest.importorskip("torchao", reason="not installed").optim
    for make in (
        lambda them: optim.Adam8bit(them, block_size=64),
        optim.AdamW4bit,
        optim.AdamFp8,
        lambda them: optim._AdamW(them, amsgrad=True),
    ):
        ours = predicted(make, torch.bfloat16)
        assert ours.by_tensor == real(make, torch.bfloat16).by_tensor
        assert ours.total > 0


def test_a_4_bit_step_takes_24_bytes_for_each_element_of_the_largest_weight() -> None:
    # Weights of 512 x 512: scales of 1024 blocks, fp32 values, and indices, twice.
    name = CATEGORIES.index("temporaries")
    trace = session("mebi").affine(Recipe(batch_size=2, optimizer=FOUR))
    step = [phase for phase in trace.phases if phase.name == "optimizer"][-1]
    allocated = [
        event - 1 for event in trace.events[step.start : step.end] if event > 0
    ]
    sizes = [int(trace.fixed_bytes[index]) for index in allocated]
    assert sizes[:6] == [4096, 4096, 2**20, 2**20, 2**21, 2**21]
    assert {int(trace.category[index]) for index in allocated} == {name}
    without = session("mebi").affine(Recipe(batch_size=2, optimizer="sgd"))
    states = trace.fixed_bytes[trace.category == CATEGORIES.index("optimizer_state")]
    ours, plain = (
        replay(each, 2, find_gpu(ADA)).phase_peaks_bytes["optimizer"]
        for each in (trace, without)
    )
    rounded = sum(-(-int(size) // 512) * 512 for size in states)
    assert ours == plain + rounded + sum(sizes[:6])
    assert "budgetfit.torchao_step_.default" in trace.op_names


def _states_of_shards(dtype: torch.dtype) -> dict[str, list[int]]:
    found = {}
    for name in SPECS:
        module = torch.nn.ParameterList(torch.ones(each, dtype=dtype) for each in WHOLE)
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        weights = list(module)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        found[name] = real(name, dtype, weights).by_tensor
    return found


# Halves of them have 64 blocks, 16.5 blocks and 8 blocks.
WHOLE = ((64, 512), (66, 128), (8, 512))
HALVES = ((32, 512), (33, 128), (4, 512))


def test_a_rank_of_fsdp2_quantises_its_shards() -> None:
    pytest.importorskip("torchao", reason="not installed")
    for found in on_ranks(_states_of_shards, 2, torch.float32):
        for name in SPECS:
            assert found[name] == predicted(name, torch.float32, HALVES).by_tensor


def test_a_trace_of_fsdp2_has_the_states_and_the_step_of_shards() -> None:
    # Weights of 512 x 512 on 8 ranks: 128 blocks each.
    recipe = Recipe(batch_size=2, optimizer=EIGHT, parallelism=FSDP2)
    trace = session("mebi").affine(recipe)
    states = trace.fixed_bytes[trace.category == CATEGORIES.index("optimizer_state")]
    assert sorted({int(each) for each in states if each}) == [512, 1024, 32768]
    assert "budgetfit.torchao_step_.default" in trace.op_names
    recipe = Recipe(batch_size=2, optimizer="adamw_bnb_8bit", parallelism=FSDP2)
    with pytest.raises(TraceError, match=r"no DTensor.*another optimizer or loss"):
        session("mebi").affine(recipe)


def test_a_prediction_says_that_the_first_step_compiles() -> None:
    assert "compiles its step at the first" in optimizer_notes(EIGHT)[0]
    assert "nearer to adamw_torch" in optimizer_notes(EIGHT, "fsdp2")[1]
    assert len(optimizer_notes(EIGHT, "ddp")) == 1
