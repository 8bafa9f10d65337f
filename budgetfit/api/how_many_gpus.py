"""``gpus="auto"``: the fewest GPUs that fit, or the cheapest number of them."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from budgetfit.applying.quantized_layers.stored_weights import has_quantized_weights
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import Plan
from budgetfit.core.validation import python_number
from budgetfit.errors import DoesNotFitError, InputError, TraceError
from budgetfit.gpus.interconnect import check_link, is_between_nodes
from budgetfit.inputs.arguments import Arguments
from budgetfit.inputs.several_gpus import AUTO, parse_gpus
from budgetfit.inputs.target_gpu import find_target_gpu
from budgetfit.planning.search.lowest_peak import LowestPeak
from budgetfit.planning.session import budget_of_rank
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text

PER_NODE: Final = 8
MOST_NODES: Final = 128
COUNTS: Final = (
    *("1", "2", "4", str(PER_NODE)),
    *(f"{PER_NODE}x{2**power}" for power in range(1, MOST_NODES.bit_length())),
)
SECONDS_PER_HOUR: Final = 3600


def check_price(price: float | None, gpus: object) -> None:
    """Check that a price is a positive number, and ``gpus="auto"`` asked for."""
    if price is None:
        return
    if gpus != AUTO:
        raise InputError(
            "price= chooses the cheapest number of GPUs: add gpus='auto' (--gpus auto)."
            " For the cost of given ones: budgetfit compare MODEL --gpus NAMES --price "
            "NAME=PRICE."
        )
    price = python_number(price)
    if isinstance(price, bool) or not isinstance(price, (int, float)):
        price = math.nan
    if not 0 < price < math.inf:
        raise InputError(
            "price= must be a number above 0, money per hour of one GPU, for example "
            "2.50."
        )


def plan_auto(
    plan: Callable[[Arguments], Plan], given: Arguments, price: float | None
) -> Plan:
    """Plan for the fewest GPUs that fit, or with a price for the cheapest number.

    Numbers are doubled, up to 8 in a machine, then machines of 8. Of too few it is
    enough that a share of one GPU's weights, gradients and optimizer states is too
    much; others are traced. With a price numbers are doubled as long as samples get
    cheaper.

    ``price``: money per hour of one GPU; None for the fewest.

    Raises:
        DoesNotFitError: No number of GPUs helps.
    """
    search = _Search(given, price)
    best: Plan | None = None
    offloaded: Plan | None = None  # more GPUs are faster
    for gpus in COUNTS:
        here = search.worth_tracing(gpus)
        made = None if here is None else search.planned(plan, here)
        if made is None:
            continue
        if made.recipe.cpu_offload:
            offloaded = offloaded or made
            continue
        rate = _per_money(made, price)
        if best is not None and rate <= _per_money(best, price):
            break
        best = made
        if price is None:
            break
    best = best or offloaded
    if best is None:
        raise search.refusal()
    chosen = best.recipe.parallelism
    why = "the fewest that fit"
    if price is not None:
        why = "the cheapest; numbers were doubled while samples got cheaper"
    said = {
        "gpus_tried": search.said,
        "gpus_chosen": f"{1 if chosen is None else chosen.gpus}, {why}",
    }
    return best.changed(provenance={**best.provenance, **said})


class _Search:
    """The numbers of GPUs that were tried, and in ``said`` what came of each."""

    def __init__(self, given: Arguments, price: float | None) -> None:
        if given.link is not None:
            check_link(given.link)
        self.given = given
        self._price = price
        self.said: list[list[str]] = []
        self.floor_bytes = 0
        self._largest = ("parameters", 0)
        self.least: LowestPeak | None = None
        self._target = find_target_gpu(given.vram, given.gpu, given.allocator)
        self._gpus = ""
        self._stopped = ""

    def say(self, gpus: str, text: str) -> None:
        """Add what came of a number."""
        self.said.append([gpus, text])

    def planned(
        self, plan: Callable[[Arguments], Plan], here: Arguments
    ) -> Plan | None:
        """Return the plan for a number of GPUs, or None; says what came of it."""
        if here.progress is not None:
            here.progress(f"looking at {here.gpus} GPUs")
        try:
            if self.is_too_much(here):
                return None
            made = plan(here)
        except DoesNotFitError as error:
            self.say(self._gpus, str(error).splitlines()[0])
            return None
        except (InputError, TraceError) as error:  # what several, or so many, cannot do
            if self._gpus == COUNTS[0]:
                raise
            self._stopped = "more GPUs were not tried"
            self.say(self._gpus, str(error).rstrip("."))
            return None
        where = " offloaded to the CPU" * made.recipe.cpu_offload
        self.say(self._gpus, f"fits{where}, {_rates(made, self._price)}")
        return made

    def worth_tracing(self, gpus: str) -> Arguments | None:
        """Return the arguments for this number; None where it cannot be enough."""
        per_node, nodes = parse_gpus(gpus)
        count, batch = per_node * nodes, self.given.effective_batch_size
        if self._stopped:
            return None
        if batch is not None and batch % count:
            if batch > count:
                self.say(gpus, f"no divisor of the effective batch size {batch}")
            else:
                self._stopped = f"more GPUs have no share of {batch} samples"
            return None
        try:
            usable_bytes = self._usable_bytes(count)
        except InputError as error:  # NCCL and the CUDA context leave nothing
            if count == 1:
                raise
            self._stopped = "more GPUs were not tried"
            self.say(gpus, str(error).rstrip("."))
            return None
        share_bytes = self.floor_bytes // count
        if share_bytes > usable_bytes:
            self.say(
                gpus,
                "weights, gradients and optimizer states take "
                f"{format_bytes(share_bytes)} on each, {format_bytes(usable_bytes)} "
                "are usable",
            )
            return None
        self._gpus = gpus
        link = self.given.link
        if link is not None and (
            count == 1 or (nodes == 1 and is_between_nodes(check_link(link)))
        ):
            link = None
        engine = AUTO if count == 1 else self.given.engine
        return replace(self.given, gpus=gpus, engine=engine, link=link)

    def is_too_much(self, here: Arguments) -> bool:
        """Whether not even the lowest peak fits; says so, and what is known by it."""
        asked = here.parsed()
        least = asked.least()
        if least.fits:
            return False
        self.least = least
        ranks = asked.parallelisms[0].gpus if asked.parallelisms else 1
        each = " on each" if ranks > 1 else ""
        self.say(
            self._gpus,
            f"the lowest peak found{each} is {format_bytes(least.needed_bytes)}, "
            f"{format_bytes(least.limit_bytes)} are usable",
        )
        weights_bytes = sum(each.nbytes for each in asked.workload.model.parameters())
        self._largest = ("parameters", weights_bytes)
        if least.estimate is not None:
            at_peak = least.estimate.at_peak_bytes
            self._largest = max(at_peak.items(), key=lambda item: item[1])
            peaks = least.estimate.timeline.phase_peaks_bytes
            sharded_bytes = peaks.get("optimizer", 0)
        else:  # at most, with the two states of Adam
            sharded_bytes = 4 * weights_bytes // ranks
        if ranks == 1:
            self.floor_bytes = _optimizer_step_bytes(here, least)
        fixed_bytes = least.needed_bytes - sharded_bytes
        if has_quantized_weights(asked.workload.model):
            self._stopped = "more GPUs would not help: each holds the quantised base"
        elif self.given.engine == "ddp":
            self._stopped = "DDP keeps the whole model on each GPU: try engine='fsdp2'"
        elif ranks > 1 and fixed_bytes > least.limit_bytes:
            self._stopped = (
                "more GPUs would not help: beside weights, gradients and optimizer "
                f"states {format_bytes(fixed_bytes)} are needed on each"
            )
        return True

    def refusal(self) -> DoesNotFitError:
        """Return the error that says which numbers were tried."""
        least = self.least
        tried = "; ".join(f"{gpus}: {text}" for gpus, text in self.said)
        why = self._stopped or f"more than {COUNTS[-1]} GPUs were not looked at"
        return DoesNotFitError(
            needed_bytes=least.needed_bytes if least else self.floor_bytes,
            usable_bytes=least.limit_bytes if least else self._usable_bytes(1),
            largest=self._largest,
            notes=(f"GPUs tried: {tried}", why),
        )

    def _usable_bytes(self, count: int) -> int:
        budget = self._target.budget(self.given.headroom, self.given.host_ram)
        if count > 1:
            sharded = Parallelism(engine="fsdp2", gpus=count)
            budget = budget_of_rank(budget, sharded)
        return budget.usable_bytes


def _optimizer_step_bytes(one: Arguments, least: LowestPeak) -> int:
    """Return the optimizer step's peak on one GPU where that is too much; else 0.

    Whatever is recomputed: ranks that share it take at least their share. ``least``:
    the lowest peak with the checkpointing that is asked for.
    """
    asked = replace(one, checkpointing="auto").parsed()
    if len(asked.precisions) > 1:
        return 0
    if one.checkpointing != "auto":
        least = asked.least()
    if least.estimate is None:
        return 0
    return least.estimate.timeline.phase_peaks_bytes["optimizer"]


def _per_money(plan: Plan, price: float | None) -> float:
    """Return samples per 1.00 of money; without a price samples per GPU-hour."""
    hourly = plan.samples_per_s_of_data * SECONDS_PER_HOUR / plan.recipe.ranks
    return hourly / (1.0 if price is None else price)


def _rates(plan: Plan, price: float | None) -> str:
    rate = f"{rate_text(plan.samples_per_s_of_data)} samples/s"
    if price is None:
        return rate
    return f"{rate}, {rate_text(_per_money(plan, price))} samples per 1.00"
