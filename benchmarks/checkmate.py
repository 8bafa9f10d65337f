"""Checkmate's integer program on small chains, beside the plan for the same chain.

    python -m benchmarks.checkmate

Checkmate (Jain et al. 2020) decides for every tensor and every stage whether it is held
or computed again, which is the most that any schedule can do; this is its integer
program for HiGHS. Each block is three nodes: what it saves, its output and its
gradient. The plan is found by exact labels on the same chain. Checkmate may also do
what no checkpointing call does: drop an output that a held block makes again at no
cost. "Whole blocks" is the same program without that: an output is made again only
together with its block.
"""

import sys
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from benchmarks.shared import table
from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.chain_dp import chain_dp
from budgetfit.solvers.problem import Problem, describe

INSIDE: Final = 4  # bytes inside a block, beside an input of 1
LENGTHS: Final = (4, 6, 8, 10, 12)
SHARES: Final = (0.5, 0.7)  # of what keeping everything takes
TIME_LIMIT_S: Final = 30.0


@dataclass(frozen=True)
class Node:
    """A tensor: its bytes, the time to compute it, and the tensors that needs.

    ``inside`` is the block that it is the output of.
    """

    bytes: int
    time: int
    needs: tuple[int, ...] = ()
    inside: int | None = None


def nodes_of(count: int) -> list[Node]:
    """Return a chain of blocks as Checkmate sees it: forward, then backward.

    A block's inside costs 1, its gradient 2, an output nothing more. The last block
    makes the loss: it has no output. Node 0 is the chain's input.
    """
    nodes = [Node(bytes=1, time=0)]
    inside, inputs = [], []
    for number in range(count):
        inputs.append(len(nodes) - 1)
        nodes.append(Node(INSIDE, 1, (inputs[-1],)))
        inside.append(len(nodes) - 1)
        if number < count - 1:
            nodes.append(Node(1, 0, (inside[-1],), inside[-1]))
    gradient: tuple[int, ...] = ()
    for number in reversed(range(count)):
        nodes.append(Node(1, 2, (inputs[number], inside[number], *gradient)))
        gradient = (len(nodes) - 1,)
    return nodes


def chain_of(count: int) -> ChainProfile:
    """Return the same chain as the planner sees it."""
    blocks = []
    for number in range(count):
        out = 0 if number == count - 1 else 1
        kept = BlockOption(
            mode="keep",
            saved_bytes=1 + INSIDE,
            forward_bytes=1 + INSIDE + out,
            backward_bytes=1,
        )
        again = BlockOption(
            mode="recompute",
            saved_bytes=1,
            forward_bytes=1 + INSIDE + out,
            backward_bytes=INSIDE + 1,
            extra_ns=1,
        )
        blocks.append(
            BlockProfile(
                name=f"block.{number}",
                options=(kept, again),
                gradient_bytes=0,
                output_bytes=out,
                forward_ns=1,
                backward_ns=2,
                joins_next=number < count - 1,
            )
        )
    return ChainProfile(
        batch_size=1,
        static_bytes=0,
        input_bytes=1,
        optimizer_bytes=0,
        optimizer_ns=0,
        blocks=tuple(blocks),
    )


class Program:
    """Rows of a mixed integer program, collected one by one."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.top: list[float] = []
        self.whole: list[int] = []
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def variable(self, cost: float = 0, top: float = 1, *, whole: bool = True) -> int:
        """Return the number of a new variable between 0 and ``top``."""
        self.cost.append(cost)
        self.top.append(top)
        self.whole.append(int(whole))
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], low: float, high: float) -> None:
        """Keep a weighted sum of variables between two numbers."""
        number = len(self.low)
        self.entries += [(number, column, weight) for column, weight in terms.items()]
        self.low.append(low)
        self.high.append(high)

    def solve(self) -> tuple[float | None, float]:
        """Return the least cost (None if there is no answer), and the proven gap."""
        rows, columns, weights = zip(*self.entries, strict=True)
        shape = (len(self.low), len(self.cost))
        result = milp(
            np.array(self.cost),
            integrality=np.array(self.whole),
            bounds=Bounds(0, np.array(self.top)),
            constraints=LinearConstraint(
                coo_array((weights, (rows, columns)), shape).tocsr(),
                np.array(self.low),
                np.array(self.high),
            ),
            options={"time_limit": TIME_LIMIT_S},
        )
        if result.x is None:
            return None, 0.0
        return float(np.round(result.fun)), float(result.mip_gap)


class Checkmate:
    """The program: R computes, S holds, U is memory; stage t ends with node t.

    Stage t computes node t for the first time; earlier nodes may be computed again in
    it. U[t, k] is what is alive once node k has been computed, or not, in stage t.
    """

    def __init__(self, nodes: list[Node], budget: int, *, whole: bool = False) -> None:
        self.nodes, self.program, self.whole = nodes, Program(), whole
        new = self.program.variable
        stages = range(len(nodes))
        self.r = {(t, k): new(nodes[k].time) for t in stages for k in range(t + 1)}
        self.s = {(t, k): new() for t in stages for k in range(t)}
        self.u = {at: new(top=budget, whole=False) for at in self.r}
        self.users = [[m for m in stages if k in nodes[m].needs] for k in stages]
        for t in stages:
            self._order(t)
            self._memory(t)

    def _order(self, t: int) -> None:
        """Compute only from what is there, hold only what was there."""
        row = self.program.row
        row({self.r[t, t]: 1}, 1, 1)
        if t:  # the batch is there all the time
            row({self.s[t, 0]: 1}, 1, 1)
        for k in range(t - 1):
            there = {self.r[t - 1, k]: -1.0, self.s[t - 1, k]: -1.0}
            row({self.s[t, k]: 1.0, **there}, -2, 0)
        for k in range(t + 1):
            if self.whole and k < t and self.nodes[k].inside is not None:
                row({self.r[t, k]: 1.0, self.r[t, self.nodes[k].inside]: -1.0}, -1, 0)
            for need in self.nodes[k].needs:
                there = {self.r[t, need]: -1.0, self.s[t, need]: -1.0}
                row({self.r[t, k]: 1.0, **there}, -2, 0)

    def _memory(self, t: int) -> None:
        """Account for a stage: what it starts with, and each node's place."""
        size = [float(node.bytes) for node in self.nodes]
        held = {self.s[t, k]: -size[k] for k in range(t)}
        self.program.row({self.u[t, 0]: 1.0, self.r[t, 0]: -size[0], **held}, 0, 0)
        for k in range(t):
            terms = {self.u[t, k + 1]: 1.0, self.u[t, k]: -1.0}
            terms[self.r[t, k + 1]] = -size[k + 1]
            for i in (*self.nodes[k].needs, k):
                terms[self._freed(t, k, i)] = size[i]
            self.program.row(terms, 0, 0)

    def _freed(self, t: int, k: int, i: int) -> int:
        """Return whether node i is freed after node k: if that ran and none needs i.

        To free what can be freed never hurts, so nothing has to force it.
        """
        freed = self.program.variable(whole=False)
        self.program.row({freed: 1.0, self.r[t, k]: -1.0}, -1, 0)
        needed = [self.r[t, user] for user in self.users[i] if k < user <= t]
        if (t + 1, i) in self.s:
            needed.append(self.s[t + 1, i])
        for use in needed:
            self.program.row({freed: 1.0, use: 1.0}, 0, 1)
        return freed


def solved(nodes: list[Node], budget: int, *, whole: bool) -> tuple[str, str, int]:
    """Return Checkmate's least time, marked where not proven, seconds, variables."""
    started = time.perf_counter()
    program = Checkmate(nodes, budget, whole=whole).program
    least, gap = program.solve()
    seconds = time.perf_counter() - started
    found = "none found" if least is None else f"{least:.0f}"
    if gap:
        found += f" (gap {gap:.1%})"
    return found, f"{seconds:.2f}", len(program.cost)


def main() -> int:
    """Print a line per chain and budget."""
    rows = []
    for count in LENGTHS:
        chain, nodes = chain_of(count), nodes_of(count)
        everything = chain_peak_bytes(chain, ())
        for share in SHARES:
            budget = int(share * everything)
            free, free_s, variables = solved(nodes, budget, whole=False)
            whole, whole_s, _ = solved(nodes, budget, whole=True)
            started = time.perf_counter()
            plan = chain_dp(Problem(chain=chain, limit_bytes=budget)).segments
            plan_s = f"{time.perf_counter() - started:.4f}"
            ours = "no plan" if plan is None else f"{chain_time_ns(chain, plan)}"
            does = "" if plan is None else describe(chain, plan)
            limit = f"{share:.0%} ({budget})"
            rows.append(
                (
                    does,
                    f"{count}",
                    limit,
                    f"{variables:,}",
                    *(free, free_s),
                    *(whole, whole_s),
                    *(ours, plan_s),
                )
            )
    headers = (
        "what the plan does",
        "blocks",
        "budget",
        "variables",
        "Checkmate",
        "s",
        "whole blocks",
        "s",
        "plan",
        "s",
    )
    print(table(headers, rows))
    print("\nTimes of one step, of which 3 for each block without recomputation.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
