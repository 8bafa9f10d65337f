"""What would fit instead: another method, a shorter text, a larger card; each tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from budgetfit.adapter_arguments import find_adapter
from budgetfit.arguments import (
    find_card,
    make_subject,
    optimizer_name,
    parse_lengths,
    parse_request,
)
from budgetfit.core.errors import InputError, TraceError
from budgetfit.core.gpus import all_gpus
from budgetfit.planning.candidates import precisions
from budgetfit.planning.make_plan import least_plan
from budgetfit.planning.what_if import suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from budgetfit.core.errors import DoesNotFitError, Suggestion
    from budgetfit.core.plan import Estimate

Arguments = dict[str, Any]  # of ``plan``, by name

SUBJECT_ARGUMENTS: Final = ("batch", "loss", "optimizer", "trust_remote_code")
ADAPTER_ARGUMENTS: Final = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "quantization",
    "double_quantization",
    "prepare_for_kbit",
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
            found = _least({**given, **change})
        except (InputError, TraceError):
            continue  # the model cannot run that way, so it is no advice
        if found is not None and found.fits:
            yield suggestion(change, found)


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


def _least(given: Arguments) -> Estimate | None:
    """Return something that fits, or the lowest peak; None if nothing can fit."""
    card = find_card(given["vram"], given["gpu"])
    chosen = precisions(given["precision"], card.gpu)
    adapter = find_adapter(
        given["method"],
        card.gpu,
        chosen,
        **{name: given[name] for name in ADAPTER_ARGUMENTS},
    )
    subject, _ = make_subject(
        given["model"],
        card,
        max_length=given["max_length"],
        lengths=parse_lengths(given["lengths"], given["max_length"]),
        adapter=adapter,
        progress=given["progress"],
        **{name: given[name] for name in SUBJECT_ARGUMENTS},
    )
    return least_plan(
        subject,
        card.budget(given["headroom"], given["host_ram"]),
        parse_request(
            given["checkpointing"],
            given["objective"],
            given["batch_size"],
            subject,
        ),
        precision=chosen[0],
        optimizer=optimizer_name(given["optimizer"]),
        effective_batch_size=given["effective_batch_size"],
        progress=given["progress"],
    )
