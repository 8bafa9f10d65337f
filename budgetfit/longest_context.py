"""objective="length": the plan for the longest samples that fit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from budgetfit.adapter_arguments import find_adapter
from budgetfit.arguments import (
    find_card,
    make_subject,
    optimizer_name,
    parse_loss,
    parse_request,
)
from budgetfit.core.counts import whole_number
from budgetfit.core.errors import InputError
from budgetfit.integrations.model_source import resolve_model
from budgetfit.planning.candidates import check_batch, precisions
from budgetfit.planning.fallback import fallback
from budgetfit.planning.least_need import least_need
from budgetfit.planning.longest_length import FIRST, lengths_up_to, longest_plan
from budgetfit.tracing.batch_shapes import describe_batch
from budgetfit.tracing.made_batch import make_batch, most_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.plan import Plan
    from budgetfit.integrations.resolved_model import ResolvedModel
    from budgetfit.planning.longest_length import Need

# Where neither the model nor the user names a limit; few look for more.
NO_LIMIT: Final = 2**17
ADAPTERS: Final = (
    *("lora_r", "lora_alpha", "lora_dropout", "target_modules"),
    *("quantization", "double_quantization", "prepare_for_kbit"),
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
    resolved = resolve_model(
        asked["model"], trust_remote_code=asked["trust_remote_code"]
    )
    for name, given in (
        ("batch", asked["batch"] if resolved.batch is None else resolved.batch),
        ("lengths", asked["lengths"]),
    ):
        if given is not None:
            raise InputError(
                f'objective="length" looks for the length itself. Leave {name}= out; '
                "max_length= says the longest of interest."
            )
    check_batch(asked["batch_size"], asked["effective_batch_size"])
    size = asked["batch_size"] or 1
    asked = {**asked, "batch_size": size, "objective": "throughput"}
    lengths = _lengths(resolved, asked)
    length, made = longest_plan(
        lambda length: plan(**{**asked, "max_length": length}),
        _needs(resolved, asked),
        lengths,
    )
    found = {"longest_length": length, "longest_looked_at": lengths[-1]}
    return made.changed(provenance={**made.provenance, **found})


def _lengths(resolved: ResolvedModel, asked: dict[str, Any]) -> Sequence[int]:
    """Return the lengths of samples that the model can be trained on.

    Of models that read images too, those that leave room for one.
    """
    model = resolved.model
    longest = asked["max_length"]
    if longest is None:
        longest = most_positions(model) or NO_LIMIT
    lengths = lengths_up_to(whole_number("max_length", longest, example=1024))
    make = partial(
        make_batch,
        model,
        batch_size=1,
        image_size=asked["image_size"],
        text_only=asked["text_only"],
    )

    def shapes(length: int) -> dict[str, Any]:
        try:
            return describe_batch(make(max_length=length).batch)
        except InputError:  # it has no room for an image of the size asked for
            return {}

    usual = lengths[bisect_right(lengths, FIRST) - 1]
    found, shortest = describe_batch(make(max_length=usual).batch), shapes(lengths[0])
    if found == shortest and len(lengths) > 1:
        raise InputError(
            f'objective="length" is for batches that are made from max_length; '
            f"samples of {resolved.name} have no length. Use another objective, for "
            'example "throughput".'
        )

    def is_whole(length: int) -> bool:
        """Whether a row of so many tokens holds all that the usual one does."""
        there = shapes(length)
        return there.keys() == found.keys() and any(
            length in shape for shape, _ in there.values()
        )

    first = bisect_left(lengths, x=True, key=is_whole)
    return lengths[first:] or lengths


def _needs(resolved: ResolvedModel, asked: dict[str, Any]) -> Callable[[int], Need]:
    """Return what says how much samples of a length need at least."""
    card = find_card(asked["vram"], asked["gpu"])
    chosen = precisions(asked["precision"], card.gpu)
    adapter = find_adapter(
        asked["method"],
        card.gpu,
        chosen,
        **{name: asked[name] for name in ADAPTERS},
    )
    loss = parse_loss(asked["loss"]) or resolved.loss

    def need_at(length: int) -> Need:
        if asked["progress"] is not None:
            asked["progress"](f"looking for the longest samples: {length:,} tokens")
        subject, _ = make_subject(
            resolved.model,
            card,
            max_length=length,
            image_size=asked["image_size"],
            text_only=asked["text_only"],
            loss=loss,
            optimizer=asked["optimizer"],
            adapter=adapter,
        )
        request = parse_request(
            asked["checkpointing"],
            asked["objective"],
            asked["batch_size"],
            subject.blocks,
        )
        return least_need(
            subject,
            card.budget(asked["headroom"]),
            request,
            precisions=chosen,
            optimizer=optimizer_name(asked["optimizer"]),
            effective_batch_size=asked["effective_batch_size"],
            instead=fallback(asked["precision"]) if adapter is None else None,
        )

    return need_at
