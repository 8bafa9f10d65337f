"""Find blocks that modify their input in place, which cannot be recomputed.

Recomputation would start from other values, and torch's checkpoint refuses it. Examples
are children of a ``Sequential`` with ``ReLU(inplace=True)``, and residual ``x += ...``.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from budgetfit.batches.batch_tree import Batch, map_batch
from budgetfit.errors import TraceError
from budgetfit.tracing.fake.model_copy import (
    fake_copy,
    fake_mode,
    silence_fake_tensor_log,
)
from budgetfit.tracing.isolation.cuda_device_names import CudaDevicesOnCpu
from budgetfit.tracing.isolation.lru_caches import lru_caches_cleared
from budgetfit.tracing.isolation.python_state import python_state_preserved
from budgetfit.tracing.isolation.user_state import user_state_preserved


def blocks_mutating_inputs(
    model: nn.Module,
    batch: Batch,
    blocks: Sequence[str],
    call: Callable[[nn.Module, Batch], object],
) -> frozenset[str]:
    """Return the blocks with an input that was modified by the end of the forward.

    Args:
        model: Read only; a fake copy of it runs.
        batch: Of any size.
        blocks: Module paths.
        call: ``call(model, batch)`` runs a forward; an exception only ends it early.
    """
    inputs: list[tuple[str, torch.Tensor, int]] = []
    with (
        silence_fake_tensor_log(),
        python_state_preserved(),
        lru_caches_cleared(list(model.modules())),
        user_state_preserved(model),
        fake_mode() as mode,
    ):
        try:
            fake = fake_copy(model, mode)
        except TraceError:
            return frozenset()
        fake.train()
        for name in blocks:
            fake.get_submodule(name).register_forward_pre_hook(
                _note_inputs(name, inputs), with_kwargs=True
            )
        # Blocks that ran before an exception have been seen.
        with contextlib.suppress(Exception), CudaDevicesOnCpu() as device:
            on_cpu = map_batch(batch, device.on_cpu)
            call(fake, map_batch(on_cpu, mode.from_tensor))
    return frozenset(
        name for name, tensor, version in inputs if tensor._version != version
    )


def _note_inputs(
    name: str, inputs: list[tuple[str, torch.Tensor, int]]
) -> Callable[..., None]:
    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        # Version counters count writes (torch's autograd notes, in-place checks).
        inputs.extend(
            (name, value, value._version)
            for value in tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor)
        )

    return note
