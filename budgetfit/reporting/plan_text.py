"""Text report of a plan: recommendation, memory by category, alternatives."""

import shlex
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from budgetfit.core.allocator.settings import VARIABLE
from budgetfit.core.plan import NO_LOSS, Alternative, Estimate, Plan
from budgetfit.reporting.estimate_text import (
    memory_section,
    peak_lines,
    phase_lines,
    recipe_lines,
    time_lines,
)
from budgetfit.reporting.formatting import faster_text
from budgetfit.reporting.header import plan_header
from budgetfit.reporting.layout import bullets, fits_text, lines, section, table
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text
from budgetfit.utils.function_name import is_factory_text

# Labels of what most people do, judged with every plan, and what they call it.
USUAL = {
    "everything kept": "gradient checkpointing off",
    "every block recomputed": "gradient checkpointing on",
}
_DETAILS = "--details, or plan.details(): where the memory goes, more alternatives"
# Published speed-ups: benchmarks/compiled_steps.py.
_COMPILE = "--compile auto tries torch.compile, too: published steps ran 16-85 % faster"
_SEARCHED_BRIEFLY = (
    "what changes training is searched for briefly here: a plan made with it may be a "
    "few per cent faster"
)
_OF_THE_LONGEST = (
    "samples/s: of the longest samples alone; over all, smaller batches are padded "
    "less and may be faster"
)
_SHOWN = 5e-5  # less is 0.00 %
_VERSIONS = ("budgetfit", "torch", "transformers")


def plan_text(
    plan: Plan, *, saved_as: str | None = None, samples: int | None = None
) -> RenderableType:
    """Render what to set, whether it fits and how fast it is; evaluates nothing.

    ``saved_as``: path of the saved plan, for the suggested commands; ``samples``: per
    epoch, to show its time.
    """
    known = [row for row in plan.judged_alternatives if row.label in USUAL]
    rows = [_alternative("this plan", plan.estimate, plan.fits)]
    rows += [(USUAL[row.label], *_row(row, plan)[1:]) for row in known]
    parts = [_header(plan), _recommendation(plan, samples), *_gpus_tried(plan)]
    if known:
        body = Group(_table(rows), *_notes(plan, known, USUAL))
        parts.append(section("COMPARED WITH USUAL SETTINGS", body))
    parts += [*_warnings(plan), *_next(plan, saved_as)]
    parts.append(Text(f"  {_DETAILS}"))
    return Group(*parts)


def details_text(plan: Plan) -> RenderableType:
    """Render a plan with its memory by category and all alternatives."""
    return Group(recommendation_text(plan), reasons_text(plan))


def recommendation_text(plan: Plan, samples: int | None = None) -> RenderableType:
    """Render the part of ``details_text`` that needs no alternatives."""
    return Group(
        _header(plan),
        _recommendation(plan, samples, phase_lines(plan.estimate)),
        *_gpus_tried(plan),
        memory_section(plan.estimate),
    )


def reasons_text(plan: Plan, saved_as: str | None = None) -> RenderableType:
    """Render the rest of ``details_text``: alternatives, warnings, next commands."""
    parts: list[RenderableType] = [_alternatives(plan)] if plan.alternatives else []
    parts += [*_warnings(plan), *_next(plan, saved_as), Text("")]
    parts.append(Text(versions_text(plan.provenance), style="dim"))
    return Group(*parts)


def _header(plan: Plan) -> RenderableType:
    return lines([*plan_header(plan), ""])


def _warnings(plan: Plan) -> list[RenderableType]:
    warnings = list(dict.fromkeys((*plan.warnings, *plan.estimate.notes)))
    return [section("WATCH OUT", bullets(warnings))] if warnings else []


def _recommendation(
    plan: Plan, samples: int | None, further: Sequence[str] = ()
) -> RenderableType:
    estimate = plan.estimate
    side = Text(
        f"reserved {format_bytes(estimate.reserved_bytes)} "
        f"of {format_bytes(plan.budget.usable_bytes)} usable{_host(plan)}   "
    )
    left_bytes = plan.budget.usable_bytes - estimate.reserved_bytes
    side.append_text(fits_text(plan.fits, left_bytes))
    texts = [
        *_longest(plan),
        *recipe_lines(plan.recipe, plan.model.blocks),
        *time_lines(estimate, samples, samples and plan.hours(samples)),
        *lengths_lines(plan),
    ]
    proof = [gain_text(plan), plan.provenance.get("certificate")]
    if any(proof):
        texts.append("; ".join(filter(None, proof)))
    body = lines([*texts, *peak_lines(estimate), *further])
    return section("RECOMMENDED", body, side)


def _gpus_tried(plan: Plan) -> list[RenderableType]:
    """What came of each number of GPUs, for ``gpus="auto"``."""
    tried = plan.provenance.get("gpus_tried")
    if not tried:
        return []
    grid = Table.grid(padding=(0, 2, 0, 0))
    for gpus, said in tried:
        grid.add_row(Text(gpus), Text(said))
    chosen = Text(f"taken: {plan.provenance['gpus_chosen']}")
    return [section("HOW MANY GPUS", Group(grid, chosen))]


def _host(plan: Plan) -> str:
    """Pinned host memory of its limit, where a plan uses some."""
    used, limit = plan.estimate.host_bytes, plan.budget.host_ram_bytes
    if not used:
        return ""
    of_limit = "" if limit is None else f" of {format_bytes(limit)}"
    return f", host {format_bytes(used)}{of_limit}"


def _longest(plan: Plan) -> list[str]:
    """The result of ``objective="length"``."""
    length = plan.longest_length
    if length is None:
        return []
    text = f"longest context that fits: {length:,} tokens"
    if length == plan.provenance.get("longest_looked_at"):
        text += " (longer ones were not looked at)"
    return [text]


def lengths_lines(plan: Plan) -> list[str]:
    """Say how fast batches of several lengths are, and how they fit."""
    lengths = plan.varying_lengths
    if lengths is None:
        return []
    multiple = lengths.pad_to_multiple_of
    to = f"pad_to_multiple_of={multiple}" if multiple else "to their largest"
    waiting = ", all ranks wait for the longest" if plan.recipe.ranks > 1 else ""
    reserved = format_bytes(lengths.reserved_bytes)
    replayed = f"{reserved} reserved in {lengths.updates} updates of random sizes"
    how = {
        "none": "",
        "longest first": ": the first run.step() also runs the longest",
        "expandable segments": ": with PYTORCH_ALLOC_CONF=expandable_segments:True",
    }[lengths.measure]
    return [
        (
            f"{lengths.span}, padded {to}: {rate_text(lengths.samples_per_s)} "
            f"samples/s ({rate_text(lengths.grouped_samples_per_s)} in batches of one "
            f"size){waiting}"
        ),
        f"{replayed}{how}",
    ]


def gain_text(plan: Plan) -> str | None:
    """Say the speedup over checkpointing every block; None if there is none to say."""
    # It was not judged, or is what the plan does: recipes may differ in the order of
    # batches.
    full = _full_checkpointing(plan)
    if full is None or full.recipe == plan.recipe:
        return None
    ratio = plan.estimate.samples_per_s / full.samples_per_s - 1
    if abs(ratio) < _SHOWN:
        return None
    return f"{faster_text(ratio)} than checkpointing every block"


def _full_checkpointing(plan: Plan) -> Estimate | None:
    blocks = set(plan.model.blocks)
    for alternative in plan.judged_alternatives:
        if alternative.is_suggestion:
            continue
        recipe = alternative.estimate.recipe
        alone = all(len(segment.blocks) == 1 for segment in recipe.segments)
        settings = {(each.precision, each.optimizer) for each in (recipe, plan.recipe)}
        every = bool(blocks) and set(recipe.wrapped_blocks) == blocks
        if alternative.fits and alone and len(settings) == 1 and every:
            return alternative.estimate
    return None


def _alternatives(plan: Plan) -> RenderableType:
    same = [row for row in plan.alternatives if not row.changes_training]
    changing = [row for row in plan.alternatives if row.changes_training]
    rows = [_alternative("this plan", plan.estimate, plan.fits)]
    rows += [_row(row, plan) for row in same]
    if changing:
        rows.append(("changes what is trained:", "", "", "", "", ""))
        rows += [_row(row, plan) for row in changing]
    notes = _notes(plan, plan.alternatives, {})
    if changing:
        notes.append(Text(_SEARCHED_BRIEFLY, style="dim"))
    return section("ALTERNATIVES", Group(_table(rows), *notes))


def _notes(
    plan: Plan, rows: Sequence[Alternative], names: Mapping[str, str]
) -> list[RenderableType]:
    """What to know before a row is chosen; ``names``: labels that are shown."""
    notes = [_OF_THE_LONGEST] if plan.varying_lengths else []
    notes += [
        f"{names.get(row.label, row.label)}: {row.note}" for row in rows if row.note
    ]
    return [Text("\n".join(notes), style="dim")] if notes else []


def _table(rows: Sequence[tuple[str, ...]]) -> RenderableType:
    columns = ("", "batch", "accum.", "reserved", "samples/s", "")
    return table(columns, rows, left=(0, 5))


def _row(row: Alternative, plan: Plan) -> tuple[str, ...]:
    same = row.estimate.recipe == plan.estimate.recipe and not row.changes_training
    if same:
        return (row.label, "", "", "", "", "= this plan")
    return _alternative(row.label, row.estimate, row.fits)


def _alternative(label: str, estimate: Estimate, fits: bool) -> tuple[str, ...]:
    recipe = estimate.recipe
    return (
        label,
        f"{recipe.batch_size}",
        f"{recipe.gradient_accumulation_steps}",
        format_bytes(estimate.reserved_bytes),
        rate_text(estimate.samples_per_s),
        "fits" if fits else "too much",
    )


def _next(plan: Plan, saved_as: str | None) -> list[RenderableType]:
    """The suggested commands, never wrapped."""
    several = plan.recipe.parallelism
    start = f"{several.torchrun} -m " if several else ""
    verify = f"{start}budgetfit verify"
    has_loss = NO_LOSS not in (*plan.warnings, *plan.estimate.notes)
    option, given = (
        ("", "") if has_loss else (" --loss FILE.py:FUNCTION", ", loss=loss")
    )
    again = f"budgetfit.verify(plan{given})"
    texts = [
        f"run it with --save plan.json, then, on the GPU: {verify} plan.json{option}",
        f"or in Python: run = budgetfit.apply(plan{given}); {again}",
    ]
    if saved_as:
        saved = shlex.quote(saved_as)
        option = f"{_own_code(plan)}{option}"
        texts = [
            f"{verify} {saved}{option}   # real GPU steps against these numbers",
            f"budgetfit export {saved} --to {_script(plan)} > train.py",
        ]
    elif plan.provenance.get("may_compile"):
        texts.append(_COMPILE)
    settings = plan.budget.allocator
    if settings.text:
        texts.insert(0, f"export {VARIABLE}={settings.shell_text}   # before training")
    commands = [Text(f"  {text}", no_wrap=True, overflow="ignore") for text in texts]
    return [Text("NEXT", "bold"), *commands]


def _own_code(plan: Plan) -> str:
    """Return options that name a plan's own code; it is not run unasked."""
    asked = plan.provenance.get("asked")
    if not isinstance(asked, dict):
        return ""
    is_factory = is_factory_text(str(asked.get("model")))
    names = ["model"] if is_factory else []
    if not asked.get("loss_of_factory"):
        names.append("loss")
    options = ""
    for name in (*names, "batch"):
        text = asked.get(name)
        # A function that was handed in is recorded by a name that loads nothing.
        if text and (is_factory or is_factory_text(str(text))):
            options += f" --{name} {shlex.quote(str(text))}"
    return options + " --trust-remote-code" * bool(asked.get("trust_remote_code"))


def _script(plan: Plan) -> str:
    """The export that can write a plan's program: torch's API alone, if it suffices."""
    recipe = plan.recipe
    on_host = recipe.offloads_activations
    more = recipe.loss_chunks > 1 or recipe.optimizer_in_backward
    needs_more = plan.adapter or plan.model.nested_tensor or on_host or more
    return "trainer" if needs_more else "torch"


def versions_text(known: Mapping[str, object]) -> str:
    """The versions of the libraries that a plan's numbers depend on."""
    return ", ".join(f"{name} {known[name]}" for name in _VERSIONS if name in known)
