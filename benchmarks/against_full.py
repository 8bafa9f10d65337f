"""The plan against the usual practice: every block recomputed, the largest batch.

    python -m benchmarks.against_full

Both train the same samples per optimizer step on the same card; both are traced as they
would be applied, and judged by the same replay and the same kernel times. The usual
practice takes the largest micro-batch that fits, which is the effective batch halved
until it does. The last column compares with the fastest batch of that practice, which
is not always its largest.
"""

import sys
from typing import Final, NamedTuple

from benchmarks.shared import GIB, chains_of, config, side_by_side, table
from budgetfit import Estimate, Plan
from budgetfit.core.budget import Budget

ROOM: Final = 1.1  # of the practice's peak: with as much, the plan has to be faster
GAIN: Final = 1.05


class Case(NamedTuple):
    """One model on one card, and how many samples make an optimizer step."""

    model: str
    length: int | None
    effective_batch: int
    gpu: str
    precision: str
    optimizer: str


# Cards on which training all weights fits: AdamW takes 16 bytes per parameter with fp32
# weights (bf16-mixed), 8 with bf16 ones, Adafactor hardly more than weights and
# gradients. Where fp32 weights do not fit a card, bf16 ones are taken.
ADAMW: Final = "adamw_torch_fused"
CASES: Final = (
    Case("SmolLM2-1.7B", 2048, 64, "rtx-4090", "bf16", ADAMW),
    Case("SmolLM2-1.7B", 2048, 64, "a100-40gb", "bf16-mixed", ADAMW),
    Case("SmolLM2-1.7B", 2048, 64, "h100-80gb", "bf16-mixed", ADAMW),
    Case("Llama-3.1-8B", 2048, 64, "a100-80gb", "bf16", "adafactor"),
    Case("Llama-3.1-8B", 2048, 64, "h100-80gb", "bf16", ADAMW),
    Case("Llama-3.1-8B", 2048, 64, "h200", "bf16", ADAMW),
    Case("vit-large-patch16-224", None, 1024, "rtx-4090", "bf16-mixed", ADAMW),
    Case("vit-large-patch16-224", None, 1024, "a100-40gb", "bf16-mixed", ADAMW),
    Case("vit-large-patch16-224", None, 1024, "h100-80gb", "bf16-mixed", ADAMW),
    Case("bert-large-uncased", 512, 256, "rtx-4090", "bf16-mixed", ADAMW),
    Case("bert-large-uncased", 512, 256, "a100-40gb", "bf16-mixed", ADAMW),
    Case("bert-large-uncased", 512, 256, "h100-80gb", "bf16-mixed", ADAMW),
    Case("t5-large", 512, 128, "rtx-4090", "bf16-mixed", ADAMW),
    Case("t5-large", 512, 128, "a100-40gb", "bf16-mixed", ADAMW),
    Case("t5-large", 512, 128, "h100-80gb", "bf16-mixed", ADAMW),
)


class Result(NamedTuple):
    """What both do: samples per second and reserved bytes, predicted."""

    case: Case
    plan: str
    wrapped: int
    batch: int
    per_second: float
    reserved_bytes: int
    full_batch: int
    full_per_second: float
    full_reserved_bytes: int
    full_best_per_second: float
    usable_bytes: int

    @property
    def has_room(self) -> bool:
        """Whether the budget is a tenth above what the practice takes."""
        return self.usable_bytes >= ROOM * self.full_reserved_bytes

    @property
    def gain(self) -> float:
        """Samples per second over those of the usual practice."""
        return self.per_second / self.full_per_second


def practice(case: Case, budget: Budget) -> tuple[Estimate, Estimate]:
    """Return every block recomputed: at the largest batch, and at the fastest."""
    from budgetfit.planning.search.baselines import best_with_policy
    from budgetfit.planning.session import PlanningSession, Request

    chains = chains_of(
        config(case.model),
        case.gpu,
        case.precision,
        optimizer=case.optimizer,
        max_length=case.length,
        effective_batch_size=case.effective_batch,
    )
    found = []
    for objective in ("batch_size", "throughput"):
        request = Request(budget=budget, checkpointing="full", objective=objective)  # type: ignore[arg-type]
        estimate = best_with_policy(PlanningSession(chains, request), "full")
        if not estimate.fits:
            raise RuntimeError(f"{case}: not even one sample fits")
        found.append(estimate)
    return found[0], found[1]


def compare(case: Case) -> Result:
    """Return both sides of one case."""
    from budgetfit import plan

    ours = plan(
        config(case.model),
        gpu=case.gpu,
        precision=case.precision,
        optimizer=case.optimizer,
        max_length=case.length,
        effective_batch_size=case.effective_batch,
    )
    full, best = practice(case, ours.budget)
    return Result(
        case=case,
        plan=shape(ours),
        wrapped=len(ours.recipe.wrapped_blocks),
        batch=ours.recipe.batch_size,
        per_second=ours.estimate.samples_per_s,
        reserved_bytes=ours.estimate.reserved_bytes,
        full_batch=full.recipe.batch_size,
        full_per_second=full.samples_per_s,
        full_reserved_bytes=full.reserved_bytes,
        full_best_per_second=best.samples_per_s,
        usable_bytes=ours.budget.usable_bytes,
    )


def shape(plan: Plan) -> str:
    """Return in few words what a plan does to the blocks."""
    recipe = plan.recipe
    counts: dict[str, int] = {"keep": len(plan.model.blocks)}
    for segment in recipe.segments:
        counts["keep"] -= len(segment.blocks)
        mode = "nested" if segment.nested else segment.mode
        counts[mode] = counts.get(mode, 0) + len(segment.blocks)
    words = [f"{count} {mode}" for mode, count in counts.items() if count]
    if recipe.loss_chunks > 1:
        words.append(f"loss in {recipe.loss_chunks}")
    return ", ".join(words)


def row(result: Result) -> tuple[str, ...]:
    """Return one line of the table."""
    case = result.case
    settings = case.precision + (", adafactor" if case.optimizer != ADAMW else "")
    return (
        case.model,
        case.gpu,
        settings,
        result.plan,
        f"{result.batch} x {case.effective_batch // result.batch}",
        f"{result.per_second:,.1f}",
        f"{result.reserved_bytes / result.usable_bytes:.1%}",
        f"{result.full_batch} x {case.effective_batch // result.full_batch}",
        f"{result.full_per_second:,.1f}",
        f"{result.full_reserved_bytes / GIB:.2f}",
        f"{result.usable_bytes / GIB:.2f}",
        "yes" if result.has_room else "no",
        f"{result.gain - 1:+.1%}",
        f"{result.per_second / result.full_best_per_second - 1:+.1%}",
    )


HEADERS: Final = (
    "model",
    "card",
    "precision",
    "plan: blocks",
    "batch",
    "samples/s",
    "of budget",
    "full: batch",
    "samples/s",
    "GiB",
    "budget GiB",
    f"room {ROOM:g} x",
    "faster by",
    "than its best",
)


def summary(results: list[Result]) -> list[str]:
    """Return what was reached, and every case where it was not."""
    roomy = [each for each in results if each.has_room]
    reached = [each for each in roomy if each.gain >= GAIN]
    slower = [each for each in results if each.gain < 1]
    target = f"At least {GAIN - 1:.0%} faster wherever the budget is {ROOM:g} x"
    lines = [
        f"* {target} that practice's peak: {len(reached)} of {len(roomy)}.",
        f"* Slower than that practice: {len(slower)} of {len(results)}.",
    ]
    lines += [
        f"* Not reached: {each.case.model} on {each.case.gpu}, {each.gain - 1:+.1%} "
        f"({each.plan})."
        for each in roomy
        if each.gain < GAIN
    ]
    loose = [
        each
        for each in results
        if each.reserved_bytes < 0.98 * each.usable_bytes and each.wrapped
    ]
    lines += [
        f"* More than 2 % of the budget unused although blocks are not kept: "
        f"{each.case.model} on {each.case.gpu}, "
        f"{1 - each.reserved_bytes / each.usable_bytes:.1%}."
        for each in loose
    ]
    return lines


def main() -> int:
    """Print the table and what was reached."""
    wanted = sys.argv[1:]
    cases = [each for each in CASES if not wanted or each.model in wanted]
    results = side_by_side(compare, [(case,) for case in cases])
    print(table(HEADERS, [row(each) for each in results], left=4))
    print()
    print("\n".join(summary(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
