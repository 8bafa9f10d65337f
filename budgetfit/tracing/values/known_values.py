"""Answer data-dependent ops in a trace by constant propagation on small tensors.

Models branch on values: are all mask entries one, are the position ids packed, which
tokens are images? A fake tensor has no values, so integers of the batch, and whatever
is computed from them or from constants, are also computed concretely. If values depend
on weights or random numbers, a rule assumes them (``assumptions``), and a note reports
it. Without a rule, ``UnknownValueError`` is raised. See
``docs/decisions/0010-known-values.md``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

# Torch imports it when dispatch modes are disabled, which fails inside of some modes.
import torch._subclasses.schema_check_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from budgetfit.tracing.call_cache import Args, Kwargs
from budgetfit.tracing.records import RunOp, call_op
from budgetfit.tracing.values.assumptions import (
    ANSWERED_NO,
    FULL_MASK,
    READ_NUMBER,
    AssumedValue,
    to_bool,
)
from budgetfit.tracing.values.concrete_execution import (
    REAL_VALUES,
    is_small_integer_buffer,
    weight_values,
)
from budgetfit.tracing.values.data_dependent_ops import (
    ASSUMED_RESULTS,
    HOST_OUTPUTS,
    AssumedResult,
    unlisted_places,
)
from budgetfit.tracing.values.op_traits import SCALARS, indices_of, traits_of
from budgetfit.tracing.values.propagation import (
    MAX_INTEGERS,
    PropagatedValues,
    count_nonzero,
    tensors_of,
    without_repeats,
)
from budgetfit.tracing.values.value_checks import ValueChecks

if TYPE_CHECKING:
    import numpy as np


# Unknown conditions are assumed true; a loop that ends on false would never end.
MAX_ASSUMED_RESULTS = 2000
aten = torch.ops.aten
_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class UnknownValueError(Exception):
    """A model's sizes or branches depend on a value that is unknown in the trace.

    Attributes:
        op: The data-dependent op.
    """

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(f"{op}: {reason}")
        self.op = op


class KnownValues:
    """Runs ops on fake tensors and propagates their concrete values where known.

    ``run`` runs an op on fakes. Without ``assumes_for_large`` nothing is assumed once
    an integer tensor was too large to be tracked: its values may be known in a smaller
    batch. ``checks``: those that earlier traces found.

    Attributes:
        notes: Assumption that a model relied on -> the module that did so first.
        where: Returns the path of the current module.
        on_array: Called with each tensor that is read without an op.
        phase: Of the step. Nothing is assumed in the optimizer.
    """

    def __init__(
        self,
        run: RunOp = call_op,
        *,
        assumes_for_large: bool = True,
        all_values: bool = False,
        checks: ValueChecks | None = None,
    ) -> None:
        self._run = run
        self._checks = checks or ValueChecks()
        self._assumes = assumes_for_large
        self._values = PropagatedValues(self._checks, all_values=all_values)
        self._asked: Counter[tuple[object, int]] = Counter()
        self.notes: dict[str, str] = {}
        self.where: Callable[[], str] = str
        self.on_array: Callable[[torch.Tensor], object] = id
        self.phase = "setup"
        self.record = self._values.record
        self.value = self._values.value

    def run(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an op on fakes; if all its input values are known, compute the outputs'.

        Raises:
            UnknownValueError: The op needs an unknown value.
            DataDependentOutputException: The same in the optimizer.
        """
        traits, values = traits_of(func), self._values
        if traits.takes_masks:
            args = (args[0], list(self._masks_to_indices(args[1])), *args[2:])
        known = values.inputs_known(traits, args, kwargs)
        if traits.data_dependent:
            return self._run_data_dependent(func, args, kwargs, known=known)
        if traits.takes_indices:
            self._check_bounds(func, args)
        out = self._run(func, args, kwargs)
        if known and values.all_values and self._needs_no_values():
            known = False
        if traits.assumption is not None and (traits.random or not known):
            self._assume(traits.assumption, args, kwargs, out)
        elif not known or (traits.random and not values.all_values):
            if traits.mutates:
                values.invalidate(func, args)
        elif values.worth_computing(traits, args, out):
            values.propagate(func, args, kwargs, out)
        return out

    def _check_bounds(self, func: OpOverload, args: Args) -> None:
        """Check known indices against the tensor's size, as CUDA kernels do."""
        for dim, indices in indices_of(func, args):
            real = self.value(indices)
            if real is None or not real.numel() or self._values.reasons(indices):
                continue
            with _disable_current_modes():
                least, most = (int(x) for x in without_repeats(real).aminmax())
            size = args[0].shape[dim]
            if most >= size or least < -size:
                raise IndexError(
                    f"index {most if most >= size else least} is out of bounds for "
                    f"dimension {dim} with size {size}"
                )

    def note_lines(self) -> list[str]:
        """Return the notes, each with the module that needed it first."""
        notes = self.notes
        if self._checks.says_no:
            answers = (FULL_MASK, READ_NUMBER)
            notes = {ANSWERED_NO if n in answers else n: m for n, m in notes.items()}
        lines = [
            f"{note} (first in {module!r})" if module else note
            for note, module in sorted(notes.items())
        ]
        return [REAL_VALUES, *lines] if self._values.all_values else lines

    def array_of(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """Return a fake tensor's values as a numpy array, if known or no integers."""
        self.on_array(tensor)
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

    # -- known values -----------------------------------------------------------------

    def _needs_no_values(self) -> bool:
        """Return whether this phase reads no values: backward and optimizer."""
        # A recomputation in the backward builds a graph, and reads them again.
        return self.phase == "optimizer" or (
            self.phase == "backward" and not torch.is_grad_enabled()
        )

    def record_weight(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """Record the values of a weight or buffer: all, or of small integer buffers."""
        with _disable_current_modes():
            if self._values.all_values:
                self.record(fake, weight_values(real))
            elif is_small_integer_buffer(real):
                self.record(fake, real.detach().to("cpu", copy=True))

    def _assume(
        self,
        assumption: Callable[..., AssumedValue | None],
        args: Args,
        kwargs: Kwargs,
        out: object,
    ) -> None:
        if assumption is to_bool and kwargs.get("dtype") is not torch.bool:
            return  # as most casts are: disabling the modes takes longer than an op
        with _disable_current_modes():
            found = assumption(out, *args, **kwargs)
        if found is not None:
            why = (found.why,) if found.why else ()
            self.record(found.output, found.value, why)

    # -- data-dependent ops -----------------------------------------------------------

    def _run_data_dependent(
        self, func: OpOverload, args: Args, kwargs: Kwargs, *, known: bool
    ) -> object:
        if known and func not in HOST_OUTPUTS:
            why = self._values.reasons(args, tuple(kwargs.values()))
            self._note(why, func)
            large = func is aten.nonzero.default and args[0].numel() > MAX_INTEGERS
            if large and (mask := self.value(args[0])) is not None:
                with _disable_current_modes():
                    places = unlisted_places(count_nonzero(mask), mask.dim())
                return self._fakes_of(places, why)
            real = self._values.compute(func, args, kwargs)
            if real is None:
                raise UnknownValueError(str(func), "it does not run with real values")
            return self._answer(real, why)
        if func is aten.masked_select.default:
            x, mask = torch.broadcast_tensors(args[0], args[1])
            return self.run(aten.index.Tensor, (x, [mask]), {})
        if self.phase == "optimizer":
            return func(*args, **kwargs)  # raises, unless a fake has the value
        try:
            return func(*args, **kwargs)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            RuntimeError,
        ):
            with _disable_current_modes():
                found = ASSUMED_RESULTS[func](self.value, *args, **kwargs)
        if found is None:
            raise UnknownValueError(str(func), "it needs values that are not known")
        return self._assumed(func, found)

    def _assumed(self, func: OpOverload, found: AssumedResult) -> object:
        if found.why == READ_NUMBER:
            found = found._replace(result=self._checks.number())
        why = (found.why,) if found.why else ()
        self._note(why, func)
        host = HOST_OUTPUTS.get(func, ())
        if not host:
            return self._answer(found.result, why)
        return tuple(
            x if n in host else self._fakes_of(x, why)
            for n, x in enumerate(found.result)
        )

    def _answer(self, real: object, why: Iterable[str]) -> Any:
        """Return a result's fakes, or the answer to a question about unknown values."""
        if real is True and FULL_MASK in why:
            return self._checks.answer()
        return self._fakes_of(real, why)

    def _fakes_of(self, real: object, why: Iterable[str] = ()) -> object:
        """Return fakes for concrete tensors, and for unknown ones on meta."""
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
                self.record(fake, value, why)
        return tree_unflatten(fakes, spec)

    def _masks_to_indices(
        self, indices: list[torch.Tensor | None]
    ) -> Iterator[torch.Tensor | None]:
        """Convert boolean masks to indices; a fake mask has no count of them."""
        for index in indices:
            if index is not None and index.dtype == torch.bool:
                known = self.value(index) is not None
                found = self._run_data_dependent(
                    aten.nonzero.default, (index,), {}, known=known
                )
                yield from self.run(aten.unbind.int, (found, 1), {})
            else:
                yield index

    def _note(self, why: Iterable[str], func: OpOverload | None = None) -> None:
        """Note the assumptions behind a result.

        Raises:
            UnknownValueError: The same line has been answered "true" too often, an
                endless loop; or the value may be known in a smaller batch.
        """
        for reason in why:
            self.notes.setdefault(reason, self.where())
        if why and self._values.overflowed and not self._assumes:
            raise UnknownValueError(
                str(func), "more whole numbers than are followed in a trace"
            )
        if FULL_MASK in why and func in SCALARS:
            line = _model_line()
            self._asked[line] += 1
            if self._asked[line] > MAX_ASSUMED_RESULTS:
                raise UnknownValueError(
                    str(func), "a loop ends when values say so that are not known"
                )


def _model_line() -> tuple[object, int]:
    """Return the current line of the model's code."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        _NOT_THE_MODEL
    ):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno
