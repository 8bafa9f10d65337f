"""Apply a recipe's segments by wrapping forwards.

Not by the flags of transformers' layers: these drop generation caches in training mode
even where there is no gradient, so that ``generate`` gives other tokens.
"""

import difflib
import functools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn
from torch._subclasses import FakeTensor
from torch.utils.checkpoint import checkpoint

from budgetfit.applying.checkpointing.block_checkpoint import (
    BlockCall,
    CheckpointedForward,
)
from budgetfit.applying.checkpointing.recomputation_state import RepeatableForwards
from budgetfit.applying.checkpointing.segment_checkpoint import SegmentCheckpoint
from budgetfit.applying.checkpointing.selective import SelectiveCheckpoint
from budgetfit.applying.undo import Undo
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError

_FLAG = "gradient_checkpointing"


def apply_segments(  # noqa: PLR0913 - one value each, all needed
    model: nn.Module,
    segments: Sequence[Segment],
    *,
    random_blocks: Collection[str] | None = None,
    determinism_check: str = "values",
    keep_own_checkpointing: bool = False,
    keep_generation_cache: bool = False,
    in_graph: bool = False,
) -> Undo:
    """Recompute, selectively checkpoint or offload the blocks of ``segments``.

    ``state_dict`` keys, hooks and signatures stay; generation caches are off, because a
    recomputation would fill them twice. The model's own checkpointing is switched off,
    until undone.

    ``random_blocks``: those that draw random numbers; None if unknown, which preserves
    the RNG state for every block. ``determinism_check``: ``"values"`` compares sampled
    values of recomputed tensors in some steps; ``"default"`` their shape, dtype and
    device, as of fake tensors, which have no values; ``"none"`` nothing.
    ``keep_own_checkpointing`` leaves the model's own switched on, and without segments
    its generation cache too; ``keep_generation_cache`` that in any case. ``in_graph``:
    the model will be compiled around its blocks: dynamo turns torch's own checkpoint
    into a tag of the graph, by which it is partitioned.

    Returns:
        Reverts the changes.

    Raises:
        InputError: If a name is no module of the model, two names are the same module,
            or a saved op cannot be saved. The model is then unchanged.
    """
    blocks = _find_blocks(model, segments)
    owners = _name_counts(model)
    if any(isinstance(item, FakeTensor) for item in model.parameters()):
        determinism_check = "none" if determinism_check == "none" else "default"
    saved = {segment: _saved_calls(segment, owners, blocks) for segment in segments}
    with Undo() as undo:
        if segments or not (keep_own_checkpointing or keep_generation_cache):
            _disable_generation_cache(model, undo)
        if not keep_own_checkpointing:
            for module in model.modules():
                _disable_checkpointing(module, undo)
        for segment in () if in_graph else segments:
            calls = [
                BlockCall(
                    block=blocks[name],
                    repeats=_repeatable(name, blocks[name], determinism_check),
                    random=random_blocks is None or name in random_blocks,
                    check=determinism_check,
                    saved=saved[segment],
                    offload=segment.mode == "offload",
                    input_on_host=segment.input_on_host and len(segment.blocks) == 1,
                    run_to_end=_writes_to_saved_tensors(blocks[name]),
                )
                for name in segment.blocks
            ]
            _apply_segment(segment, calls, undo)
        for block in blocks.values() if in_graph else ():
            _disable_checkpointing(block, undo)
            forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            undo.set_attribute(block, "forward", forward)
    return undo


def _repeatable(
    name: str, block: nn.Module, determinism_check: str, *, in_segment: bool = False
) -> RepeatableForwards:
    return RepeatableForwards(
        block,
        name,
        check=determinism_check == "values",
        run_to_end=_writes_to_saved_tensors(block),
        in_segment=in_segment,
    )


def _writes_to_saved_tensors(block: nn.Module) -> bool:
    """Whether an op writes to a tensor after autograd has saved it: RReLU's noise."""
    # With ``early_stop``, a recomputation would stop before that write.
    return any(isinstance(module, nn.RReLU) for module in block.modules())


def _apply_segment(segment: Segment, calls: list[BlockCall], undo: Undo) -> None:
    first = calls[0]
    for call in calls:
        _disable_checkpointing(call.block, undo)
    if len(calls) > 1:
        checkpoint = SegmentCheckpoint(
            check=first.check != "none",
            input_on_host=segment.input_on_host,
            run_to_end=any(call.run_to_end for call in calls),
        )
        for position, (name, call) in enumerate(
            zip(segment.blocks, calls, strict=True)
        ):
            forward = CheckpointedForward(
                call,
                call.block.forward,
                checkpoint,
                position,
                repeats=_repeatable(name, call.block, call.check, in_segment=True),
                nested=segment.nested,
            )
            undo.set_attribute(call.block, "forward", forward)
    else:
        forward = CheckpointedForward(first, first.block.forward)
        undo.set_attribute(first.block, "forward", forward)


def _saved_calls(
    segment: Segment, owners: Counter[nn.Parameter], blocks: dict[str, nn.Module]
) -> SelectiveCheckpoint | None:
    if segment.mode != "selective":
        return None
    (name,) = segment.blocks
    inside = _name_counts(blocks[name])
    shares = any(owners[parameter] > count for parameter, count in inside.items())
    return SelectiveCheckpoint(name, segment.saved_ops, shares_weights=shares)


def _name_counts(module: nn.Module) -> Counter[nn.Parameter]:
    """Return the number of names of each parameter in the module (tied weights)."""
    return Counter(
        parameter for _, parameter in module.named_parameters(remove_duplicate=False)
    )


def _find_blocks(model: nn.Module, segments: Sequence[Segment]) -> dict[str, nn.Module]:
    """Return the segments' blocks by name."""
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


def _disable_checkpointing(module: nn.Module, undo: Undo) -> None:
    """Switch off the module's own checkpointing: transformers' flag or our wrapper."""
    if getattr(module, _FLAG, False) is True:
        undo.set_attribute(module, _FLAG, value=False)
    if isinstance(module.__dict__.get("forward"), CheckpointedForward):
        undo.hide_attribute(module, "forward")


def _disable_generation_cache(model: nn.Module, undo: Undo) -> None:
    """Set ``config.use_cache`` to False, as transformers' Trainer does."""
    # Until ``undo``, ``save_pretrained`` still writes True: generation needs it.
    changed: list[Any] = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            undo.add(setattr, config, "use_cache", True)
            config.use_cache = False
            changed.append(config)
    for module in model.modules() if changed else ():
        if callable(getattr(type(module), "save_pretrained", None)):
            undo.set_attribute(
                module, "save_pretrained", _SavePretrained(module, changed)
            )


class _SavePretrained:
    """Replacement of a model's ``save_pretrained``; is deep-copied with the model."""

    def __init__(self, model: nn.Module, configs: list[Any]) -> None:
        self._model: Any = model
        self._configs = configs

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Save the model with the original ``use_cache``."""
        now = [config.use_cache for config in self._configs]
        for config in self._configs:
            config.use_cache = True
        try:
            return type(self._model).save_pretrained(self._model, *args, **kwargs)
        finally:
            for config, value in zip(self._configs, now, strict=True):
                config.use_cache = value
