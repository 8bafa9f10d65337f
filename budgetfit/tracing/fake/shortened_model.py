"""A model with the middle of its runs of blocks taken out, in a copy (tracing T9).

What is left out of a ``ModuleList`` closes up, so that a loop or an index finds the
rest; a list of settings with one entry for each block (``config.layer_types``) closes
up with it. Where a model still asks for what is not there, its twin cannot run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from budgetfit.tracing.blocks.block_signature import lists_outside
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import nn

    from budgetfit.core.recipe import Segment
    from budgetfit.tracing.blocks.repeated_runs import BlockRun


@dataclass(frozen=True, slots=True)
class Shortening:
    """Which blocks a twin has, and how their paths and all others map.

    Attributes:
        blocks: All candidate blocks of the whole model.
        left_out: Those that the twin does without.
        paths: Every module path of the whole model; None where the twin has no such
            module, else the path there.
    """

    blocks: tuple[str, ...]
    left_out: frozenset[str]
    paths: dict[str, str | None]

    @property
    def kept_blocks(self) -> tuple[str, ...]:
        """The blocks that stay, by their paths in the whole model."""
        return tuple(name for name in self.blocks if name not in self.left_out)

    @property
    def twin_blocks(self) -> tuple[str, ...]:
        """The same by their paths in the twin."""
        return tuple(self.path(name) for name in self.kept_blocks)

    @property
    def twin_layers(self) -> tuple[str, ...]:
        """Every module path of the twin, in the order of the whole model."""
        return tuple(path for path in self.paths.values() if path is not None)

    def path(self, name: str) -> str:
        """Return the twin's path of a module that it has.

        Raises:
            NotRepeatedError: If it has none, which the whole model may have.
        """
        path = self.paths.get(name)
        if path is None:
            raise NotRepeatedError(f"its twin has no {name}")
        return path

    def segments(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Return the segments of a recipe that concern the twin, in its paths."""
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
    """Return a module's path in the twin: a block's new path may begin it."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        prefix = ".".join(parts[:depth])
        if prefix in renamed:
            found = renamed[prefix]
            rest = parts[depth:]
            return None if found is None else ".".join([found, *rest])
    return name


class _LeftOut:
    """Stands in a copy where a block was; whoever calls it is told."""


def holes(model: nn.Module, left_out: Collection[str]) -> dict[int, Any]:
    """Return a ``deepcopy`` memo that copies everything but the blocks left out."""
    return {id(model.get_submodule(name)): _LeftOut() for name in left_out}


def close_up(copy: nn.Module, short: Shortening) -> None:
    """Close the gaps in a copy that was made with ``holes``, in place."""
    lengths: dict[int, set[tuple[int, ...]]] = {}
    for container in {name.rpartition(".")[0] for name in short.left_out}:
        children = copy.get_submodule(container)._modules
        kept = _kept_positions(list(children), container, short.left_out)
        lengths.setdefault(len(children), set()).add(kept)
        pairs = list(children.items())
        prefix = f"{container}." if container else ""
        children.clear()
        for position in kept:
            key, child = pairs[position]
            children[short.path(f"{prefix}{key}")[len(prefix) :]] = child
    found_lists = list(lists_outside(copy, short.twin_blocks))
    for _, (holder, name), values in found_lists:
        found = lengths.get(len(values), set())
        if len(found) == 1 and type(values) in {
            list,
            tuple,
        }:  # two chains of one length may be shortened differently
            (kept,) = found
            vars(holder)[name] = type(values)(values[position] for position in kept)


def _kept_positions(
    keys: Sequence[str], container: str, left_out: Collection[str]
) -> tuple[int, ...]:
    prefix = f"{container}." if container else ""
    return tuple(n for n, key in enumerate(keys) if f"{prefix}{key}" not in left_out)
