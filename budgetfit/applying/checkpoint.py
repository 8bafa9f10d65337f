"""Recompute a plan's segments: by transformers' own flags, or replaced forwards."""

from __future__ import annotations

import difflib
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from budgetfit.applying.nested import tensors_in
from budgetfit.applying.segment_region import SegmentRegion
from budgetfit.applying.undo import Undo
from budgetfit.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from budgetfit.core.recipe import Segment

_FLAG = "gradient_checkpointing"
_FLAG_FUNCTION = "_gradient_checkpointing_func"


def apply_segments(
    model: nn.Module,
    segments: Sequence[Segment],
    *,
    random_blocks: Collection[str] | None = None,
    determinism_check: str = "default",
    keep_own_checkpointing: bool = False,
) -> Undo:
    """Make ``model`` recompute ``segments`` in backward, and nothing else.

    ``state_dict`` keys, hooks and signatures stay; generation caches are off, because a
    recomputation would fill them twice. The segments are the whole truth: checkpointing
    that the model had on before is off, until undone.

    Args:
        model: Modified in place.
        segments: Of mode ``recompute``; their names are module paths in ``model``.
        random_blocks: Names of blocks that draw random numbers; None when unknown,
            which keeps the generators' state for every block (applying P7).
        determinism_check: ``"default"`` compares what is recomputed with the original
            by shape, dtype and device; ``"none"`` does not.
        keep_own_checkpointing: Leave the model's other checkpointing switched on, and
            without segments its generation cache too: the model as it is.

    Returns:
        What puts everything back.

    Raises:
        InputError: If a name is no module of the model, two names are the same module,
            or a mode is not ``recompute``. The model is then as it was.
    """
    blocks = _find_blocks(model, segments)
    with Undo() as undo:
        if segments or not keep_own_checkpointing:
            switch_off_caches(model, undo)
        if not keep_own_checkpointing:
            for module in model.modules():
                _switch_off(module, undo)
        for segment in segments:
            members = [
                _Member(
                    blocks[name],
                    random=random_blocks is None or name in random_blocks,
                    check=determinism_check,
                )
                for name in segment.blocks
            ]
            if len(members) > 1:
                region = SegmentRegion(check=determinism_check != "none")
                for position, member in enumerate(members):
                    member.replace_forward(undo, region, position)
            elif _has_own_flag(members[0].block):
                members[0].set_flag(undo)
            else:
                members[0].replace_forward(undo)
    return undo


def switch_off_caches(model: nn.Module, undo: Undo) -> None:
    """Set ``config.use_cache`` to False where it is on, as transformers' Trainer."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            undo.add(setattr, config, "use_cache", True)
            config.use_cache = False  # type: ignore[union-attr]


class CheckpointedForward:
    """Stands in for one block's ``forward`` and recomputes it in backward.

    A plain object and no closure, so that a deep copy of the model is a working model
    of its own. ``__wrapped__`` is the block's forward, for ``inspect.signature``.
    """

    def __init__(
        self,
        member: _Member,
        plain: Callable[..., Any],
        region: SegmentRegion | None,
        position: int,
    ) -> None:
        functools.update_wrapper(self, plain)
        self.__wrapped__ = plain
        self._member = member
        self._region = region
        self._position = position

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the block, to be recomputed."""
        kwargs = _without_cache(self._member.block, kwargs)
        if self._region is None:
            return self._member.checkpoint(self.__wrapped__, *args, **kwargs)
        return self._region.call(
            self._position,
            self.__wrapped__,
            args,
            kwargs,
            random=self._member.random,
        )


class _Member:
    """A block of a segment, and how it is to be checkpointed."""

    def __init__(self, block: nn.Module, *, random: bool, check: str) -> None:
        self.block = block
        self.random = random
        self.check = check

    def set_flag(self, undo: Undo) -> None:
        """Switch transformers' own checkpointing on, for this block alone."""
        _switch_off(self.block, undo)
        undo.set_on(self.block, _FLAG, value=True)
        undo.set_on(self.block, _FLAG_FUNCTION, self.checkpoint)

    def replace_forward(
        self, undo: Undo, region: SegmentRegion | None = None, position: int = 0
    ) -> None:
        """Put a checkpointing forward on this block alone."""
        _switch_off(self.block, undo)
        forward = CheckpointedForward(self, self.block.forward, region, position)
        undo.set_on(self.block, "forward", forward)

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Call ``function`` under torch's non-reentrant checkpoint."""
        if next(tensors_in(args), None) is None:
            # Torch keeps the generators only of devices that it sees in ``args``: with
            # all tensors behind keywords, dropout would differ in the recomputation.
            function, args, kwargs = _keywords_first(function, args, kwargs)
        return checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=self.random,
            determinism_check=self.check,
            **kwargs,
        )


def _keywords_first(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Turn tensors that are keyword arguments into positional ones."""
    if isinstance(function, functools.partial):  # transformers binds keywords this way
        args = (*function.args, *args)
        kwargs = {**function.keywords, **kwargs}
        function = function.func
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    rest = {name: value for name, value in kwargs.items() if name not in names}

    def call(*values: torch.Tensor) -> Any:  # noqa: ANN401
        return function(*args, **dict(zip(names, values, strict=True)), **rest)

    return call, tuple(kwargs[name] for name in names), {}


def _find_blocks(model: nn.Module, segments: Sequence[Segment]) -> dict[str, nn.Module]:
    """Return the modules that the segments name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Module, str] = {}
    for segment in segments:
        if segment.mode != "recompute":
            raise InputError(
                f"Segments of mode {segment.mode!r} cannot be applied; "
                'use mode="recompute".'
            )
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
    return _is_transformers_layer(block) and block.training


def _is_transformers_layer(block: nn.Module) -> bool:
    layers = sys.modules.get("transformers.modeling_layers")  # not there: no such block
    return layers is not None and isinstance(block, layers.GradientCheckpointingLayer)


def _without_cache(block: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take a generation cache away, by the rule of transformers' own layers."""
    if not _is_transformers_layer(block) or not torch.is_grad_enabled():
        return kwargs
    kwargs = dict(kwargs)
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    if not getattr(block, "_can_checkpoint_with_cache", False):
        for name in ("past_key_values", "layer_past"):
            if name in kwargs:
                kwargs[name] = None
    return kwargs


def _switch_off(module: nn.Module, undo: Undo) -> None:
    """Switch off whatever checkpointing of the module itself can be seen."""
    if getattr(module, _FLAG, False) is True:
        undo.set_on(module, _FLAG, value=False)
    if isinstance(module.__dict__.get("forward"), CheckpointedForward):
        undo.hide_on(module, "forward")
