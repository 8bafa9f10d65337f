"""Which workspaces products take. The rows are calls on the null driver, by version."""

from collections.abc import Callable

import pytest
import torch

from budgetfit.tracing.cuda.kernel_memory.matmul import in_cublaslt
from budgetfit.tracing.cuda.kernel_memory.registry import Call
from budgetfit.tracing.cuda.op_semantics import CudaOpSemantics
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake.model_copy import fake_mode
from budgetfit.tracing.recording.storage_log import StorageLog

aten = torch.ops.aten
HALF, SINGLE = torch.bfloat16, torch.float32
PLAIN, LT = "cublas_workspace", "cublaslt_workspace"


def target(version: tuple[int, int], *, cudnn: bool = True) -> CudaTarget:
    return CudaTarget(compute_capability=(8, 9), torch_version=version, cudnn=cudnn)


def history(to: CudaTarget, run: Callable[[], object]) -> list[str]:
    """Return ``+rule`` and ``-rule`` of each workspace, ``+`` of every other malloc."""
    with fake_mode(), StorageLog(CudaOpSemantics(to)) as log:
        kept = run()
        events = list(log.events)
    del kept
    rules = {k: log.scratch[k].rule if k in log.scratch else "" for k in range(999)}
    return [
        ("+" if event > 0 else "-") + rules[abs(event) - 1]
        for event in events
        if event > 0 or rules[abs(event) - 1] in {PLAIN, LT}
    ]


def products() -> object:
    x, bias = torch.empty(6, 4), torch.empty(4)
    weight = torch.empty(4, 4)
    return [torch.mm(x, weight), *(torch.addmm(bias, x, weight) for _ in range(2))]


def test_in_2_11_a_thread_keeps_a_workspace_of_each_library() -> None:
    expected = ["+", "+", "+", "+", f"+{PLAIN}", "+", f"+{LT}", "+"]
    assert history(target((2, 11)), products) == expected


@pytest.mark.parametrize("version", [(2, 12), (2, 13), (2, 14)])
def test_then_both_libraries_share_one(version: tuple[int, int]) -> None:
    expected = ["+", "+", "+", "+", f"+{PLAIN}", "+", "+"]
    assert history(target(version), products) == expected


def test_from_2_15_each_product_takes_one_after_its_output_and_gives_it_back() -> None:
    lt = ["+", f"+{LT}", f"-{LT}"]
    expected = ["+", "+", "+", "+", f"+{PLAIN}", f"-{PLAIN}", *lt, *lt]
    assert history(target((2, 15)), products) == expected


def test_the_first_product_of_2_11_brings_both_if_it_adds_a_bias() -> None:
    def biased() -> object:
        return torch.addmm(torch.empty(4), torch.empty(6, 4), torch.empty(4, 4))

    assert history(target((2, 11)), biased)[-2:] == [f"+{PLAIN}", f"+{LT}"]


def test_batches_of_outer_products_are_multiplied_without_cublas_by_2_15() -> None:
    def outer(inner: int) -> Callable[[], object]:
        return lambda: torch.bmm(torch.empty(2, 6, inner), torch.empty(2, inner, 4))

    assert f"+{PLAIN}" not in history(target((2, 15)), outer(1))
    assert f"+{PLAIN}" in history(target((2, 15)), outer(2))


def convolve() -> object:
    return aten.convolution(
        torch.empty(2, 8, 16, 16),
        torch.empty(12, 8, 3, 3),
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
    )


def test_without_cudnn_a_convolution_multiplies_beside_its_patches() -> None:
    expected = ["+", "+", "+", "+buffer", f"+{PLAIN}", f"-{PLAIN}"]
    assert history(target((2, 15), cudnn=False), convolve) == expected
    assert f"+{PLAIN}" in history(target((2, 13), cudnn=False), convolve)
    assert f"+{PLAIN}" not in history(target((2, 15)), convolve)


def test_both_gradients_of_a_convolution_multiply() -> None:
    def backward() -> object:
        tensors = torch.empty(2, 12, 14, 14), torch.empty(2, 8, 16, 16)
        weight = torch.empty(12, 8, 3, 3)
        numbers = [12], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
        return aten.convolution_backward(*tensors, weight, *numbers)

    found = history(target((2, 15), cudnn=False), backward)
    pair = [f"+{PLAIN}", f"-{PLAIN}"]
    assert found == ["+", "+", "+", "+", "+buffer", *pair, "+", *pair]


# Summand, rows, inner size, columns, beta: of an addmm of 2-D matrices.
SUMMANDS: dict[str, tuple[Callable[[torch.dtype], torch.Tensor], int, int, int]] = {
    "bias": (lambda d: torch.empty(5, dtype=d), 6, 4, 5),
    "row": (lambda d: torch.empty(1, 5, dtype=d), 6, 4, 5),
    "one row of output": (lambda d: torch.empty(5, dtype=d), 1, 4, 5),
    "matrix": (lambda d: torch.empty(6, 5, dtype=d), 6, 4, 5),
    "turned matrix": (lambda d: torch.empty(5, 6, dtype=d).t(), 6, 4, 5),
    "column": (lambda d: torch.empty(6, 1, dtype=d), 6, 4, 5),
    "number": (lambda d: torch.empty((), dtype=d), 6, 4, 5),
    "expanded": (lambda d: torch.empty(1, dtype=d).expand(5), 6, 4, 5),
    "every second": (lambda d: torch.empty(10, dtype=d)[::2], 6, 4, 5),
    "one column of output": (lambda d: torch.empty(1, dtype=d), 6, 4, 1),
    "nothing to sum": (lambda d: torch.empty(5, dtype=d), 6, 1, 5),
}
ALWAYS = {"bias", "row", "one row of output"}


def lt_takes(
    name: str, dtype: torch.dtype, version: tuple[int, int], **scales: float
) -> bool:
    summand, rows, inner, columns = SUMMANDS[name]
    with fake_mode():
        one = torch.empty(rows, inner, dtype=dtype)
        other = torch.empty(inner, columns, dtype=dtype)
        args = summand(dtype), one, other
        out = torch.addmm(*args, **scales)
        call = Call(aten.addmm.default, args, dict(scales), out, target(version))
        return in_cublaslt(call)


@pytest.mark.parametrize("name", SUMMANDS)
def test_cublaslt_adds_a_bias_in_one_piece(name: str) -> None:
    expected = name in ALWAYS
    assert lt_takes(name, SINGLE, (2, 11)) == expected
    assert lt_takes(name, HALF, (2, 11)) == expected
    assert lt_takes(name, SINGLE, (2, 15)) == expected
    # In 2.15 it also adds a matrix of half precision.
    assert lt_takes(name, HALF, (2, 15)) == (expected or name == "matrix")


def test_cublaslt_scales_the_product_but_no_bias() -> None:
    assert lt_takes("bias", HALF, (2, 11), alpha=0.5)
    assert not lt_takes("bias", HALF, (2, 15), beta=0.5)
    assert not lt_takes("bias", HALF, (2, 15), beta=0)
    assert lt_takes("matrix", HALF, (2, 15), beta=0.5)
    assert not lt_takes("matrix", HALF, (2, 15), beta=0)


def test_products_without_a_summand_are_cublas_own() -> None:
    with fake_mode():
        args = torch.empty(6, 4), torch.empty(4, 5)
        out = torch.mm(*args)
    assert not in_cublaslt(Call(aten.mm.default, args, {}, out, target((2, 15))))
