"""The first screen of the report: what to set, whether it fits, how fast it is."""

from typing import NamedTuple

from budgetfit.core.plan import Plan
from budgetfit.reporting.estimate_text import range_text
from budgetfit.reporting.formatting import blocks_text
from budgetfit.reporting.html.section import Cell, Number, memory, rate
from budgetfit.reporting.plan_text import gain_text, lengths_lines
from budgetfit.utils.format_bytes import format_bytes


class Answer(NamedTuple):
    """One question, the answer in large letters, and details.

    ``facts``: (name, value) below it. ``tone``: ``good``, ``bad`` or empty.
    """

    question: str
    answer: Cell
    facts: tuple[tuple[str, Cell], ...]
    tone: str = ""


def answers(plan: Plan) -> tuple[Answer, ...]:
    """Return the three answers of a plan."""
    return _settings(plan), _memory(plan), _speed(plan)


def _settings(plan: Plan) -> Answer:
    recipe = plan.recipe
    size = recipe.batch_size
    facts: list[tuple[str, Cell]] = [
        (
            "gradient accumulation",
            Number(
                str(recipe.gradient_accumulation_steps),
                recipe.gradient_accumulation_steps,
            ),
        ),
        ("precision", recipe.precision),
        ("optimizer", recipe.optimizer),
        ("checkpointing", blocks_text(recipe, plan.model.blocks)),
    ]
    several = recipe.parallelism
    if several is not None:
        nodes = f" on {several.nodes} nodes" if several.nodes > 1 else ""
        facts.insert(0, ("GPUs", f"{several.gpus}{nodes}, {several.describe()}"))
    if recipe.reduction:
        facts.append(("accumulation", recipe.reduction))
    if recipe.compile != "none":
        what = "each block" if recipe.compile == "blocks" else "the model"
        facts.append(("torch.compile", f"the forward of {what}"))
    if recipe.loss_chunks > 1:
        facts.append(("output head and loss", f"in {recipe.loss_chunks} parts"))
    if recipe.optimizer_in_backward:
        facts.append(("optimizer steps", "in the backward pass"))
    if plan.longest_length is not None:
        facts.append(("longest context", f"{plan.longest_length:,} tokens"))
    each = " on each GPU" if several is not None else ""
    answer = Number(f"batch size {size}{each}", size)
    return Answer("What to set", answer, tuple(facts))


def _memory(plan: Plan) -> Answer:
    estimate, limit = plan.estimate, plan.budget.usable_bytes
    left = limit - estimate.reserved_bytes
    facts: list[tuple[str, Cell]] = [
        ("reserved at most", memory(estimate.reserved_bytes)),
        ("limit", memory(limit)),
        ("allocated at most", memory(estimate.allocated_bytes)),
        ("whole process", memory(estimate.process_bytes)),
    ]
    if plan.varying_lengths is not None:
        facts.append(("batches of all sizes", lengths_lines(plan)[1]))
    if estimate.host_bytes:
        facts.append((estimate.host_memory, memory(estimate.host_bytes)))
        if plan.budget.host_ram_bytes is not None:
            facts.append(("host memory limit", memory(plan.budget.host_ram_bytes)))
    if not plan.fits:
        text = f"No: {format_bytes(-left)} too much" if left < 0 else "No"
        return Answer("Does it fit?", Number(text, left), tuple(facts), "bad")
    text = f"Yes, with {format_bytes(left)} to spare"
    return Answer("Does it fit?", Number(text, left), tuple(facts), "good")


def _speed(plan: Plan) -> Answer:
    estimate = plan.estimate
    facts: list[tuple[str, Cell]] = [
        ("one step", Number(range_text(estimate), estimate.step_ms)),
        ("samples per step", str(estimate.recipe.effective_batch_size)),
    ]
    if plan.varying_lengths is not None:
        facts.append(("batches of all sizes", lengths_lines(plan)[0]))
    gain = gain_text(plan)
    if gain:
        facts.append(("against usual practice", gain))
    proof = plan.provenance.get("certificate")
    if proof:
        facts.append(("how sure", str(proof)))
    speed = rate(estimate.samples_per_s)
    return Answer(
        "How fast is it?", Number(f"{speed.text} samples/s", speed.value), tuple(facts)
    )
