"""Blocks whose input is written to: running them again would start from other values.

Torch's checkpoint refuses to. Such are the cells of a Sequential with
``ReLU(inplace=True)``, and blocks that add to what they are given.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from budgetfit.batches.batch_tree import Batch, change_tensors
from budgetfit.errors import TraceError
from budgetfit.tracing.fake.model_copy import fake_copy, fake_mode, quiet_fakes
from budgetfit.tracing.isolation.cuda_device_names import OneDevice
from budgetfit.tracing.isolation.lru_caches import no_fakes_remembered
from budgetfit.tracing.isolation.python_state import quiet_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


def overwriting_blocks(
    model: nn.Module,
    batch: Batch,
    blocks: Sequence[str],
    call: Callable[[nn.Module, Batch], object],
) -> frozenset[str]:
    """Return the blocks whose inputs are not the same at the end of the forward.

    Args:
        model: Read only; a fake copy of it runs.
        batch: Of any size.
        blocks: Module paths.
        call: ``call(model, batch)`` runs a forward. What it raises ends the look.
    """
    inputs: list[tuple[str, torch.Tensor, int]] = []
    with (
        quiet_fakes(),
        quiet_machine(),
        no_fakes_remembered(model),
        fake_mode() as mode,
    ):
        try:
            twin = fake_copy(model, mode)
        except TraceError:
            return frozenset()
        twin.train()
        for name in blocks:
            twin.get_submodule(name).register_forward_pre_hook(
                _note_inputs(name, inputs), with_kwargs=True
            )
        # What ran until something is raised is seen.
        with contextlib.suppress(Exception), OneDevice() as device:
            here = change_tensors(batch, device.here)
            call(twin, change_tensors(here, mode.from_tensor))
    return frozenset(
        name for name, tensor, version in inputs if tensor._version != version
    )


def _note_inputs(
    name: str, inputs: list[tuple[str, torch.Tensor, int]]
) -> Callable[..., None]:
    def note(_: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        # Versions count writes: torch's notes on autograd, in-place checks.
        inputs.extend(
            (name, value, value._version)
            for value in tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor)
        )

    return note
