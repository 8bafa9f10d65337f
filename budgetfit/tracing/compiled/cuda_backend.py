"""CudaBackend: a torch.compile backend that generates code for a GPU that is not here.

A graph of fake CPU tensors is moved to device cuda, inductor lowers, fuses and
schedules it for the GPU, and the Python code that it generates runs on fakes.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeGuard

import torch
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map

from budgetfit.errors import InputError
from budgetfit.tracing.compiled.decompositions import cuda_decompositions
from budgetfit.tracing.compiled.generated_code import module_on_fakes
from budgetfit.tracing.compiled.inductor_answers import CUDA, answers_for_inductor
from budgetfit.tracing.cuda.target import CudaTarget, installed_torch_version

# What inductor generates was compared with a CUDA build of these versions.
CHECKED_TORCH: Final = ((2, 13),)
_OLDEST_CAPABILITY: Final = (7, 0)  # of Triton


def check_supported(target: CudaTarget) -> None:
    """Check that generated code can be had here, and is that of the target."""
    torch_version = target.torch_version
    if torch_version not in CHECKED_TORCH or torch_version != installed_torch_version():
        checked = ", ".join(".".join(map(str, version)) for version in CHECKED_TORCH)
        here = ".".join(map(str, torch_version))
        raise InputError(
            f"Compiled blocks are predicted for torch {checked}, and this is torch "
            f"{here}: the memory of its generated code was not compared with a GPU "
            "build's. Use compile='none', or that torch."
        )
    if target.compute_capability < _OLDEST_CAPABILITY:
        raise InputError(
            "torch.compile needs Triton, which needs compute capability 7.0; this GPU "
            f"has {'.'.join(map(str, target.compute_capability))}. Use compile='none'."
        )
    if sys.platform != "linux":
        raise InputError(
            "Compiled blocks are predicted on Linux only: inductor's code for CUDA is "
            f"generated with Linux's PyTorch, and this is {sys.platform}. Use "
            "compile='none'."
        )


class CudaBackend:
    """Passed to ``torch.compile``.

    ``uniform``: see ``answers_for_inductor``.

    Attributes:
        graphs: How many graphs were compiled.
        runs: How often generated code has run.
    """

    def __init__(self, target: CudaTarget, *, uniform: bool) -> None:
        self._target, self._uniform = target, uniform
        self.graphs = self.runs = 0
        self._only_outputs = False

    @contextlib.contextmanager
    def only_outputs(self) -> Iterator[None]:
        """Let generated code that has run before return its outputs and do no more."""
        self._only_outputs = True
        try:
            yield
        finally:
            self._only_outputs = False

    def __call__(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> object:
        """Return what runs instead of ``graph``."""
        import torch._inductor.compile_fx as inductor  # noqa: PLC0415 - takes seconds

        self.graphs += 1
        with answers_for_inductor(
            self._target,
            uniform=self._uniform,
            partition=_partition,
            module=functools.partial(module_on_fakes, on_call=self._count),
        ):
            return inductor.compile_fx(
                graph,
                example_inputs,
                inner_compile=self._compile,
                decompositions=cuda_decompositions(),
            )

    def _compile(
        self,
        graph: torch.fx.GraphModule,
        example_inputs: Sequence[object],
        **kwargs: Any,
    ) -> Any:
        """Generate the code of a forward or backward graph."""
        import torch._inductor.compile_fx as inductor  # noqa: PLC0415 - as above

        move_graph(graph)
        moved = [_on_cuda(each) for each in example_inputs]
        return inductor.compile_fx_inner(graph, moved, **kwargs)

    def _count(self) -> bool:
        self.runs += 1
        return self._only_outputs


def move_graph(graph: torch.fx.GraphModule) -> None:
    """Move the values and factory functions of a graph to device cuda, in place."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def move(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in moved:
            moved[id(value)] = value, _on_cuda(value)
        return moved[id(value)][1]

    for child in filter(_is_graph, graph.children()):
        move_graph(child)
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(move, node.meta["val"])
        if node.op == "call_function":
            node.args = map_aggregate(node.args, _device_on_cuda)
            node.kwargs = map_aggregate(node.kwargs, _device_on_cuda)
    constants = [name for name in vars(graph) if name.startswith("_tensor_constant")]
    for name in constants:
        setattr(graph, name, move(getattr(graph, name)))


def _is_graph(module: torch.nn.Module) -> TypeGuard[torch.fx.GraphModule]:
    return isinstance(module, torch.fx.GraphModule)


def _partition(
    partition: Any, graph: torch.fx.GraphModule, joint_inputs: Any, **kwargs: object
) -> object:
    """Partition a joint graph that was moved: passes depend on the device."""
    move_graph(graph)
    return partition(graph, tree_map(_on_cuda, joint_inputs), **kwargs)


def _device_on_cuda(value: object) -> Any:
    is_cpu = isinstance(value, torch.device) and value.type == "cpu"
    return CUDA if is_cpu else value


def _on_cuda(value: object) -> Any:
    """Return a fake tensor of the same layout on device cuda."""
    if not isinstance(value, torch.Tensor) or value.device.type == "cuda":
        return value
    mode: Any = getattr(value, "fake_mode", None) or torch._guards.detect_fake_mode()
    with torch.no_grad(), mode:
        return torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=CUDA
        )
