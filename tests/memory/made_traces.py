"""Step traces written by hand: what lives when, without torch."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from budgetfit.core.step_trace import (
    CATEGORIES,
    Affine,
    BlockPass,
    Category,
    Direction,
    KernelScratch,
    OpTable,
    Phase,
    PhaseName,
    StepTrace,
)

MIB = 1 << 20


class TraceMaker:
    """Collects events; storages have names."""

    def __init__(self, *blocks: str, layers: tuple[str, ...] = ("",)) -> None:
        self._blocks = blocks
        self._layers = layers
        self._storages: list[tuple[int, int, int, int]] = []
        self._scratch: dict[int, KernelScratch[Affine]] = {}
        self._index: dict[str, int] = {}
        self._events: list[int] = []
        self._phases: list[Phase] = []
        self._passes: list[BlockPass] = []

    def malloc(
        self,
        name: str,
        fixed_bytes: int = 0,
        per_sample: int = 0,
        category: Category = "activations",
        layer: int = -1,
    ) -> None:
        """Allocate a storage."""
        self._index[name] = len(self._storages)
        kind = CATEGORIES.index(category)
        self._storages.append((fixed_bytes, per_sample, kind, layer))
        self._events.append(len(self._storages))

    def scratch(self, name: str, rule: str, *arguments: Affine, part: int = 0) -> None:
        """Allocate a storage that a kernel rule sizes."""
        self.malloc(name, category="temporaries")
        self._scratch[self._index[name]] = KernelScratch(rule, arguments, part)

    def free(self, *names: str) -> None:
        """Free storages, in this order."""
        self._events += [-(self._index[name] + 1) for name in names]

    @contextmanager
    def phase(
        self, name: PhaseName, step: int = 0, micro_step: int = 0
    ) -> Iterator[None]:
        """Everything inside is one phase."""
        start = len(self._events)
        yield
        end = len(self._events)
        self._phases.append(Phase(name, step, micro_step, start, end))

    @contextmanager
    def block(
        self,
        block: int,
        direction: Direction,
        step: int = 0,
        micro_step: int = 0,
        *,
        takes: str = "",
        gives: str = "",
    ) -> Iterator[None]:
        """Everything inside is one block's pass; ``gives`` is born in it or known."""
        start = len(self._events)
        yield
        end = len(self._events)
        storages = (self._index.get(takes, -1), self._index.get(gives, -1))
        self._passes.append(
            BlockPass(block, direction, step, micro_step, start, end, *storages)
        )

    def trace(
        self,
        batch_sizes: tuple[int, ...] = (2, 3),
        joined: tuple[bool, ...] | None = None,
    ) -> StepTrace:
        """Return what was collected."""
        fixed, slope, category, layer = (
            np.array([row[k] for row in self._storages], dtype)
            for k, dtype in enumerate((np.int64, np.int64, np.int8, np.int32))
        )
        scratch_index = np.full(len(self._storages), -1, np.int32)
        for position, storage in enumerate(self._scratch):
            scratch_index[storage] = position
        none = np.zeros(0)
        return StepTrace(
            batch_sizes=batch_sizes,
            layers=self._layers,
            block_names=self._blocks,
            blocks=self._blocks,
            joined=joined or (True,) * (len(self._blocks) - 1) + (False,),
            fixed_bytes=fixed,
            bytes_per_sample=slope,
            category=category,
            layer=layer,
            scratch_index=scratch_index,
            scratch=tuple(self._scratch.values()),
            events=np.array(self._events, np.int32),
            phases=tuple(self._phases),
            passes=tuple(self._passes),
            ops=OpTable(
                event=none.astype(np.int64),
                layer=none.astype(np.int32),
                in_optimizer=none.astype(np.bool_),
                kind=none.astype(np.int8),
                kernels=none.astype(np.int16),
                efficiency=none,
                blocks=none.astype(np.int16),
                rate=none.astype(np.int8),
                flops_fixed=none,
                flops_per_sample=none,
                bytes_fixed=none,
                bytes_per_sample=none,
                name=none.astype(np.int32),
                recomputed=none.astype(np.bool_),
            ),
        )
