"""What would fit instead: another method, a shorter text, a larger card; each tried."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from budgetfit.adapter_arguments import find_adapter
from budgetfit.arguments import (
    find_card,
    make_subject,
    optimizer_name,
    parse_lengths,
    parse_request,
)
from budgetfit.core.budget import Budget
from budgetfit.core.errors import InputError, TraceError
from budgetfit.core.gpus import all_gpus
from budgetfit.planning.candidates import precisions
from budgetfit.planning.least_need import least_plan
from budgetfit.planning.longest_length import Need, lengths_of, longest_that_fits
from budgetfit.planning.search import Request
from budgetfit.planning.subject import Subject
from budgetfit.planning.what_if import suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from budgetfit.core.errors import DoesNotFitError, Suggestion
    from budgetfit.core.plan import Estimate

Arguments = dict[str, Any]  # of ``plan``, by name

# What decides on the model and its batch.
SUBJECT_ARGUMENTS: Final = (
    *("model", "batch", "max_length", "image_size", "text_only", "loss"),
    *("optimizer", "trust_remote_code", "progress"),
)
ADAPTER_ARGUMENTS: Final = (
    *("lora_r", "lora_alpha", "lora_dropout", "target_modules"),
    *("quantization", "double_quantization", "prepare_for_kbit"),
)


def what_would_fit(
    given: Mapping[str, Any], error: DoesNotFitError
) -> Iterator[Suggestion]:
    """Yield changes of a refused plan's arguments that fit, each planned for itself.

    Args:
        given: All arguments of ``plan``.
        error: The refusal.
    """
    for change in _changes(given, error):
        try:
            found = _Question.of({**given, **change}).least()
        except (InputError, TraceError):
            continue  # the model cannot run that way, so it is no advice
        if found is not None and found.fits:
            yield suggestion(change, found)
    if given["lengths"] is None and not error.proven:
        try:
            length, found = _Question.of(given).longest()
        except (InputError, TraceError):
            return  # its batch was given, or has no length
        if found is not None and found.fits:
            yield suggestion({"max_length": length}, found)


def _changes(given: Mapping[str, Any], error: DoesNotFitError) -> Iterator[Arguments]:
    method, quantization = given["method"], given["quantization"]
    if method != "qlora" and quantization is None:
        yield {"method": "qlora"}
    elif given["prepare_for_kbit"]:
        yield {"prepare_for_kbit": False}
    card = find_card(given["vram"], given["gpu"])
    larger = [
        gpu
        for gpu in all_gpus()
        if gpu.compute_capability >= card.gpu.compute_capability
        and card.on(gpu).budget(given["headroom"]).usable_bytes >= error.needed_bytes
    ]
    if larger:
        yield {"gpu": min(larger, key=lambda gpu: gpu.total_bytes).name, "vram": None}


@dataclass(frozen=True, slots=True)
class _Question:
    """What ``plan`` would be asked, turned into values."""

    subject: Subject
    budget: Budget
    request: Request
    settings: dict[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Question:
        """Parse the arguments of ``plan``.

        Raises:
            InputError: If they cannot be what was meant.
        """
        card = find_card(given["vram"], given["gpu"])
        chosen = precisions(given["precision"], card.gpu)
        adapter = find_adapter(
            given["method"],
            card.gpu,
            chosen,
            **{name: given[name] for name in ADAPTER_ARGUMENTS},
        )
        subject, _ = make_subject(
            card=card,
            lengths=parse_lengths(given["lengths"], given["max_length"]),
            adapter=adapter,
            keeps_dtypes="as-is" in chosen,
            **{name: given[name] for name in SUBJECT_ARGUMENTS},
        )
        return cls(
            subject,
            card.budget(given["headroom"], given["host_ram"]),
            parse_request(
                given["checkpointing"],
                given["objective"],
                given["batch_size"],
                subject,
            ),
            {
                "precision": chosen[0],
                "optimizer": optimizer_name(given["optimizer"]),
                "effective_batch_size": given["effective_batch_size"],
                "progress": given["progress"],
            },
        )

    def least(self) -> Estimate | None:
        """Return something that fits, or the lowest peak; None if nothing can fit."""
        return least_plan(self.subject, self.budget, self.request, **self.settings)

    def longest(self) -> tuple[int, Estimate | None]:
        """Return the longest samples that fit, and something that fits with them.

        Raises:
            InputError: No length decides about the batch, or none fits.
        """
        found: dict[int, Estimate | None] = {}

        def need_at(length: int) -> Need:
            shorter = replace(self, subject=self.subject.at_length(length))
            found[length] = estimate = shorter.least()
            most = self.budget.total_bytes
            return Need(
                needed_bytes=most if estimate is None else estimate.reserved_bytes,
                limit_bytes=self.budget.usable_bytes,
                fits=bool(estimate and estimate.fits),
            )

        longest = longest_that_fits(need_at, lengths_of(self.subject))
        if longest is None:
            raise InputError("No length fits. Use another method or optimizer.")
        return longest, found[longest]
