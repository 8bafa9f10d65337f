"""Plan, Estimate, Layer: the answers, as values that round-trip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetfit.core.adapter import Adapter
from budgetfit.core.answer_text import text_of
from budgetfit.core.block_report import BlockRow, find_block
from budgetfit.core.budget import Budget
from budgetfit.core.memory_timeline import MemoryTimeline
from budgetfit.core.plan_exports import PlanExports
from budgetfit.core.recipe import Recipe
from budgetfit.core.sample_dims import SampleDims
from budgetfit.core.validation import check_samples
from budgetfit.core.verification import CategoryCheck, PhaseCheck, Verification
from budgetfit.gpus.table import Gpu
from budgetfit.utils.late_import import import_late

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "Alternative",
    "CategoryCheck",
    "Estimate",
    "Layer",
    "LayerMemory",
    "ModelSummary",
    "PhaseCheck",
    "Plan",
    "Verification",
]

SECONDS_PER_HOUR = 3600
# The label of the row that says what a plan takes where gradients are accumulated.
ACCUMULATING = "accumulating"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """A layer under one dtype policy: bytes of its weights and of what it saves."""

    weight_bytes: int
    saved_bytes: int
    saved_bytes_per_sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One row of the layer table.

    ``by_precision`` maps a policy's name to what the layer takes under it;
    ``recompute_flops_per_sample`` is its forward's arithmetic.
    """

    name: str
    type: str
    parameter_count: int
    recompute_flops_per_sample: float
    by_precision: dict[str, LayerMemory]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The predicted cost of one recipe.

    Attributes:
        recipe: What was traced.
        allocated_bytes: Peak of ``torch.cuda.max_memory_allocated``.
        reserved_bytes: Peak of ``torch.cuda.max_memory_reserved``.
        process_bytes: Peak that nvidia-smi shows: reserved + what the budget
            sets aside for the CUDA context.
        process_range_bytes: Between what that peak is expected in 19 of 20 processes;
            None where no budget was given.
        host_bytes: Pinned host memory that offloaded tensors wait in.
        phase_peaks_bytes: ``forward``, ``backward``, ``optimizer`` -> peak allocated.
        at_peak_bytes: Category -> bytes at the moment of the allocated peak.
        step_ms: One optimizer step, all its micro-batches included: a roofline
            estimate, times ``time_factor``.
        time_factor: Measured over roofline, where ``verify`` has run on such a card.
        timeline: The replay, stretch by stretch.
        layers: The largest consumers.
        notes: What is not modelled, in plain words.
        fits: Whether the replay ended within the budget, without allocator retries;
            None where no budget was given.
        usable_bytes: What ``reserved_bytes`` may be at most; None without a budget.
        as_is: The dtypes of the weights, where the recipe leaves them as they are.
        eval_batch_size: Samples that can be evaluated at once between training steps,
            without gradients and labels; None where it was not asked or cannot be told.
    """

    recipe: Recipe
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    phase_peaks_bytes: dict[str, int]
    at_peak_bytes: dict[str, int]
    step_ms: float
    timeline: MemoryTimeline
    layers: tuple[Layer, ...] = ()
    notes: tuple[str, ...] = ()
    fits: bool | None = None
    usable_bytes: int | None = None
    as_is: str = ""
    process_range_bytes: tuple[int, int] | None = None
    eval_batch_size: int | None = None
    time_factor: float = 1.0
    host_bytes: int = 0

    def __str__(self) -> str:
        return text_of(self, "render_estimate")

    def with_samples(self, samples: int) -> Estimate | None:
        """Return what this is with so many samples per optimizer step.

        What was judged with several micro-batches bounds what one takes, whose
        gradients come and go. The rate is taken to stay.

        Args:
            samples: The effective batch size.

        Returns:
            None where neither its micro-batches nor one of them make it up.
        """
        steps, rest = divmod(samples, self.recipe.batch_size)
        judged = self.recipe.gradient_accumulation_steps
        if rest or steps not in {1, judged}:
            return None
        return replace(
            self,
            recipe=replace(self.recipe, gradient_accumulation_steps=steps),
            step_ms=self.step_ms * steps / judged,
        )

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the roofline estimate."""
        return self.recipe.effective_batch_size / (self.step_ms / 1000)

    def hours(self, samples: int) -> float:
        """Return how long one pass over so many samples takes, by the estimate.

        Raises:
            InputError: If ``samples`` is no whole number of at least 1.
        """
        check_samples(samples)
        return samples / self.samples_per_s / SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another recipe, judged like the plan itself.

    Attributes:
        label: What is different, in plain words.
        estimate: At its own best batch size.
        fits: Whether the judge let it pass.
        changes_training: Whether it trains other numbers.
        note: What to know before taking it; empty if nothing.
    """

    label: str
    estimate: Estimate
    fits: bool
    changes_training: bool = False
    note: str = ""

    @property
    def is_suggestion(self) -> bool:
        """Whether only the user can choose it: other numbers, or no clipping."""
        return self.changes_training or self.estimate.recipe.optimizer_in_backward


@dataclass(slots=True, kw_only=True)
class LaterRows:
    """Alternatives that nobody has asked for yet.

    Attributes:
        first: Those that are known, because the decision needed them.
        find: Works out all of them, in the order of the table.
    """

    first: tuple[Alternative, ...]
    find: Callable[[], tuple[Alternative, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """What the model is, for people and for refusing the wrong one.

    ``class_name`` is its class in transformers, below adapters; empty for another.
    ``type_name`` is its class wherever that is from, below adapters. ``settings`` are
    its layers without parameters, counted, and the numbers of its config.
    ``attention`` is how it runs attention, with how many heads; empty where it does not
    say. ``batch_dims`` is in which dimension ``batch`` counts samples; None in plans
    that older versions saved.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanExports):
    """The recommended settings and the evidence for them.

    ``block_table`` says why each block is treated as it is. ``adapter`` is what is
    trained instead of the model's weights, where that was asked for. ``source`` holds
    the live model, batch, loss and optimizer that ``apply`` and ``verify`` use; it is
    not saved, so a loaded plan needs them handed in again.

    ``alternatives`` is worked out when somebody looks, by ``later``: the answer does
    not wait for it. Printing and saving look.
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
    source: Any = field(default=None, compare=False, repr=False)
    later: LaterRows | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.later is not None:
            object.__delattr__(self, "alternatives")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - asked for what is not set
        if name != "alternatives" or self.later is None:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        rows = self.later.find()
        object.__setattr__(self, "alternatives", rows)
        object.__setattr__(self, "later", None)
        return rows

    def __str__(self) -> str:
        return text_of(self, "render_plan")

    @property
    def judged_alternatives(self) -> tuple[Alternative, ...]:
        """The alternatives that are worked out already."""
        return self.alternatives if self.later is None else self.later.first

    def changed(self, **fields: Any) -> Plan:  # noqa: ANN401 - the fields' own types
        """Return the plan with other fields, its alternatives not worked out yet."""
        if self.later is not None:
            fields["alternatives"] = ()
        return replace(self, **fields)

    @property
    def comparable(self) -> Estimate:
        """The estimate to hold the alternatives against: as many micro-batches."""
        rows = (row for row in self.judged_alternatives if row.label == ACCUMULATING)
        return next((row.estimate for row in rows), self.estimate)

    @property
    def fits(self) -> bool:
        """Whether the judge let the recipe pass."""
        return bool(self.estimate.fits)

    @property
    def longest_length(self) -> int | None:
        """Tokens in the longest sample that fits; None where that was not asked."""
        length: int | None = self.provenance.get("longest_length")
        return length

    def hours(self, samples: int) -> float:
        """Return how long one pass over so many samples takes, by the estimate.

        Raises:
            InputError: If ``samples`` is no whole number of at least 1.
        """
        return self.estimate.hours(samples)

    def why(self, block: str) -> str:
        """Say why a block is treated as it is, with what each other treatment would do.

        Args:
            block: Its module path, or the end of it: ``layers.3``.

        Raises:
            InputError: If the plan has no such block, or several.
        """
        return text_of(self.row(block), "render_why")

    def row(self, block: str) -> BlockRow:
        """Return the numbers behind ``why``.

        Raises:
            InputError: As ``why``.
        """
        return find_block(self.block_table, block)

    def to_json(self) -> str:
        """Return the plan as one JSON document."""
        text: str = _json().to_json(self)
        return text

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what ``to_json`` wrote.

        Raises:
            InputError: If the text is no plan, or one of another format; the field is
                named.
        """
        plan: Plan = _json().from_json(text)
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to ``path`` as JSON; it is data, never a pickle."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a saved plan.

        Raises:
            InputError: If the file cannot be read or is no plan.
        """
        return cls.from_json(_json().read_plan_text(path))


def _json() -> ModuleType:
    return import_late("budgetfit.core.plan_json")
