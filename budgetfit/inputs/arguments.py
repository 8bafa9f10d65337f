"""The arguments of ``plan``, ``estimate`` and ``compare``: as given, and parsed once.

The search for suggestions parses them again with one argument changed (a shorter
sequence, another method) and calls ``least``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from budgetfit.applying.data_parallel import refuse_planning_distributed
from budgetfit.applying.optimizers.for_recipe import left_out_notes
from budgetfit.applying.torch_compile import compiled_modules, unwrap_compiled
from budgetfit.applying.training_modes import mode_notes
from budgetfit.batches.batch_tree import batch_size_of, describe_batch
from budgetfit.batches.packed_rows import unnamed_offsets
from budgetfit.batches.sample_count import children_of
from budgetfit.core.adapter import Adapter
from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.core.budget import Budget
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.precision import requested_precisions
from budgetfit.core.recipe import CompileMode, check_compile, check_compile_on_ranks
from budgetfit.core.samples.image_sizes import (
    ImageSizes,
    ImageSizeSummary,
    SampleSizes,
    summarize_image_sizes,
)
from budgetfit.core.samples.sample_dims import BatchDims, SampleDims
from budgetfit.core.samples.sample_lengths import summarize_lengths
from budgetfit.core.validation import (
    ImageSize,
    check_batch,
    check_objective,
    check_positive_int,
    set_python_numbers,
)
from budgetfit.errors import InputError
from budgetfit.example_batches.make_batch import ExampleBatch, loss_for, make_batch
from budgetfit.example_batches.plain_modules import batch_dimension
from budgetfit.gpus.table import Gpu
from budgetfit.inputs.adapter import (
    adapter_as_stored,
    base_of_adapter,
    find_adapter,
    model_to_trace,
)
from budgetfit.inputs.engines_for_model import worth_tracing
from budgetfit.inputs.plan_source import PlanSource, parse_loss
from budgetfit.inputs.several_gpus import (
    AUTO,
    Gpus,
    parallelisms,
    refuse_engine_of_one,
    samples_per_rank,
)
from budgetfit.inputs.target_gpu import TargetGpu, find_target_gpu
from budgetfit.integrations.model_sources.model_source import resolve_model
from budgetfit.integrations.model_sources.python_factory import load_batch
from budgetfit.integrations.model_sources.resolved_model import ResolvedModel
from budgetfit.integrations.peft import materialize_with_adapter
from budgetfit.planning.profiling.first_trace import fallback_for
from budgetfit.planning.search.lowest_peak import LowestPeak, lowest_peak_plan
from budgetfit.planning.search.policies import fixed_segments
from budgetfit.planning.session import Request, SessionSettings
from budgetfit.traces.depth_extrapolator import DepthChecks
from budgetfit.traces.loss_modules import loss_notes
from budgetfit.tracing.isolation.torch_state import unpredicted_settings
from budgetfit.utils.function_name import qualified_name
from budgetfit.workload.model_check import refuse_lazy_parameters
from budgetfit.workload.workload import Workload

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    Model = nn.Module | PretrainedConfig | str
Loss = Callable[[Any, Any], torch.Tensor]
Optimizer = str | Callable[..., torch.optim.Optimizer]
Progress = Callable[[str], None]
Lengths = Iterable[int] | Mapping[int, int]

EAGER_NOTE: Final = (
    "the model is under torch.compile, and bytes and times are those of eager mode; "
    "compile='blocks' plans with torch.compile for each block"
)
# Whoever trains in float64 means to: never cast unless asked.
KEPT_IN_DOUBLE: Final = (
    "the weights are float64 and are trained so (as-is); another precision, such as "
    "bf16-mixed, casts them and the batch to float32, which is many times faster"
)
CAST_FROM_DOUBLE: Final = (
    "the weights are float64 and this precision casts them and the batch; as-is trains "
    "them as they are"
)
QUANTIZATION_SETTINGS: Final = (
    "quantization",
    "double_quantization",
    "prepare_for_kbit",
)
ADAPTER_SETTINGS: Final = (
    *("lora_r", "lora_alpha", "lora_dropout", "target_modules"),
    *QUANTIZATION_SETTINGS,
)


_NO_NUMBERS: Final = ("model", "batch", "lengths", "image_sizes", "loss", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of ``budgetfit.plan``, as given; its docstring says what they mean.

    ``estimate``, ``compare`` and ``layers`` take some of them.
    """

    model: Model
    vram: int | str | None = None
    gpu: Gpu | str | None = None
    batch: Any = None
    batch_dims: BatchDims = None
    max_length: int | None = None
    image_size: ImageSize = None
    frames: int | None = None
    image_sizes: ImageSizes | None = None
    text_only: bool = False
    lengths: Lengths | None = None
    loss: Loss | str | None = None
    precision: str | Sequence[str] = "auto"
    optimizer: Optimizer = "adamw_torch_fused"
    batch_size: int | None = None
    effective_batch_size: int | None = None
    checkpointing: str | Sequence[str] = "auto"
    objective: str = "throughput"
    headroom: int | str | None = None
    host_ram: int | str | None = None
    allocator: AllocatorSettings | str | None = None
    optimizer_in_backward: bool = False
    compile: str = "none"
    gpus: Gpus = 1
    engine: str = AUTO
    link: str | None = None
    method: str | None = None
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    target_modules: str | Sequence[str] = "all-linear"
    quantization: str | None = None
    double_quantization: bool = True
    prepare_for_kbit: bool = True
    trust_remote_code: bool = False
    progress: Progress | None = None

    def __post_init__(self) -> None:
        """Take numbers of any library, and an engine in any spelling: ``ZeRO-3``."""
        names = (each.name for each in fields(self))
        set_python_numbers(self, (name for name in names if name not in _NO_NUMBERS))
        if isinstance(self.engine, str):
            spelled = self.engine.lower().replace("zero-", "zero")
            object.__setattr__(self, "engine", spelled)

    def adapter_on(self, gpu: Gpu, precisions: Sequence[str]) -> Adapter | None:
        """Return the adapters to train, in a dtype of the GPU; refuse bad settings."""
        settings = {name: getattr(self, name) for name in ADAPTER_SETTINGS}
        return find_adapter(self.method, gpu, precisions, **settings)

    def parsed(
        self,
        precisions: Sequence[str] | None = None,
        nodes: int = 0,
        card: Gpu | None = None,
        like: ParsedArguments | None = None,
    ) -> ParsedArguments:
        """Parse and validate all arguments, and read the model.

        Args:
            precisions: Those of a recipe, instead of ``precision``.
            nodes: Machines of a recipe for several GPUs, instead of those of ``gpus``.
            card: That of a saved plan, which need not be in the table, instead of
                ``gpu``.
            like: The same arguments for another card. Its model is taken, unless the
                adapters compute in another dtype here.

        Raises:
            InputError: If one of them is invalid; nothing was traced.
        """
        check_objective(self.objective)
        if self.progress is not None and not callable(self.progress):
            raise InputError(
                "progress must be a function that is called with a line of text, for "
                f"example progress=print; got {self.progress!r:.80}."
            )
        engines = parallelisms(self.gpus, self.engine)
        if not engines:
            refuse_engine_of_one(self.engine)
        ranks = engines[0].gpus if engines else 1
        share = samples_per_rank(self.effective_batch_size, ranks)
        check_batch(self.batch_size, share, ranks)
        self._check_update_in_backward()
        check_compile(self.compile, AUTO)
        target = find_target_gpu(self.vram, card or self.gpu, self.allocator)
        target = target.connected(self.link, engines[0].nodes if engines else nodes)
        budget = target.budget(self.headroom, self.host_ram)
        is_auto = precisions is None and self.precision == "auto"
        if precisions is None:
            precisions = requested_precisions(self.precision, target.gpu)
        adapter = self.adapter_on(target.gpu, precisions)
        name = optimizer_name(self.optimizer)
        lengths = _sample_sizes(self)
        if lengths is not None and lengths.vary and self.compile not in ("none", AUTO):
            raise InputError(
                f"compile={self.compile!r} is planned for batches of one size: each "
                "other size is compiled again, and takes memory of its own. Leave "
                "compile= or lengths= out."
            )
        if engines:
            self.check_for_several(engines)
        if like is not None and adapter == self.adapter_on(
            like.target.gpu, like.precisions
        ):
            workload, source = replace(like.workload, gpu=target.gpu), like.source
        else:
            like = None
            workload, source = _read_model(
                self, target, adapter, lengths, keeps_dtypes="as-is" in precisions
            )
        is_double = any(
            each.requires_grad and each.dtype == torch.float64
            for each in workload.model.parameters()
        )
        if is_double and is_auto:
            precisions = ["as-is"]
        if is_double and (is_auto or set(precisions) != {"as-is"}):
            note = KEPT_IN_DOUBLE if is_auto else CAST_FROM_DOUBLE
            workload = replace(workload, notes=(*workload.notes, note))
        falls_back = not adapter and not is_double
        return ParsedArguments(
            given=self,
            workload=workload,
            source=source,
            target=target,
            budget=budget,
            precisions=tuple(precisions),
            optimizer=name,
            lengths=lengths,
            fallback_precision=fallback_for(self.precision) if falls_back else None,
            parallelisms=worth_tracing(engines, workload.model, budget),
            depth_checks=DepthChecks() if like is None else like.depth_checks,
        )

    def _check_update_in_backward(self) -> None:
        """Refuse several backward passes per update where each of them updates."""
        whole = self.effective_batch_size
        differ = whole is not None and self.batch_size not in (None, whole)
        if self.optimizer_in_backward and differ:
            raise InputError(
                "optimizer_in_backward=True updates the weights in each backward pass: "
                f"batch_size={self.batch_size} cannot accumulate to "
                f"effective_batch_size={whole}. Leave one of them out."
            )

    def check_for_several(self, parallelisms: Sequence[Parallelism]) -> None:
        """Refuse what is not planned for several GPUs, in these ways."""
        if self.optimizer_in_backward:
            raise InputError(
                "optimizer_in_backward= is not planned for several GPUs yet. Leave it "
                "out, or use gpus=1."
            )
        if self.compile != AUTO:
            check_compile_on_ranks(self.compile, parallelisms[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedArguments:
    """Arguments as values that the planner takes.

    Attributes:
        workload, source: What is planned for, and its live model and functions.
        target, budget: The GPU, and what has to fit into it.
        precisions: Names of the dtype policies to compare.
        optimizer: Its name.
        lengths: Of the samples, or sizes of images, where they are known.
        fallback_precision: For models that cannot run in the first of ``precisions``.
        parallelisms: The ways to use several GPUs; none for one.
        depth_checks: Shared by all plans of this model.
    """

    given: Arguments
    workload: Workload
    source: PlanSource
    target: TargetGpu
    budget: Budget
    precisions: tuple[str, ...]
    optimizer: str
    lengths: SampleSizes | None
    fallback_precision: str | None
    parallelisms: tuple[Parallelism, ...] = ()
    depth_checks: DepthChecks = field(default_factory=DepthChecks, compare=False)

    @property
    def samples_per_rank(self) -> int | None:
        """The effective batch of each rank."""
        ranks = self.parallelisms[0].gpus if self.parallelisms else 1
        return samples_per_rank(self.given.effective_batch_size, ranks)

    @property
    def checkpointing(self) -> str | tuple[str, ...]:
        """A checkpointing policy's name, or module paths of blocks."""
        wanted = self.given.checkpointing
        if isinstance(wanted, str):
            return wanted
        if not isinstance(wanted, (list, tuple)):
            shown = " ".join(repr(wanted).split())
            raise InputError(
                "checkpointing must be auto, none, full, every-2, sqrt, as-is, or a "
                'list of block names such as ["model.layers.0"]; '
                f"got {shown:.80}."
            )
        return self.workload.full_names(wanted)

    @property
    def request(self) -> Request:
        """What the search may choose; refuses unknown policies and blocks."""
        policy = self.checkpointing
        if policy not in ("auto", "sqrt"):
            fixed_segments(policy, self.workload.blocks)
        batch_size = self.given.batch_size
        if batch_size is None and self.given.optimizer_in_backward:
            batch_size = self.samples_per_rank  # no backward pass adds to another's
        return Request(
            budget=self.budget,
            checkpointing=policy,
            objective=self.given.objective,  # type: ignore[arg-type]
            batch_size=batch_size,
        )

    @property
    def compile_modes(self) -> tuple[CompileMode, ...]:
        """The values of ``compile`` to plan with, the plainest first."""
        # Batches of several sizes are each compiled anew: ``auto`` leaves that.
        if self.given.compile != AUTO:
            return (self.given.compile,)  # type: ignore[return-value]  # checked
        varies = self.lengths is not None and self.lengths.vary
        by_deepspeed = any(each.engine == "deepspeed" for each in self.parallelisms)
        return ("none",) if varies or by_deepspeed else ("none", "blocks")

    @property
    def settings(self) -> SessionSettings:
        """The further arguments of ``make_plan``."""
        in_backward = self.given.optimizer_in_backward
        return {
            "precisions": self.precisions,
            "optimizer": self.optimizer,
            "effective_batch_size": None if in_backward else self.samples_per_rank,
            "parallelisms": self.parallelisms,
            "optimizer_in_backward": in_backward,
            "compile": self.compile_modes[0],
            "fallback_precision": self.fallback_precision,
            "progress": self.given.progress,
            "depth_checks": self.depth_checks,
        }

    def least(self) -> LowestPeak:
        """Find settings that fit, or else the lowest peak.

        Raises:
            TraceError: If the model cannot be traced.
        """
        return lowest_peak_plan(self.workload, self.request, **self.settings)

    def need_at(self, length: int) -> LowestPeak:
        """Return the lowest peak at another length, which the model must take."""
        if self.given.progress is not None:
            self.given.progress(f"looking for the longest samples: {length:,} tokens")
        return replace(self, workload=self.workload.at_length(length)).least()


def _read_model(
    asked: Arguments,
    target: TargetGpu,
    adapter: Adapter | None,
    lengths: SampleSizes | None,
    *,
    keeps_dtypes: bool,
) -> tuple[Workload, PlanSource]:
    """Build the workload to plan for and its ``PlanSource``.

    ``keeps_dtypes``: weights are trained in the dtype in which they are loaded.

    Raises:
        InputError: If the model, batch or loss is invalid.
    """
    if asked.max_length is not None:
        check_positive_int("max_length", asked.max_length, example=1024)
    if asked.frames is not None:
        check_positive_int("frames", asked.frames)
    if asked.progress is not None:
        asked.progress("reading the model")
    resolved, traced, adapter, adapter_notes = _resolved(asked, adapter)
    live = resolved.model
    notes = [*target.notes, *resolved.notes, *adapter_notes]
    if keeps_dtypes or adapter is not None:
        notes += resolved.dtype_notes
    given = asked.model if isinstance(asked.model, nn.Module) else None
    if asked.compile == "none" and given is not None and compiled_modules(given):
        notes.append(EAGER_NOTE)
    batch, dims, remake, batch_notes = _example_batch(asked, resolved, lengths)
    loss = parse_loss(asked.loss) or resolved.loss or loss_for(live, batch)
    notes += [*batch_notes, *loss_notes(loss, live), *mode_notes(live)]
    optimizer = None if isinstance(asked.optimizer, str) else asked.optimizer
    notes += left_out_notes(traced, optimizer)
    notes += [] if lengths is None else lengths.notes()
    notes += unpredicted_settings()
    source = PlanSource(
        model=None if given is None else live,
        adapter=adapter,
        materialize=materialize_with_adapter(resolved.materialize, adapter),
        batch=batch,
        batch_dims=dims,
        loss=loss,
        optimizer=optimizer,
    )
    origin = resolved.source
    workload = Workload(
        model=traced,
        batch=batch,
        batch_dims=dims,
        loss=loss,
        optimizer=source.optimizer,
        gpu=target.gpu,
        name=resolved.name,
        dequantizer=resolved.dequantizer,
        frozen_in_compute_dtype=resolved.frozen_in_compute_dtype,
        source=origin if adapter is None else f"{origin}; {adapter.describe()}",
        notes=tuple(notes),
        cudnn=torch.backends.cudnn.enabled,
        remake=remake,
        lengths=lengths,
    )
    return workload.with_found_blocks(), source


def _resolved(
    asked: Arguments, adapter: Adapter | None
) -> tuple[ResolvedModel, nn.Module, Adapter | None, tuple[str, ...]]:
    """Return the model, the one to trace, its adapter as it is stored, and notes."""
    model, is_live = asked.model, isinstance(asked.model, nn.Module)
    if isinstance(model, nn.Module):
        model = unwrap_compiled(model)
    resolved = resolve_model(model, trust_remote_code=asked.trust_remote_code)
    resolved = base_of_adapter(resolved, adapter)
    refuse_lazy_parameters(resolved.model, resolved.name)
    refuse_planning_distributed(resolved.model)
    adapter, stored_notes = adapter_as_stored(resolved, adapter, given=is_live)
    traced, adapter_notes = model_to_trace(resolved.model, adapter)
    if not any(p.requires_grad for p in traced.parameters()):
        raise InputError(
            f"{resolved.name} has no trainable parameter, so there is nothing to "
            "train. Check requires_grad."
        )
    return resolved, traced, adapter, (*stored_notes, *adapter_notes)


def _example_batch(
    asked: Arguments, resolved: ResolvedModel, lengths: SampleSizes | None
) -> tuple[object, SampleDims, Callable[..., ExampleBatch] | None, tuple[str, ...]]:
    """Return the batch that was given, that a factory returned, or that is made.

    Also returns its sample dimensions, how to make it at another length (None where it
    was given), and notes.

    Raises:
        InputError: If none can be made, or one that is given cannot be used.
    """
    batch = load_batch(asked.batch) if isinstance(asked.batch, str) else asked.batch
    batch = resolved.batch if batch is None else batch
    size, frames, text_only = asked.image_size, asked.frames, asked.text_only
    if batch is not None and (size is not None or frames is not None or text_only):
        raise InputError(
            "image_size=, frames= and text_only= are for a batch that is made. Leave "
            "them out where a batch is given, or leave the batch out."
        )
    if batch is not None and asked.max_length is not None and lengths is None:
        raise InputError(
            f"max_length={asked.max_length} changes nothing in a batch that is given. "
            "Use a batch of that length, or leave max_length= or the batch out."
        )
    dims = SampleDims.parse(asked.batch_dims, batch_dimension(resolved.model))
    remake, notes = None, tuple[str, ...]()
    if batch is None:
        images = isinstance(lengths, ImageSizeSummary)
        padded = lengths is not None and lengths.vary and not images
        remake = partial(
            make_batch,
            image_size=size,
            frames=frames,
            text_only=text_only,
            padded=padded,
            dims=dims,
        )
        largest: dict[str, Any] = {"max_length": asked.max_length}
        if lengths is not None:
            largest["image_size" if images else "max_length"] = lengths.planned
        made = remake(resolved.model, **largest)
        batch, notes = made.batch, made.notes
    batch_size_of(batch, dims=dims)
    _refuse_unnamed_offsets(resolved.model, batch)
    if lengths is not None:
        _check_holds(batch, lengths.planned, made=remake is not None)
    return batch, dims, remake, notes


def _refuse_unnamed_offsets(model: nn.Module, batch: object) -> None:
    """Refuse flat ids of embedding bags whose offsets do not show by their name."""
    if not any(isinstance(module, nn.EmbeddingBag) for module in model.modules()):
        return
    parts = dict(children_of(batch) or ())
    for name in unnamed_offsets(parts):
        raise InputError(
            f"{name!r} {list(parts[name].shape)} looks like the offsets of an "
            "nn.EmbeddingBag, at which flat ids are cut, and only the name offsets "
            'says so. Use a batch by argument names, such as {"ids": ..., "offsets": '
            "...}, whose name ends with offsets; or ids [samples, length]."
        )


def _sample_sizes(asked: Arguments) -> SampleSizes | None:
    """Return the lengths of the samples, or the sizes of images, if they were given.

    Raises:
        InputError: If they are invalid, or exclude each other.
    """
    if asked.image_sizes is None:
        if asked.lengths is None:
            return None
        return summarize_lengths(asked.lengths, asked.max_length)
    for name in ("lengths", "image_size"):
        if getattr(asked, name) is not None:
            raise InputError(
                f"image_sizes= and {name}= do not go together. Leave one of them out."
            )
    return summarize_image_sizes(asked.image_sizes)


def _check_holds(
    batch: object,
    length: int | tuple[int, int],
    *,
    made: bool,
) -> None:
    """Check that the batch, given or ``made``, holds the longest sample."""
    # After the sample dimension some tensor must have a sequence dimension; which one,
    # only the model knows.
    shapes = [shape for shape, _ in describe_batch(batch).values()]
    if isinstance(length, tuple):
        if any(shape[at : at + 2] == length for shape in shapes for at in (1, 2, 3)):
            return
        height, width = length
        pad = "" if made else ", or pad the example batch to it, or leave batch= out"
        raise InputError(
            f"The largest images are {height}x{width}, but the batch has none of that "
            f"size: {', '.join(map(str, shapes))}. Leave image_sizes= out{pad}."
        )
    if any(size >= length for shape in shapes for size in shape[1:]):
        return
    pad = f", or pad the example batch to {length}, or leave batch= out"
    raise InputError(
        f"The longest sample has {length} tokens, but the batch has no dimension that "
        f"long: {', '.join(map(str, shapes))}. Leave lengths= out where samples have "
        f"no length{'' if made else pad}."
    )


def optimizer_name(optimizer: Optimizer) -> str:
    """Return transformers' ``optim`` name, or the qualified name of a callable."""
    if isinstance(optimizer, str):
        return optimizer
    if not callable(optimizer):
        plain = optimizer is None or isinstance(optimizer, (bool, int, float))
        shown = repr(optimizer) if plain else f"a {type(optimizer).__name__}"
        raise InputError(
            "optimizer must be a name such as 'adamw_torch_fused' or a function of "
            f"the parameters such as torch.optim.AdamW; got {shown}."
        )
    return qualified_name(optimizer)
