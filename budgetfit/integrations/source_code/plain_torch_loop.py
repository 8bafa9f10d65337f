"""Data, loss and training loop of the exported training script."""

from collections.abc import Sequence
from string import Template
from textwrap import indent
from typing import Final

from budgetfit.applying.torch_compile import compiled_blocks
from budgetfit.applying.zero import input_precision
from budgetfit.batches.sample_count import batch_from_shapes, sample_dimensions
from budgetfit.core.plan import ModelSummary
from budgetfit.core.precision import Precision, find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.core.samples.sample_dims import FIRST_DIM
from budgetfit.errors import InputError
from budgetfit.integrations.source_code import plain_torch_templates as parts
from budgetfit.integrations.source_code.plain_torch_ranks import main_lines
from budgetfit.integrations.source_code.plain_torch_templates import Part
from budgetfit.integrations.source_code.python_source import DTYPES, to_source

# Name -> shape and dtype, as in ModelSummary.
Batch = dict[str, tuple[tuple[int, ...], str]]

# Classes of transformers whose labels are classes of each position.
_CLASSES_OF_POSITIONS: Final = ("ForTokenClassification", "ForSemanticSegmentation")
_FLOATS: Final = ("float", "bfloat", "half", "double")


def data_parts(model: ModelSummary, more: str = "") -> list[Part]:
    """Return source of random batches of the planned shape, one line per tensor.

    ``more``: what else the loop expects of batches.

    Raises:
        InputError: For an unknown dtype.
    """
    batch = model.batch
    counted = sample_dimensions(batch_from_shapes(batch), model.batch_dims or FIRST_DIM)
    of_positions = model.class_name.endswith(_CLASSES_OF_POSITIONS)
    lines, needs_tokens = [], False
    made: dict[tuple[tuple[int, ...], str], str] = {}
    for number, (name, (shape, dtype)) in enumerate(batch.items()):
        kind = dtype.removeprefix("torch.")
        if not kind.isidentifier():  # a plan file is untrusted: no code injection
            raise InputError(
                f"The saved plan is damaged: {dtype!r} is not a dtype. Save it again: "
                "budgetfit plan MODEL --save plan.json"
            )
        alike = made.get((shape, kind))
        variable = f"tensor_{number}"
        if name == "labels" and alike is not None and not of_positions:
            value = f"{alike}.clone()"  # language modelling
        else:
            classes = name == "labels" and (of_positions or len(shape) == 1)
            words = [str(size) for size in shape]
            dim = counted.get(name)
            if dim is not None:
                words[dim] = "BATCH_SIZE"
            size = f"({', '.join(words)}{',' if len(words) == 1 else ''})"
            value = _random(name, size, kind, classes=classes)
            made.setdefault((shape, kind), variable)
        needs_tokens |= "tokens" in value
        lines.append(f"        {variable} = {value}")
    code = parts.BATCHES.substitute(
        more=more,
        bound=parts.VOCABULARY_LINE if needs_tokens else "",
        tensors="\n".join(lines),
        names=", ".join(
            f"{to_source(name)}: tensor_{number}" for number, name in enumerate(batch)
        ),
    )
    return [Part(parts.VOCABULARY), Part(code)] if needs_tokens else [Part(code)]


def _random(name: str, shape: str, dtype: str, *, classes: bool) -> str:
    if dtype.startswith(_FLOATS):
        return f"torch.randn({shape}, dtype=torch.{dtype})"
    if dtype == "bool" or "mask" in name:
        return f"torch.ones({shape}, dtype=torch.{dtype})"
    if "type_ids" in name:
        return f"torch.zeros({shape}, dtype=torch.{dtype})"
    limit = "getattr(model.config, 'num_labels', 2)" if classes else "tokens"
    return f"torch.randint({limit}, {shape}, dtype=torch.{dtype})"


def loss_parts(batch: Batch, planned: Part | None, *, own: bool) -> list[Part]:
    """Return the source of the loss, and of what checks its inputs.

    ``batch``: with labels, a transformers model (``own``) returns its loss.
    ``planned``: an expression of the loss function, and its imports; None without one.
    """
    by_name = all(name.isidentifier() for name in batch)
    checks = Part(parts.CHECK_NAMES, ("import inspect",))
    if planned is not None:
        call = parts.CALL_BY_NAME if by_name else parts.CALL_BY_POSITION
        code = parts.NAMED_LOSS.substitute(found=planned.code, call=call)
        return [checks, Part(code, ("import functools", *planned.imports))]
    if own and "labels" in batch:
        return [Part(parts.OWN_LOSS)]
    arguments = "**batch" if by_name else "*batch.values()"
    return [checks, Part(parts.FOUND_LOSS.substitute(arguments=arguments))]


def compiled_constants(recipe: Recipe, blocks: Sequence[str]) -> list[str]:
    """Return the constant with the blocks that are compiled."""
    if recipe.compile != "blocks":
        return []
    names = "".join(
        f"    {to_source(name)},\n" for name in compiled_blocks(recipe, blocks)
    )
    return [f"COMPILED = [  # blocks whose forward is compiled\n{names}]"]


def main_part(recipe: Recipe, *, pretrained: bool) -> Part:
    """Return the source of the training loop, with only what the precision needs.

    ``pretrained``: whether ``build_model`` can load weights.
    """
    precision = find_precision(recipe.precision)
    scaled = precision.grad_scaler
    scaling = {
        "scaler": "    scaler = torch.amp.GradScaler(device.type)\n",
        "load_scaler": '        scaler.load_state_dict(state["scaler"])\n',
        "save_scaler": '        state["scaler"] = scaler.state_dict()\n',
        "more": ", scaler=scaler.state_dict()",
        "loaded": "state = ",
    }
    scaling = scaling if scaled else dict.fromkeys(scaling, "")
    ranks = main_lines(recipe.parallelism)
    states = {
        name: Template(ranks[name]).substitute(scaling, states=ranks["states"])
        for name in ("resume", "save")
    }
    code = parts.MAIN.substitute(
        {**scaling, **ranks, **states},
        part="part" if ranks["sync"] else "_",
        pretrained_option=(
            "    parser.add_argument(\n"
            '        "--pretrained", action="store_true", help="not random weights"\n'
            "    )\n"
            if pretrained
            else ""
        ),
        pretrained="pretrained=options.pretrained" if pretrained else "",
        weights=_weights(precision),
        recompute="    recompute(model)\n" if recipe.segments else "",
        compile_blocks=_compile_blocks(recipe),
        compile_model=parts.COMPILE_MODEL if recipe.compile == "model" else "",
        empty_cache=parts.EMPTY_CACHE if recipe.compile != "none" else "",
        forward=_forward(precision, recipe),
        backward=_backward(recipe, scaled=scaled),
        update=_update(recipe, scaled=scaled),
    )
    return Part(code)


def _compile_blocks(recipe: Recipe) -> str:
    if recipe.compile != "blocks":
        return ""
    return parts.WHOLE_GRAPHS * (recipe.engine == "ddp") + parts.COMPILE_BLOCKS


def _weights(precision: Precision) -> str:
    lines = {
        "fp32": "    model.float()\n",
        "bf16": "    model.to(torch.bfloat16)\n",
        "as-is": "",
    }[precision.weights]
    if precision.tf32:
        lines += '    torch.set_float32_matmul_precision("high")  # tf32\n'
    return lines


def _forward(precision: Precision, recipe: Recipe) -> str:
    line = "loss = loss_of(model, batch) / GRADIENT_ACCUMULATION_STEPS\n"
    if input_precision(recipe).weights == "bf16":
        line = (
            "batch = {\n"
            "    key: value.bfloat16() if value.is_floating_point() else value\n"
            "    for key, value in batch.items()\n"
            f"}}\n{line}"
        )
    elif precision.autocast is not None and not _has_policy(recipe):
        dtype = f"torch.{DTYPES[precision.autocast]}"
        line = f"with torch.autocast(device.type, dtype={dtype}):\n    {line}"
    return indent(line, " " * 12)


def _has_policy(recipe: Recipe) -> bool:
    """Whether ``MixedPrecisionPolicy`` takes the place of autocast."""
    parallelism = recipe.parallelism
    return parallelism is not None and parallelism.param_dtype is not None


def _backward(recipe: Recipe, *, scaled: bool) -> str:
    if recipe.zero_stage is not None:
        return "model.backward(loss, scale_wrt_gas=False)"
    return "scaler.scale(loss).backward()" if scaled else "loss.backward()"


def _update(recipe: Recipe, *, scaled: bool) -> str:
    if recipe.zero_stage is not None:
        return "        model.step()  # clips and drops the gradients, too\n"
    lines = [
        "torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)"
    ]
    if scaled:
        lines.insert(0, "scaler.unscale_(optimizer)  # before clipping")
        lines += ["scaler.step(optimizer)", "scaler.update()"]
    else:
        lines.append("optimizer.step()")
    lines.append("optimizer.zero_grad(set_to_none=True)")
    return indent("\n".join(lines) + "\n", " " * 8)
