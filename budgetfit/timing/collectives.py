"""What the network adds to a step: two queues, of kernels and of collectives.

Both run in the order in which they are issued, beside each other. As in DDP and FSDP2
of torch 2.13:

* An all-gather starts when the copies out of the one before the last are done
  (``wait_for_unshard``), in the backward pass not before the forward has ended, and its
  own copy-out waits for it.
* A reduction starts when its gradients are there. FSDP2's next one waits for it
  (one input buffer); the optimizer waits for all.
* With ``CPUOffloadPolicy`` a copy from the host comes before each all-gather, and one
  to the host after each reduction, for which the next reduction waits. Python waits for
  one that is added to a gradient. Over PCIe they take the network's time.
* DeepSpeed's kernels wait for each collective, unless it overlaps them: then for the
  all-gather before the last (a module's weights are fetched while the one before runs),
  and the optimizer for all reductions. Its optimizer step gathers what was updated.

One communicator serves them all, so they queue behind each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.parallelism import Parallelism
from budgetfit.core.step_trace import (
    SHARD_TO_DEVICE,
    SHARD_TO_HOST,
    Phase,
    StepTrace,
)
from budgetfit.gpus.interconnect import Link, find_link
from budgetfit.gpus.table import Gpu
from budgetfit.timing.kernel_times import (
    Nanoseconds,
    host_bytes_per_ns,
    is_exchange,
    phase_ops,
)

GATHERS: Final = ("c10d._allgather_base_.default", "c10d.allgather_.default")
SCATTERS: Final = "c10d._reduce_scatter_base_.default"
REDUCES_ALL: Final = "c10d.allreduce_.default"
HOST_COPIES: Final = (SHARD_TO_HOST, SHARD_TO_DEVICE)
COPY_OUT: Final = "fsdp.split_with_sizes_copy.default"
COPY_IN: Final = "fsdp.chunk_cat.default"


class NetworkTime(NamedTuple):
    """Nanoseconds that a step waits for the network: expected, and a range.

    ``link``: what the GPUs are assumed to be connected by.
    """

    expected_ns: float
    low_ns: float
    high_ns: float
    link: str


def network_time(
    trace: StepTrace,
    times_ns: Nanoseconds,
    parallelism: Parallelism,
    gpu: Gpu,
    accumulation: int,
) -> NetworkTime:
    """Return what one optimizer step waits for the network.

    Args:
        trace: Of one rank.
        times_ns: What each op takes; of collectives what the host needs, if it waits.
        parallelism: Whose ranks exchange data.
        gpu: Each rank's.
        accumulation: Micro-batches of the step.
    """
    link = _Links.of(parallelism, gpu).slowest
    expected_ns, low_ns, high_ns = (
        waiting_ns(trace, times_ns, parallelism, gpu, accumulation, factor=factor)
        for factor in (1.0, link.low, link.high)
    )
    return NetworkTime(expected_ns, low_ns, high_ns, link.name)


def waiting_ns(  # noqa: PLR0913 - those of ``network_time``, and a factor
    trace: StepTrace,
    times_ns: Nanoseconds,
    parallelism: Parallelism,
    gpu: Gpu,
    accumulation: int,
    *,
    factor: float = 1.0,
) -> float:
    """Return the same if collectives take ``factor`` times as long as expected."""
    links = _Links.of(parallelism, gpu)
    waits = [
        _wait_ns(trace, times_ns, phases, links, factor, parallelism, adds=number > 0)
        for number, phases in enumerate(_micro_steps(trace, parallelism))
    ]
    repeated = waits[-1] if parallelism.sync_each_batch else waits[0]
    return sum(waits) + repeated * (accumulation - len(waits))


class _Links(NamedTuple):
    """The links of all-gathers and reduce-scatters, and of all-reduces, with ranks.

    ``together``: all-reduces that share the network adapters of a node: between nodes
    each rank of it reduces a shard of its own (HSDP). ``host_bytes_per_ns``: the rate
    of a rank's bus.
    """

    sharding: Link
    shards: int
    copying: Link
    copies: int
    host_bytes_per_ns: float
    together: int = 1

    @classmethod
    def of(cls, parallelism: Parallelism, gpu: Gpu) -> _Links:
        per_node = parallelism.gpus_per_node or parallelism.gpus
        copies, bus = parallelism.replicate, host_bytes_per_ns(gpu)
        if parallelism.engine == "deepspeed":  # each of its collectives joins all ranks
            link = find_link(gpu, across_nodes=parallelism.gpus > per_node)
            return cls(link, parallelism.gpus, link, parallelism.gpus, bus)
        shards = parallelism.gpus // copies
        return cls(
            find_link(gpu, across_nodes=shards > per_node),
            shards,
            find_link(gpu, across_nodes=parallelism.gpus > per_node),
            copies,
            bus,
            min(shards, per_node) if parallelism.gpus > per_node else 1,
        )

    @property
    def slowest(self) -> Link:
        """The link whose range counts."""
        return self.copying if self.copies > 1 else self.sharding

    def time_ns(self, name: str, payload_bytes: float) -> float:
        """Return the time of a collective, or of a copy to or from the host."""
        if name in HOST_COPIES:
            return payload_bytes / self.host_bytes_per_ns
        if name == REDUCES_ALL:
            payload_bytes *= self.together
            return self.copying.time_ns(payload_bytes, self.copies, reduces_all=True)
        return self.sharding.time_ns(payload_bytes, self.shards, reduces_all=False)


def _micro_steps(trace: StepTrace, parallelism: Parallelism) -> list[list[Phase]]:
    """Return the phases of each micro-step of the last step that exchange data."""
    exchanging = {"forward", "backward"}
    if parallelism.engine == "deepspeed":
        exchanging.add("optimizer")
    last = max(phase.step for phase in trace.phases)
    count = 1 + max(phase.micro_step for phase in trace.phases if phase.step == last)
    return [
        [
            phase
            for phase in trace.phases
            if (phase.step, phase.micro_step) == (last, number)
            and phase.name in exchanging
        ]
        for number in range(count)
    ]


def _wait_ns(  # noqa: PLR0913, PLR0917 - those of ``network_time``, and a micro-step
    trace: StepTrace,
    times_ns: Nanoseconds,
    phases: list[Phase],
    links: _Links,
    factor: float,
    parallelism: Parallelism,
    *,
    adds: bool,
) -> float:
    """Return what the kernels of one micro-step wait for collectives.

    ``adds``: whether gradients of the micro-step before are there.
    """
    by_deepspeed = parallelism.engine == "deepspeed"
    queues = _Queues(
        ahead=by_deepspeed,
        share=links.sharding.name.startswith("PCIe"),
        blocks=adds and parallelism.sync_each_batch,
    )
    alone = 0.0
    known: dict[tuple[str, float], float] = {}  # blocks are alike
    for phase in phases:
        queues.start_phase()
        queues.waits = by_deepspeed and (
            phase.name == "optimizer" or not parallelism.overlaps
        )
        ops = phase_ops(trace, phase)
        done_ns = np.concatenate([[0.0], np.cumsum(times_ns[ops])])
        alone += float(done_ns[-1])
        before = 0
        for place in np.flatnonzero(_exchanges(trace)[ops]).tolist():
            op = ops[place]
            name = trace.op_names[trace.ops.name[op]]
            queues.now += float(done_ns[place] - done_ns[before])
            before = place + 1
            taken = float(times_ns[op])
            if is_exchange(name):
                # The payload of a collective does not depend on the batch size.
                payload = float(trace.ops.bytes_fixed[op])
                queues.now += taken  # where the host is slower: to issue it
                if (name, payload) not in known:
                    known[name, payload] = factor * links.time_ns(name, payload)
                queues.collective(name, known[name, payload])
            else:
                queues.kernel(name, taken)
        queues.now += float(done_ns[-1] - done_ns[before])
    return max(0.0, queues.end() - alone)  # sums are rounded


def _exchanges(trace: StepTrace) -> NDArray[np.bool_]:
    """Return which ops are collectives, or wait for one."""
    names = [
        is_exchange(name) or name in {COPY_IN, COPY_OUT} for name in trace.op_names
    ]
    return np.array(names, bool)[trace.ops.name]


@dataclass(slots=True)
class _Queues:
    """When the kernels and the collectives that were issued so far are done.

    ``waits``: whether kernels wait for each collective. ``ahead``: whether for the all-
    gather before the last, instead of at its copy-out. ``share``: whether copies from
    the host take the network's time. ``blocks``: whether Python waits for copies to it.
    """

    ahead: bool = False
    share: bool = False
    blocks: bool = False
    waits: bool = False
    now: float = 0.0
    network: float = 0.0
    floor: float = 0.0
    reduced: float = 0.0
    from_host: float = 0.0
    on_host: float = 0.0
    gathered: deque[float] = field(default_factory=deque)
    copied: deque[float] = field(default_factory=lambda: deque([0.0, 0.0], maxlen=2))

    def start_phase(self) -> None:
        """Begin the forward or the backward."""
        self.floor = self.now

    def collective(self, name: str, taken: float) -> None:
        """Issue a collective."""
        if name == SHARD_TO_DEVICE:
            before = self.network if self.share else self.from_host
            self.from_host = max(before, self.copied[0], self.floor) + taken
        elif name == SHARD_TO_HOST:
            self.on_host = max(self.on_host, self.reduced) + taken
            if self.share:
                self.network = max(self.network, self.on_host)
            if self.blocks:
                self.now = max(self.now, self.on_host)
        elif self.waits:
            self.now = self.network = max(self.network, self.now) + taken
        elif self.ahead and name in GATHERS:
            if self.gathered:
                self.now = max(self.now, self.gathered.popleft())
            self.network = max(self.network, self.now) + taken
            self.gathered.append(self.network)
        elif name in GATHERS:
            started = max(self.network, self.copied[0], self.floor, self.from_host)
            self.network = started + taken
            self.gathered.append(self.network)
        else:
            started = max(self.network, self.now, self.on_host)
            self.network = self.reduced = started + taken

    def kernel(self, name: str, taken: float) -> None:
        """Issue the kernels of an op."""
        if name == COPY_OUT and self.gathered:
            self.now = max(self.now, self.gathered.popleft())
        elif name == COPY_IN:
            self.now = max(self.now, self.reduced)
        self.now += taken
        if name == COPY_OUT:
            self.copied.append(self.now)

    def end(self) -> float:
        """Return when the optimizer can start."""
        return max(self.now, self.reduced, self.on_host)
