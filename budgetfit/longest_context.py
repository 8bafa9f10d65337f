"""objective="length": the plan for the longest samples that fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from budgetfit.adapter_arguments import find_adapter
from budgetfit.arguments import find_card, make_subject, optimizer_name, parse_request
from budgetfit.core.counts import whole_number
from budgetfit.core.errors import InputError
from budgetfit.planning.candidates import check_batch, precisions
from budgetfit.planning.fallback import fallback
from budgetfit.planning.least_need import least_need
from budgetfit.planning.longest_length import FIRST, lengths_of, longest_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from budgetfit.core.plan import Plan
    from budgetfit.planning.longest_length import Need

ADAPTERS: Final = (
    *("lora_r", "lora_alpha", "lora_dropout", "target_modules"),
    *("quantization", "double_quantization", "prepare_for_kbit"),
)
SAMPLES: Final = (
    *("model", "image_size", "text_only", "loss", "optimizer"),
    *("trust_remote_code", "progress"),
)


def plan_longest(plan: Callable[..., Plan], asked: dict[str, Any]) -> Plan:
    """Return the plan for the longest samples that fit, at batch 1 unless given.

    Args:
        plan: ``budgetfit.plan``.
        asked: Its arguments; ``max_length`` is the longest that is of interest.

    Raises:
        InputError: No length decides about the model's batch, or it is given.
        DoesNotFitError: Not even the shortest samples fit.
    """
    for name in ("batch", "lengths"):
        if asked[name] is not None:
            raise InputError(
                f'objective="length" looks for the length itself. Leave {name}= out; '
                "max_length= says the longest of interest."
            )
    check_batch(asked["batch_size"], asked["effective_batch_size"])
    size = asked["batch_size"] or 1
    asked = {**asked, "batch_size": size, "objective": "throughput"}
    card = find_card(asked["vram"], asked["gpu"])
    budget = card.budget(asked["headroom"], asked["host_ram"])
    chosen = precisions(asked["precision"], card.gpu)
    settings = {name: asked[name] for name in ADAPTERS}
    adapter = find_adapter(asked["method"], card.gpu, chosen, **settings)
    longest = asked["max_length"]
    if longest is not None:
        whole_number("max_length", longest, example=1024)
    subject, _ = make_subject(
        card=card,
        adapter=adapter,
        max_length=None if longest is None else min(longest, FIRST),
        **{name: asked[name] for name in SAMPLES},
    )
    request = parse_request(asked["checkpointing"], asked["objective"], size, subject)

    def need_at(length: int) -> Need:
        if asked["progress"] is not None:
            asked["progress"](f"looking for the longest samples: {length:,} tokens")
        return least_need(
            subject.at_length(length),
            budget,
            request,
            precisions=chosen,
            optimizer=optimizer_name(asked["optimizer"]),
            effective_batch_size=asked["effective_batch_size"],
            instead=fallback(asked["precision"]) if adapter is None else None,
        )

    lengths = lengths_of(subject, longest)
    length, made = longest_plan(
        lambda length: plan(**{**asked, "max_length": length}), need_at, lengths
    )
    found = {"longest_length": length, "longest_looked_at": lengths[-1]}
    return made.changed(provenance={**made.provenance, **found})
