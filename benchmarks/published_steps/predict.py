"""Predicted times of the published steps, from their recorded kernels.

What the product computes (``timing.kernel_times``), with the shares by kind of op as
parameters, so that they can be fitted and judged on different rows.
"""

import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from budgetfit.core.precision import find_precision
from budgetfit.core.step_trace import OP_KINDS, RATES, OpKind
from budgetfit.gpus.kernel_shares import find_shares
from budgetfit.gpus.table import find_gpu
from budgetfit.timing.kernel_times import (
    CHECKPOINT_NS,
    ISSUE_NS,
    PHASES,
    RECOMPUTED_NS,
    OpWork,
    elements_ns,
    kernel_times_ns,
    phases_waiting,
)
from budgetfit.timing.kind_shares import KIND_SHARES, KindShares
from budgetfit.timing.step_time_range import StepTimeRange, range_of

FOLDER: Final = Path(__file__).parent
ROWS: Final = FOLDER / "steps.json"
KERNELS: Final = FOLDER / "kernels.json.gz"
RECOMPUTATION, CHECKPOINTS = "recomputation", "checkpoints"
UNIT: Final = {
    kind: KindShares(1.0 if shares.rate else 0.0, 1.0)
    for kind, shares in KIND_SHARES.items()
}
Shares = Mapping[OpKind, KindShares]


class OneByOne(NamedTuple):
    """Kernels whose elements are loaded one by one, an array of each.

    The longer of ``elements`` and ``memory`` counts, in nanoseconds.
    """

    phase: np.ndarray
    kind: np.ndarray
    elements: np.ndarray
    memory: np.ndarray


@dataclass(frozen=True)
class Step:
    """A published step and its kernels.

    ``launch``, ``arithmetic`` and ``memory`` are the nanoseconds by phase and kind with
    shares of 1 by kind, but for the memory of kernels whose elements are loaded one by
    one (``one_by_one``); ``kernels`` counts kernels by phase, ``recomputed`` those that
    run again in the backward, under so many ``checkpoints``.
    """

    row: dict[str, Any]
    launch: np.ndarray
    arithmetic: np.ndarray
    memory: np.ndarray
    one_by_one: "OneByOne"
    kernels: np.ndarray
    recomputed: int
    checkpoints: int

    @property
    def measured_ms(self) -> float:
        """Of the step, or of the parts that were measured."""
        return float(self.row["measured_ms"])

    @property
    def is_single_gpu(self) -> bool:
        """Whether one GPU trained; llm-foundry's rows hold communication of eight."""
        return bool(self.row["group"] != "llm-foundry")

    @property
    def is_eager(self) -> bool:
        """Whether the step was not compiled."""
        return bool(self.row["mode"] != "compiled")

    @property
    def expected_range(self) -> StepTimeRange:
        """The range that a plan would print."""
        kernels_ns = self._kernels_ns(KIND_SHARES)
        waiting = phases_waiting(kernels_ns.sum(axis=1).tolist(), self._issue_ns())
        gpu = find_gpu(self.row["gpu"])
        return range_of(kernels_ns.sum(axis=0), gpu, host_bound=waiting > 0)

    def predicted_ms(self, shares: Shares = KIND_SHARES, issue: float = 1.0) -> float:
        """Return the predicted time, as the row's ``parts`` ask.

        Args:
            shares: By kind of op.
            issue: Factor on the host's time to issue a kernel.
        """
        kernels_ns = self._kernels_ns(shares).sum(axis=1).tolist()
        issue_ns = [issue * ns for ns in self._issue_ns()]
        parts = self.row.get("parts") or ""
        counted = 2 if parts else 3
        waiting = phases_waiting(kernels_ns[:counted], issue_ns[:counted])
        total = sum(issue_ns[:waiting]) + sum(kernels_ns[waiting:counted])
        if "opt" in parts:  # sharded over eight GPUs, once for all micro-batches
            total += kernels_ns[2] / (8 * self.row.get("accum", 1))
        return total / 1e6

    def _kernels_ns(self, shares: Shares) -> np.ndarray:
        """Return what kernels take on the GPU, by phase and kind."""
        rate = np.array([shares[kind].rate or 1.0 for kind in OP_KINDS])
        bandwidth = np.array([shares[kind].bandwidth for kind in OP_KINDS])
        found: np.ndarray = self.launch + self.arithmetic / rate
        found += self.memory / bandwidth
        alone = self.one_by_one
        moved_ns = alone.memory / bandwidth[alone.kind]
        np.add.at(
            found, (alone.phase, alone.kind), np.maximum(moved_ns, alone.elements)
        )
        return found

    def _issue_ns(self) -> list[float]:
        forward, backward, optimizer = (
            ISSUE_NS[name] * count
            for name, count in zip(PHASES, self.kernels, strict=True)
        )
        again = self.recomputed
        backward += (ISSUE_NS["forward"] - ISSUE_NS["backward"]) * again
        hooks = CHECKPOINT_NS * self.checkpoints + RECOMPUTED_NS * again
        host = find_shares(find_gpu(self.row["gpu"])).host
        return [host * (forward + hooks), host * (backward + hooks), host * optimizer]


def recorded_kernels() -> dict[str, list[list[Any]]]:
    """Return, by row, [phase, kind, rate, kernels, FLOPs, bytes, blocks].

    What runs again has a phase of its own, and checkpoints are counted in one more.
    """
    found: dict[str, list[list[Any]]] = json.loads(
        gzip.decompress(KERNELS.read_bytes())
    )
    return found


def steps() -> list[Step]:
    """Return all published steps that are recorded."""
    kernels = recorded_kernels()
    rows = json.loads(ROWS.read_text())
    return [_step(row, kernels[row["id"]]) for row in rows if row["id"] in kernels]


def _step(row: dict[str, Any], kernels: list[list[Any]]) -> Step:
    gpu = find_gpu(row["gpu"])
    checkpoints = sum(entry[3] for entry in kernels if entry[0] == CHECKPOINTS)
    kernels = [entry for entry in kernels if entry[0] != CHECKPOINTS]
    again = np.array([entry[0] == RECOMPUTATION for entry in kernels])
    phase = np.array(
        [
            PHASES.index("backward" if entry[0] == RECOMPUTATION else entry[0])
            for entry in kernels
        ]
    )
    work = OpWork(
        np.array([OP_KINDS.index(entry[1]) for entry in kernels], np.int8),
        np.array([RATES.index(entry[2]) for entry in kernels], np.int8),
        np.array([entry[3] for entry in kernels]),
        np.array([entry[4] for entry in kernels], np.float64),
        np.array([entry[5] for entry in kernels], np.float64),
        np.array([entry[6] for entry in kernels]),
    )
    tf32 = find_precision(row["precision"]).tf32
    nothing = np.zeros(len(kernels))

    def times_ns(part: OpWork) -> np.ndarray:
        together = row["group"] == "llm-foundry"
        return kernel_times_ns(part, gpu, tf32=tf32, kinds=UNIT, together=together)

    def by_phase_and_kind(of_entries: np.ndarray) -> np.ndarray:
        sums = np.zeros((len(PHASES), len(OP_KINDS)))
        np.add.at(sums, (phase, work.kind), of_entries)
        return sums

    counts = np.zeros(len(PHASES))
    np.add.at(counts, phase, work.kernels)
    launch = times_ns(work._replace(flops=nothing, moved_bytes=nothing))
    elements = elements_ns(work, gpu)
    arithmetic = times_ns(work._replace(moved_bytes=nothing)) - launch - elements
    memory = times_ns(work._replace(flops=nothing)) - launch
    alone = elements > 0
    return Step(
        row,
        by_phase_and_kind(launch),
        by_phase_and_kind(arithmetic),
        by_phase_and_kind(np.where(alone, 0.0, memory)),
        OneByOne(phase[alone], work.kind[alone], elements[alone], memory[alone]),
        counts,
        int(work.kernels[again].sum()),
        checkpoints,
    )


def fold(row: dict[str, Any]) -> int:
    """Return the half of the rows, 0 or 1, that a row's model belongs to."""
    return hashlib.sha256(row["model"].encode()).digest()[0] % 2
