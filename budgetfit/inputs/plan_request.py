"""Parse the arguments of ``plan``, and find the lowest peak that they allow.

The search for suggestions parses them again with one argument changed (a shorter
sequence, another method) and calls ``least``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from budgetfit.core.budget import Budget
from budgetfit.core.precision import requested_precisions
from budgetfit.core.validation import check_batch, check_objective
from budgetfit.inputs.adapter import find_adapter
from budgetfit.inputs.plan_source import PlanSource
from budgetfit.inputs.sample_lengths import LengthSummary
from budgetfit.inputs.settings import (
    find_target_gpu,
    make_workload,
    optimizer_name,
    parse_lengths,
    parse_request,
)
from budgetfit.planning.alternatives.longest_length import MemoryNeed
from budgetfit.planning.profiling.precision_fallback import fallback_for
from budgetfit.planning.search.lowest_peak import LowestPeak, lowest_peak_plan
from budgetfit.planning.search.search import Request
from budgetfit.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

# Arguments that determine the model and its batch.
WORKLOAD_ARGUMENTS: Final = (
    *("model", "batch", "batch_dims", "max_length", "image_size", "text_only"),
    *("loss", "optimizer", "trust_remote_code", "progress"),
)
ADAPTER_ARGUMENTS: Final = (
    *("lora_r", "lora_alpha", "lora_dropout", "target_modules"),
    *("quantization", "double_quantization", "prepare_for_kbit"),
)


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """The parsed arguments of ``plan``.

    Attributes:
        subject, source: What is planned for, and its live things.
        budget, request: What it has to fit into, and what is free.
        lengths: Of the samples, where they are known.
        settings: The further arguments of ``make_plan``.
    """

    workload: Workload
    source: PlanSource
    budget: Budget
    request: Request
    lengths: LengthSummary | None
    settings: dict[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> PlanArguments:
        """Parse all arguments of ``plan``, by name.

        Raises:
            InputError: If one of them is invalid; nothing was traced.
        """
        check_objective(given["objective"])
        check_batch(given["batch_size"], given["effective_batch_size"])
        target = find_target_gpu(given["vram"], given["gpu"])
        budget = target.budget(given["headroom"], given["host_ram"])
        chosen = requested_precisions(given["precision"], target.gpu)
        adapter = find_adapter(
            given["method"],
            target.gpu,
            chosen,
            **{name: given[name] for name in ADAPTER_ARGUMENTS},
        )
        name = optimizer_name(given["optimizer"])
        lengths = parse_lengths(given["lengths"], given["max_length"])
        workload, source = make_workload(
            target=target,
            lengths=lengths,
            adapter=adapter,
            keeps_dtypes="as-is" in chosen,
            **{name: given[name] for name in WORKLOAD_ARGUMENTS},
        )
        request = parse_request(
            given["checkpointing"], given["objective"], given["batch_size"], workload
        )
        settings = {
            "precisions": chosen,
            "optimizer": name,
            "effective_batch_size": given["effective_batch_size"],
            "optimizer_in_backward": given["optimizer_in_backward"],
            "fallback_precision": fallback_for(given["precision"])
            if adapter is None
            else None,
            "progress": given["progress"],
        }
        return cls(workload, source, budget, request, lengths, settings)

    def least(self) -> LowestPeak:
        """Find settings that fit, or else the lowest peak.

        Raises:
            TraceError: If the model cannot be traced.
        """
        return lowest_peak_plan(
            self.workload, self.budget, self.request, **self.settings
        )

    def at_length(self, length: int) -> PlanArguments:
        """Return the request at another sequence length; only for a generated batch.

        Raises:
            InputError: If the model has no positions for it.
        """
        return replace(self, workload=self.workload.at_length(length))

    def need_at(self, length: int) -> MemoryNeed:
        """Return the lowest peak at a sequence length."""
        progress = self.settings["progress"]
        if progress is not None:
            progress(f"looking for the longest samples: {length:,} tokens")
        found = self.at_length(length).least()
        return MemoryNeed(
            needed_bytes=found.needed_bytes,
            limit_bytes=self.budget.usable_bytes,
            fits=found.fits,
            estimate=found.estimate,
        )
