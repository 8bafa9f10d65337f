"""Compare the gradients of a planned model with the unmodified model's."""

import gc
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from budgetfit.errors import RecomputationError
from budgetfit.measuring.preserve_model import snapshot_attributes, snapshot_outside
from budgetfit.measuring.protocols import MakeRun
from budgetfit.measuring.recomputed_blocks import (
    RecomputationWatcher,
    find_blocks_saving_nothing,
)
from budgetfit.utils.lazy_import import lazy_import

TOLERANCE = 1e-5  # relative; recomputation repeats the same kernels
NOISE_FACTOR = 3.0  # CUDA atomics: two runs of the unmodified model differ, too
# Upper limit of the tolerance. Atomics stay below it (attention of GPT-2 on an H100:
# 0.0077); a model whose runs differ more from equal seeds and state uses hidden random
# numbers or counters.
MAX_TOLERANCE = 0.05
# Of the squared norm of all gradients: what parameters may hold that differ more than
# that on their own. A key's bias has a gradient of zero but for rounding: 0.18 of its
# norm (BERT on an H100).
MAX_LEFT_OUT = 0.01

# Runs of the unmodified model after a difference: two may agree by chance.
MORE_RUNS = 3

# Samples: the unmodified model with its gradients must fit as well.
COMPARED_ON_CUDA = 2

Gradients = dict[str, torch.Tensor | None]
T = TypeVar("T")

# State that a forward changes is small: running statistics, counters, seeds.
_MOST_STATE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheck:
    """Gradients of a planned model against the unmodified one's.

    Attributes:
        max_error: Largest relative difference of a parameter's gradient: the norm of
            the difference over the norm of the unmodified model's.
        noise: The same between two runs of the unmodified model; NaN where none of its
            gradients is finite.
        recomputed_blocks: Number of blocks that were recomputed in backward; of the
            planned ones also those that need no recomputation: they save nothing, or
            the loss does not depend on them.
        refusal: The text of the ``RecomputationError`` of the run; empty if none.
        left_out: Parameters that differ no more than between two runs of the unmodified
            model, which is too much to say anything. They count in neither figure.
    """

    max_error: float
    parameter: str
    noise: float
    recomputed_blocks: int
    refusal: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def match(self) -> bool | None:
        """Whether gradients differ no more than those of two unmodified runs.

        None where these differ so much that a comparison says nothing, or none is
        finite.
        """
        if self.refusal or (math.isinf(self.max_error) and math.isfinite(self.noise)):
            return False
        if math.isnan(self.noise):
            return None
        tolerance = max(TOLERANCE, NOISE_FACTOR * self.noise)
        if tolerance > MAX_TOLERANCE:
            return None
        return self.max_error <= tolerance


def check_gradients(  # noqa: PLR0913 - a model, two ways to run it, and what to see
    model: nn.Module,
    make_planned: MakeRun,
    make_plain: MakeRun,
    batch: object,
    *,
    blocks: Sequence[str],
    planned: Collection[str] = (),
    seed: int = 0,
    mean: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    loss: object = None,
    more_runs: int = MORE_RUNS,
) -> GradientCheck:
    """Compare one micro-batch's gradients, with the same batch and RNG state.

    No weight is updated. The unmodified model's gradients are kept in CPU memory.

    ``model``: that both factories modify, or make copies of. ``make_planned`` makes the
    run of the plan, each of whose steps must be a whole optimizer step; ``make_plain``
    the same without recomputation. ``batch``: small enough for the unmodified model.
    ``blocks`` are watched for recomputation; ``planned``: those that the plan
    recomputes. ``mean`` returns the mean over all ranks of a gradient of the unmodified
    model, in CPU memory. ``loss``: what it and hooks change is restored, as are the
    model's buffers. ``more_runs``: how often the unmodified model may run again where
    gradients differ, for its noise; 0 where ranks might not agree that they do.
    """
    seen = RecomputationWatcher()
    restore = _restorer(model, loss)
    plain = _run_to_gradients(
        model, make_plain, batch, seed, lambda trained: dict(_copies(trained, mean))
    )
    restore()

    def compare_again(trained: nn.Module) -> dict[str, float]:
        return relative_errors(_copies(trained, mean), plain)

    def compare(trained: nn.Module) -> dict[str, float]:
        return relative_errors(_gradients(trained), plain)

    idle: set[str] = set()
    with find_blocks_saving_nothing(model, sorted(planned), idle):
        noise = _run_to_gradients(model, make_plain, batch, seed, compare_again)
    restore()
    idle |= _unused(model, planned, plain)
    errors: dict[str, float] = {}
    refused: RecomputationError | None = None
    try:
        errors = _run_to_gradients(
            model, make_planned, batch, seed, compare, seen=seen, blocks=blocks
        )
    except RecomputationError as error:
        refused, more_runs = error, 0
        idle |= set(planned)  # the number is not reported after a refusal

    def found() -> GradientCheck:
        left_out = _left_out(errors, noise, plain) if errors else frozenset()
        error, parameter = (
            (refused.difference, refused.block)
            if refused is not None
            else _largest(errors, left_out)
        )
        return GradientCheck(
            max_error=error,
            parameter=parameter,
            noise=_largest(noise, left_out)[0] if _has_values(plain) else math.nan,
            recomputed_blocks=len(seen.seen | idle),
            refusal=str(refused) if refused is not None else "",
            left_out=tuple(sorted(left_out)),
        )

    result = found()
    for _ in range(more_runs):
        if result.match is not False or math.isinf(result.max_error):
            break
        restore()
        again = _run_to_gradients(model, make_plain, batch, seed, compare_again)
        noise = {name: max(each, again[name]) for name, each in noise.items()}
        result = found()
    return result


def gradient_difference(  # noqa: PLR0913 - as ``check_gradients``
    model: nn.Module,
    make_one: MakeRun,
    make_other: MakeRun,
    batch: object,
    *,
    loss: object = None,
    left_out: Collection[str] = (),
) -> tuple[float, str]:
    """Return by how much a gradient differs most between two runs, and its parameter.

    Relative to its norm in the other run. Arguments as for ``check_gradients``;
    ``left_out``: parameters that are not compared.
    """
    restore = _restorer(model, loss)
    other = _run_to_gradients(
        model, make_other, batch, 0, lambda trained: dict(_copies(trained))
    )
    restore()
    errors = _run_to_gradients(
        model, make_one, batch, 0, lambda run: relative_errors(_gradients(run), other)
    )
    restore()
    return _largest(errors, left_out)


def _left_out(
    errors: dict[str, float], noise: dict[str, float], plain: Gradients
) -> frozenset[str]:
    """Return the parameters of which a comparison says nothing, if they hold little."""
    noisy = {
        name
        for name, of_plain in noise.items()
        if NOISE_FACTOR * of_plain > MAX_TOLERANCE and math.isfinite(of_plain)
    }
    if not noisy:
        return frozenset()
    squares = {
        name: torch.nan_to_num(grad, 0.0, 0.0, 0.0).norm().item() ** 2
        for name, grad in plain.items()
        if grad is not None
    }
    if sum(squares[name] for name in noisy) > MAX_LEFT_OUT * sum(squares.values()):
        return frozenset()
    return frozenset(
        name for name in noisy if errors[name] <= NOISE_FACTOR * noise[name]
    )


def _largest(errors: dict[str, float], left_out: Collection[str]) -> tuple[float, str]:
    """Return the largest error and its parameter; 0 and "" without any."""
    compared = [(errors[name], name) for name in errors if name not in left_out]
    error, parameter = max(compared, default=(0.0, ""), key=lambda row: row[0])
    return error, parameter if error else ""


def _unused(model: nn.Module, blocks: Collection[str], plain: Gradients) -> set[str]:
    """Return the blocks with trainable weights that the loss does not depend on."""
    unused = set()
    for block in blocks:
        trained = [
            name
            for name, parameter in model.get_submodule(block).named_parameters()
            if parameter.requires_grad
        ]
        if trained and all(plain.get(f"{block}.{name}") is None for name in trained):
            unused.add(block)
    return unused


def _has_values(gradients: Gradients) -> bool:
    """Whether some element is finite and not zero, or all are zero."""
    # Else equal gradients show nothing: NaNs of a weight or loss are everywhere, but
    # for the zeros of unused rows.
    found = [grad for grad in gradients.values() if grad is not None]
    if any(bool((grad.isfinite() & (grad != 0)).any()) for grad in found):
        return True
    return all(bool(grad.isfinite().all()) for grad in found)


def relative_errors(
    planned: Iterable[tuple[str, torch.Tensor | None]], plain: Gradients
) -> dict[str, float]:
    """Return the relative error of each parameter's gradient.

    The error is infinite for a gradient that only one side has, or with infinities in
    other places; infinities and NaNs in the same places are equal (fp16 overflow).
    """
    return {
        name: _relative_error(gradient, plain.get(name)) for name, gradient in planned
    }


class _GradientsAreThere(Exception):  # noqa: N818 - no error
    """Raised to leave a step before it updates the weights."""


def _gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield dense gradients by name; of sharded ones each rank gathers the whole."""
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            grad = lazy_import("deepspeed.utils").safe_get_full_grad(parameter)
        elif hasattr(grad, "full_tensor"):
            grad = grad.full_tensor()
        yield name, None if grad is None else grad.to_dense()


def _copies(
    model: nn.Module, mean: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield gradients by name, copied to CPU memory one after the other."""
    for name, grad in _gradients(model):
        yield name, None if grad is None else mean(grad.to("cpu", copy=True))


def _restorer(model: nn.Module, loss: object) -> Callable[[], None]:
    """Return a function that restores what forward, loss and hooks may change."""
    attributes = snapshot_attributes(model)
    restore_outside = snapshot_outside(model, loss)
    tensors = [
        (tensor, tensor.detach().to("cpu", copy=True))
        for tensor in _untrained_tensors(model)
        if tensor.nbytes <= _MOST_STATE_BYTES
    ]

    def restore() -> None:
        attributes.restore()
        restore_outside()
        with torch.no_grad():
            for tensor, value in tensors:
                tensor.data.copy_(value)

    return restore


def _untrained_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield buffers, frozen parameters and tensors in attributes."""
    yield from model.buffers()
    yield from (item for item in model.parameters() if not item.requires_grad)
    for module in model.modules():
        for item in vars(module).values():
            if isinstance(item, torch.Tensor) and not item.requires_grad:
                yield item


def _run_to_gradients(  # noqa: PLR0913
    model: nn.Module,
    make_run: MakeRun,
    batch: object,
    seed: int,
    look: Callable[[nn.Module], T],
    *,
    seen: RecomputationWatcher | None = None,
    blocks: Sequence[str] = (),
) -> T:
    """Run one micro-batch; return what ``look`` finds before the update."""
    found: list[T] = []
    seen = seen if seen is not None else RecomputationWatcher()

    def on_phase(phase: str) -> None:
        seen.on_phase(phase)
        if phase == "optimizer":
            found.append(look(trained))
            raise _GradientsAreThere

    if torch.cuda.is_available():
        gc.collect()  # an error of an earlier run may still hold tensors
        torch.cuda.empty_cache()
    run = make_run(on_phase)
    trained: nn.Module = getattr(run, "model", model)
    for parameter in trained.parameters():
        parameter.grad = None  # also of those that no optimizer clears
    cards = sorted({item.device.index for item in model.parameters() if item.is_cuda})
    try:
        with torch.random.fork_rng(cards), seen.watching(trained, blocks):
            _seed(seed, cards)
            with suppress(_GradientsAreThere):
                run.step(batch)
    finally:
        run.undo()
    (result,) = found
    return result


def _seed(seed: int, cards: Iterable[int]) -> None:
    """Seed the generators in use; ``torch.manual_seed`` would seed all devices."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global one, which models draw from
    torch.default_generator.manual_seed(seed)
    for card in cards:
        with torch.cuda.device(card):
            torch.cuda.manual_seed(seed)


def _relative_error(planned: torch.Tensor | None, plain: torch.Tensor | None) -> float:
    if planned is None or plain is None:
        return 0.0 if planned is plain else math.inf
    wide = torch.promote_types(plain.dtype, torch.float64)  # complex stays complex
    planned, plain = planned.to("cpu", wide), plain.to(wide)
    same = (planned == plain) | (planned.isnan() & plain.isnan())
    if same.all():
        return 0.0
    difference = torch.where(same, 0.0, planned - plain).norm()
    norm = torch.where(plain.isfinite(), plain, 0.0).norm()
    error = (difference / norm).item()
    return math.inf if math.isnan(error) else error
