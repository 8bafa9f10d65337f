"""Plan, Estimate, Alternative, GpuComparison, Layer: the results of planning."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from budgetfit.core.adapter import FULL, Adapter
from budgetfit.core.block_report import BlockRow, find_block
from budgetfit.core.budget import Budget
from budgetfit.core.loop import RUN, Loop
from budgetfit.core.memory_timeline import MemoryTimeline
from budgetfit.core.plan_curves import LazyCurves
from budgetfit.core.plan_exports import PlanExports
from budgetfit.core.recipe import Recipe
from budgetfit.core.samples.sample_dims import SampleDims
from budgetfit.core.validation import MAX_BATCH_SIZE, check_positive_int
from budgetfit.core.varying_lengths import VaryingLengths
from budgetfit.errors import InputError, file_error
from budgetfit.gpus.table import Gpu
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.lazy_import import lazy_import
from budgetfit.utils.whole_file import write_whole

SECONDS_PER_HOUR = 3600
# Note of an estimate.
NO_LOSS = (
    "there is no loss: planned with the mean of the float outputs; pass loss=, or "
    "labels in the batch, to plan for the real one and to train"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Weight and saved-activation bytes of a layer under one dtype policy."""

    weight_bytes: int
    saved_bytes: int
    saved_bytes_per_sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One row of the layer table.

    ``by_precision`` maps a policy's name to the layer's memory under it;
    ``recompute_flops_per_sample`` is the FLOPs of its forward.
    """

    name: str
    type: str
    parameter_count: int
    recompute_flops_per_sample: float
    by_precision: dict[str, LayerMemory]


# Memory categories that do not grow with the batch.
_BATCH_INDEPENDENT: Final = ("parameters", "buffers", "gradients", "optimizer_state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted memory and step time of one recipe.

    Attributes:
        recipe: The traced settings.
        allocated_bytes: Peak of ``torch.cuda.max_memory_allocated``.
        reserved_bytes: Peak of ``torch.cuda.max_memory_reserved``.
        process_bytes: Peak that nvidia-smi shows: reserved + what the budget
            sets aside for the CUDA context and NCCL.
        process_range_bytes: 95 % interval of that peak; None without a budget.
        host_bytes: Host memory of offloaded tensors.
        unpinned_bytes: Of it what is not pinned: optimizer states on the CPU.
        phase_peaks_bytes: ``forward``, ``backward``, ``optimizer`` -> peak allocated.
        at_peak_bytes: Category -> bytes at the moment of the allocated peak.
        step_ms: One optimizer step, all its micro-batches included: the sum of its
            kernels' times, or what the host needs to launch them, times
            ``time_factor``.
        step_range_ms: From the shortest to the longest that is expected; None in plans
            that were stored without it.
        optimizer_ms: The optimizer's part of it, once per step.
        time_factor: Measured over predicted, where ``verify`` has run on such a card.
        timeline: Peaks of the replay, per phase and block.
        notes: What is not modelled.
        fits: Whether the replay stayed within the budget, without allocator retries;
            None without a budget.
        usable_bytes: Limit on ``reserved_bytes``; None without a budget.
        as_is: The dtypes of the weights, where the recipe does not cast them.
        eval_batch_size: Largest evaluation batch between training steps, without
            gradients, with labels and the loss; 0 if not even one sample fits; None in
            an estimate, on several GPUs, and where it is unknown.
        loop: The training loop around the steps.
        nccl_bytes: Range of NCCL's memory in the process, on several GPUs.
        network_ms: The part of ``step_ms`` in which kernels wait for the network.
        network: What the GPUs are assumed to be connected by.
        data_samples_per_s: Samples per second over all lengths of the samples, or sizes
            of images; None where they do not vary, and ``samples_per_s`` is theirs.
    """

    recipe: Recipe
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    phase_peaks_bytes: dict[str, int]
    at_peak_bytes: dict[str, int]
    step_ms: float
    timeline: MemoryTimeline
    notes: tuple[str, ...] = ()
    fits: bool | None = None
    usable_bytes: int | None = None
    as_is: str = ""
    process_range_bytes: tuple[int, int] | None = None
    eval_batch_size: int | None = None
    time_factor: float = 1.0
    host_bytes: int = 0
    unpinned_bytes: int = 0
    step_range_ms: tuple[float, float] | None = None
    optimizer_ms: float = 0.0
    loop: Loop = RUN
    nccl_bytes: tuple[int, int] | None = None
    network_ms: float = 0.0
    network: str = ""
    data_samples_per_s: float | None = None

    def __repr__(self) -> str:
        recipe, limit = self.recipe, ""
        if self.usable_bytes is not None:
            verdict = "fits" if self.fits else "does not fit"
            limit = f" of {format_bytes(self.usable_bytes)} usable, {verdict}"
        return (
            f"<Estimate: batch_size {recipe.batch_size}, gradient_accumulation_steps "
            f"{recipe.gradient_accumulation_steps}, precision {recipe.precision}; "
            f"allocated {format_bytes(self.allocated_bytes)}, "
            f"reserved {format_bytes(self.reserved_bytes)}{limit}>"
        )

    def __str__(self) -> str:
        reports = lazy_import("budgetfit.reporting.render")
        return str(reports.render(reports.estimate_text(self)))

    @property
    def host_memory(self) -> str:
        """What ``host_bytes`` are, in words."""
        return "host memory" if self.unpinned_bytes else "pinned host memory"

    @property
    def left_bytes(self) -> int | None:
        """``usable_bytes`` less ``reserved_bytes``; None without a budget."""
        if self.usable_bytes is None:
            return None
        return self.usable_bytes - self.reserved_bytes

    def with_samples(self, samples: int) -> Estimate | None:
        """Return this estimate at another effective batch size.

        None where neither its micro-batches nor one of them add up to it. Memory judged
        with accumulation is an upper bound for a single micro-batch.
        """
        steps, rest = divmod(samples, self.recipe.batch_size * self.recipe.ranks)
        judged = self.recipe.gradient_accumulation_steps
        if rest or steps not in {1, judged}:
            return None
        micro_batch_ms = (self.step_ms - self.optimizer_ms) / judged
        step_ms = micro_batch_ms * steps + self.optimizer_ms
        span = self.step_range_ms
        if span is not None:
            low, high = (ms * step_ms / self.step_ms for ms in span)
            span = low, high
        return replace(
            self,
            recipe=replace(self.recipe, gradient_accumulation_steps=steps),
            step_ms=step_ms,
            step_range_ms=span,
        )

    @property
    def batch_independent_bytes(self) -> int:
        """Bytes of weights, buffers, gradients and optimizer states at the peak."""
        return sum(self.at_peak_bytes.get(name, 0) for name in _BATCH_INDEPENDENT)

    @property
    def samples_per_s(self) -> float:
        """Samples per second, estimated; were all samples the longest."""
        return self.recipe.effective_batch_size / (self.step_ms / 1000)

    @property
    def samples_per_s_of_data(self) -> float:
        """Samples per second over all lengths or sizes of the samples."""
        over = self.data_samples_per_s
        return self.samples_per_s if over is None else over

    def hours(self, samples: int) -> float:
        """Return the estimated hours of one epoch over ``samples`` samples of the data.

        Raises:
            InputError: If ``samples`` is not a positive whole number.
        """
        return _hours(samples, self.samples_per_s_of_data)


def _hours(samples: int, samples_per_s: float) -> float:
    samples = check_positive_int(
        "samples", samples, example=50_000, most=MAX_BATCH_SIZE
    )
    return samples / samples_per_s / SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another recipe, judged in the same way as the plan.

    Attributes:
        label: What is different.
        estimate: At its own best batch size.
        fits: Whether its judged peak fits.
        changes_training: Whether training computes other numbers.
        note: What to ask for and to know before choosing it; empty where nothing.
    """

    label: str
    estimate: Estimate
    fits: bool
    changes_training: bool = False
    note: str = ""

    @property
    def is_suggestion(self) -> bool:
        """Whether only users may choose it: it changes training, or has a condition."""
        rules_out_clipping = self.estimate.recipe.optimizer_in_backward
        return self.changes_training or rules_out_clipping or bool(self.note)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuComparison:
    """The best settings for a model on one GPU or several, by one training method.

    Attributes:
        gpu, budget: The GPU and its usable memory, of each where there are several.
        estimate: The best settings; where nothing fits, those with the lowest peak;
            None where the GPU cannot run the requested precision.
        problem: Why it cannot; empty otherwise.
        blocks: Number of blocks that can be checkpointed.
        warnings: Deviations from the request.
        method: ``full``, ``lora`` or ``qlora``: what is trained.
        price_per_hour: Money per hour of all GPUs of the row, in any currency; None
            where none was given.
        gpus, nodes: How many GPUs train together, in how many machines.
    """

    gpu: Gpu
    budget: Budget
    estimate: Estimate | None
    problem: str = ""
    blocks: int = 0
    warnings: tuple[str, ...] = ()
    method: str = FULL
    price_per_hour: float | None = None
    gpus: int = 1
    nodes: int = 1

    @property
    def name(self) -> str:
        """The GPU and how many there are, as ``compare`` takes it: ``h100-80gbx8``."""
        nodes = f"x{self.nodes}" if self.nodes > 1 else ""
        many = f"x{self.gpus // self.nodes}{nodes}" if self.gpus > 1 else ""
        return self.gpu.name + many

    @property
    def fits(self) -> bool:
        """Whether the judged peak fits this GPU."""
        return self.estimate is not None and bool(self.estimate.fits)

    @property
    def samples_per_money(self) -> float | None:
        """Samples per 1.00 of money; None without a price or where it does not fit."""
        if self.estimate is None or not self.fits or self.price_per_hour is None:
            return None
        rate = self.estimate.samples_per_s_of_data
        return rate * SECONDS_PER_HOUR / self.price_per_hour

    def cost(self, samples: int) -> float | None:
        """Return the money for ``samples`` samples: estimated hours x price per hour.

        None without a price or where it does not fit.

        Raises:
            InputError: If ``samples`` is not a positive whole number.
        """
        samples = check_positive_int(
            "samples", samples, example=50_000, most=MAX_BATCH_SIZE
        )
        if self.samples_per_money is None:
            return None
        return samples / self.samples_per_money


@dataclass(slots=True, kw_only=True)
class LazyAlternatives:
    """Lazily evaluated alternatives of a plan.

    Attributes:
        known: Those that were judged already, because the decision needed them.
        evaluate: Evaluates all of them, in the order of the table.
    """

    known: tuple[Alternative, ...]
    evaluate: Callable[[], tuple[Alternative, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """Identity of the planned model, for reports and for the check of ``apply``.

    ``block_type`` is the class of most of its blocks; ``block_types`` are those of all,
    in their order, and empty in plans that older versions saved. ``class_name`` is its
    transformers class without adapters, ``diffusers.`` and the class for one of
    diffusers; empty for others. ``type_name`` is its class of any library, without
    adapters. ``settings`` counts its layers without parameters and holds the numbers of
    its config. ``attention`` is the attention implementation and number of heads; empty
    if unknown. ``batch_dims`` is the sample dimension of ``batch``; None in plans that
    older versions saved. ``dequantizer`` is the config class of transformers that
    dequantizes the stored weights while they are loaded; empty where none does.
    """

    name: str
    parameter_count: int
    trainable_count: int
    blocks: tuple[str, ...]
    block_type: str
    source: str
    batch: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    class_name: str = ""
    type_name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    attention: str = ""
    batch_dims: SampleDims | None = None
    block_types: tuple[str, ...] = ()
    dequantizer: str = ""

    @property
    def nested_tensor(self) -> str:
        """Path of a tensor that is inside of a container of ``batch``; or empty."""
        return next((path for path in self.batch if "." in path), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanExports):
    """The recommended settings and the evidence for them.

    ``block_table`` explains the checkpointing of each block. ``adapter`` is what is
    trained instead of the model's weights, if any. ``source`` holds the model, batch,
    loss and optimizer that ``apply`` and ``verify`` use; it is not saved, so a loaded
    plan needs them again.

    ``alternatives`` is evaluated on first access, by ``lazy_alternatives``, so that
    planning does not wait for it. ``details`` and saving access it.

    ``lazy_curves`` returns what the report shows around the plan; it is not saved.

    ``varying_lengths`` is what training does so that batches of all lengths fit, and
    how fast it is over them; None where all are equally long.
    """

    recipe: Recipe
    estimate: Estimate
    budget: Budget
    gpu: Gpu
    model: ModelSummary
    alternatives: tuple[Alternative, ...] = ()
    warnings: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)
    block_table: tuple[BlockRow, ...] = ()
    adapter: Adapter | None = None
    varying_lengths: VaryingLengths | None = None
    source: Any = field(default=None, compare=False, repr=False)
    lazy_alternatives: LazyAlternatives | None = field(
        default=None, compare=False, repr=False
    )
    lazy_curves: LazyCurves | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.lazy_alternatives is not None:
            object.__delattr__(self, "alternatives")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - __getattr__ of an unset field
        if name != "alternatives" or self.lazy_alternatives is None:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        rows = self.lazy_alternatives.evaluate()
        object.__setattr__(self, "alternatives", rows)
        object.__setattr__(self, "lazy_alternatives", None)
        return rows

    def __repr__(self) -> str:
        return f"<Plan of {self.model.name} for {self.gpu.name}: {self.estimate!r}>"

    def __str__(self) -> str:
        reports = lazy_import("budgetfit.reporting.render")
        return str(reports.render(reports.plan_text(self)))

    def details(self) -> str:
        """Return the plan's text with memory by category and all alternatives."""
        reports = lazy_import("budgetfit.reporting.render")
        return str(reports.render(reports.details_text(self)))

    def _repr_html_(self) -> str | None:
        """Return the report for a notebook; None, for its text, without matplotlib."""
        reports = lazy_import("budgetfit.reporting.html.report")
        html: str | None = reports.notebook_html(self)
        return html

    def report(
        self, path: str | Path, *, comparison: Sequence[GpuComparison] = ()
    ) -> None:
        """Write the report with figures to ``path``: one HTML file that loads nothing.

        Args:
            path: Its name, such as ``plan.html``.
            comparison: Rows of ``budgetfit.api.plan.compare``, to show GPUs side by
                side.

        Raises:
            InputError: If matplotlib or Jinja2 is missing, or it cannot be written.
        """
        page = lazy_import("budgetfit.reporting.html.report").plan_page
        _write(path, page(self, comparison=comparison))

    def dump_snapshot(self, path: str | Path) -> None:
        """Write the predicted step with the peak as a CUDA memory snapshot.

        A pickle as of ``torch.cuda.memory._dump_snapshot``: pytorch.org/memory_viz
        draws it.

        Raises:
            InputError: If the plan was loaded: a saved plan has no single allocations;
                or it cannot be written.
        """
        known = self.lazy_curves.snapshot if self.lazy_curves is not None else None
        if known is None:
            raise InputError(
                "A saved plan has no single allocations to write. Plan again, then "
                "call dump_snapshot, or: budgetfit plan ... --snapshot step.pickle"
            )
        _write(path, pickle.dumps(known(), protocol=4))

    @property
    def judged_alternatives(self) -> tuple[Alternative, ...]:
        """The alternatives that are evaluated already."""
        return (
            self.alternatives
            if self.lazy_alternatives is None
            else self.lazy_alternatives.known
        )

    def without_lazy_alternatives(self) -> Plan:
        """Return a copy with only the alternatives that are evaluated already."""
        known = self.judged_alternatives
        return replace(self, alternatives=known, lazy_alternatives=None)

    def changed(self, **fields: Any) -> Plan:
        """Return a copy with other fields; lazy alternatives stay lazy."""
        if self.lazy_alternatives is not None:
            fields["alternatives"] = ()
        return replace(self, **fields)

    @property
    def fits(self) -> bool:
        """Whether the judged peak fits the budget."""
        return bool(self.estimate.fits)

    @property
    def needs_expandable_segments(self) -> bool:
        """Whether it was judged with ``expandable_segments:True``."""
        lengths = self.varying_lengths
        return lengths is not None and lengths.measure == "expandable segments"

    @property
    def longest_length(self) -> int | None:
        """Tokens in the longest sample that fits; None for other objectives."""
        length: int | None = self.provenance.get("longest_length")
        return length

    @property
    def samples_per_s_of_data(self) -> float:
        """Samples per second over all lengths or sizes; those of the longest if equal.

        ``estimate.samples_per_s`` is the rate were all samples the longest.
        """
        over = self.varying_lengths
        return self.estimate.samples_per_s if over is None else over.samples_per_s

    def hours(self, samples: int) -> float:
        """Return the estimated hours of one epoch over ``samples`` samples of the data.

        Raises:
            InputError: If ``samples`` is not a positive whole number.
        """
        return _hours(samples, self.samples_per_s_of_data)

    def why(self, block: str) -> str:
        """Explain the checkpointing of a block, with the cost of each other option.

        Args:
            block: Its module path, or the end of it: ``layers.3``.

        Raises:
            InputError: If no block, or more than one, matches.
        """
        reports = lazy_import("budgetfit.reporting.render")
        return str(reports.render(reports.why_text(self.row(block))))

    def row(self, block: str) -> BlockRow:
        """Return the numbers behind ``why``."""
        return find_block(self.block_table, block)

    def to_json(self) -> str:
        """Return the plan as one JSON document."""
        return str(lazy_import("budgetfit.core.plan_json").to_json(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what ``to_json`` wrote.

        Raises:
            InputError: If the text is not a plan of this format; names the field.
        """
        plan: Plan = lazy_import("budgetfit.core.plan_json").from_json(text)
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to ``path`` as JSON; it is data, never a pickle.

        Evaluates all alternatives, which may take longer than the plan took:
        ``plan.without_lazy_alternatives()`` has only those that it needed.

        Raises:
            InputError: It cannot be written; a file that was there stays as it was.
                It is an ``OSError``, too.
        """
        _write(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a saved plan.

        Raises:
            InputError: If the file cannot be read or is not a plan.
        """
        read_plan_text = lazy_import("budgetfit.core.plan_json").read_plan_text
        return cls.from_json(read_plan_text(path))


def _write(path: str | Path, content: str | bytes) -> None:
    """Write a file that the user names; ``FileError`` if it cannot be."""
    try:
        write_whole(path, content)
    except (OSError, TypeError, ValueError) as error:  # of no path, or a zero in it
        raise file_error(path, error) from error
