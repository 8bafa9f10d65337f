"""``compare``: the best settings on each of several GPUs, by each training method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from budgetfit.core.adapter import FULL, METHODS, Adapter
from budgetfit.core.plan import GpuComparison, ModelSummary
from budgetfit.core.precision import requested_precisions
from budgetfit.core.validation import check_batch, check_objective
from budgetfit.errors import InputError, TraceError
from budgetfit.gpus.hourly_prices import hourly_prices
from budgetfit.gpus.table import Gpu
from budgetfit.inputs.arguments import (
    ADAPTER_SETTINGS,
    QUANTIZATION_SETTINGS,
    Arguments,
)
from budgetfit.inputs.engines_for_model import worth_tracing
from budgetfit.inputs.several_gpus import (
    AUTO,
    CountedGpu,
    find_counted_gpu,
    parallelisms,
    parse_link,
    refuse_engine_of_one,
    samples_per_rank,
)
from budgetfit.inputs.target_gpu import find_target_gpu
from budgetfit.planning.alternatives.compare_gpus import Card, compare_gpus
from budgetfit.tracing.isolation.torch_state import neutral_torch_state

if TYPE_CHECKING:
    from budgetfit.inputs.arguments import Model, ParsedArguments


@neutral_torch_state()
def compare(
    model: Model,
    gpus: Sequence[str],
    *,
    methods: Sequence[str] | None = None,
    prices: Mapping[str, float] | None = None,
    **given: Any,
) -> tuple[tuple[GpuComparison, ...], ModelSummary]:
    """Find the best training settings on each of several GPUs, by each method.

    The arguments are those of ``budgetfit.plan``, with names of GPUs instead of one,
    and ``methods``: several of ``full``, ``lora`` and ``qlora``. Settings of adapters
    are for those that have some; how the base is stored is ``qlora``'s, where asked
    for. ``"h100-80gbx8"`` is eight of a GPU that train together in one machine,
    ``"h100-80gbx8x4"`` four such machines; ``engine`` and ``link`` are for those.

    ``prices`` are money per hour by GPU, in any one currency, for example
    ``{"rtx-4090": 0.35, "a100-80gb": 1.60}``, and of several that of each; GPUs may be
    left out. Rows with a price have ``samples_per_money`` and ``cost(samples)``.

    Returns:
        A row for each GPU and method, GPUs in their order, and the model summary.

    Raises:
        InputError: An argument is invalid, for example the price of a GPU that is not
            compared; nothing was traced.
        TraceError: The model cannot run on fake tensors.
    """
    # The rows have the memory of their GPUs, and weights that are updated at the end.
    asked = Arguments(model=model, vram=None, optimizer_in_backward=False, **given)
    _check_question(asked)
    if (
        isinstance(gpus, str)
        or not isinstance(gpus, Iterable)
        or not (gpus := list(gpus))
    ):
        raise InputError(
            'Name the cards to compare, for example ["t4", "rtx-4090"] '
            "(--gpus t4,rtx-4090)."
        )
    counted = [find_counted_gpu(name) for name in gpus]
    cards = _cards(asked, counted)
    hourly = _hourly(prices, [each.gpu for each in counted])
    wanted = _methods(asked.method, methods)
    tables: list[list[GpuComparison]] = []
    errors: list[InputError | TraceError] = []
    summaries: list[ModelSummary] = []
    for name in wanted:
        try:
            rows = _rows(_asked_by(asked, name, wanted), cards, summaries)
        except (InputError, TraceError) as error:
            if asked.progress is not None:
                asked.progress(f"{name} is left out")
            errors.append(error)
            problem = f"{name}: {error}"
            rows = [
                GpuComparison(
                    gpu=card.gpu, budget=card.budget, estimate=None, problem=problem
                )
                for card in cards
            ]
        tables.append(rows)
    if len(errors) == len(wanted):
        raise errors[0]
    found = (
        _named(row, name, number, hourly.get(row.gpu.name))
        for number, *rows_of_gpu in zip(counted, *tables, strict=True)
        for name, row in zip(wanted, rows_of_gpu, strict=True)
    )
    return tuple(found), summaries[0]


def _check_question(asked: Arguments) -> None:
    """Refuse what is planned for one GPU at a time."""
    check_objective(asked.objective)
    if asked.objective == "length":
        raise InputError(
            'objective="length" is a question to one card at a time. Use plan: '
            "budgetfit plan MODEL --gpu NAME --objective length."
        )
    if asked.compile != "none":
        raise InputError(
            f"compile={asked.compile!r} is planned for one card at a time: use plan, "
            "or leave compile= out."
        )
    if asked.gpu is not None:
        raise InputError(
            f"gpu={asked.gpu!r} is one card, and compare takes a list: name all in "
            f"gpus, for example [{asked.gpu!r}]."
        )
    check_batch(asked.batch_size, asked.effective_batch_size)


def _named(
    row: GpuComparison, method: str, number: CountedGpu, price: float | None
) -> GpuComparison:
    """Return a row with its method, how many GPUs there are, and what all cost."""
    return replace(
        row,
        method=method,
        gpus=number.gpus,
        nodes=number.nodes,
        price_per_hour=None if price is None else price * number.gpus,
    )


def _cards(asked: Arguments, counted: Sequence[CountedGpu]) -> list[Card]:
    """Return what is compared, with all ways to use several GPUs.

    Raises:
        InputError: If ``engine`` or ``link`` is invalid.
    """
    nodes = max(each.nodes if each.gpus > 1 else 0 for each in counted)
    link = parse_link(asked.link, nodes)
    if not nodes:
        refuse_engine_of_one(asked.engine)
    cards = []
    for gpu, per_node, count in counted:
        target = find_target_gpu(None, gpu.name, asked.allocator)
        ways = parallelisms(f"{per_node}x{count}", asked.engine)
        cards.append(
            Card(
                replace(target.gpu, interconnect=link if ways else ""),
                target.budget(asked.headroom, asked.host_ram),
                ways,
                asked.effective_batch_size,
            )
        )
    return cards


def _hourly(
    prices: Mapping[str, float] | None, gpus: Sequence[Gpu]
) -> dict[str, float]:
    """Return the prices by canonical name; refuse other GPUs and what is no price."""
    prices = {} if prices is None else prices
    if not isinstance(prices, Mapping) or not all(isinstance(n, str) for n in prices):
        raise InputError(
            'prices must be money per hour by card, for example {"rtx-4090": 0.35} '
            f"(--price rtx-4090=0.35); got {prices!r:.80}."
        )
    return hourly_prices(prices.items(), gpus)


def _methods(method: str | None, methods: Sequence[str] | None) -> list[str]:
    """Return the methods to compare, each once; refuse unknown ones."""
    known = (FULL, *METHODS)
    if methods is None:
        methods = [FULL if method is None else method]
    elif method is not None:
        raise InputError("Say either method= or methods=, which takes several.")
    several = not isinstance(methods, str) and isinstance(methods, Iterable)
    named = list(methods) if several else []
    if not named or not all(name in known for name in named):
        raise InputError(
            f"methods must be some of {', '.join(known)}, for example "
            f'["full", "lora"] (--methods full,lora); got {methods!r:.80}.'
        )
    return list(dict.fromkeys(named))


def _asked_by(asked: Arguments, name: str, wanted: Sequence[str]) -> Arguments:
    """Return the arguments for one of several methods, with the settings it has."""
    usual = {field.name: field.default for field in fields(Arguments)}
    others: Sequence[str] = ()
    if len(wanted) > 1 and name == FULL:
        others = ADAPTER_SETTINGS
    elif name == "lora" and "qlora" in wanted:
        others = QUANTIZATION_SETTINGS
    changes: dict[str, Any] = {setting: usual[setting] for setting in others}
    return replace(asked, method=name, **changes)


def _rows(
    asked: Arguments, cards: Sequence[Card], summaries: list[ModelSummary]
) -> list[GpuComparison]:
    """Return a row for each GPU; append the summary of what was planned for."""
    # The compute dtype of an adapter, and with it the model, depends on the GPU.
    groups: dict[Adapter | None, list[int]] = {}
    precisions = [_precisions(asked, card.gpu) for card in cards]
    for number, card in enumerate(cards):
        adapter = asked.adapter_on(card.gpu, precisions[number])
        groups.setdefault(adapter, []).append(number)
    rows: dict[int, GpuComparison] = {}
    for group in groups.values():
        first = group[0]
        alone = replace(asked, gpu=cards[first].gpu.name, engine=AUTO, link=None)
        here = alone.parsed(None if asked.precision == "auto" else precisions[first])
        summaries.append(here.workload.summary())
        made = compare_gpus(
            here.workload,
            [_worth_planning(cards[number], here) for number in group],
            here.request,
            precision="as-is" if here.precisions == ("as-is",) else asked.precision,
            optimizer=here.optimizer,
            progress=asked.progress,
        )
        rows |= zip(group, made, strict=True)
    return [rows[number] for number in range(len(cards))]


def _worth_planning(card: Card, here: ParsedArguments) -> Card:
    """Return it with the engines that may fit, and each GPU's share of the batch."""
    if not card.parallelisms:
        return card
    model = here.workload.model
    try:
        ways = worth_tracing(card.parallelisms, model, card.budget)
        here.given.check_for_several(ways)
        share = samples_per_rank(card.effective_batch_size, ways[0].gpus)
        check_batch(here.given.batch_size, share, ways[0].gpus)
    except InputError as error:
        return card._replace(problem=str(error))
    return card._replace(parallelisms=ways, effective_batch_size=share)


def _precisions(asked: Arguments, gpu: Gpu) -> tuple[str, ...]:
    try:
        return requested_precisions(asked.precision, gpu)
    except InputError:  # reported in the GPU's row
        return ("fp32",)
