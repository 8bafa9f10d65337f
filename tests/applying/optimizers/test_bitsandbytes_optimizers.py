import functools
from collections.abc import Iterable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from budgetfit.applying.optimizers.bitsandbytes import FakeBnbOptimizer
from budgetfit.applying.optimizers.factory import make_optimizer, optimizer_notes
from budgetfit.applying.optimizers.in_backward import OptimizerInBackward
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import replay
from budgetfit.planning.judge import judge
from tests.applying.optimizers.optimizer_states import kept_by_tensor
from tests.traced import ADA, ROOMY, session

# A bias, the smallest tensor with 8-bit states, one with a last block of 1 element,
# a paged one, and one that is not contiguous.
SHAPES = ((4095,), (64, 64), (4097,), (400, 250), (100, 80))


def parameters() -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    made[-1] = torch.nn.Parameter(torch.ones(SHAPES[-1][::-1]).t())
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def stepped(name: str) -> list[dict[str, tuple[object, ...]]]:
    """Return the states after a step of the stand-in, tensor by tensor, in order."""
    with FakeTensorMode():
        fakes = parameters()
        optimizer = make_optimizer(name, fakes, device_type="cpu")
        assert isinstance(optimizer, FakeBnbOptimizer)
        optimizer.step()
    return described(optimizer, fakes)


def described(
    optimizer: torch.optim.Optimizer, trained: Iterable[torch.nn.Parameter]
) -> list[dict[str, tuple[object, ...]]]:
    return [
        {
            name: (tuple(value.shape), value.stride(), value.dtype)
            for name, value in optimizer.state[parameter].items()
            if isinstance(value, torch.Tensor)
        }
        for parameter in trained
    ]


def test_tensors_from_4096_elements_on_have_8_bit_states_and_a_scale_per_256() -> None:
    small, square, odd, large, turned = stepped("adamw_bnb_8bit")
    assert small == dict.fromkeys(("state1", "state2"), ((4095,), (1,), torch.float32))
    assert set(square) == {"state1", "qmap1", "state2", "qmap2", "absmax1", "absmax2"}
    assert square["state1"] == square["state2"] == ((64, 64), (64, 1), torch.uint8)
    assert square["qmap1"] == ((256,), (1,), torch.float32)
    assert square["absmax1"] == ((16,), (1,), torch.float32)
    assert odd["absmax2"] == ((17,), (1,), torch.float32)
    assert large["state1"] == ((400, 250), (250, 1), torch.uint8)
    assert turned["state1"] == ((100, 80), (1, 100), torch.uint8)


def test_states_are_those_of_the_library() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    trained = parameters()
    optimizer = make_optimizer("adamw_bnb_8bit", trained, device_type="cpu")
    optimizer.step()
    assert described(optimizer, trained) == stepped("adamw_bnb_8bit")


def test_a_callable_of_the_library_is_traced_by_its_own_settings() -> None:
    optim = pytest.importorskip("bitsandbytes", reason="not installed").optim
    for make in (
        lambda them: optim.Adam8bit(them, min_8bit_size=5000),
        lambda them: optim.SGD8bit(them, lr=0.1, momentum=0.9),
        optim.LAMB8bit,
        optim.AdEMAMix8bit,
    ):
        with FakeTensorMode():
            fakes = parameters()
            ours = make_optimizer(make, fakes, device_type="cpu")
            assert isinstance(ours, FakeBnbOptimizer)
            ours.step()
        trained = parameters()
        theirs = make(trained)
        for parameter in trained:  # some of the library's kernels are none of a CPU's
            theirs.init_state(theirs.param_groups[0], parameter, 0, 0)
        assert described(ours, fakes) == described(theirs, trained)


def test_in_backward_each_tensor_has_tables_of_its_own() -> None:
    def kept(weights: list[torch.nn.Parameter]) -> list[int]:
        make = functools.partial(make_optimizer, "lion_8bit", device_type="cpu")
        optimizer = OptimizerInBackward(weights, make)
        for weight in weights:
            weight.sum().backward()
        return kept_by_tensor(optimizer, weights)

    with FakeTensorMode():
        ours = kept(parameters())
    assert ours[1:3] == [4096 + 16 * 4 + 256 * 4, 4097 + 17 * 4 + 256 * 4]
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    assert ours == kept(parameters())


def test_a_step_leaves_weights_contiguous_as_the_library_does() -> None:
    with FakeTensorMode():
        fakes = parameters()
        assert not fakes[-1].is_contiguous()
        make_optimizer("lion_8bit", fakes, device_type="cpu").step()
        assert fakes[-1].is_contiguous()


def test_paged_states_of_large_tensors_are_outside_the_allocator() -> None:
    *_, large, turned = stepped("paged_adamw_8bit")
    assert large["state1"] == large["state2"] == ((0,), (1,), torch.uint8)
    assert large["absmax1"] == ((391,), (1,), torch.float32)
    assert turned["state1"] == ((100, 80), (1, 100), torch.uint8)
    assert "managed memory" in optimizer_notes("paged_adamw_8bit")[0]
    assert "embeddings in 32 bits" in optimizer_notes("adamw_bnb_8bit")[0]
    assert optimizer_notes("lion_32bit") == ()


def test_a_step_of_a_trace_makes_the_states_and_nothing_that_passes() -> None:
    # Three weights of 512 x 512: 2 bytes each, 1024 scales of 4 bytes twice, and two
    # tables for all.
    trace = session("mebi").affine(Recipe(batch_size=2, optimizer="adamw_bnb_8bit"))
    states = trace.fixed_bytes[trace.category == CATEGORIES.index("optimizer_state")]
    assert states.sum() == 3 * (2 * 512 * 512 + 2 * 1024 * 4) + 2 * 256 * 4
    assert "budgetfit.bitsandbytes_step_.default" in trace.op_names
    without = session("mebi").affine(Recipe(batch_size=2, optimizer="sgd"))
    ours, plain = (
        replay(each, 2, find_gpu(ADA)).phase_peaks_bytes["optimizer"]
        for each in (trace, without)
    )
    assert ours == plain + states.sum()


def test_an_estimate_says_what_lies_outside_it() -> None:
    traces = session("mebi")
    recipe = Recipe(batch_size=2, optimizer="paged_adamw_8bit")
    found = judge(
        traces.affine(recipe), recipe, traces.workload.gpu, ROOMY, context_bytes=0
    )
    assert any("managed memory" in note for note in found.notes)
