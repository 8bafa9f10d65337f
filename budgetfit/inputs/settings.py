"""Parse and validate the arguments of ``plan`` and ``estimate``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.applying.data_parallel import refuse_planning_distributed
from budgetfit.applying.torch_compile import unwrap_compiled
from budgetfit.applying.training_modes import mode_notes
from budgetfit.batches.batch_tree import batch_size_of, describe_batch
from budgetfit.calibration.known_measurements import context_for, gpu_of_device
from budgetfit.core.budget import Budget, plan_budget
from budgetfit.core.recipe import Recipe
from budgetfit.core.sample_dims import SampleDims
from budgetfit.core.units import parse_bytes
from budgetfit.core.validation import check_positive_int
from budgetfit.errors import InputError
from budgetfit.example_batches.make_batch import (
    ExampleBatch,
    batch_dimension,
    make_batch,
)
from budgetfit.gpus.cuda_context import CudaContext
from budgetfit.gpus.table import Gpu, builds_note, find_gpu, generic_gpu
from budgetfit.inputs.adapter import adapter_as_stored, model_to_trace
from budgetfit.inputs.plan_source import PlanSource
from budgetfit.inputs.sample_lengths import LengthSummary, summarize_lengths
from budgetfit.integrations.model_sources.model_source import resolve_model
from budgetfit.integrations.model_sources.python_factory import load_batch, load_loss
from budgetfit.integrations.peft import materialize_with_adapter
from budgetfit.measuring.process_memory import free_bytes
from budgetfit.planning.search.search import Request, fixed_segments
from budgetfit.traces.loss_modules import loss_notes
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.function_name import qualified_name
from budgetfit.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from budgetfit.core.adapter import Adapter
    from budgetfit.core.sample_dims import BatchDims
    from budgetfit.core.validation import ImageSize


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGpu:
    """The GPU to plan for, a memory limit, the CUDA context, and notes on assumptions.

    ``is_here``: whether this machine has it.
    """

    gpu: Gpu
    total_bytes: int | None
    context: CudaContext
    notes: tuple[str, ...] = ()
    is_here: bool = False

    def budget(
        self, headroom: int | str | None, host_ram: int | str | None = None
    ) -> Budget:
        """Compute the allocator budget and the limit on pinned host memory.

        Raises:
            InputError: If an argument is not a size, or nothing is left.
        """
        headroom_bytes = None
        if headroom is not None:
            headroom_bytes = 0 if headroom in (0, "0") else parse_bytes(headroom)
        total = self.gpu.total_bytes if self.total_bytes is None else self.total_bytes
        made = plan_budget(total, self.gpu, headroom_bytes, self.context)
        host_ram_bytes, source = self._host_ram(host_ram)
        return replace(made, host_ram_bytes=host_ram_bytes, host_ram_source=source)

    def _host_ram(self, host_ram: int | str | None) -> tuple[int, str]:
        if host_ram is not None:
            asked = 0 if host_ram in (0, "0") else parse_bytes(host_ram)
            return asked, "given"
        free = free_bytes() if self.is_here else None
        if free is None:
            assumed = round(self.gpu.host_ram_gib * 2**30)
            return assumed, "assumed (host_ram=, --host-ram)"
        return free, "free on this machine"

    def on(self, gpu: Gpu) -> TargetGpu:
        """Return another GPU as target, with all of its memory."""
        context, _ = context_for(gpu)
        return TargetGpu(gpu=gpu, total_bytes=None, context=context)

    @property
    def context_bytes(self) -> int:
        """Bytes set aside for the CUDA context."""
        return self.context.planned_bytes


def find_target_gpu(vram: int | str | None, gpu: str | None) -> TargetGpu:
    """Resolve ``gpu`` and ``vram`` to a GPU and a memory limit.

    Raises:
        InputError: If neither is given and this machine has no CUDA device.
    """
    found, total_bytes, notes = _gpu_and_limit(vram, gpu)
    context, more = context_for(found)
    old = builds_note(found)
    return TargetGpu(
        gpu=found,
        total_bytes=total_bytes,
        context=context,
        notes=(*notes, *more, *([old] if old else [])),
        is_here=torch.cuda.is_available() and current_gpu().name == found.name,
    )


def _gpu_and_limit(
    vram: int | str | None, gpu: str | None
) -> tuple[Gpu, int | None, tuple[str, ...]]:
    limit = None if vram is None else _limit(vram)
    if gpu is not None:
        if not isinstance(gpu, str):
            raise InputError(f'gpu must be a name such as "rtx-4090"; got {gpu!r}.')
        found = find_gpu(gpu)
        if limit is not None and limit > found.total_bytes:
            have = format_bytes(found.total_bytes)
            note = (
                f"{found.title} has {have}, less than the {format_bytes(limit)} asked "
                f"for: planned for {have}"
            )
            return found, found.total_bytes, (note,)
        return found, limit, ()
    if torch.cuda.is_available():
        return current_gpu(), limit, ()
    if limit is None:
        raise InputError(
            "Say how much memory to plan for: this machine has no CUDA device. For "
            'example vram="24GB" or gpu="rtx-4090" (--vram 24GB, --gpu rtx-4090).'
        )
    found = generic_gpu(limit)
    note = f"no card named: planned for {found.title}; name yours with gpu= (--gpu)"
    return found, limit, (note,)


def _limit(vram: int | str) -> int:
    try:
        return parse_bytes(vram)
    except InputError:
        if not isinstance(vram, str) or not _is_gpu_name(vram):
            raise
    raise InputError(
        f"{vram!r} is a card and no memory size: use gpu={vram!r} (--gpu {vram})."
    )


def _is_gpu_name(name: str) -> bool:
    try:
        find_gpu(name)
    except InputError:
        return False
    return True


def _shown(value: object) -> str:
    """Return the repr of a plain value, or the class name of another."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if plain else f"a {type(value).__name__}"


def current_gpu() -> Gpu:
    """Return the CUDA device of this machine."""
    return gpu_of_device(torch.device("cuda", torch.cuda.current_device()))


def make_workload(  # noqa: PLR0913 - one value each, all needed
    model: nn.Module | Any,  # noqa: ANN401 - a config or text as well
    target: TargetGpu,
    *,
    batch: Any = None,  # noqa: ANN401 - any nesting of tensors
    batch_dims: BatchDims = None,
    max_length: int | None = None,
    image_size: ImageSize = None,
    text_only: bool = False,
    lengths: LengthSummary | None = None,
    loss: str | Callable[..., Any] | None = None,
    optimizer: str | Callable[..., torch.optim.Optimizer],
    adapter: Adapter | None = None,
    keeps_dtypes: bool = False,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[Workload, PlanSource]:
    """Build the workload to plan for and its ``PlanSource``.

    ``keeps_dtypes``: weights are trained in the dtype in which they are loaded.

    Raises:
        InputError: If the model, batch or loss is invalid.
    """
    if max_length is not None:
        check_positive_int("max_length", max_length, example=1024)
    if progress is not None:
        progress("reading the model")
    plain = unwrap_compiled(model) if isinstance(model, nn.Module) else model
    resolved = resolve_model(plain, trust_remote_code=trust_remote_code)
    live = resolved.model
    refuse_planning_distributed(live)
    is_live = isinstance(model, nn.Module)
    adapter, stored_notes = adapter_as_stored(resolved, adapter, given=is_live)
    batch = load_batch(batch) if isinstance(batch, str) else batch
    batch = resolved.batch if batch is None else batch
    if batch is not None and (image_size is not None or text_only):
        raise InputError(
            "image_size= and text_only= are for a batch that is made. Leave them out "
            "where a batch is given, or leave the batch out."
        )
    loss = parse_loss(loss) or resolved.loss
    traced, adapter_notes = model_to_trace(live, adapter)
    _check_trains(traced, resolved.name)
    notes = [*target.notes, *resolved.notes, *stored_notes, *adapter_notes]
    if keeps_dtypes or adapter is not None:
        notes += resolved.dtype_notes
    if plain is not model:
        notes.append("planned, and trained by apply(), without torch.compile")
    longest = max_length if lengths is None else lengths.planned
    dims = SampleDims.parse(batch_dims, batch_dimension(live))
    make = partial(make_batch, image_size=image_size, text_only=text_only, dims=dims)
    given = batch is not None
    batch, batch_notes = _example(live, batch, partial(make, max_length=longest))
    batch_size_of(batch, dims=dims)
    notes += [*batch_notes, *loss_notes(loss, live), *mode_notes(live)]
    if lengths is not None:
        _check_holds(batch, lengths.planned)
        notes += lengths.notes()
    function = None if isinstance(optimizer, str) else optimizer
    workload = Workload(
        model=traced,
        batch=batch,
        batch_dims=dims,
        loss=loss,
        optimizer=function,
        gpu=target.gpu,
        name=resolved.name,
        source=resolved.source
        if adapter is None
        else f"{resolved.source}; {adapter.describe()}",
        notes=tuple(notes),
        cudnn=torch.backends.cudnn.enabled,
        remake=None if given else make,
    ).with_found_blocks()
    source = PlanSource(
        model=live if is_live else None,
        adapter=adapter,
        materialize=materialize_with_adapter(resolved.materialize, adapter),
        batch=batch,
        batch_dims=dims,
        loss=loss,
        optimizer=function,
    )
    return workload, source


def _check_trains(model: nn.Module, name: str) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            f"{name} has no trainable parameter, so there is nothing to "
            "train. Check requires_grad."
        )


def _example(
    model: nn.Module,
    batch: Any,  # noqa: ANN401 - any nesting of tensors
    make: Callable[[nn.Module], ExampleBatch],
) -> tuple[Any, tuple[str, ...]]:
    """Return the given batch or a generated one, and notes.

    Raises:
        InputError: If none can be generated.
    """
    if batch is not None:
        return batch, ()
    made = make(model)
    return made.batch, made.notes


def parse_loss(loss: object) -> Callable[..., Any] | None:
    """Return the loss function, loaded where text names it.

    Raises:
        InputError: If it is not a function.
    """
    if isinstance(loss, str):
        return load_loss(loss)
    if isinstance(loss, nn.modules.loss._Loss):  # noqa: SLF001 - torch's own, all of them
        name = type(loss).__name__
        raise InputError(
            f"loss={name}() takes a target, and a loss here takes the batch: use "
            f"loss=lambda outputs, batch: {name}()(outputs, batch[...])."
        )
    if loss is not None and not callable(loss):
        raise InputError(
            "loss must be a function: loss(outputs, batch) -> scalar; for example "
            "loss=lambda outputs, batch: outputs.mean()."
        )
    return loss


def parse_lengths(
    lengths: Iterable[int] | Mapping[int, int] | None, max_length: int | None
) -> LengthSummary | None:
    """Parse a list of sequence lengths or a mapping of length to samples.

    Raises:
        InputError: If it is neither.
    """
    if lengths is None:
        return None
    if isinstance(lengths, (str, bytes, int)):
        raise InputError(
            "lengths must be a list of lengths such as [512, 2048], or samples by "
            f"length such as {{512: 900, 2048: 100}}; got {lengths!r}."
        )
    return summarize_lengths(lengths, max_length)


def _check_holds(batch: Any, length: int) -> None:  # noqa: ANN401
    """Check that the batch is long enough for the longest sample.

    After the sample dimension some tensor must have a sequence dimension; which one,
    only the model knows.
    """
    shapes = [shape for shape, _ in describe_batch(batch).values()]
    if any(size >= length for shape in shapes for size in shape[1:]):
        return
    raise InputError(
        f"The longest sample has {length} tokens, but the batch has no dimension that "
        f"long: {', '.join(map(str, shapes))}. Pad the example batch to {length}, or "
        "leave batch= out, or lengths= where samples have no length."
    )


def optimizer_name(optimizer: str | Callable[..., torch.optim.Optimizer]) -> str:
    """Return transformers' ``optim`` name, or the qualified name of a callable."""
    if isinstance(optimizer, str):
        return optimizer
    if not callable(optimizer):
        raise InputError(
            "optimizer must be a name such as 'adamw_torch_fused' or a function of "
            f"the parameters such as torch.optim.AdamW; got {_shown(optimizer)}."
        )
    return qualified_name(optimizer)


def parse_checkpointing(
    wanted: str | Sequence[str], workload: Workload
) -> str | tuple[str, ...]:
    """Return a checkpointing policy's name, or module paths of blocks."""
    if isinstance(wanted, str):
        return wanted
    if not isinstance(wanted, (list, tuple)):
        raise InputError(
            "checkpointing must be auto, none, full, every-2, sqrt, as-is, or a list "
            f'of block names such as ["model.layers.0"]; got {wanted!r}.'
        )
    return workload.full_names(wanted)


def parse_request(
    checkpointing: str | Sequence[str],
    objective: str,
    batch_size: int | None,
    workload: Workload,
) -> Request:
    """Build the search request, once the model's blocks are known.

    Raises:
        InputError: If a policy or a named block is unknown.
    """
    policy = parse_checkpointing(checkpointing, workload)
    if policy not in ("auto", "sqrt"):
        fixed_segments(policy, workload.blocks)
    return Request(checkpointing=policy, objective=objective, batch_size=batch_size)  # type: ignore[arg-type]


def check_recipe(recipe: Recipe | None) -> None:
    """Raise InputError unless ``recipe`` is a Recipe or None."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputError(
            f"recipe must be a Recipe, not a {type(recipe).__name__}; for example "
            'budgetfit.Recipe(batch_size=8, precision="bf16-mixed").'
        )
