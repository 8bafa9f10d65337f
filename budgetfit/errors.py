"""Exceptions of budgetfit, with messages for users and fields for programs.

All can be pickled, because they cross processes in data loaders and launchers.
"""

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

from budgetfit.utils.format_bytes import format_bytes

SMALL_BATCH = 0.01  # of the optimizer step: not worth a word
MAX_SUGGESTIONS = 3  # in the message; the error may have more


class BudgetfitError(Exception):
    """Base class of all errors of this package."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own calls subclasses without their keyword-only arguments.
        return (_rebuild, (type(self), self.args, self.__dict__))


class InputError(BudgetfitError, ValueError):
    """An argument is invalid; the message shows the right form."""


class FileError(OSError, InputError):
    """A file that an argument names cannot be written; with ``errno``, ``filename``."""

    def __str__(self) -> str:
        """Return the message alone; ``OSError`` adds a number and the name."""
        return str(self.args[0])


def file_error(path: object, error: Exception) -> FileError:
    """Return the error for a file that could not be written, from the system's."""
    reason = getattr(error, "strerror", None) or error
    made = FileError(
        f"Cannot write {str(path)!r}: {reason}. Name a file in a folder that can be "
        "written to, such as plan.json; a file that was there is as it was."
    )
    made.errno = getattr(error, "errno", None)
    made.filename = str(path)
    return made


class RecomputationError(InputError):
    """Recomputing a checkpointed block gave another result than its forward.

    Attributes:
        block: The block's name.
        difference: Relative difference of the saved tensors (norm of the difference
            over norm); infinite where shapes or numbers of tensors differ.
    """

    def __init__(self, message: str, *, block: str, difference: float) -> None:
        super().__init__(message)
        self.block = block
        self.difference = difference


class TraceError(BudgetfitError):
    """A training step could not be traced.

    Attributes:
        module: Path of the module in the model, for example ``"layers.3.router"``.
        op: The operation, for example ``"aten.nonzero.default"``.
    """

    def __init__(self, message: str, *, module: str, op: str) -> None:
        super().__init__(message)
        self.module = module
        self.op = op


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change that was evaluated and fits.

    Attributes:
        arguments: Arguments of ``plan`` to change, with their values.
        recipe: The ``Recipe`` that was evaluated.
        peak_bytes: Predicted peak of reserved memory.
        host_bytes: Host memory, of all GPUs in a machine.
        samples_per_s: Estimate for that recipe, which need not be the fastest
            with the change.
        changes_training: Whether training computes other numbers.
    """

    arguments: dict[str, Any]
    recipe: object | None
    peak_bytes: int
    host_bytes: int = 0
    samples_per_s: float = 0.0
    changes_training: bool = True

    @property
    def text(self) -> str:
        """The changed arguments in Python syntax."""
        return ", ".join(f"{name}={_value(x)}" for name, x in self._given())

    @property
    def options(self) -> str:
        """The changed arguments as command-line options."""
        return " ".join(_option(name, value) for name, value in self._given())

    def _given(self) -> list[tuple[str, Any]]:
        return [(name, x) for name, x in self.arguments.items() if x is not None]


def _left_out(suggestion: Suggestion, *, as_options: bool) -> str:
    """Name the arguments that must not be given any more."""
    names = [name for name, value in suggestion.arguments.items() if value is None]
    if not names:
        return ""
    told = [f"--{n.replace('_', '-')}" if as_options else f"{n}=" for n in names]
    return f" instead of {' and '.join(told)}"


def _value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _option(name: str, value: object) -> str:
    """Format an argument as a command-line option.

    >>> _option("prepare_for_kbit", False), _option("gpu", "a100-80gb")
    ('--no-prepare-for-kbit', '--gpu a100-80gb')
    """
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    return f"--{dashed} {value}"


class DoesNotFitError(BudgetfitError):
    """No allowed settings fit the budget.

    Attributes:
        needed_bytes: The lowest peak found over all settings that a plan may choose; of
            a large model the lowest by formula, where ``floor_bytes`` is too much. An
            upper bound: far above ``usable_bytes`` it is looked for more briefly, and
            with more memory a lower one may be found.
        usable_bytes: Limit on reserved memory by the budget.
        largest: Name and bytes of the largest category at that peak.
        suggestions: Changes that were evaluated and fit, best first. Further changes of
            an argument are evaluated only where first ones are fewer than three.
        floor_bytes: Lower bound of every plan: weights, gradients, optimizer states and
            the batch in the optimizer step, or weights while they are converted,
            whatever is recomputed or offloaded within the host's memory.
        batch_bytes: What the batch takes of that.
        notes: Explanations of surprising sizes.
        host_bytes: Host memory at that peak, of all GPUs in a machine.
        host_ram_bytes: Limit on it; None: no limit.
    """

    def __init__(  # noqa: PLR0913 - one value each
        self,
        *,
        needed_bytes: int,
        usable_bytes: int,
        largest: tuple[str, int],
        suggestions: tuple[Suggestion, ...] = (),
        floor_bytes: int = 0,
        batch_bytes: int = 0,
        notes: tuple[str, ...] = (),
        host_bytes: int = 0,
        host_ram_bytes: int | None = None,
    ) -> None:
        self.needed_bytes = needed_bytes
        self.usable_bytes = usable_bytes
        self.largest = largest
        self.suggestions = suggestions
        self.floor_bytes = floor_bytes
        self.batch_bytes = batch_bytes
        self.notes = notes
        self.host_bytes = host_bytes
        self.host_ram_bytes = host_ram_bytes
        super().__init__(self.text())

    @property
    def proven(self) -> bool:
        """Whether it is proven that no plan fits; else none was found."""
        return self.floor_bytes > self.usable_bytes

    def with_suggestions(self, more: tuple[Suggestion, ...]) -> "DoesNotFitError":
        """Return the error with further suggestions, best first."""
        # Those that train the same on this card come first, then the first change of
        # each argument, as they were evaluated, before the second of any; of these the
        # fastest.
        seen = Counter[str]()
        ranked = []
        for each in (*self.suggestions, *more):
            name = next(iter(each.arguments))
            decides = each.changes_training or "gpu" in each.arguments
            ranked.append(((decides, seen[name], -each.samples_per_s), each))
            seen[name] += 1
        found = [each for _, each in sorted(ranked, key=operator.itemgetter(0))]
        return DoesNotFitError(
            needed_bytes=self.needed_bytes,
            usable_bytes=self.usable_bytes,
            largest=self.largest,
            suggestions=tuple(found),
            floor_bytes=self.floor_bytes,
            batch_bytes=self.batch_bytes,
            notes=self.notes,
            host_bytes=self.host_bytes,
            host_ram_bytes=self.host_ram_bytes,
        )

    def text(self, *, as_options: bool = False) -> str:
        """Return the message; ``as_options``: suggestions are command-line options."""
        name, largest_bytes = self.largest
        needed, usable = (
            format_bytes(size) for size in (self.needed_bytes, self.usable_bytes)
        )
        if self.proven:
            reason = "Does not fit: weights, gradients and optimizer states take"
            if self.batch_bytes > self.floor_bytes * SMALL_BATCH:
                batch = format_bytes(self.batch_bytes)
                reason = (
                    "Does not fit: weights, gradients, optimizer states and the batch "
                    f"({batch}) take"
                )
            reason += (
                f" {format_bytes(self.floor_bytes)}, whatever is recomputed, and "
                f"{usable} are usable."
            )
        elif (
            self.needed_bytes <= self.usable_bytes
            and self.host_ram_bytes is not None
            and self.host_bytes > self.host_ram_bytes
        ):
            reason = (
                f"Does not fit: {format_bytes(self.host_bytes)} of host memory are "
                f"needed, and {format_bytes(self.host_ram_bytes)} are allowed "
                "(host_ram=, --host-ram)."
            )
        else:
            reason = (
                f"Does not fit: the lowest peak that was found is {needed}, and "
                f"{usable} are usable."
            )
        lines = [
            reason,
            f"Largest part: {name.replace('_', ' ')}, {format_bytes(largest_bytes)}.",
        ]
        if self.suggestions:
            lines.append("What would fit:")
            lines += [
                f"  {each.options if as_options else each.text}"
                f"{_left_out(each, as_options=as_options)}: "
                f"peak {format_bytes(each.peak_bytes)}"
                + (
                    f", host memory {format_bytes(each.host_bytes)}"
                    * (each.host_bytes > 0)
                )
                for each in self.suggestions[:MAX_SUGGESTIONS]
            ]
        else:
            lines.append("No change that was tried fits.")
        lines += [f"Note: {note}." for note in self.notes]
        return "\n".join(lines)


def _rebuild(
    kind: type[BudgetfitError], args: tuple[object, ...], fields: dict[str, Any]
) -> BudgetfitError:
    """Recreate a pickled error without calling its constructor."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error
