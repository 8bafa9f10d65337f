"""A plan as a training script of its own: plain torch and transformers, no budgetfit.

What a user must still do is marked with FILL IN (the model, where the plan was made
from one in memory) and REPLACE (the data).
"""

from __future__ import annotations

import ast
import json
import pprint
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from budgetfit.core.byte_text import format_bytes
from budgetfit.integrations import torch_script_parts as parts
from budgetfit.integrations.torch_script_loop import (
    data_parts,
    loss_part,
    main_part,
    source_text,
)
from budgetfit.integrations.torch_script_parts import Part
from budgetfit.reporting.words import blocks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.core.plan import Plan

_FACTORY: Final = re.compile(r"(?P<home>.+):(?P<name>[A-Za-z_]\w*)")
_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


def torch_script(plan: Plan) -> str:
    """Return a Python script that trains by the plan's recipe.

    It builds the model, checkpoints the chosen blocks without reentrant autograd, runs
    autocast, loss scaling (unscaled before clipping) and accumulation as the recipe
    says, and saves the states of model, optimizer and scaler.

    Args:
        plan: Made from a transformers model or config, a config file, a hub id or a
            factory, the script builds the model itself; else one function is left to
            be filled in.
    """
    model = _model(plan)
    sections = [
        model,
        _optimizer(plan.recipe.optimizer),
        *_recompute(plan),
        *data_parts(plan.model.batch),
        loss_part(plan.model.batch, own="import transformers" in model.imports),
        main_part(plan.recipe, pretrained="pretrained" in model.code),
    ]
    imports = {line for part in sections for line in part.imports}
    head = "\n".join([_docstring(plan), _import_block(imports), _constants(plan)])
    return "\n\n".join([head, *(part.code for part in sections)])


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
    ]
    if recipe.segments:
        lines.append("SEGMENTS = [  # blocks that are recomputed together")
        lines += [f"    {_tuple(segment.blocks)}," for segment in recipe.segments]
        lines.append("]")
    return "\n".join(lines) + "\n"


def _tuple(names: Sequence[str]) -> str:
    """A tuple of texts as source; one name per line where it is long."""
    words = [source_text(name) for name in names]
    line = f"({', '.join(words)}{',' if len(words) == 1 else ''})"
    if len(line) < 80:  # noqa: PLR2004, with its indentation below 88
        return line
    inner = "".join(f"        {word},\n" for word in words)
    return f"(\n{inner}    )"


def _model(plan: Plan) -> Part:
    """How the script gets its model: from what the plan was made from."""
    text = plan.model.source
    config, class_name = _known_config(plan)
    if config is not None and class_name is not None:
        code = parts.MODEL_FROM_CONFIG.substitute(
            config=_literal(config), class_name=class_name
        )
        return Part(code, ("import transformers",))
    factory = _FACTORY.fullmatch(text)
    if factory and factory["home"].endswith(".py"):
        code = parts.MODEL_FROM_FILE.substitute(
            path=source_text(factory["home"]), name=source_text(factory["name"])
        )
        return Part(code, ("import runpy",))
    if factory and all(word.isidentifier() for word in factory["home"].split(".")):
        code = parts.MODEL_FROM_MODULE.substitute(
            module=source_text(factory["home"]), name=factory["name"]
        )
        return Part(code, ("import importlib",))
    if text and (_HUB_ID.fullmatch(text) or Path(text).is_dir()):
        code = parts.MODEL_FROM_HUB.substitute(name=source_text(text))
        return Part(code, ("import transformers",))
    message = (
        f"Fill in build_model(): return {plan.model.name} with "
        f"{plan.model.parameter_count} parameters."
    )
    return Part(parts.MODEL_TO_FILL_IN.substitute(message=source_text(message)))


def _known_config(plan: Plan) -> tuple[dict[str, Any] | None, str | None]:
    """The transformers config and class of the live model or of a config file."""
    live = getattr(plan.source, "model", None)
    config = getattr(live, "config", None)
    if type(live).__module__.startswith("transformers.models.") and config is not None:
        known = json.loads(config.to_json_string(use_diff=True))
        attention = getattr(config, "_attn_implementation", None)
        if attention is not None:  # decides the memory, and is not in the JSON
            known["attn_implementation"] = attention
        return known, type(live).__name__
    path = Path(plan.model.source) if plan.model.source.endswith(".json") else None
    if path is None or not path.is_file():
        return None, None
    loaded = json.loads(path.read_text(encoding="utf-8"))
    names = loaded.get("architectures") or [None]
    return loaded, names[0]


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


def _recompute(plan: Plan) -> list[Part]:
    if not plan.recipe.segments:
        return []
    if any(len(segment.blocks) > 1 for segment in plan.recipe.segments):
        return [parts.REGION, parts.RECOMPUTE]
    code = parts.RECOMPUTE.code.replace(*parts.NO_REGION)
    return [Part(code, parts.RECOMPUTE.imports)]
