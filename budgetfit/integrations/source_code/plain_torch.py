"""A plan as a training script of its own: plain torch and transformers, no budgetfit.

What a user must still do is marked with FILL IN (the model, where the plan was made
from one in memory) and REPLACE (the data).
"""

from __future__ import annotations

import ast
import json
import pprint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetfit.errors import InputError
from budgetfit.integrations.model_sources.model_name import (
    is_factory_text,
    is_local_path,
)
from budgetfit.integrations.model_sources.model_source import resolve_model
from budgetfit.integrations.source_code import plain_torch_templates as parts
from budgetfit.integrations.source_code.plain_torch_checkpointing import (
    recompute_parts,
    segment_constants,
)
from budgetfit.integrations.source_code.plain_torch_loop import (
    data_parts,
    loss_part,
    main_part,
    source_text,
)
from budgetfit.integrations.source_code.plain_torch_templates import Part
from budgetfit.reporting.phrases import blocks_text
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from budgetfit.core.plan import Plan


def torch_script(plan: Plan) -> str:
    """Return a Python script that trains by the plan's recipe.

    It builds the model, checkpoints the chosen blocks without reentrant autograd, runs
    autocast, loss scaling (unscaled before clipping) and accumulation as the recipe
    says, and saves the states of model, optimizer and scaler.

    Args:
        plan: Made from a transformers model or config, a config file, a hub id or a
            factory, the script builds the model itself; else one function is left to
            be filled in.

    Raises:
        InputError: If a block or the loss is treated in a way that takes more than a
            page of code, or adapters are trained, which peft makes.
    """
    if plan.adapter is not None:
        raise InputError(
            f"A script of torch alone cannot train {plan.adapter.describe()}: peft "
            "makes it. Export --to trainer or --to sft, or train with "
            "budgetfit.apply(plan, model)."
        )
    model = _model(plan)
    sections = [
        model,
        _optimizer(plan.recipe.optimizer),
        *recompute_parts(plan.recipe),
        *data_parts(plan.model.batch, plan.model.batch_dims),
        loss_part(plan.model.batch, own="import transformers" in model.imports),
        main_part(plan.recipe, pretrained="pretrained" in model.code),
    ]
    imports = {line for part in sections for line in part.imports}
    head = "\n".join([_docstring(plan), _import_block(imports), _constants(plan)])
    return "\n\n".join([head, *(part.code for part in sections)])


def export_text(plan: Plan, plan_file: str) -> str:  # noqa: ARG001 - as other exports
    """Return the script; it needs no plan."""
    return torch_script(plan)


def _docstring(plan: Plan) -> str:
    estimate = plan.estimate
    peaks = ", ".join(
        (
            f"{format_bytes(estimate.allocated_bytes)} allocated",
            f"{format_bytes(estimate.reserved_bytes)} reserved",
            format_bytes(estimate.process_bytes),
        )
    )
    lines = [
        f"Train {plan.model.name} with settings planned for {plan.gpu.title}.",
        "",
        f"Predicted peaks: {peaks} for the process.",
        f"Blocks: {blocks_text(plan.recipe, plan.model.blocks)}.",
        "",
        "Made by budgetfit, which it does not need. Look for FILL IN and REPLACE.",
    ]
    # Names come from users: nothing in them may end the docstring.
    text = "\n".join(lines).replace("\\", "/").replace('"', "'")
    return f'"""{text}\n"""\n'


def _import_block(imports: set[str]) -> str:
    imports = {"import argparse", "import torch", *imports}
    ordered = sorted(imports, key=lambda line: (line.startswith("from"), line))
    groups = [
        [line for line in ordered if _is_library(line) is library]
        for library in (False, True)
    ]
    return "\n\n".join("\n".join(group) for group in groups) + "\n"


def _is_library(line: str) -> bool:
    return line.split()[1].split(".", maxsplit=1)[0] in {"torch", "transformers"}


def _constants(plan: Plan) -> str:
    recipe = plan.recipe
    lines = [
        f"BATCH_SIZE = {recipe.batch_size}  # samples in one micro-batch",
        f"# {recipe.effective_batch_size} samples in one optimizer step",
        f"GRADIENT_ACCUMULATION_STEPS = {recipe.gradient_accumulation_steps}",
        *segment_constants(recipe),
    ]
    return "\n".join(lines) + "\n"


def _model(plan: Plan) -> Part:
    """How the script gets its model: from what the plan was made from."""
    text = (plan.provenance.get("asked") or {}).get("model") or ""
    if is_factory_text(text):
        return _from_factory(text)
    if text and (not is_local_path(text) or Path(text).expanduser().is_dir()):
        code = parts.MODEL_FROM_HUB.substitute(name=source_text(text))
        return Part(code, ("import transformers",))
    model: Any = planned_model(plan, text)
    if type(model).__module__.startswith("transformers.models."):
        code = parts.MODEL_FROM_CONFIG.substitute(
            config=_literal(_config(model)),
            class_name=type(model).__name__,
            dtype=next(model.parameters()).dtype,
        )
        return Part(code, ("import transformers",))
    return own_model(plan, "")


def own_model(plan: Plan, text: str) -> Part:
    """Return ``build_model`` of a factory's text, or one that is left to fill in."""
    if is_factory_text(text):
        return _from_factory(text)
    message = (
        f"Fill in build_model(): return {plan.model.name} with "
        f"{plan.model.parameter_count} parameters."
    )
    return Part(parts.MODEL_TO_FILL_IN.substitute(message=source_text(message)))


def _from_factory(text: str) -> Part:
    place, _, name = text.rpartition(":")
    first, *rest = name.split(".")
    if place.endswith(".py"):
        made = f"runpy.run_path({source_text(place)})[{source_text(first)}]"
        imports = ("import runpy",)
    else:
        made = f"importlib.import_module({source_text(place)}).{first}"
        imports = ("import importlib",)
    code = parts.MODEL_FROM_FACTORY.substitute(made=".".join([made, *rest]))
    return Part(code, imports)


def planned_model(plan: Plan, text: str) -> object:
    """The model that was planned, as long as that takes no weights; None elsewhere."""
    live = getattr(plan.source, "model", None)
    if live is not None:
        return live
    materialise = getattr(plan.source, "materialise", None)
    if materialise is not None:
        return materialise("meta")
    # A plan that was saved knows the config file that it was made from.
    return resolve_model(text).model if text else None


def _config(model: Any) -> dict[str, Any]:  # noqa: ANN401 - a PreTrainedModel
    """The model's config as plain values, without the defaults of its class."""
    known: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    attention = getattr(model.config, "_attn_implementation", None)
    if attention is not None:  # decides the memory, and is not in the JSON
        known["attn_implementation"] = attention
    return known


def _literal(value: object) -> str:
    """The value as Python source; infinities and the like need json to be read."""
    text = pprint.pformat(value, sort_dicts=False, width=84)
    try:
        if ast.literal_eval(text) == value:
            return text
    except ValueError:
        pass
    return f"json.loads({json.dumps(value)!r})"


def _optimizer(name: str) -> Part:
    known = parts.OPTIMIZERS.get(name)
    if known is not None:
        return Part(
            f"def make_optimizer(parameters, lr):\n    return {known.code}\n",
            known.imports,
        )
    module, _, function = name.rpartition(".")
    importable = all(word.isidentifier() for word in name.split("."))
    if module and module != "__main__" and importable:
        return Part(
            "def make_optimizer(parameters, lr):\n"
            '    """As planned; it brings its own learning rate."""\n'
            f"    home = importlib.import_module({source_text(module)})\n"
            f"    return home.{function}(parameters)\n",
            ("import importlib",),
        )
    message = f"Fill in make_optimizer(): return {name}."
    return Part(
        "def make_optimizer(parameters, lr):\n"
        '    """FILL IN: return the optimizer that was planned."""\n'
        f"    raise SystemExit({source_text(message)})\n"
    )
