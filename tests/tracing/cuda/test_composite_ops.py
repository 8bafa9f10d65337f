"""CUDA's branches of torch's own C++, on fake CPU tensors and on no others."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from budgetfit.tracing.cuda.dispatch import thread_kernels
from budgetfit.tracing.cuda.dispatch.composite_ops import (
    _convolution_double_backward,
    cuda_composite_ops,
)
from budgetfit.tracing.cuda.op_semantics import CudaOpSemantics
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake.model_copy import fake_mode
from budgetfit.tracing.recording.storage_log import StorageLog
from tests.counted_ops import CountedOps

ADA = CudaTarget(compute_capability=(8, 9), torch_version=(2, 13))
PATCHED = ("dropout", "softmax.int", "log_softmax.int", "scaled_dot_product_attention")


@pytest.fixture
def on_cuda() -> Iterator[None]:
    with fake_mode(), cuda_composite_ops(ADA):
        yield


def node(tensor: torch.Tensor) -> str:
    return type(tensor.grad_fn).__name__


def leaf(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(4, 8, dtype=dtype, requires_grad=True)


@pytest.mark.usefixtures("on_cuda")
def test_dropout_saves_a_mask_of_one_byte_an_element() -> None:
    out = functional.dropout(leaf(), 0.1)
    assert node(out) == "NativeDropoutBackward0"
    assert out.grad_fn._saved_result1.dtype == torch.bool


def test_a_cpus_dropout_multiplies_by_floats() -> None:
    with fake_mode():
        assert node(functional.dropout(leaf(), 0.1)) == "MulBackward0"


@pytest.mark.usefixtures("on_cuda")
def test_dropout_that_drops_nothing_hands_its_input_on() -> None:
    x = leaf()
    assert functional.dropout(x, 0.1, training=False) is x
    assert functional.dropout(x, 0.0) is x


@pytest.mark.usefixtures("on_cuda")
def test_dropout_that_drops_all_is_not_fused() -> None:
    # CUDA's kernel is for 0 < p < 1.
    assert node(functional.dropout(leaf(), 1.0)) == "MulBackward0"


SOFTMAXES: dict[str, Callable[..., torch.Tensor]] = {
    "_softmax": functional.softmax,
    "_log_softmax": functional.log_softmax,
}


@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize(
    ("given", "wanted", "copies"),
    [
        (torch.float16, torch.float32, False),  # only that is fused
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float64, True),
        (torch.float32, torch.float64, True),
    ],
)
def test_softmax_of_fp16_into_fp32_alone_makes_no_copy_of_its_input(
    name: str, given: torch.dtype, wanted: torch.dtype, copies: bool
) -> None:
    with fake_mode(), cuda_composite_ops(ADA), CountedOps() as ops:
        out = SOFTMAXES[name](leaf(given), dim=-1, dtype=wanted)
    assert out.dtype == wanted
    assert f"aten.{name}.default" in ops.counts
    assert ("aten._to_copy.default" in ops.counts) == copies


@pytest.mark.usefixtures("on_cuda")
def test_softmax_without_a_dtype_is_what_it_was() -> None:
    assert functional.softmax(leaf(torch.float16), dim=-1).dtype == torch.float16


def test_real_tensors_go_the_usual_way() -> None:
    x = torch.randn(2, 2, 4, 8, requires_grad=True)
    plain = functional.scaled_dot_product_attention(x, x, x)
    with cuda_composite_ops(ADA):
        inside = functional.scaled_dot_product_attention(x, x, x)
        dropped = functional.dropout(x, 0.5)
        whole = x.half().softmax(-1, dtype=torch.float32)
    assert torch.equal(inside, plain)
    assert node(inside) == node(plain)
    assert node(dropped) == "MulBackward0"
    assert torch.allclose(whole.sum(-1), torch.ones(2, 2, 4))


def dispatcher() -> list[str]:
    return [torch._C._dispatch_dump(f"aten::{name}") for name in PATCHED]


def test_nothing_is_left_behind_not_even_by_an_error() -> None:
    thread_kernels.unregister_unused()
    before = dispatcher()
    with cuda_composite_ops(ADA):
        assert softmax_is_fused()
    assert not softmax_is_fused()
    with pytest.raises(KeyError), cuda_composite_ops(ADA):
        raise KeyError
    assert not softmax_is_fused()
    # What is registered stays while other threads are alive, and does nothing.
    assert dispatcher() == before or threading.active_count() > 1


def softmax_is_fused() -> bool:
    """Whether a softmax of fp16 into fp32 is one op, as on CUDA."""
    with fake_mode(), CountedOps() as ops:
        functional.softmax(leaf(torch.float16), -1, dtype=torch.float32)
    return "aten._to_copy.default" not in ops.counts


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("selective", "added"), [(False, "aten.add_.Tensor"), (True, "aten.add.Tensor")]
)
def test_under_selective_checkpointing_a_mask_is_added_out_of_place(
    selective: bool, added: str
) -> None:
    # Its dispatch mode makes ATen take every tensor for a subclass, as on a card.
    query = torch.ones(1, 2, 8, 4, requires_grad=True)
    mask = torch.zeros(8, 8)

    def attend(query: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(query, query, query, mask)

    def contexts() -> tuple[object, object]:
        return create_selective_checkpoint_contexts([torch.ops.aten.bmm.default])

    with CountedOps() as seen:
        if selective:
            checkpoint(attend, query, use_reentrant=False, context_fn=contexts)
        else:
            attend(query)
    assert added in seen.counts
    assert len({"aten.add_.Tensor", "aten.add.Tensor"} & set(seen.counts)) == 1


def grouped(x: torch.Tensor) -> tuple[torch.Tensor, Counter[str]]:
    with CountedOps() as ops:
        out = functional.group_norm(x.to(memory_format=torch.channels_last), 2)
    return out, ops.counts


@pytest.mark.usefixtures("on_cuda")
def test_group_norm_copies_a_channels_last_input() -> None:
    out, counts = grouped(torch.ones(2, 8, 4, 4, requires_grad=True))
    assert counts["aten.clone.default"] == 1
    assert out.is_contiguous()
    assert out.grad_fn._saved_input.is_contiguous()


def test_a_cpus_group_norm_takes_channels_last_as_it_is() -> None:
    with fake_mode():
        out, counts = grouped(torch.ones(2, 8, 4, 4, requires_grad=True))
    assert "aten.clone.default" not in counts
    assert not out.is_contiguous()


@pytest.mark.parametrize(
    ("transposed", "stride", "padding", "dilation"),
    [(False, 1, 1, 1), (False, 2, 1, 1), (False, 3, 0, 2), (True, 2, 1, 1)],
)
def test_gradients_of_a_convolutions_gradient_are_torchs(
    transposed: bool, stride: int, padding: int, dilation: int
) -> None:
    x = torch.randn(4, 3, 9, 11, dtype=torch.double)
    weight = torch.randn(*((3, 5) if transposed else (5, 3)), 3, 3, dtype=torch.double)
    where = [[size] * 2 for size in (stride, padding, dilation)]
    rest = (*where, transposed, [0, 0], 1)
    grad = torch.randn_like(torch.convolution(x, weight, None, *rest))
    call = torch.randn_like(x), None, None, grad, weight, x, *rest, [True] * 3
    found = _convolution_double_backward(*call)
    expected = torch.ops.aten._convolution_double_backward(*call)
    torch.testing.assert_close(found[::2], expected[::2])
    assert not found[1]
    assert not expected[1]


@pytest.mark.usefixtures("on_cuda")
def test_the_weight_gets_its_gradient_of_a_gradient_from_a_turned_copy() -> None:
    x, weight = torch.ones(4, 3, 9, 9, requires_grad=True), torch.ones(5, 3, 3, 3)
    out = functional.conv2d(x, weight.requires_grad_())
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with CountedOps() as ops:
        grad.sum().backward()
    assert ops.counts["aten.clone.default"] == 1


@pytest.mark.usefixtures("on_cuda")
def test_one_hot_writes_ones_into_zeros_and_compares_nothing() -> None:
    with CountedOps() as ops:
        out = functional.one_hot(torch.zeros(4, 8, dtype=torch.long), 5)
    assert out.shape == (4, 8, 5)
    assert "aten.scatter_.value" in ops.counts
    assert "aten.eq.Tensor" not in ops.counts


@pytest.mark.usefixtures("on_cuda")
def test_composite_ops_under_inference_mode_are_logged_as_what_they_consist_of() -> (
    None
):
    def sizes(context: AbstractContextManager[object]) -> list[int]:
        log = StorageLog(CudaOpSemantics(ADA))
        x, weight = torch.ones(4, 8, 16), torch.ones(16, 16)
        with context, log:
            functional.linear(x.transpose(0, 1), weight, torch.ones(16)).softmax(-1)
        log.close()
        return log.sizes

    assert sizes(torch.inference_mode()) == sizes(torch.no_grad())
