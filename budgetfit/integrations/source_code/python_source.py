"""Generate Python source: calls, imports, literals; the plan's summary lines."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from budgetfit.core.allocator.settings import VARIABLE
from budgetfit.core.loop import RUN
from budgetfit.core.plan import Plan
from budgetfit.errors import InputError
from budgetfit.reporting.formatting import blocks_text
from budgetfit.utils.format_bytes import format_bytes

_WIDTH: Final = 88  # columns of a source line
_STANDARD: Final = frozenset({"functools", "importlib", "itertools", "runpy"})
DTYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
MAX_EVAL_BATCH_SIZE: Final = 1024
LENGTH_NAMES = ("input_ids", "decoder_input_ids")


def asked_model(plan: Plan) -> str:
    """Return the text that named the model when the plan was made; empty if none."""
    return str((plan.provenance.get("asked") or {}).get("model") or "")


def dequantizer_of(plan: Plan) -> str:
    """Return the config class that dequantizes the stored weights; empty for none."""
    name = plan.model.dequantizer
    return name if name.isidentifier() and name.endswith("Config") else ""


def planned_loss(plan: Plan) -> str:
    """Return what names the loss function that was planned; empty without one."""
    asked = plan.provenance.get("asked") or {}
    if asked.get("loss_of_factory"):
        return f"the loss of {asked_model(plan)}"
    return str(asked.get("loss") or "")


def exported_eval_batch_size(plan: Plan) -> int | None:
    """Return the evaluation batch size for exports, at least 1; None if unknown."""
    # At most 1,024, or the training batch: of a tiny model a million samples fit, which
    # a library would then wait for, and larger batches are no faster.
    fits = plan.estimate.eval_batch_size
    most = max(MAX_EVAL_BATCH_SIZE, plan.recipe.batch_size)
    return None if fits is None else max(1, min(fits, most))


def plan_summary_lines(plan: Plan, what: str) -> list[str]:
    """Return lines that summarize the plan, safe inside a docstring."""
    lines = [
        f"{what} for {plan.model.name}, as planned for {plan.gpu.title}.",
        "",
        *_prediction(plan),
        f"Blocks: {blocks_text(plan.recipe, plan.model.blocks)}.",
        f"Precision: {plan.recipe.precision}; optimizer: {_optimizer(plan)}.",
    ]
    if plan.adapter is not None:
        lines.append(f"Trained: {plan.adapter.describe()}.")
    if plan.recipe.loss_chunks > 1:
        lines.append(f"Output head and loss: in {plan.recipe.loss_chunks} parts.")
    lines += allocator_lines(plan)
    length = planned_length(plan)
    if length is not None:
        lines.append(f"Samples: at most {length} tokens.")
    lines += lengths_lines(plan)
    loss = planned_loss(plan)
    if loss:
        lines.append(f"Loss: planned with {loss}.")
    return [escape_line(line) for line in lines]


def allocator_lines(plan: Plan) -> list[str]:
    """Return a line with the environment variable to set before the program starts."""
    settings = plan.budget.allocator
    if not settings.text:
        return []
    return [f"Allocator: export {VARIABLE}={settings.shell_text} before this starts."]


def _prediction(plan: Plan) -> list[str]:
    """The predicted memory, in the loop that it was predicted for."""
    found = plan.estimate
    where = "" if found.loop == RUN else f" in {found.loop.describe()}"
    lines = [f"Predicted for the process{where}: {format_bytes(found.process_bytes)}."]
    if found.fits is False:
        lines.append(
            f"That is too much: {format_bytes(found.reserved_bytes)} reserved of "
            f"{format_bytes(plan.budget.usable_bytes)} usable. Plan with less: "
            "--headroom, or a smaller --batch-size."
        )
    return lines


def escape_line(text: str) -> str:
    """Escape user text so that it cannot end a docstring or a comment."""
    return " ".join(text.replace("\\", "/").replace('"', "'").splitlines())


def lengths_lines(plan: Plan) -> list[str]:
    """Return what a loop other than ``Run`` needs, so that all lengths fit."""
    lengths = plan.varying_lengths
    if lengths is None:
        return []
    lines = [f"Planned for {lengths.span}."]
    if lengths.measure == "longest first":  # no other loop does so
        lines.append("Start it with PYTORCH_ALLOC_CONF=expandable_segments:True.")
    if lengths.pad_to_multiple_of:
        multiple = lengths.pad_to_multiple_of
        lines.append(f"Collate with pad_to_multiple_of={multiple}.")
    return lines


def planned_padding(plan: Plan) -> dict[str, int]:
    """Return ``pad_to_multiple_of``, where batches are planned to be padded so."""
    over = plan.varying_lengths
    if over is None or not over.pad_to_multiple_of:
        return {}
    return {"pad_to_multiple_of": over.pad_to_multiple_of}


def _optimizer(plan: Plan) -> str:
    inside = ", inside the backward pass" if plan.recipe.optimizer_in_backward else ""
    return plan.recipe.optimizer + inside


def refuse_optimizer_in_backward(plan: Plan, library: str) -> None:
    """Refuse optimizer in backward for a library that needs gradients later."""
    if plan.recipe.optimizer_in_backward:
        raise InputError(
            f"{library} steps its optimizer after the backward pass, and the plan's "
            "steps inside it. Train with budgetfit.apply(plan, model), or plan with "
            "optimizer_in_backward=False."
        )


def refuse_compile(plan: Plan, program: str) -> None:
    """Refuse torch.compile as planned, for a program that compiles otherwise."""
    what = {"blocks": "single blocks", "model": "the model around tagged blocks"}
    if plan.recipe.compile != "none":
        raise InputError(
            f"{program} has no setting that compiles {what[plan.recipe.compile]}, and "
            "the plan's bytes are theirs. Train with budgetfit.apply(plan, model), or "
            "plan with compile='none'."
        )


def planned_length(plan: Plan) -> int | None:
    """Return the planned sequence length; None where samples are not text."""
    for name in LENGTH_NAMES:
        match plan.model.batch.get(name):
            case (_, tokens), _:
                return tokens
    return None


def to_source(value: object) -> str:
    """Format a plain value as Python source, strings in double quotes."""
    # JSON escapes are valid in Python, except for characters above 16 bits.
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def call_source(
    function: str, arguments: Sequence[str], indent: int, before: int = 0
) -> str:
    """Format a call as source, one argument per line where one line is too long.

    Multi-line arguments are indented by ``indent + 4``. ``before``: characters before
    the call in its line, without indentation.
    """
    line = f"{function}({', '.join(arguments)})"
    if "\n" not in line and indent + before + len(line) <= _WIDTH:
        return line
    space = " " * indent
    inner = "".join(f"{space}    {argument},\n" for argument in arguments)
    return f"{function}(\n{inner}{space})"


def import_block(modules: Iterable[str], names: Iterable[tuple[str, str]]) -> str:
    """Return import lines: ``import``, then ``from`` imports, then budgetfit."""
    found = set(modules)
    by_module: dict[str, set[str]] = {}
    for module, name in names:
        by_module.setdefault(module, set()).add(name)
    groups = [
        [f"import {each}" for each in sorted(found & _STANDARD)],
        [
            *(f"import {each}" for each in sorted(found - _STANDARD - {"budgetfit"})),
            *(_import_names(*each) for each in sorted(by_module.items())),
        ],
        ["import budgetfit"] if "budgetfit" in found else [],
    ]
    return "\n\n".join("\n".join(group) for group in groups if group) + "\n"


def _import_names(module: str, names: Iterable[str]) -> str:
    ordered = sorted(names, key=lambda name: (not name.isupper(), name))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= _WIDTH:
        return line
    return call_source(f"from {module} import ", ordered, 0)


def keyword_lines(arguments: Mapping[str, object]) -> str:
    """Format the arguments of a call in a function, ``name=value,`` in each line."""
    return "".join(
        f"        {name}={to_source(value)},\n" for name, value in arguments.items()
    )
