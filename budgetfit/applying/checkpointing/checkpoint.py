"""Apply a plan's segments: by transformers' own flags, or by replaced forwards."""

from __future__ import annotations

import difflib
from collections import Counter
from typing import TYPE_CHECKING

from torch import nn
from torch._subclasses import FakeTensor

from budgetfit.applying.checkpointing.checkpointed_forward import (
    BlockCall,
    CheckpointedForward,
    is_transformers_layer,
)
from budgetfit.applying.checkpointing.generation_cache import switch_off_caches
from budgetfit.applying.checkpointing.repeatable_forward import Repeatable
from budgetfit.applying.checkpointing.segment_checkpoint import SegmentRegion
from budgetfit.applying.checkpointing.selective import SavedCalls
from budgetfit.applying.undo import Undo
from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from budgetfit.core.recipe import Segment

_FLAG = "gradient_checkpointing"
_FLAG_FUNCTION = "_gradient_checkpointing_func"


def apply_segments(
    model: nn.Module,
    segments: Sequence[Segment],
    *,
    random_blocks: Collection[str] | None = None,
    determinism_check: str = "values",
    keep_own_checkpointing: bool = False,
) -> Undo:
    """Make ``model`` treat ``segments`` as they say, and keep everything else.

    ``state_dict`` keys, hooks and signatures stay; generation caches are off, because a
    recomputation would fill them twice. The segments are the whole truth: checkpointing
    that the model had on before is off, until undone.

    Args:
        model: Modified in place.
        segments: Of any mode; their names are module paths in ``model``.
        random_blocks: Names of blocks that draw random numbers; None when unknown,
            which keeps the generators' state for every block (applying P7).
        determinism_check: ``"values"`` compares what is recomputed with the original,
            now and then by some of its values; ``"default"`` by shape, dtype and device
            alone; ``"none"`` does not. Fake tensors have no values.
        keep_own_checkpointing: Leave the model's other checkpointing switched on, and
            without segments its generation cache too: the model as it is.

    Returns:
        What puts everything back.

    Raises:
        InputError: If a name is no module of the model, two names are the same module,
            or a saved op cannot be saved. The model is then as it was.
    """
    blocks = _find_blocks(model, segments)
    owners = _owners(model)
    if any(isinstance(item, FakeTensor) for item in model.parameters()):
        determinism_check = "none" if determinism_check == "none" else "default"
    saved = {segment: _saved_calls(segment, owners, blocks) for segment in segments}
    with Undo() as undo:
        if segments or not keep_own_checkpointing:
            switch_off_caches(model, undo)
        if not keep_own_checkpointing:
            for module in model.modules():
                _switch_off(module, undo)
        for segment in segments:
            region = SegmentRegion(
                check=determinism_check != "none",
                input_on_host=segment.input_on_host,
                to_the_end=any(_fills_what_it_saved(blocks[n]) for n in segment.blocks),
            )
            calls = [
                BlockCall(
                    block=blocks[name],
                    repeats=_repeats(name, blocks[name], determinism_check),
                    random=random_blocks is None or name in random_blocks,
                    check=determinism_check,
                    saved=saved[segment],
                    offload=segment.mode == "offload",
                    input_on_host=segment.input_on_host and len(segment.blocks) == 1,
                    to_the_end=_fills_what_it_saved(blocks[name]),
                )
                for name in segment.blocks
            ]
            _apply_segment(segment, calls, region, undo)
    return undo


def _repeats(
    name: str, block: nn.Module, determinism_check: str, *, in_segment: bool = False
) -> Repeatable:
    return Repeatable(
        block,
        name,
        check=determinism_check == "values",
        to_the_end=_fills_what_it_saved(block),
        in_segment=in_segment,
    )


def _fills_what_it_saved(block: nn.Module) -> bool:
    """Whether an op writes into a tensor after autograd has saved it: RReLU's noise.

    A recomputation that stops once the last tensor is saved leaves that one empty.
    """
    return any(isinstance(module, nn.RReLU) for module in block.modules())


def _apply_segment(
    segment: Segment, calls: list[BlockCall], region: SegmentRegion, undo: Undo
) -> None:
    first = calls[0]
    for call in calls:
        _switch_off(call.block, undo)
    if len(calls) > 1:
        for position, (name, call) in enumerate(
            zip(segment.blocks, calls, strict=True)
        ):
            forward = CheckpointedForward(
                call,
                call.block.forward,
                region,
                position,
                repeats=_repeats(name, call.block, call.check, in_segment=True),
                nested=segment.nested,
            )
            undo.set_on(call.block, "forward", forward)
    elif _has_own_flag(first.block) and not first.offload:
        undo.set_on(first.block, _FLAG, value=True)
        undo.set_on(first.block, _FLAG_FUNCTION, first)
    else:
        forward = CheckpointedForward(first, first.block.forward)
        undo.set_on(first.block, "forward", forward)


def _saved_calls(
    segment: Segment, owners: Counter[nn.Parameter], blocks: dict[str, nn.Module]
) -> SavedCalls | None:
    if segment.mode != "selective":
        return None
    (name,) = segment.blocks
    inside = _owners(blocks[name])
    shares = any(owners[parameter] > count for parameter, count in inside.items())
    return SavedCalls(name, segment.saved_ops, shares_weights=shares)


def _owners(module: nn.Module) -> Counter[nn.Parameter]:
    """Return under how many names each parameter is in the module."""
    return Counter(
        parameter for _, parameter in module.named_parameters(remove_duplicate=False)
    )


def _find_blocks(model: nn.Module, segments: Sequence[Segment]) -> dict[str, nn.Module]:
    """Return the modules that the segments name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Module, str] = {}
    for segment in segments:
        for name in segment.blocks:
            if name not in modules or not name:
                raise InputError(_unknown_block(name, modules))
            other = names.setdefault(modules[name], name)
            if other != name:
                raise InputError(
                    f"Blocks {other!r} and {name!r} are one and the same module. "
                    "Name it once."
                )
    return {name: module for module, name in names.items()}


def _unknown_block(name: str, modules: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name, [*filter(None, modules)], cutoff=0.5)
    if not nearest:
        nearest = [module for module in modules if module][:3]
    hint = f" Did you mean: {', '.join(nearest)}?" if nearest else ""
    return f"The model has no block {name!r}.{hint}"


def _has_own_flag(block: nn.Module) -> bool:
    """Whether transformers' per-layer flag works on this block as it is now.

    The flag is heeded only while the block is in training mode; a block that a user
    keeps in evaluation mode needs its forward replaced.
    """
    return is_transformers_layer(block) and block.training


def _switch_off(module: nn.Module, undo: Undo) -> None:
    """Switch off whatever checkpointing of the module itself can be seen."""
    if getattr(module, _FLAG, False) is True:
        undo.set_on(module, _FLAG, value=False)
    if isinstance(module.__dict__.get("forward"), CheckpointedForward):
        undo.hide_on(module, "forward")
