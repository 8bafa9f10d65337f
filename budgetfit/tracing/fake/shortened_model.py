"""Shortened model: a copy with fewer repeated blocks, for depth extrapolation.

The remaining children of a ``ModuleList`` are renumbered, so that loops and indices
find them; lists with one entry per block (``config.layer_types``) are shortened as
well, and lists of some blocks' numbers get the new ones. A model that still refers to a
missing block cannot be traced shortened.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from budgetfit.core.recipe import Segment
from budgetfit.tracing.blocks.block_signature import config_lists, numbers_blocks
from budgetfit.tracing.blocks.repeated_runs import BlockRun, NotRepeatedError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Shortening:
    """Which blocks a shortened model leaves out, and how module paths map to it.

    Attributes:
        blocks: All candidate blocks of the full model.
        left_out: Those that the shortened model leaves out.
        paths: Every module path of the full model -> the path in the shortened one;
            None if it is left out.
    """

    blocks: tuple[str, ...]
    left_out: frozenset[str]
    paths: dict[str, str | None]

    @property
    def kept_blocks(self) -> tuple[str, ...]:
        """The remaining blocks, by their paths in the full model."""
        return tuple(name for name in self.blocks if name not in self.left_out)

    @property
    def short_blocks(self) -> tuple[str, ...]:
        """The remaining blocks, by their paths in the shortened model."""
        return tuple(self.path(name) for name in self.kept_blocks)

    @property
    def short_layers(self) -> tuple[str, ...]:
        """Every module path of the shortened model, in the full model's order."""
        return tuple(path for path in self.paths.values() if path is not None)

    def path(self, name: str) -> str:
        """Return the path of a module in the shortened model.

        Raises:
            NotRepeatedError: If the module is left out.
        """
        path = self.paths.get(name)
        if path is None:
            raise NotRepeatedError(f"the shortened model has no {name}")
        return path

    def segments(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Return a recipe's segments of remaining blocks, in shortened paths."""
        return tuple(
            replace(segment, blocks=tuple(map(self.path, segment.blocks)))
            for segment in segments
            if self.left_out.isdisjoint(segment.blocks)
        )


def shortening(
    model: nn.Module, blocks: Sequence[str], runs: Sequence[BlockRun], periods: int
) -> Shortening:
    """Return how to shorten ``model`` so that each run has ``periods`` periods."""
    left_out = frozenset(name for run in runs for name in run.left_out(periods))
    renamed: dict[str, str | None] = dict.fromkeys(left_out)
    for container in {run.container for run in runs}:
        prefix = f"{container}." if container else ""
        kept = [
            key
            for key in model.get_submodule(container)._modules
            if f"{prefix}{key}" not in left_out
        ]
        if all(key.isdecimal() for key in kept):
            renamed |= {f"{prefix}{key}": f"{prefix}{n}" for n, key in enumerate(kept)}
    paths = {name: _renamed(name, renamed) for name, _ in model.named_modules()}
    return Shortening(tuple(blocks), left_out, paths)


def _renamed(name: str, renamed: dict[str, str | None]) -> str | None:
    """Return a module's shortened path: its block may have a new one."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        prefix = ".".join(parts[:depth])
        if prefix in renamed:
            found = renamed[prefix]
            rest = parts[depth:]
            return None if found is None else ".".join([found, *rest])
    return name


class _Placeholder:
    """Takes the place of a left-out block in a copy; calling it fails."""


def placeholder_memo(model: nn.Module, left_out: Collection[str]) -> dict[int, Any]:
    """Return a ``deepcopy`` memo with a placeholder for each left-out block."""
    return {id(model.get_submodule(name)): _Placeholder() for name in left_out}


def close_gaps(copy: nn.Module, short: Shortening) -> None:
    """Remove the placeholders of ``placeholder_memo`` from a copy, in place."""
    lengths: dict[int, set[tuple[int, ...]]] = {}
    containers: dict[str, tuple[int, tuple[int, ...]]] = {}
    for container in {name.rpartition(".")[0] for name in short.left_out}:
        children = copy.get_submodule(container)._modules
        kept = _kept_positions(list(children), container, short.left_out)
        lengths.setdefault(len(children), set()).add(kept)
        containers[container] = len(children), kept
        pairs = list(children.items())
        prefix = f"{container}." if container else ""
        children.clear()
        for position in kept:
            key, child = pairs[position]
            children[short.path(f"{prefix}{key}")[len(prefix) :]] = child
    found_lists = list(config_lists(copy, short.short_blocks))
    for where, (holder, name), values in found_lists:
        if type(values) not in {list, tuple}:
            continue
        found = lengths.get(len(values), set())
        if len(found) == 1:  # two chains of one length may be shortened differently
            (kept,) = found
            vars(holder)[name] = type(values)(values[position] for position in kept)
            continue
        for container, (count, kept) in containers.items():
            if numbers_blocks(where, values, container, count):
                numbers = (kept.index(number) for number in values if number in kept)
                vars(holder)[name] = type(values)(numbers)


def _kept_positions(
    keys: Sequence[str], container: str, left_out: Collection[str]
) -> tuple[int, ...]:
    prefix = f"{container}." if container else ""
    return tuple(n for n, key in enumerate(keys) if f"{prefix}{key}" not in left_out)
