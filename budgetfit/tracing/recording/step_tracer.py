"""Run training steps on fake tensors and record them as a RawTrace."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from budgetfit.batches.batch_tree import map_batch, resize_batch
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.samples.sample_dims import FIRST_DIM, SampleDims
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.tracing.cuda.op_semantics import imitate_cuda
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.cuda.triton.launches import kernels_on_fakes, triton_is_loaded
from budgetfit.tracing.fake.host_tensor import host_tensors, moves_attributes
from budgetfit.tracing.fake.model_copy import fake_copy, fake_mode, kept_modules
from budgetfit.tracing.fake.result_cache import FakeResultCache
from budgetfit.tracing.fake.shortened_model import Shortening
from budgetfit.tracing.isolation.cuda_device_names import CudaDevicesOnCpu
from budgetfit.tracing.isolation.lru_caches import lru_caches_cleared
from budgetfit.tracing.isolation.python_state import python_state_preserved
from budgetfit.tracing.isolation.user_state import user_state_preserved
from budgetfit.tracing.recording.changed_containers import ChangedContainers
from budgetfit.tracing.recording.later_steps import look_at_later_steps
from budgetfit.tracing.recording.loop_recorder import LoopRecorder
from budgetfit.tracing.recording.module_tracker import ModuleTracker
from budgetfit.tracing.recording.rank_differences import (
    ChangedBuffers,
    experts_note,
    refuse_written_weights,
)
from budgetfit.tracing.recording.raw_trace import (
    LoopRunner,
    RawTrace,
    Runner,
    StepProgram,
)
from budgetfit.tracing.recording.step_recorder import StepRecorder
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.recording.tensor_owners import log_weights
from budgetfit.tracing.records import OpSemantics, RunOp
from budgetfit.tracing.values.assumptions import EVEN_CHOICE
from budgetfit.tracing.values.concrete_execution import weight_values
from budgetfit.tracing.values.known_values import KnownValues
from budgetfit.tracing.values.library_patches import patch_libraries
from budgetfit.tracing.values.value_checks import ValueChecks
from budgetfit.utils.lazy_import import lazy_import

# Values too large to propagate are assumed only at the batch sizes of an affine trace;
# at larger ones the affine trace is more reliable.
MAX_ASSUMED_BATCH_SIZE = 3


class TraceOptions(TypedDict):
    """How a program is traced.

    Attributes:
        blocks: Module paths of the chain, in the shortened model if ``short``.
        target: The GPU whose semantics are imitated; None for CPU semantics.
        short: How to shorten the model.
        real_values: Also run the forward on real tensors, for models whose control flow
            depends on tensor values.
        redirect_cuda: Redirect CUDA devices named by the program to the CPU, where the
            fakes are.
        containers: Watches the containers that blocks are given; the trace then says
            nothing about memory.
        checks: Checks of values that earlier traces found.
        only_forward: End after the first forward.
    """

    blocks: Sequence[str]
    target: CudaTarget | None
    short: NotRequired[Shortening | None]
    real_values: NotRequired[bool]
    redirect_cuda: NotRequired[bool]
    containers: NotRequired[ChangedContainers]
    checks: NotRequired[ValueChecks]
    only_forward: NotRequired[bool]


def trace_step(  # noqa: PLR0913 - one value each, all needed
    model: nn.Module,
    program: StepProgram,
    batch: Any,
    *,
    batch_size: int,
    dims: SampleDims = FIRST_DIM,
    micro_steps: int = 1,
    steps: int = 1,
    parallelism: Parallelism | None = None,
    copy_modules: Callable[[FakeTensorMode, nn.Module], Sequence[nn.Module]]
    | None = None,
    collate: Callable[[Any], Any] = lambda batch: batch,
    also_runs: Sequence[object] = (),
    **options: Unpack[TraceOptions],
) -> RawTrace:
    """Run ``steps`` optimizer steps of ``micro_steps`` micro-batches on fake tensors.

    Neither ``model`` nor any global state is changed.

    Args:
        model: Of real, meta or CUDA tensors; a fake copy of it runs.
        program: Prepares the copy for training.
        batch: Any pytree of tensors.
        batch_size: Samples of each micro-batch.
        dims: The sample dimension of each tensor.
        micro_steps: Micro-batches of each step.
        steps: One is enough for a ``Run``: ``append_steady_step`` derives the second.
        parallelism: That of the program, which is traced as one of its ranks.
        copy_modules: Given the fake mode and the fake model, makes fake copies of the
            other modules that the program runs; their tensors are weights as well.
        collate: Makes of a batch of that size what the program is given.
        also_runs: A loss, an optimizer: code of the user's that runs beside the model.
        options: How it is traced.
    """
    target, blocks = options["target"], options["blocks"]
    short, real_values = options.get("short"), options.get("real_values", False)
    sized = collate(_resized(batch, batch_size, dims, real_values=real_values))
    modules = list(kept_modules(model, short).values())
    left_out = [] if short is None else map(model.get_submodule, short.left_out)
    # Triton's code names CUDA.
    redirects = options.get("redirect_cuda", False) or triton_is_loaded()
    with (
        python_state_preserved(),
        lru_caches_cleared(modules),
        user_state_preserved(model, *also_runs, never_run=left_out),
        fake_mode() as mode,
    ):
        results = FakeResultCache(mode)
        values = KnownValues(
            results.run,
            assumes_for_large=batch_size <= MAX_ASSUMED_BATCH_SIZE,
            all_values=real_values,
            checks=options.get("checks"),
        )
        fake = fake_copy(model, mode, short, values.record_weight)
        others = () if copy_modules is None else copy_modules(mode, fake)
        semantics, imitation = imitate_cuda(target)
        log, ranks = _storage_log(parallelism, semantics, values.run, mode)
        log.take_key = results.take_key
        tracker = ModuleTracker(fake, blocks, log)
        values.where = tracker.current_path
        values.on_array = log.note_reads
        if "containers" in options:
            options["containers"].watch(fake, blocks)
        raw = RawTrace(batch_size=batch_size, log=log, layers=tracker.layers)
        recorder = StepRecorder(
            *(fake, log, tracker, values, semantics, raw),
            only_forward=options.get("only_forward", False),
        )
        with (
            contextlib.ExitStack() as at_end,
            imitation,
            CudaDevicesOnCpu() if redirects else contextlib.nullcontext(),
            kernels_on_fakes(target),
            patch_libraries(values),
            ranks,
            log,
        ):
            log.on_op = tracker.on_backward_op
            log_weights(fake, log, tracker)
            for other in others:
                log_weights(other, log)
            _log_attributes((fake, *others), log)
            runner = program(fake, recorder.start_phase)
            at_end.callback(_remove_optimizer_hooks, runner)
            if parallelism is not None:
                tracker.hook_wrapped(fake)
                changed = ChangedBuffers(fake)
                refuse_written_weights(fake, parallelism.engine)
            if isinstance(runner, LoopRunner):
                LoopRecorder(recorder, steps, micro_steps).train(runner, sized)
            else:
                recorder.train(runner, sized, steps, micro_steps)
            if parallelism is None and not options.get("only_forward"):
                log.stop()
                look_at_later_steps(raw, fake, runner.optimizer, log.run_op)
        log.close()
        _recategorize_forward_temporaries(raw)
        raw.notes = sorted(semantics.notes) if semantics is not None else []
        raw.notes += values.note_lines()
        if parallelism is not None:
            chooser = values.notes.get(EVEN_CHOICE)
            raw.notes += experts_note(fake, chooser, parallelism.engine)
            raw.notes += changed.note(parallelism.engine)
        raw.gives_containers = tracker.gives_containers
        tracker.remove_hooks()
    return raw


def _log_attributes(models: Iterable[nn.Module], log: StorageLog) -> None:
    """Log tensors in plain attributes: those that stay on the host take nothing."""
    with torch._C.DisableTorchFunctionSubclass():
        for module in (each for model in models for each in model.modules()):
            for tensor in host_tensors(module):
                log.log_storage(tensor, "buffers", size_bytes=0)
            for value in vars(module).values() if moves_attributes(module) else ():
                if isinstance(value, torch.Tensor):
                    log.log_storage(value, "buffers")


def _storage_log(
    parallelism: Parallelism | None,
    semantics: OpSemantics | None,
    run: RunOp,
    mode: FakeTensorMode,
) -> tuple[StorageLog, AbstractContextManager[None]]:
    """Return the log, and the context in which the program may wrap its model."""
    if parallelism is None:
        return StorageLog(semantics, run), contextlib.nullcontext()
    ranks = lazy_import("budgetfit.tracing.recording.distributed.one_rank")
    return ranks.as_one_rank(parallelism, semantics, run, mode)


def _resized(
    batch: Any, batch_size: int, dims: SampleDims, *, real_values: bool
) -> Any:
    """Return the batch with ``batch_size`` samples, and the values a trace needs."""
    # Called outside the fake mode, in which added samples would have no values.
    if not real_values:
        return resize_batch(_integers_only(batch), batch_size, dims=dims)
    # All samples are the first, so that control flow is the same for each.
    real = map_batch(batch, lambda x: weight_values(_on_cpu(x)))
    return resize_batch(real, batch_size, dims=dims, of_first=1)


def _remove_optimizer_hooks(runner: Runner | LoopRunner) -> None:
    """Remove an optimizer's hooks from the fakes: their reference cycle would leak."""
    remove_hooks = getattr(runner.optimizer, "remove_hooks", None)
    if remove_hooks is not None:
        remove_hooks()


def _integers_only(batch: Any) -> Any:
    """Move floating-point tensors to meta; keep integers, which models may read."""

    def without_floats(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.device.type == "meta":
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        return _on_cpu(tensor)

    return map_batch(batch, without_floats)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.detach().cpu()


def _recategorize_forward_temporaries(raw: RawTrace) -> None:
    """Turn activations that are freed within their forward into temporaries."""
    activations, temporaries = (
        CATEGORIES.index(name) for name in ("activations", "temporaries")
    )
    categories = raw.log.categories
    for phase in raw.phases:
        if phase.name == "forward":
            for event in raw.log.events[phase.start : phase.end]:
                if event < 0 and categories[-event - 1] == activations:
                    categories[-event - 1] = temporaries
