"""Export a plan as a stand-alone training script: torch and transformers only.

Placeholders for the user are marked with FILL IN (the model, where the plan was made
from one in memory) and REPLACE (the data).
"""

import ast
import json
import keyword
import pprint
from pathlib import Path
from typing import Any

from budgetfit.core.plan import Plan
from budgetfit.errors import InputError
from budgetfit.integrations.model_sources.model_name import is_local_path, parse_fields
from budgetfit.integrations.model_sources.model_source import resolve_model
from budgetfit.integrations.source_code import plain_torch_templates as parts
from budgetfit.integrations.source_code.plain_torch_checkpointing import (
    recompute_parts,
    segment_constants,
)
from budgetfit.integrations.source_code.plain_torch_loop import (
    compiled_constants,
    data_parts,
    loss_parts,
    main_part,
)
from budgetfit.integrations.source_code.plain_torch_ranks import (
    launch_line,
    ranks_constants,
    ranks_parts,
)
from budgetfit.integrations.source_code.plain_torch_templates import Part
from budgetfit.integrations.source_code.python_source import (
    allocator_lines,
    asked_model,
    call_source,
    dequantizer_of,
    escape_line,
    lengths_lines,
    to_source,
)
from budgetfit.reporting.formatting import blocks_text
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.function_name import is_factory_text


def torch_script(plan: Plan) -> str:
    """Return a Python script that trains by the plan's recipe.

    It builds the model, checkpoints the chosen blocks (non-reentrant), runs autocast,
    loss scaling (unscaled before clipping) and accumulation, and saves the states of
    model, optimizer and scaler. It builds the model itself where the plan was made from
    a transformers model or config, a config file, a hub id or a factory; else it has a
    placeholder function.

    Raises:
        InputError: If the plan offloads, chunks the loss, trains adapters, or has a
            batch of containers in containers.
    """
    if plan.adapter is not None:
        other = "--to trainer" + ("" if plan.recipe.parallelism else " or --to sft")
        raise InputError(
            f"A script of torch alone cannot train {plan.adapter.describe()}: peft "
            f"makes it. Export {other}, or train with budgetfit.apply(plan, model)."
        )
    nested = plan.model.nested_tensor
    if nested:
        raise InputError(
            "A script of torch alone takes a batch that is one dictionary or tuple of "
            f"tensors, and this plan's has others inside, such as {nested}. Train with "
            "budgetfit.apply(plan, model), or export --to trainer or --to accelerate."
        )
    model = _model(plan)
    sections = [
        model,
        _optimizer(plan.recipe.optimizer),
        *([Part(parts.COMPILE)] if plan.recipe.compile != "none" else []),
        *recompute_parts(plan.recipe),
        *ranks_parts(plan.recipe, plan.model.block_types),
        *data_parts(
            plan.model,
            parts.EQUAL_BATCHES + parts.OWN_SAMPLES * (plan.recipe.ranks > 1),
        ),
        *loss_parts(
            plan.model.batch,
            _planned_loss(plan),
            own="import transformers" in model.imports,
        ),
        main_part(plan.recipe, pretrained="pretrained" in model.code),
    ]
    imports = {line for part in sections for line in part.imports}
    head = "\n".join([_docstring(plan), _import_block(imports), _constants(plan)])
    return "\n\n".join([head, *(part.code for part in sections)])


def export_text(plan: Plan, _plan_file: str) -> str:
    """Return the script for ``budgetfit export --to torch``."""
    return torch_script(plan)


def _docstring(plan: Plan) -> str:
    estimate, parallelism = plan.estimate, plan.recipe.parallelism
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
        *allocator_lines(plan),
        *lengths_lines(plan),
        *([launch_line(parallelism)] if parallelism else []),
        "",
        "Made by budgetfit, which it does not need. Look for FILL IN and REPLACE.",
    ]
    text = "\n".join(map(escape_line, lines))
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
        *ranks_constants(recipe, plan.model.blocks),
        *compiled_constants(recipe, plan.model.blocks),
        *segment_constants(recipe),
    ]
    return "\n".join(lines) + "\n"


def _model(plan: Plan) -> Part:
    """Source that builds the model, by the plan's model source."""
    text = asked_model(plan)
    if is_factory_text(text):
        return _from_factory(text)
    if text and (not is_local_path(text) or Path(text).expanduser().is_dir()):
        return _from_hub(plan, text)
    model: Any = planned_model(plan)
    if type(model).__module__.startswith("transformers.models."):
        config = _literal(_config(model))
        code = parts.MODEL_FROM_CONFIG.substitute(
            config=config.code,
            class_name=type(model).__name__,
            dtype=next(model.parameters()).dtype,
        )
        return Part(code, ("import transformers", *config.imports))
    return own_model(plan, "")


def _from_hub(plan: Plan, text: str) -> Part:
    """Source that builds a model of transformers by its class, else a placeholder."""
    name = plan.model.class_name
    if not name.isidentifier() or keyword.iskeyword(name):  # such as one of diffusers
        return own_model(plan, "")
    arguments = ["MODEL", 'dtype="auto"']
    if dequantizer := dequantizer_of(plan):
        made = f"transformers.{dequantizer}(dequantize=True)"
        arguments.append(f"quantization_config={made}")
    code = parts.MODEL_FROM_HUB.substitute(
        name=to_source(text),
        class_name=name,
        loaded=call_source("kind.from_pretrained", arguments, 8, len("return ")),
    )
    return Part(code, ("import transformers",))


def own_model(plan: Plan, text: str) -> Part:
    """Return ``build_model`` of a factory, or a placeholder."""
    if is_factory_text(text):
        return _from_factory(text)
    message = (
        f"Fill in build_model(): return {plan.model.name} with "
        f"{plan.model.parameter_count} parameters."
    )
    return Part(parts.MODEL_TO_FILL_IN.substitute(message=to_source(message)))


def _from_factory(text: str) -> Part:
    found = _named(text)
    code = parts.MODEL_FROM_FACTORY.substitute(made=found.code)
    return Part(code, ("import functools", *found.imports))


def _planned_loss(plan: Plan) -> Part | None:
    """Return an expression of the planned loss; None if nothing names one."""
    asked = plan.provenance.get("asked") or {}
    loss = str(asked.get("loss") or "")
    if asked.get("loss_of_factory") and is_factory_text(asked_model(plan)):
        return Part("factory()[2]")
    return _named(loss) if is_factory_text(loss) else None


def _named(text: str) -> Part:
    """Return an expression of what ``file.py:name`` or ``module:name`` names."""
    place, _, name = text.rpartition(":")
    first, *rest = name.split(".")
    if place.endswith(".py"):
        made = f"runpy.run_path({to_source(place)})[{to_source(first)}]"
        imports = ("import runpy",)
    else:
        made = f"importlib.import_module({to_source(place)}).{first}"
        imports = ("import importlib",)
    return Part(".".join([made, *rest]), imports)


def planned_model(plan: Plan) -> object:
    """The planned model on meta; None if it cannot be built without weights."""
    live = getattr(plan.source, "model", None)
    if live is not None:
        return live
    materialize = getattr(plan.source, "materialize", None)
    if materialize is not None:
        return materialize("meta")
    # A saved plan records the config file that it was made from.
    text = asked_model(plan)
    return resolve_model(text).model if text else None


def _config(model: Any) -> dict[str, Any]:
    """The model's config as plain values, without defaults."""
    known: dict[str, Any] = parse_fields(model.config.to_json_string(use_diff=True))
    attention = getattr(model.config, "_attn_implementation", None)
    if attention is not None:  # determines the memory, and is not in the JSON
        known["attn_implementation"] = attention
    return known


def _literal(value: object) -> Part:
    """The value as Python source; infinities need ``json.loads``."""
    text = pprint.pformat(value, sort_dicts=False, width=84)
    try:
        if ast.literal_eval(text) == value:
            return Part(text)
    except ValueError:
        pass
    return Part(f"json.loads({json.dumps(value)!r})", ("import json",))


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
            f"    home = importlib.import_module({to_source(module)})\n"
            f"    return home.{function}(parameters)\n",
            ("import importlib",),
        )
    message = f"Fill in make_optimizer(): return {name}."
    return Part(
        "def make_optimizer(parameters, lr):\n"
        '    """FILL IN: return the optimizer that was planned."""\n'
        f"    raise SystemExit({to_source(message)})\n"
    )
