"""Checkpointing code of the exported training script."""

from collections.abc import Sequence
from string import Template
from typing import Final

from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError
from budgetfit.integrations.source_code.plain_torch_templates import Part, exported_part
from budgetfit.integrations.source_code.python_source import to_source

_LONGEST: Final = 80  # with its indentation below 88


def recompute_parts(recipe: Recipe) -> list[Part]:
    """Return the source that checkpoints the recipe's segments, and its imports.

    Raises:
        InputError: If a segment is offloaded or the loss is chunked: not exported, as
            that takes more than a page of code.
    """
    _refuse_what_is_not_exported(recipe)
    if not recipe.segments:
        return []
    if recipe.compile == "model":
        return [Part(RECOMPUTE_IN_GRAPH, _CHECKPOINT)]
    long = [segment for segment in recipe.segments if len(segment.blocks) > 1]
    selective = [each for each in recipe.segments if each.mode == "selective"]
    code = RECOMPUTE.substitute(
        region=REGION_CALL if long else "",
        selective=SELECTIVE_CALLS if selective else "",
    )
    parts = [REGION] * bool(long) + [SELECTIVE] * bool(selective)
    code += RECOMPUTE_BLOCK.code
    return [*parts, Part(code, RECOMPUTE_BLOCK.imports)]


def segment_constants(recipe: Recipe) -> list[str]:
    """Return the constants with the segments' blocks, for the head of the script."""
    if not recipe.segments:
        return []
    ordinary = [each for each in recipe.segments if each.mode == "recompute"]
    lines = ["SEGMENTS = [  # blocks that are recomputed together"]
    lines += [f"    {_tuple(segment.blocks)}," for segment in ordinary]
    lines.append("]")
    if any(len(segment.blocks) > 1 for segment in ordinary):
        nested = [segment.blocks[0] for segment in ordinary if segment.nested]
        lines.append("# The first blocks of segments whose blocks run twice more.")
        lines.append(f"NESTED = {_tuple(nested, indent=0)}")
    groups: dict[tuple[str, ...], list[str]] = {}
    for segment in recipe.segments:
        if segment.mode == "selective":
            groups.setdefault(segment.saved_ops, []).extend(segment.blocks)
    if groups:
        lines.append("SELECTIVE = [  # blocks, and the calls of ops that they save")
        lines += [f"    ({_tuple(b)}, {_tuple(ops)})," for ops, b in groups.items()]
        lines.append("]")
    return lines


def _refuse_what_is_not_exported(recipe: Recipe) -> None:
    refused = [
        f"{' to '.join(dict.fromkeys((each.blocks[0], each.blocks[-1])))} "
        f"({'offload' if each.mode == 'offload' else 'input_on_host'})"
        for each in recipe.segments
        if each.mode == "offload" or each.input_on_host
    ]
    several = recipe.parallelism
    if several is not None and several.gathers:
        refused += [
            f"{each.blocks[0]} to {each.blocks[-1]} (recomputed together, and "
            f"{several.engine} gathers the weights of one block)"
            for each in recipe.segments
            if len(each.blocks) > 1
        ]
    if recipe.loss_chunks > 1:
        refused.append(f"the loss in {recipe.loss_chunks} chunks")
    if recipe.optimizer_in_backward:
        refused.append("an optimizer that steps in the backward pass")
    if refused:
        raise InputError(
            f"A script cannot be exported for: {'; '.join(refused)}. Train with "
            "budgetfit.apply(plan, model) or export --to trainer, or plan anew "
            "without them."
        )


def _tuple(names: Sequence[str], indent: int = 4) -> str:
    """Format a tuple of strings as source, one per line where it is long."""
    words = [to_source(name) for name in names]
    line = f"({', '.join(words)}{',' if len(words) == 1 else ''})"
    if len(line) < _LONGEST:
        return line
    inner = "".join(f"{' ' * (indent + 4)}{word},\n" for word in words)
    return f"(\n{inner}{' ' * indent})"


_CHECKPOINT: Final = (
    "import functools",
    "from torch.utils.checkpoint import checkpoint",
)

RECOMPUTE: Final = Template('''\
def recompute(model):
    """Checkpoint the planned blocks, without reentrant autograd, and nothing else."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False
    for segment in SEGMENTS:
        blocks = [model.get_submodule(name) for name in segment]
$region        recompute_block(blocks[0])
$selective

''')
RECOMPUTE_BLOCK: Final = exported_part("recompute.py.txt")

RECOMPUTE_IN_GRAPH: Final = '''\
def recompute(model):
    """Checkpoint the planned blocks in the compiled graph, and nothing else."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False
    for (name,) in SEGMENTS:
        block = model.get_submodule(name)
        again = functools.partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = again
'''

REGION_CALL: Final = """\
        if len(blocks) > 1:
            Region(blocks, nested=segment[0] in NESTED)
            continue
"""

SELECTIVE_CALLS: Final = """\
    for names, calls in SELECTIVE:
        for name in names:
            contexts = functools.partial(selective_contexts, frozenset(calls))
            recompute_block(model.get_submodule(name), context_fn=contexts)
"""

SELECTIVE: Final = exported_part("selective.py.txt")

REGION: Final = exported_part("region.py.txt")
