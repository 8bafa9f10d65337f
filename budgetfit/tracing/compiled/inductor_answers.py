"""What inductor is told while it generates code: that the GPU of the plan is here."""

# ruff: noqa: PLC0415 - inductor's modules take seconds to import

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from budgetfit.tracing.cuda.kernel_memory.norms import CHANNELS_LAST
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.isolation.lru_caches import cached_functions

if TYPE_CHECKING:
    _Patch = Callable[[Any, str, Any], None]

CUDA: Final = torch.device("cuda", 0)
# c10/core/impl/DeviceGuardImplInterface.h and torch/headeronly/core/DeviceType.h.
_GUARDS: Final = "_ZN3c104impl26device_guard_impl_registryE"
_DEVICE_TYPES, _CUDA, _META = 21, 1, 14
_TRITON: Final = "3.7.1"  # that of torch 2.13
_NUMBERS_OF_TRITON: Final = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
# Their functions keep what they were told about the device.
_CACHES: Final = (
    "torch._inductor.runtime.hints",
    "torch._inductor.utils",
    "torch.utils._triton",
)
UNIFORM: Final = {"split_reductions": False, "triton.mix_order_reduction": False}


@contextlib.contextmanager
def answers_for_inductor(
    target: CudaTarget,
    *,
    uniform: bool,
    partition: Callable[..., object],
    module: Callable[[str], object],
) -> Iterator[None]:
    """Let inductor generate code for the target's GPU without CUDA and Triton.

    Args:
        target: With ``sm_count`` and ``threads_per_sm``.
        uniform: Generate the same code for almost all batch sizes: reductions are not
            split to fill the GPU, nor fused with those over other dimensions.
        partition: Called with inductor's ``partition_fn`` and its arguments.
        module: Makes the module of generated code.
    """
    import torch._inductor.compile_fx as inductor
    import torch._inductor.scheduler
    from torch._inductor.graph import GraphLowering

    def compile_to_module(lowering: Any) -> Any:
        code, _ = lowering.codegen()
        return module(code.value)

    with contextlib.ExitStack() as stack:

        def patch(owner: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        # Neither another plan's GPU is here, nor this one in what follows.
        for function in itertools.chain.from_iterable(map(cached_functions, _CACHES)):
            function.cache_clear()
            stack.callback(function.cache_clear)
        if torch.version.cuda is None:
            stack.enter_context(_guard_for_cuda())
            _folded_constants_on_host(stack)
        if "triton" not in sys.modules:
            # Not mock.patch.dict: all else that is imported meanwhile would be imported
            # again each time, and its classes would be others.
            for name, stand_in in _triton().items():
                sys.modules[name] = stand_in
                stack.callback(sys.modules.pop, name)
        _answer_for_device(target, patch)
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # none is made on the device
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        _answer_for_decompositions(patch)
        layout = functools.partial(_layout_of_convolution, cudnn=target.cudnn)
        patch(torch._C, "_conv_determine_backend_memory_format", layout)
        _answer_for_triton(patch)
        _change_settings(stack, patch, uniform=uniform)
        function = functools.partial(partition, inductor.partition_fn)
        patch(inductor, "partition_fn", function)
        patch(GraphLowering, "_compile_to_module", compile_to_module)
        yield


def _answer_for_device(target: CudaTarget, patch: _Patch) -> None:
    """Answer questions about the device, asked of torch or of Dynamo's interface."""
    from torch._dynamo.device_interface import CudaInterface

    properties, capability = _properties(target), target.compute_capability
    both: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "get_device_properties": lambda *_, **__: properties,
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
    }
    of_torch: dict[str, Any] = {
        "get_device_capability": lambda *_, **__: capability,
        "get_device_name": lambda *_, **__: properties.name,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda *_: None,
        "default_generators": (CudaGenerator(),),
        "_DeviceGuard": _NoGuard,
        "device": _NoGuard,
    }
    number = capability[0] * 10 + capability[1]
    of_interface: dict[str, Callable[..., Any]] = {
        "get_compute_capability": lambda *_: number,
        "is_triton_capable": lambda *_: True,
        "raise_if_triton_unavailable": lambda *_: None,
        "exchange_device": lambda *_: 0,
        "maybe_exchange_device": lambda *_: 0,
        "is_bf16_supported": lambda *_, **__: capability >= (8, 0),
    }
    for name, answer in (both | of_torch).items():
        patch(torch.cuda, name, answer)
    for name, answer in (both | of_interface).items():
        patch(CudaInterface, name, staticmethod(answer))
    for name in ("get_device_properties", "current_device"):
        patch(CudaInterface.Worker, name, staticmethod(both[name]))
    patch(CudaInterface, "device", _NoGuard)
    patch(torch.version, "cuda", "13.0")
    patch(FakeTensorMode, "avoid_device_init", property(lambda _: True))


def _answer_for_decompositions(patch: _Patch) -> None:
    """Say that tensors are on a GPU where torch's decompositions ask for it."""
    # Those of a convolution's gradients and of ``masked_scatter`` do; tensors are on
    # the CPU while the joint graph is traced.
    from torch._inductor import decomposition
    from torch._inductor.codegen import common

    has_feature = common.has_backend_feature
    patch(decomposition, "is_gpu", lambda _: True)
    patch(common, "has_backend_feature", lambda _, feature: has_feature(CUDA, feature))


def _layout_of_convolution(
    x: torch.Tensor, weight: torch.Tensor, backend: object, *, cudnn: bool
) -> torch.memory_format:
    """Return the memory format of a convolution's result on CUDA."""
    # A fake tensor's convolution asks for it: a CPU build answers for itself. Source:
    # ``cudnn_conv_suggest_memory_format`` in aten/src/ATen/native/ConvUtils.h;
    # PyTorch's own kernels for CUDA are contiguous.
    del backend
    last = CHANNELS_LAST.get(weight.dim(), torch.contiguous_format)
    if not cudnn or torch.float64 in (x.dtype, weight.dtype):
        return torch.contiguous_format
    formats = suggest_memory_format(x), suggest_memory_format(weight)
    return last if last in formats else torch.contiguous_format


def _answer_for_triton(patch: _Patch) -> None:
    """Let inductor find Triton, and ask nothing of it."""
    import torch._inductor.codegen.triton as codegen
    from torch._inductor import utils

    version = utils.TritonAttrsDescriptorVersion.V4_DICT
    answers: dict[str, Callable[..., Any]] = {
        "triton_version_uses_attrs_dict": lambda: True,
        "get_triton_attrs_descriptor_version": lambda: version,
        "has_triton": lambda *_: True,
        "has_triton_package": lambda *_: True,
    }
    modules = [m for n, m in sys.modules.items() if n.startswith("torch._inductor")]
    for module in [*modules, sys.modules["torch.utils._triton"]]:
        for name, answer in answers.items():
            if name in vars(module):
                patch(module, name, answer)
    patch(codegen, "gen_attr_descriptor_import", lambda: "")
    patch(
        codegen.TritonKernel, "inductor_meta_common", classmethod(lambda *_, **__: {})
    )


def _change_settings(
    stack: contextlib.ExitStack, patch: _Patch, *, uniform: bool
) -> None:
    """Generate code in this process, at once, as training with a plan does."""
    import torch._functorch.config as autograd_config
    import torch._inductor.compile_fx as inductor
    from torch._inductor import config, scheduler, utils
    from torch._inductor.fx_passes import joint_graph

    tables = functools.partial(_tables_on_cpu, joint_graph.lazy_init)
    patch(joint_graph, "lazy_init", tables)
    patch(inductor, "get_input_idxs_to_check", lambda *_, **__: ())
    patch(utils.log, "warning", lambda *_, **__: None)  # of few SMs, for each graph
    patch(scheduler.log, "fatal", lambda *_, **__: None)  # beside the error it raises
    stack.enter_context(
        config.patch(force_disable_caches=True, compile_threads=1, shape_padding=False)
    )
    if uniform:
        stack.enter_context(config.patch(UNIFORM))
    stack.enter_context(
        autograd_config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True
        )
    )


def _tables_on_cpu(lazy_init: Callable[..., None], *_: object) -> None:
    """Make inductor's tables of patterns, once, from traces on the CPU."""
    # Only those that training makes for each device: of the others a second is refused.
    lazy_init(torch.device("cpu"))


def _properties(target: CudaTarget) -> Any:
    """Return what ``torch.cuda.get_device_properties`` would."""
    # Without ``sm_count`` and ``threads_per_sm`` there is no telling how inductor
    # splits reductions. The rest decides how kernels are launched, not what they write.
    major, minor = target.compute_capability
    return types.SimpleNamespace(
        name="GPU",
        major=major,
        minor=minor,
        multi_processor_count=target.sm_count,
        max_threads_per_multi_processor=target.threads_per_sm,
        total_memory=24 << 30,
        regs_per_multiprocessor=65536,
        warp_size=32,
        max_threads_per_block=1024,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=99 << 10,
        shared_memory_per_multiprocessor=100 << 10,
        L2_cache_size=48 << 20,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
    )


class CudaGenerator(torch.Generator):
    """A generator of a device that is not here: of random ops that are recomputed.

    ``torch.cuda.default_generators`` has one while code is generated and first run.
    """

    device = CUDA

    def clone_state(self) -> CudaGenerator:
        """Return another one."""
        return CudaGenerator()

    def manual_seed(self, seed: int) -> CudaGenerator:
        """Return itself: nothing is drawn."""
        del seed
        return self

    def get_state(self) -> None:  # type: ignore[override]
        """Return no state."""

    def set_state(self, new_state: object) -> CudaGenerator:
        """Take no state."""
        del new_state
        return self


class _NoGuard:
    """``torch.cuda.device`` without a device."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _triton() -> dict[str, types.ModuleType]:
    """Return modules in place of Triton."""
    # Inductor asks whether a value is its, and, for the scratch of a split scan, how
    # many bits a number has.
    triton: Any = types.ModuleType("triton")
    language: Any = types.ModuleType("triton.language")
    triton.__version__ = _TRITON
    triton.language = language
    language.dtype = type("dtype", (), {})
    language.constexpr = type("constexpr", (), {})
    for name in _NUMBERS_OF_TRITON:
        dtype: Any = language.dtype()
        dtype.primitive_bitwidth = int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))
        setattr(language, name, dtype)
    return {"triton": triton, "triton.language": language}


@contextlib.contextmanager
def _guard_for_cuda() -> Iterator[None]:
    """Lend device cuda the device guard of meta, which does nothing."""
    # A CPU build has none for cuda, and asks for it in every op on a fake tensor there.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(library, _GUARDS)
    before = registry[_CUDA]
    if before is None:
        registry[_CUDA] = registry[_META]
    try:
        yield
    finally:
        registry[_CUDA] = before


def _folded_constants_on_host(stack: contextlib.ExitStack) -> None:
    """Let what inductor evaluates to fold constants be made on the host."""
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, **_: object) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def empty_strided(
        size: Any, stride: Any, *, dtype: Any = None, **_: object
    ) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    library.impl("empty.memory_format", empty, "CUDA")
    library.impl("empty_strided", empty_strided, "CUDA")
    stack.callback(library._destroy)
