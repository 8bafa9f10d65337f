"""Samples per second over batches of many lengths, or sizes of images.

Of several GPUs each has other samples, and all wait for the longest batch among them:
in each micro-batch where weights are gathered or gradients reduced in it, else once per
update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.plan import Estimate
from budgetfit.core.samples.image_sizes import SampleSizes
from budgetfit.core.step_trace import StepTrace
from budgetfit.gpus.table import Gpu
from budgetfit.planning.judge import network_of, times_of_ops
from budgetfit.timing.kernel_times import step_time_ns

if TYPE_CHECKING:
    Size = Any  # a length, or height and width

MICRO_BATCHES: Final = 16  # of an update; the mean of more is theirs
_LEAST_UPDATES: Final = 20  # per seed


class RateOverLengths:
    """Rates of a recipe, estimated between those of the sizes that were traced."""

    def __init__(
        self,
        traced: Mapping[Size, StepTrace],
        estimate: Estimate,
        gpu: Gpu,
        lengths: SampleSizes,
        rated_steps: int,
    ) -> None:
        """Time each traced size.

        Args:
            traced: Traces of the recipe.
            estimate: Of the recipe.
            gpu: That of each rank.
            lengths: Those of the samples.
            rated_steps: Micro-batches per update.
        """
        self._recipe, self._lengths, self._steps = estimate.recipe, lengths, rated_steps
        self._extent: Callable[[Size], int] = lengths.extent
        self._factor = estimate.time_factor
        parallelism = self._recipe.parallelism
        self._each_waits = parallelism is not None and (
            parallelism.engine != "ddp" or parallelism.sync_each_batch
        )
        # 480x640 and 640x480 have as many pixels, and take as long.
        by_extent = {self._extent(size): trace for size, trace in traced.items()}
        self._extents = sorted(by_extent)
        self._micro_batch_ns: list[float] = []
        self._network_ns: list[float] = []  # of an update
        # Where the host decides about some lengths, the optimizer takes longer there.
        self._optimizer_ns: list[float] = []
        rated = replace(self._recipe, gradient_accumulation_steps=rated_steps)
        for trace in map(by_extent.__getitem__, self._extents):
            times = times_of_ops(trace, rated, gpu)
            own = step_time_ns(trace, times.times_ns, rated_steps)
            waits = network_of(trace, times, rated, gpu, rated_steps)
            self._micro_batch_ns.append(own.forward_ns + own.backward_ns)
            self._network_ns.append(waits.expected_ns if waits else 0.0)
            self._optimizer_ns.append(own.optimizer_ns)

    def drawn(
        self, seeds: range, updates: int, padded: Callable[[Size], Size]
    ) -> float:
        """Return the rate over random batches, each padded."""
        # ``updates`` per seed, of fewer where there are many GPUs.
        ranks, samples = self._recipe.ranks, self._recipe.batch_size
        steps = min(self._steps, MICRO_BATCHES)
        updates = max(updates // ranks, _LEAST_UPDATES) if ranks > 1 else updates
        draws = [
            self._lengths.draw(samples, ranks * steps, updates, seed) for seed in seeds
        ]
        extents = np.array(
            [
                [self._extent(padded(size)) for size in row]
                for draw in draws
                for row in draw
            ]
        ).reshape(-1, ranks, steps)
        if not self._each_waits:
            times = self._at(extents, self._micro_batch_ns).sum(axis=2)
            slowest = extents[np.arange(len(extents)), times.argmax(axis=1)]
        else:
            slowest = extents.max(axis=1)
        return self._rate(slowest.ravel(), np.ones(slowest.size))

    def grouped(self) -> float:
        """Return the rate were all samples of an update equally long."""
        extents = [self._extent(size) for size, _ in self._lengths.kept]
        weights = [samples for _, samples in self._lengths.kept]
        return self._rate(np.array(extents), np.array(weights))

    def _rate(self, extents: NDArray[Any], weights: NDArray[Any]) -> float:
        """Return the rate of micro-batches of these extents, the slowest of all ranks.

        ``weights``: how often each occurs.
        """
        micro_ns = np.average(self._at(extents, self._micro_batch_ns), weights=weights)
        waits_ns = np.average(self._at(extents, self._network_ns), weights=weights)
        own_ns = np.average(self._at(extents, self._optimizer_ns), weights=weights)
        update_ns = (micro_ns * self._steps + own_ns) * self._factor
        samples = self._recipe.batch_size * self._steps * self._recipe.ranks
        return float(samples / (update_ns + waits_ns) * 1e9)

    def _at(self, extents: NDArray[Any], values: list[float]) -> NDArray[np.float64]:
        return np.interp(extents, self._extents, values)
