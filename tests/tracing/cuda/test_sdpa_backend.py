"""Which attention kernel CUDA runs: by rule, and as its own build answered."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from budgetfit.tracing.cuda.dispatch import sdpa_backend
from budgetfit.tracing.cuda.dispatch.composite_ops import cuda_composite_ops
from budgetfit.tracing.cuda.dispatch.sdpa_backend import AttentionCall, choose_backend
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake.model_copy import fake_mode
from budgetfit.tracing.recording.storage_log import StorageLog
from tests.tracing.cuda.attention_calls import Call, calls

RECORDINGS = {
    version: json.loads(
        (
            Path(__file__).parent / "fixtures" / f"attention_choices_{version}.json"
        ).read_text()
    )
    for version in ("2.11", "2.12", "2.13", "2.14", "2.15")
}
KERNELS = {"m": "math", "f": "flash", "e": "efficient", "c": "cudnn"}
T4, A100, ADA, HOPPER, BLACKWELL = (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)


def target(
    capability: tuple[int, int] = ADA,
    torch_version: tuple[int, int] = (2, 13),
    *,
    cudnn: bool = True,
) -> CudaTarget:
    return CudaTarget(
        compute_capability=capability, torch_version=torch_version, cudnn=cudnn
    )


def choice(call: Call, to: CudaTarget) -> str:
    query, key, value, mask = call.tensors("meta")
    assert query is not None
    assert key is not None
    assert value is not None
    facts = AttentionCall(
        query=query,
        key=key,
        value=value,
        mask=mask,
        dropout_p=call.dropout,
        is_causal=call.causal,
        enable_gqa=call.gqa,
    )
    return choose_backend(facts, to)


@pytest.mark.parametrize(
    ("version", "capability"),
    [
        (version, capability)
        for version, recording in RECORDINGS.items()
        for capability in recording["choices"]
    ],
)
def test_the_choice_is_that_of_pytorchs_own_cuda_build(
    version: str, capability: str
) -> None:
    recording = RECORDINGS[version]
    assert recording["torch"].startswith(f"{version}.")
    card = _numbers(capability)
    recorded = [KERNELS[letter] for letter in recording["choices"][capability]]
    to = target(card, _numbers(version))
    chosen = [choice(call, to) for call in calls()]
    differing = [
        (call, right, ours)
        for call, right, ours in zip(calls(), recorded, chosen, strict=True)
        if right != ours
    ]
    assert not differing


def _numbers(text: str) -> tuple[int, int]:
    major, minor = map(int, text.split("."))
    return major, minor


def test_the_recordings_know_every_kernel() -> None:
    for recording in RECORDINGS.values():
        assert set().union(*recording["choices"].values()) == set(KERNELS)


@pytest.mark.parametrize(
    ("call", "capability", "kernel"),
    [
        (Call("bfloat16"), ADA, "flash"),
        (Call("float16"), T4, "efficient"),  # flash begins with 8.0
        (Call("bfloat16"), T4, "math"),  # emulated there, so no fused kernel
        (Call("float32"), ADA, "efficient"),
        (Call("float32"), T4, "efficient"),
        (Call("float64"), A100, "math"),
        (Call("bfloat16", mask="bool"), ADA, "efficient"),  # flash takes no mask
        (Call("bfloat16", 256), ADA, "flash"),
        (Call("bfloat16", 200), A100, "flash"),
        (Call("bfloat16", 200), ADA, "efficient"),  # too little shared memory
        (Call("bfloat16", 200, needs_grad=False), ADA, "flash"),
        (Call("bfloat16", 264), A100, "efficient"),
        (Call("bfloat16", 20), A100, "flash"),  # padded to 24
        (Call("bfloat16", 20, mask="bool"), A100, "math"),  # not aligned
        (Call("bfloat16", key_heads=2, gqa=True), ADA, "flash"),
        (Call("bfloat16", key_heads=2, gqa=True, mask="bool"), ADA, "math"),
        (Call("float16", key_heads=2, gqa=True), T4, "math"),
        (Call("bfloat16", keys=24, causal=True), ADA, "efficient"),
        (Call("bfloat16"), HOPPER, "cudnn"),
        (Call("bfloat16"), BLACKWELL, "cudnn"),
        (Call("float32"), HOPPER, "efficient"),
        (Call("bfloat16", mask="bool"), HOPPER, "cudnn"),
        (Call("bfloat16", dropout=0.1), HOPPER, "flash"),  # it knows 16ths only
        (Call("bfloat16", dropout=0.125), HOPPER, "cudnn"),
        (Call("bfloat16", 256), HOPPER, "cudnn"),
        (Call("bfloat16", 256), BLACKWELL, "flash"),
        (Call("bfloat16", 192, 128), BLACKWELL, "cudnn"),
    ],
)
def test_dtype_head_size_mask_groups_and_card_decide(
    call: Call, capability: tuple[int, int], kernel: str
) -> None:
    assert choice(call, target(capability)) == kernel


def test_from_torch_2_14_on_the_efficient_kernel_takes_grouped_heads() -> None:
    call = Call("float16", key_heads=2, gqa=True)
    assert choice(call, target(T4, (2, 13))) == "math"
    assert choice(call, target(T4, (2, 14))) == "efficient"


def test_cudnn_comes_first_whatever_another_switch_says() -> None:
    call = Call("bfloat16")
    assert choice(call, target(HOPPER, (2, 11))) == "cudnn"
    # torch.backends.cudnn.enabled is another switch.
    assert choice(call, target(HOPPER, cudnn=False)) == "cudnn"


def test_what_a_user_switched_off_is_not_chosen() -> None:
    call = Call("bfloat16")
    with sdpa_kernel(SDPBackend.MATH):
        assert choice(call, target(HOPPER)) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert choice(call, target(HOPPER)) == "efficient"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert choice(call, target(HOPPER)) == "flash"
    assert choice(call, target(HOPPER)) == "cudnn"


NODES = {
    "flash": "ScaledDotProductFlashAttentionBackward0",
    "efficient": "ScaledDotProductEfficientAttentionBackward0",
    "cudnn": "ScaledDotProductCudnnAttentionBackward0",
}


@pytest.fixture
def attend() -> Iterator[Any]:
    """Return the output of a call on fake CPU tensors."""

    def run(call: Call, to: CudaTarget) -> torch.Tensor:
        with cuda_composite_ops(to):
            query, key, value, mask = call.tensors("cpu")
            assert query is not None
            assert key is not None
            assert value is not None
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, mask, call.dropout, call.causal, enable_gqa=call.gqa
            )

    with fake_mode():
        yield run


@pytest.mark.parametrize(
    ("call", "capability", "kernel"),
    [
        (Call("bfloat16"), ADA, "flash"),
        (Call("bfloat16", key_heads=2, gqa=True), ADA, "flash"),
        (Call("bfloat16", mask="bool"), ADA, "efficient"),
        (Call("float32"), T4, "efficient"),
        (Call("bfloat16", dropout=0.5), HOPPER, "cudnn"),
    ],
)
def test_the_chosen_kernel_is_what_autograd_saw(
    attend: Any, call: Call, capability: tuple[int, int], kernel: str
) -> None:
    out = attend(call, target(capability))
    names = {type(out.grad_fn).__name__}
    assert names == {NODES[kernel]}
    assert out.shape == (2, 4, 16, 64)


def test_a_head_size_that_flash_pads_comes_out_as_it_went_in(attend: Any) -> None:
    out = attend(Call("bfloat16", 20), target(ADA))
    assert out.shape[-1] == 20
    assert type(out.grad_fn).__name__ == "SliceBackward0"
    assert out._base.shape[-1] == 24


@pytest.mark.parametrize(("keys", "rows"), [(24, 24), (20, 24)])
def test_rows_of_a_mask_are_padded_to_eight_values(
    attend: Any, keys: int, rows: int
) -> None:
    call = Call("bfloat16", keys=keys, mask="bool")
    with StorageLog() as log:
        attend(call, target(ADA))
    half = 2 * 16 * 2  # samples, queries, bytes
    assert half * rows in log.sizes


@pytest.mark.parametrize(
    ("bias", "row"),
    [
        (torch.ones(1, 1, 16, 16), 16),
        (torch.ones(1, 1, 16, 20), 24),
        # One head's bias as T5 makes it: the heads were the last dimension.
        (torch.ones(16, 16, 1).permute(2, 0, 1)[None], 24),
    ],
)
def test_rows_of_a_bias_are_padded_where_a_stride_is_not_aligned(
    bias: torch.Tensor, row: int
) -> None:
    padded = sdpa_backend._aligned_mask(bias)
    assert padded.shape == bias.shape
    assert padded.untyped_storage().nbytes() == 16 * row * 4


@pytest.mark.parametrize(
    "call",
    [
        Call("float64"),
        Call("float64", causal=True, dropout=0.5),
        Call("float64", mask="bool"),
        Call("bfloat16", 20, mask="bool", key_heads=2, gqa=True),
    ],
)
def test_plain_products_keep_shape_and_dtype(attend: Any, call: Call) -> None:
    out = attend(call, target(ADA))
    assert out.shape == (2, 4, 16, call.head_dim)
    assert out.dtype == getattr(torch, call.dtype)
    assert "ScaledDotProduct" not in type(out.grad_fn).__name__
