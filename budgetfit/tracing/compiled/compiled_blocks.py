"""CompiledBlocks: forwards of blocks as torch.compile would run them on a GPU."""

import contextlib
import copy
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from budgetfit.errors import InputError
from budgetfit.tracing.compiled.cuda_backend import CudaBackend, check_supported
from budgetfit.tracing.compiled.inductor_answers import CudaGenerator
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake.host_tensor import count_as_on_gpu

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# The first may set attributes (transformers: ``config.problem_type``), the second finds
# them set, the third is as all others.
_CALLS_THAT_COMPILE = 4
# Of one code object: blocks of one class in several sizes, modes and dtypes.
_RECOMPILE_LIMIT = 1024


class CompiledBlocks:
    """Compiles one traced model or its blocks; equal blocks share generated code.

    Args:
        target: The GPU, with ``sm_count`` and ``threads_per_sm``.
        whole_model: Whether the model is compiled as a whole, not its blocks.
        uniform: Generate the same code for almost all batch sizes, for a search among
            them: some small buffers of training are then missing or larger.

    Attributes:
        notes: What was compiled to several graphs, and why.

    Raises:
        InputError: If there is no target (a trace of the CPU), or the generated code of
            this installation is not known to be that of training.
    """

    def __init__(
        self,
        target: CudaTarget | None,
        *,
        uniform: bool = False,
        whole_model: bool = False,
    ) -> None:
        if target is None:
            raise InputError(
                "Compiled blocks are planned and verified for CUDA: on the CPU, "
                "torch.compile generates other code. Use compile='none' there."
            )
        check_supported(target)
        self._backend = CudaBackend(target, uniform=uniform)
        self._whole_model = whole_model
        self._copies: dict[types.FunctionType, types.FunctionType] = {}
        self.notes: dict[str, None] = {}  # as a set in order

    def forward_of(self, block: nn.Module) -> Callable[..., object]:
        """Return a module's forward, compiled at its first call for each grad mode."""
        # The compiled code is kept with the returned function alone: it does not change
        # what the process has compiled.
        with _without_warnings():
            import torch._dynamo  # noqa: PLC0415 - takes seconds

        count_as_on_gpu(block)
        plain = self._copied(block.forward)
        compiled: Any = torch.compile(plain, backend=self._backend, dynamic=False)
        runs: dict[bool, int] = {}  # of generated code in a call, by grad mode
        backend, name = self._backend, type(block).__name__

        def compile_for(*args: object, **kwargs: object) -> int:
            """Compile until a call finds all of it compiled; return its runs."""
            if self._whole_model:  # which takes long, and blocks seldom set anything
                # What a call sets is set by one that compiles nothing, where that runs;
                # without a graph, which would hold its inputs until they are collected.
                quietly = contextlib.suppress(Exception)
                with _compiling(block), _casts_not_kept(), torch.no_grad(), quietly:
                    plain(*_copied(args), **_copied(kwargs))
            for _ in range(_CALLS_THAT_COMPILE):
                graphs, before = backend.graphs, backend.runs
                with (
                    _compiling(block),
                    self._noting_graphs(name),
                    backend.only_outputs(),
                ):
                    compiled(*_copied(args), **_copied(kwargs))
                if backend.graphs == graphs:
                    return backend.runs - before
            raise InputError(
                f"torch.compile compiles {name}.forward again in each call: the memory "
                "of a later one cannot be told. Use compile='none'."
            )

        def forward(*args: object, **kwargs: object) -> Any:
            grad = torch.is_grad_enabled()
            if grad not in runs:
                runs[grad] = compile_for(*args, **kwargs)
            before = backend.runs
            out = compiled(*args, **kwargs)
            if backend.runs - before < max(1, runs[grad]):
                raise InputError(
                    f"torch.compile runs {name}.forward eagerly, or parts of it: it "
                    "found nothing in it that it can compile, or other code in each "
                    "call. Use compile='none'."
                )
            return out

        return forward

    @contextlib.contextmanager
    def _noting_graphs(self, name: str) -> Iterator[None]:
        """Note it if a call compiles several graphs, with dynamo's reasons."""
        counters: Any = importlib.import_module("torch._dynamo.utils").counters
        before, graphs = dict(counters["graph_break"]), self._backend.graphs
        yield
        breaks = counters["graph_break"]
        reasons = [text for text in breaks if breaks[text] != before.get(text, 0)]
        made = self._backend.graphs - graphs
        if made > 1 and reasons:
            first = "; ".join(each.splitlines()[0] for each in reasons)
            note = f"torch.compile makes {made} graphs of {name}.forward: {first}"
            self.notes[note] = None

    def _copied(self, forward: Callable[..., object]) -> Callable[..., Any]:
        """Return the bound method with a code object of its own."""
        # Dynamo keeps what it has compiled with the code object: in the model's own, it
        # would meet what a user compiles, and stay behind.
        if not isinstance(forward, types.MethodType):
            return forward
        function = forward.__func__
        if not isinstance(function, types.FunctionType):
            return forward
        # Not by code: decorated forwards of several classes have that of one wrapper.
        if function not in self._copies:
            self._copies[function] = _copy(function)
        return types.MethodType(self._copies[function], forward.__self__)


def _copied(value: Any) -> Any:
    """Return an argument with containers of its own, and the same tensors."""
    # A block may append to a list or to a generation cache: the call that follows would
    # find what the calls that compile have added.
    kind = type(value)
    if kind is dict:
        return {key: _copied(each) for key, each in value.items()}
    if kind in (list, tuple, set):
        return kind(map(_copied, value))
    library = sys.modules.get("transformers.cache_utils")
    if library and isinstance(value, (library.Cache, library.CacheLayerMixin)):
        value = copy.copy(value)
        vars(value).update(_copied(vars(value)))
    return value


def _copy(function: types.FunctionType) -> types.FunctionType:
    copied = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


@contextlib.contextmanager
def _compiling(block: nn.Module) -> Iterator[None]:
    """Run a call that only compiles: what it allocates and saves is not recorded."""
    # Dynamo compiles nothing under a dispatch mode, and a checkpoint around the block
    # must not see the tensors that this call saves.
    mode = next(
        mode
        for mode in _get_current_dispatch_mode_stack()
        if isinstance(mode, FakeTensorMode)
    )
    dynamo: Any = torch._dynamo
    with (
        _without_warnings(),
        _disable_current_modes(),
        mode,
        _without_hooks(block),
        torch.random.fork_rng(devices=()),
        mock.patch.object(torch.cuda, "default_generators", (CudaGenerator(),)),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        dynamo.config.patch(
            recompile_limit=_RECOMPILE_LIMIT,
            accumulated_recompile_limit=_RECOMPILE_LIMIT,
            optimize_ddp=False,  # as ``compile_blocks``
        ),
    ):
        yield


@contextlib.contextmanager
def _casts_not_kept() -> Iterator[None]:
    """Keep autocast from caching casts of weights for the calls that follow."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide what torch's compiler warns of: its own deprecated functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _without_hooks(block: nn.Module) -> Iterator[None]:
    kept = [
        (hooks, dict(hooks))
        for module in block.modules()
        for hooks in (getattr(module, name) for name in _HOOKS)
        if hooks
    ]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)
