"""Preconditions of a training step: no other one, grad mode, autocast, batch."""

import contextlib
import threading
from collections.abc import Iterator

import torch

from budgetfit.applying.pytree import tensors_in
from budgetfit.errors import InputError


class StepLock:
    """Allows one step at a time, until the run is undone."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self.ended = False

    def check(self) -> None:
        """Refuse to use a run after ``undo``."""
        if self.ended:
            raise InputError(
                "This run is undone: its model is the plain one again. Apply the plan "
                "to it once more to go on."
            )

    @contextlib.contextmanager
    def acquired(self) -> Iterator[None]:
        """Hold the lock, or refuse: two steps at once would share gradients and RNG."""
        self.check()
        if not self._running.acquire(blocking=False):
            raise InputError(
                "A step of this run is already running, in another thread or around "
                "this call (a hook, a loss). Call run.step one after the other."
            )
        try:
            yield
        finally:
            self._running.release()


def check_grad_and_autocast() -> None:
    """Refuse a step without grad mode, or inside ``torch.autocast``."""
    # The autocast weight cache is cleared at the end of the outermost region only, so
    # casts of weights would outlive the update.
    if not torch.is_grad_enabled():
        raise InputError(
            "run.step was called under torch.no_grad() or torch.inference_mode(), "
            "where nothing trains. Call it outside; only evaluation belongs inside."
        )
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    if depth:
        raise InputError(
            "run.step was called inside of torch.autocast. It has the plan's own, and "
            "inside of another the 16-bit copies of weights would outlive the update. "
            'Call it outside; plan(..., precision="bf16-mixed") is how to autocast.'
        )


def check_batch_not_empty(batch: object) -> None:
    """Refuse a batch without tensors, or with empty ones or without values."""
    tensors = list(tensors_in(batch))
    sizes = [tensor.numel() for tensor in tensors]
    if not sizes:
        raise InputError(
            f"There is no tensor in this batch, a {type(batch).__name__}. Hand in one "
            "micro-batch of tensors, what a loader yields; numpy arrays and lists of "
            "numbers become tensors by torch.as_tensor."
        )
    if any(tensor.is_meta for tensor in tensors):
        raise InputError(
            "The batch is on the meta device: it has no values to train on. Hand in "
            "what a loader yields; shapes alone are for budgetfit.plan(batch=...)."
        )
    if not any(sizes):
        raise InputError(
            "The batch is empty: its tensors have no elements, and the mean of nothing "
            "is nan. Leave it out; a loader with drop_last=True makes none."
        )
