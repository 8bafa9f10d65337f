"""The ranks that train one model: process group, this rank's device, values of all."""

import atexit
import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed, nn

from budgetfit.applying.quantized_layers.stored_weights import quantized_tensors
from budgetfit.core.parallelism import BACKENDS, Engine, Parallelism
from budgetfit.errors import InputError

# What torchrun sets, and ``init_process_group`` reads.
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLACES = 1024  # squares and sums of such numbers are exact in float64
_SAMPLED = 16  # elements of each tensor, to compare ranks


class GroupRanks:
    """This process among the ranks of a process group; each calls every method.

    Values are exchanged in host memory, so that nothing waits for a GPU: by the process
    group's own gloo backend, or one of its own beside NCCL alone. A ``group`` of None
    is that of all processes.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        # Of a fake one the other ranks do not exist.
        self._is_fake = distributed.get_backend(group) == "fake"
        self._group = group
        backends = str(distributed.get_backend_config(group))
        if not self._is_fake and "gloo" not in backends:
            self._group = distributed.new_group(
                None if group is None else distributed.get_process_group_ranks(group),
                backend="gloo",
                use_local_synchronization=group is not None,
            )

    def total(self, value: float) -> float:
        """Return the sum of all ranks' values."""
        return self.total_at((), value)

    def total_at(self, place: Sequence[int], value: float) -> float:
        """Return the sum of all ranks' values, which are at the same place.

        Raises:
            InputError: On all ranks, if one is at another.
        """
        if self._is_fake:
            return value * self.size
        place = [each % _PLACES for each in place]
        squares = [each**2 for each in place]
        sent = torch.tensor([value, *place, *squares], dtype=torch.float64)
        distributed.all_reduce(sent, group=self._group)
        total, *sums = sent.tolist()
        count = len(place)
        if any(
            self.size * squared != each**2  # without variance all are equal
            for each, squared in zip(sums[:count], sums[count:], strict=True)
        ):
            raise InputError(
                f"The {self.size} ranks are not at the same micro-batch of an update, "
                "and would train on parts of several. On one an error was caught, or "
                "it has adopted another recipe alone. Start all ranks anew, from the "
                "last state that was saved."
            )
        return total

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor in host memory, changed in place."""
        if not self._is_fake:
            distributed.all_reduce(tensor, group=self._group)
            tensor /= self.size
        return tensor

    def have_same(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Return whether all ranks have tensors of the same names and values."""
        if self._is_fake:
            return False
        # A flat tensor of another layout would be a copy on the GPU.
        dense = ((n, x.cpu()) for n, x in tensors if x.layout == torch.strided)
        return len(set(self.gather(_digest(dense, sampled=None)))) == 1

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, in order."""
        values: list[Any] = [value] * self.size
        if not self._is_fake:
            distributed.all_gather_object(values, value, group=self._group)
        return values


class Ranks(GroupRanks):
    """This process among the ranks of a plan, on its GPU if there is one.

    ``device``: ``"cpu"`` to train there.

    Raises:
        InputError: If the process group has not as many ranks as planned; or there is
            none, and torchrun has not started this process.
    """

    def __init__(
        self, parallelism: Parallelism, device: torch.device | str | None = None
    ) -> None:
        on_cpu = device is not None and torch.device(device).type == "cpu"
        if not distributed.is_initialized():
            has_nccl = torch.cuda.is_available() and distributed.is_nccl_available()
            _initialize(parallelism, on_cuda=has_nccl and not on_cpu)
        size = distributed.get_world_size()
        if size != parallelism.gpus:
            raise InputError(
                f"The plan is for {parallelism.gpus} GPUs, one process each, and "
                f"{size} processes train. Start it with "
                f"{parallelism.torchrun} your_script.py, or plan with gpus={size}."
            )
        backends = str(distributed.get_backend_config())
        trains_on_cuda = any(f"cuda:{name}" in backends for name in ("nccl", "fake"))
        if parallelism.cpu_offload and not re.search("gloo|fake", backends):
            raise InputError(
                "With cpu_offload gradients in host memory are clipped to the norm "
                f"over all ranks, for which the process group ({backends}) has no "
                f'backend. Use init_process_group("{BACKENDS}").'
            )
        self.device = _device(
            on_cuda=trains_on_cuda and torch.cuda.is_available() and not on_cpu
        )
        super().__init__()

    def check_same_weights(self, model: nn.Module, engine: Engine) -> None:
        """Check that all ranks hold the same weights, unless rank 0 sends them."""
        # FSDP2 keeps a part of each rank's own. DDP sends quantised weights and not
        # their scales, which are no buffers; DeepSpeed sends all.
        if engine == "deepspeed":
            return
        tensors: Iterable[tuple[str, torch.Tensor]] = model.named_parameters()
        why = "each would keep a part of another"
        if engine == "ddp":
            tensors = quantized_tensors(model)
            why = "DDP sends packed weights without the scales of the"
        digests = self.gather(_digest(tensors))
        other = [k for k, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise InputError(
                f"Rank {other[0]} has other weights than rank 0 (as have "
                f"{len(other) - 1} more): {why} model. Load the same checkpoint on all "
                "ranks, or call the same torch.manual_seed before the model is made."
            )


@contextlib.contextmanager
def same_random_weights() -> Iterator[None]:
    """Seed torch's generator alike on all ranks, for a model that is made inside."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def started_processes() -> int:
    """Return how many processes train: of the process group, or torchrun's number."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    by_torchrun = all(name in os.environ for name in _TORCHRUN)
    return int(os.environ["WORLD_SIZE"]) if by_torchrun else 1


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def check_started(parallelism: Parallelism) -> None:
    """Check for a process group, or that torchrun has started this process."""
    if distributed.is_initialized():
        return
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing:
        raise InputError(
            f"The plan is for {parallelism.gpus} GPUs, one process each, and this is "
            f"one process without a process group ({missing[0]} is not set). Start it "
            f"with {parallelism.torchrun} your_script.py, or plan with gpus=1."
        )


def _initialize(parallelism: Parallelism, *, on_cuda: bool) -> None:
    """Initialize the process group from torchrun's environment variables."""
    check_started(parallelism)
    if on_cuda:
        torch.cuda.set_device(_device(on_cuda=True))
    distributed.init_process_group(BACKENDS if on_cuda else "gloo")
    atexit.register(_destroy, distributed.group.WORLD)


def _destroy(_group: distributed.ProcessGroup | None) -> None:
    """Destroy the process group, or torch warns at the end of the program."""
    # It is held until then: DDP's reducer, as its last owner, deadlocks with gloo's
    # threads (https://github.com/pytorch/pytorch/issues/56297).
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _device(*, on_cuda: bool) -> torch.device:
    if not on_cuda:
        return torch.device("cpu")
    local = os.environ.get("LOCAL_RANK")
    index = torch.cuda.current_device() if local is None else int(local)
    return torch.device("cuda", index)


def _digest(
    tensors: Iterable[tuple[str, torch.Tensor]], *, sampled: int | None = _SAMPLED
) -> str:
    """Return a digest of some elements of each tensor; ``sampled=None``: of all."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        flat = tensor.detach().flatten()
        step = max(1, len(flat) // sampled) if sampled else 1
        sample = flat[::step].to("cpu", copy=True)
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
