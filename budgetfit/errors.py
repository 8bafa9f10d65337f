"""Every error that budgetfit raises on purpose: text for people, fields for programs.

All of them can be pickled, because they cross process borders in data loaders and
launchers.
"""

from dataclasses import dataclass
from typing import Any

from budgetfit.utils.format_bytes import format_bytes

MOST_SUGGESTIONS = 3  # that are told; all are in the error


class BudgetfitError(Exception):
    """The parent of all errors of this package; catching it catches them all."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own would call a child without its keyword-only arguments.
        return (_rebuild, (type(self), self.args, self.__dict__))


class InputError(BudgetfitError, ValueError):
    """What a user handed in is not usable; the text shows the right form."""


class RecomputationError(InputError):
    """A block did something else when it ran again in backward.

    Attributes:
        block: The block's name.
        difference: Of what backward reads: the norm of the difference over the norm;
            infinite where shapes or numbers of tensors differ.
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
        arguments: What to change: arguments of ``plan`` and their values.
        recipe: The ``Recipe`` that was evaluated.
        peak_bytes: Predicted peak of what PyTorch reserves with it.
        host_bytes: Pinned host memory that it uses.
        samples_per_s: The roofline's estimate for that recipe, which need not be the
            fastest with the change.
        changes_training: Whether it trains other numbers.
    """

    arguments: dict[str, Any]
    recipe: object | None
    peak_bytes: int
    host_bytes: int = 0
    samples_per_s: float = 0.0
    changes_training: bool = True

    @property
    def text(self) -> str:
        """What to change, as arguments in Python."""
        return ", ".join(f"{name}={_value(x)}" for name, x in self._given())

    @property
    def options(self) -> str:
        """What to change, as options of the command line."""
        return " ".join(_option(name, value) for name, value in self._given())

    def _given(self) -> list[tuple[str, Any]]:
        return [(name, x) for name, x in self.arguments.items() if x is not None]


def _value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _option(name: str, value: object) -> str:
    """Return an argument as an option.

    >>> _option("prepare_for_kbit", False), _option("gpu", "a100-80gb")
    ('--no-prepare-for-kbit', '--gpu a100-80gb')
    """
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    return f"--{dashed} {value}"


class DoesNotFitError(BudgetfitError):
    """Nothing that was allowed fits the budget.

    Attributes:
        needed_bytes: The lowest peak that is known: of everything a plan may choose.
        usable_bytes: What the budget leaves for the allocator.
        largest: Name and bytes of the largest part at that peak.
        suggestions: Changes that were evaluated and fit, best first.
        floor_bytes: What no plan is below: weights, gradients and optimizer states in
            the optimizer step, or weights while they are converted, whatever is
            recomputed or offloaded.
        notes: What explains a surprising size.
    """

    def __init__(  # noqa: PLR0913 - one value each
        self,
        *,
        needed_bytes: int,
        usable_bytes: int,
        largest: tuple[str, int],
        suggestions: tuple[Suggestion, ...] = (),
        floor_bytes: int = 0,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.needed_bytes = needed_bytes
        self.usable_bytes = usable_bytes
        self.largest = largest
        self.suggestions = suggestions
        self.floor_bytes = floor_bytes
        self.notes = notes
        super().__init__(self.text())

    @property
    def proven(self) -> bool:
        """Whether no plan can fit; else only that none was found."""
        return self.floor_bytes > self.usable_bytes

    def with_suggestions(self, more: tuple[Suggestion, ...]) -> "DoesNotFitError":
        """Return the error with further suggestions, the best of all first."""
        found = sorted(
            (*self.suggestions, *more),
            key=lambda each: (each.changes_training, -each.samples_per_s),
        )
        return DoesNotFitError(
            needed_bytes=self.needed_bytes,
            usable_bytes=self.usable_bytes,
            largest=self.largest,
            suggestions=tuple(found),
            floor_bytes=self.floor_bytes,
            notes=self.notes,
        )

    def text(self, *, as_options: bool = False) -> str:
        """Return what the error says.

        Args:
            as_options: Whether suggestions are options of the command line.
        """
        name, largest_bytes = self.largest
        needed, usable = (
            format_bytes(size) for size in (self.needed_bytes, self.usable_bytes)
        )
        if self.proven:
            reason = (
                "Does not fit: weights, gradients and optimizer states take "
                f"{format_bytes(self.floor_bytes)}, whatever is recomputed, and "
                f"{usable} are usable."
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
                f"  {each.options if as_options else each.text}: "
                f"peak {format_bytes(each.peak_bytes)}"
                + (
                    f", host memory {format_bytes(each.host_bytes)}"
                    * (each.host_bytes > 0)
                )
                for each in self.suggestions[:MOST_SUGGESTIONS]
            ]
        else:
            lines.append("No change that was tried fits.")
        lines += [f"Note: {note}." for note in self.notes]
        return "\n".join(lines)


def _rebuild(
    kind: type[BudgetfitError], args: tuple[Any, ...], fields: dict[str, Any]
) -> BudgetfitError:
    """Make an error again without asking its constructor."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error
