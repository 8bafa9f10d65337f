"""Values of small tensors made from known ones, beside their fakes (tracing T8).

Models ask tensors questions: are all mask entries one, are the position ids packed,
which tokens are images? A fake tensor has no values, so whole numbers that come from
the batch, and whatever is made from them or from constants, are computed for real
beside the trace. Where values depend on weights or on random numbers, a documented
rule says what is assumed (``assumed_values``), and a note that it was. Where no rule
says it, a question is an ``UnknownValueError``.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

# Torch imports it when dispatch modes are put aside, which fails inside of some.
import torch._subclasses.schema_check_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from budgetfit.tracing.records import run_plainly
from budgetfit.tracing.values.assumptions import (
    FULL_MASK,
    READ_NUMBER,
)
from budgetfit.tracing.values.concrete_execution import (
    REAL_VALUES,
    is_asked_about,
    weight_like,
)
from budgetfit.tracing.values.data_dependent_ops import (
    ANSWERS,
    HOST_RESULTS,
    Answer,
    full_positions,
)
from budgetfit.tracing.values.index_ops import PLACES, places_of
from budgetfit.tracing.values.op_traits import SCALARS, nature_of
from budgetfit.tracing.values.propagation import (
    LARGEST_ELEMENTS,
    FollowedValues,
    tensors_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np

    from budgetfit.tracing.records import RunOp
    from budgetfit.tracing.values.assumptions import Assumed

# Yes is the answer to what nobody knows; a loop that ends on a no would never end.
MOST_ASSUMED_ANSWERS = 2000
aten = torch.ops.aten
_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class UnknownValueError(Exception):
    """A model asked for a value that nothing says: its sizes or its way depend on it.

    Attributes:
        op: What asked.
    """

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(f"{op}: {reason}")
        self.op = op


class KnownValues:
    """Remembers real values for fake tensors and computes those of ops on them.

    ``run`` makes the fakes. Without ``assumes_for_large`` nothing is assumed once there
    were more whole numbers than are followed: a smaller batch says it better.

    Attributes:
        notes: What was assumed where a model asked -> the module that asked first.
        where: Returns the path of the module that runs.
        phase: Of the step. For an optimizer nothing is assumed.
    """

    def __init__(
        self,
        run: RunOp = run_plainly,
        *,
        assumes_for_large: bool = True,
        everything: bool = False,
    ) -> None:
        self._run = run
        self._assumes = assumes_for_large
        self._values = FollowedValues(everything=everything)
        self._asked: Counter[tuple[object, int]] = Counter()
        self.notes: dict[str, str] = {}
        self.where: Callable[[], str] = str
        self.phase = "setup"
        self.remember = self._values.remember
        self.value = self._values.value

    def run(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run an op on fakes; where all its inputs are known, know its output too.

        Raises:
            UnknownValueError: If the op needs a value that nothing says.
            DataDependentOutputException: If an optimizer does.
        """
        nature, values = nature_of(func), self._values
        if nature.takes_masks:
            args = (args[0], list(self._positions(args[1])), *args[2:])
        known = values.inputs_known(nature, args, kwargs)
        if nature.asks:
            return self._answer(func, args, kwargs, known=known)
        if func in PLACES:
            self._check_places(func, args)
        out = self._run(func, args, kwargs)
        if known and values.everything and self._needs_no_values():
            known = False
        if nature.rule is not None and (nature.random or not known):
            self._assume(nature.rule, args, kwargs, out)
        elif not known or (nature.random and not values.everything):
            if nature.writes:
                values.forget(func, args)
        elif values.worth_computing(nature, args, out):
            values.follow(func, args, kwargs, out)
        return out

    def _check_places(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
        """Refuse places outside of a tensor, as a card does; fakes have none.

        Raises:
            IndexError: Some are outside, and nothing was assumed of them.
        """
        for dim, places in places_of(func, args):
            real = self.value(places)
            if real is None or not real.numel() or self._values.reasons(places):
                continue
            with _disable_current_modes():
                least, most = (int(x) for x in real.aminmax())
            size = args[0].shape[dim]
            if most >= size or least < -size:
                raise IndexError(
                    f"index {most if most >= size else least} is out of bounds for "
                    f"dimension {dim} with size {size}"
                )

    def said(self) -> list[str]:
        """Return the notes, each with where it was first needed."""
        said = [
            f"{note} (first in {place!r})" if place else note
            for note, place in sorted(self.notes.items())
        ]
        return [REAL_VALUES, *said] if self._values.everything else said

    def array_of(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """Return a fake tensor's values for what runs outside of torch.

        Raises:
            UnknownValueError: If they are whole numbers that nobody knows.
        """
        real = self.value(tensor)
        with _disable_current_modes():
            if real is None:
                if not tensor.is_floating_point() and tensor.dtype != torch.bool:
                    raise UnknownValueError("numpy", "whole numbers are not known")
                self._note((READ_NUMBER,))
                real = torch.ones(tensor.shape, dtype=tensor.dtype)
            else:
                self._note(self._values.reasons(tensor))
            return real.detach().clone().numpy()

    # -- what is known ----------------------------------------------------------------

    def _needs_no_values(self) -> bool:
        """Say whether gradients or weights are computed, whose values nobody asks for.

        A recomputation asks again, and builds a graph.
        """
        return self.phase == "optimizer" or (
            self.phase == "backward" and not torch.is_grad_enabled()
        )

    def know_weight(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """Note the values of a weight or buffer: all, or those of small buffers."""
        with _disable_current_modes():
            if self._values.everything:
                self.remember(fake, weight_like(real))
            elif is_asked_about(real):
                self.remember(fake, real.detach().to("cpu", copy=True))

    def _assume(
        self,
        rule: Callable[..., Assumed | None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,  # noqa: ANN401
    ) -> None:
        with _disable_current_modes():
            found = rule(out, *args, **kwargs)
        if found is not None:
            why = (found.why,) if found.why else ()
            self.remember(found.output, found.value, why)

    # -- questions --------------------------------------------------------------------

    def _answer(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        known: bool,
    ) -> Any:  # noqa: ANN401
        if known and func not in HOST_RESULTS:
            why = self._values.reasons(args, tuple(kwargs.values()))
            self._note(why, func)
            if func is aten.nonzero.default and args[0].numel() > LARGEST_ELEMENTS:
                return self._fakes_of(full_positions(args[0].shape), why)
            real = self._values.compute(func, args, kwargs)
            if real is None:
                raise UnknownValueError(str(func), "it does not run with real values")
            return self._fakes_of(real, why)
        if func is aten.masked_select.default:
            x, mask = torch.broadcast_tensors(args[0], args[1])
            return self.run(aten.index.Tensor, (x, [mask]), {})
        if self.phase == "optimizer":
            return func(*args, **kwargs)  # raises, unless a fake can answer
        try:
            return func(*args, **kwargs)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            RuntimeError,
        ):
            with _disable_current_modes():
                found = ANSWERS[func](self.value, *args, **kwargs)
        if found is None:
            raise UnknownValueError(str(func), "it needs values that are not known")
        return self._given(func, found)

    def _given(self, func: torch._ops.OpOverload, answer: Answer) -> Any:  # noqa: ANN401
        why = (answer.why,) if answer.why else ()
        self._note(why, func)
        host = HOST_RESULTS.get(func, ())
        if not host:
            return self._fakes_of(answer.result, why)
        return tuple(
            x if n in host else self._fakes_of(x, why)
            for n, x in enumerate(answer.result)
        )

    def _fakes_of(self, real: Any, why: Iterable[str] = ()) -> Any:  # noqa: ANN401
        """Return fakes for real tensors, and for those on meta that nobody knows."""
        if not any(True for _ in tensors_of(real)):
            return real
        leaves, spec = tree_flatten(real)
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
            if isinstance(x, torch.Tensor)
            else x
            for x in leaves
        ]
        for fake, value in zip(fakes, leaves, strict=True):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self.remember(fake, value, why)
        return tree_unflatten(fakes, spec)

    def _positions(
        self, indices: list[torch.Tensor | None]
    ) -> Iterator[torch.Tensor | None]:
        """Turn masks into positions; a fake cannot say how many those are."""
        for index in indices:
            if index is not None and index.dtype == torch.bool:
                known = self.value(index) is not None
                found = self._answer(aten.nonzero.default, (index,), {}, known=known)
                yield from self.run(aten.unbind.int, (found, 1), {})
            else:
                yield index

    def _note(
        self, why: Iterable[str], func: torch._ops.OpOverload | None = None
    ) -> None:
        """Note what was assumed for an answer.

        Raises:
            UnknownValueError: If the same line asks for ever, and is told yes; or if
                it may be known in a smaller batch.
        """
        for reason in why:
            self.notes.setdefault(reason, self.where())
        if why and self._values.too_many and not self._assumes:
            raise UnknownValueError(
                str(func), "more whole numbers than are followed in a trace"
            )
        if FULL_MASK in why and func in SCALARS:
            place = _asking_line()
            self._asked[place] += 1
            if self._asked[place] > MOST_ASSUMED_ANSWERS:
                raise UnknownValueError(
                    str(func), "a loop ends when values say so that are not known"
                )


def _asking_line() -> tuple[object, int]:
    """Return the line of the model's code that runs."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        _NOT_THE_MODEL
    ):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


__all__ = ["KnownValues", "UnknownValueError"]
