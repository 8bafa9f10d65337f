"""Every error that budgetfit raises on purpose: text for people, fields for programs.

All of them can be pickled, because they cross process borders in data loaders and
launchers.
"""

from dataclasses import dataclass
from typing import Any

from budgetfit.core.byte_text import format_bytes


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


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change that was evaluated and fits.

    Attributes:
        text: What to change, in plain words.
        recipe: The ``Recipe`` that was evaluated; None where the change is no recipe
            (a larger card).
        peak_bytes: Predicted peak of the process with it.
    """

    text: str
    recipe: object | None
    peak_bytes: int


class DoesNotFitError(BudgetfitError):
    """Nothing that was allowed fits the budget.

    Attributes:
        needed_bytes: The least peak found: batch size 1, everything recomputed.
        usable_bytes: What the budget leaves for the allocator.
        largest: Name and bytes of the largest part at that peak.
        suggestions: Evaluated recipes that would fit, best first.
    """

    def __init__(
        self,
        *,
        needed_bytes: int,
        usable_bytes: int,
        largest: tuple[str, int],
        suggestions: tuple[Suggestion, ...] = (),
    ) -> None:
        self.needed_bytes = needed_bytes
        self.usable_bytes = usable_bytes
        self.largest = largest
        self.suggestions = suggestions
        super().__init__(self._text())

    def _text(self) -> str:
        name, largest_bytes = self.largest
        needed = format_bytes(self.needed_bytes)
        usable = format_bytes(self.usable_bytes)
        lines = [
            f"Does not fit: at least {needed} are needed, {usable} are usable.",
            f"Largest part: {name.replace('_', ' ')}, {format_bytes(largest_bytes)}.",
        ]
        if self.suggestions:
            lines.append("What would fit:")
            lines += [
                f"  {suggestion.text}: peak {format_bytes(suggestion.peak_bytes)}"
                for suggestion in self.suggestions
            ]
        else:
            lines.append(
                "No evaluated change fits: take a smaller model or a larger card."
            )
        return "\n".join(lines)


def _rebuild(
    kind: type[BudgetfitError], args: tuple[Any, ...], fields: dict[str, Any]
) -> BudgetfitError:
    """Make an error again without asking its constructor."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error
