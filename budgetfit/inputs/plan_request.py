"""The arguments of ``plan``, turned into values: for a plan, or for what it would need.

Whoever asks the same with one argument changed (a shorter text, another method) parses
them anew and asks ``least``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from budgetfit.core.budget import Budget
from budgetfit.core.requested_precision import check_batch, check_objective, precisions
from budgetfit.inputs.adapter import find_adapter
from budgetfit.inputs.plan_source import PlanSource
from budgetfit.inputs.sample_lengths import LengthSummary
from budgetfit.inputs.settings import (
    find_card,
    make_subject,
    optimizer_name,
    parse_lengths,
    parse_request,
)
from budgetfit.planning.alternatives.longest_length import Need
from budgetfit.planning.profiling.precision_fallback import fallback
from budgetfit.planning.search.lowest_peak import Least, least_plan
from budgetfit.planning.search.search import Request
from budgetfit.workload.workload import Subject

if TYPE_CHECKING:
    from collections.abc import Mapping

# What decides on the model and its batch.
SUBJECT_ARGUMENTS: Final = (
    *("model", "batch", "batch_dims", "max_length", "image_size", "text_only"),
    *("loss", "optimizer", "trust_remote_code", "progress"),
)
ADAPTER_ARGUMENTS: Final = (
    *("lora_r", "lora_alpha", "lora_dropout", "target_modules"),
    *("quantization", "double_quantization", "prepare_for_kbit"),
)


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """What a plan is asked for.

    Attributes:
        subject, source: What is planned for, and its live things.
        budget, request: What it has to fit into, and what is free.
        lengths: Of the samples, where they are known.
        settings: The further arguments of ``make_plan``.
    """

    subject: Subject
    source: PlanSource
    budget: Budget
    request: Request
    lengths: LengthSummary | None
    settings: dict[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> PlanArguments:
        """Parse all arguments of ``plan``, by name.

        Raises:
            InputError: If one of them cannot be what was meant; nothing was traced.
        """
        check_objective(given["objective"])
        check_batch(given["batch_size"], given["effective_batch_size"])
        card = find_card(given["vram"], given["gpu"])
        budget = card.budget(given["headroom"], given["host_ram"])
        chosen = precisions(given["precision"], card.gpu)
        adapter = find_adapter(
            given["method"],
            card.gpu,
            chosen,
            **{name: given[name] for name in ADAPTER_ARGUMENTS},
        )
        name = optimizer_name(given["optimizer"])
        lengths = parse_lengths(given["lengths"], given["max_length"])
        subject, source = make_subject(
            card=card,
            lengths=lengths,
            adapter=adapter,
            keeps_dtypes="as-is" in chosen,
            **{name: given[name] for name in SUBJECT_ARGUMENTS},
        )
        request = parse_request(
            given["checkpointing"], given["objective"], given["batch_size"], subject
        )
        settings = {
            "precisions": chosen,
            "optimizer": name,
            "effective_batch_size": given["effective_batch_size"],
            "optimizer_in_backward": given["optimizer_in_backward"],
            "instead": fallback(given["precision"]) if adapter is None else None,
            "progress": given["progress"],
        }
        return cls(subject, source, budget, request, lengths, settings)

    def least(self) -> Least:
        """Return something that fits, or what would be needed.

        Raises:
            TraceError: If the model cannot be traced.
        """
        return least_plan(self.subject, self.budget, self.request, **self.settings)

    def at_length(self, length: int) -> PlanArguments:
        """Return the same for samples of another length; only of a made batch.

        Raises:
            InputError: If the model has no positions for it.
        """
        return replace(self, subject=self.subject.at_length(length))

    def need_at(self, length: int) -> Need:
        """Return what samples of a length need at least, as ``at_length``."""
        progress = self.settings["progress"]
        if progress is not None:
            progress(f"looking for the longest samples: {length:,} tokens")
        found = self.at_length(length).least()
        return Need(
            needed_bytes=found.needed_bytes,
            limit_bytes=self.budget.usable_bytes,
            fits=found.fits,
            estimate=found.estimate,
        )
