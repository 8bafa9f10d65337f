"""What a right answer says: worked out by hand, never taken from an answer."""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from budgetfit.gpus.table import find_gpu
from tests.situations.answer import DOES_NOT_FIT, FITS, GIB, Answer

DEFAULT_HOST_GIB = 16.0  # of plans made where the card is not
ROUNDING_GIB = 0.01  # of figures that are written with two digits
NEAR = 0.01  # share by which bytes may differ from those by hand
# Refusals look no further where less than this share could be saved (decision 0029).
NOT_SOUGHT = 0.002
# Beyond that: copies that autocast keeps, and the ends of the allocator's blocks, which
# PyTorch counts as allocated (up to 1 MiB for each tensor).
MORE_GIB = 0.03


class Expectation(Protocol):
    """What a question's answer is held to."""

    def wrong(self, answer: Answer) -> Iterator[str]:
        """Yield what is wrong with it, with the numbers."""

    def in_short(self) -> str:
        """Return itself for a table."""


@dataclass(frozen=True, slots=True)
class Fits:
    """Settings that fit, with the bytes that can be counted by hand.

    Attributes:
        parameters_gib: Of all weights, adapters and copies of weights; within 1 %.
        states_gib: Of the optimizer; within 1 %. None where it is not checked.
        reserved_gib: Bounds of the peak, where other work or a count gives them.
        samples_per_s: The least speed: that of known settings that fit.
        host_gib: Memory of the host that may be pinned.
        recipe: Settings that must be exactly so.
        effective: Samples of one optimizer step; never changed.
        says: What it must say in words.
        fits: False for an estimate that does not fit.
    """

    parameters_gib: float
    states_gib: float | None = None
    reserved_gib: tuple[float, float] = (0.0, float("inf"))
    _: KW_ONLY
    samples_per_s: float = 0.0
    host_gib: float = DEFAULT_HOST_GIB
    recipe: Mapping[str, object] = field(default_factory=dict)
    effective: int | None = None
    says: tuple[str, ...] = ()
    fits: bool = True

    def wrong(self, answer: Answer) -> Iterator[str]:
        """Yield what is wrong with the answer."""
        if answer.code != (FITS if self.fits else DOES_NOT_FIT):
            yield f"exit {answer.code}: {_error(answer)}"
            return
        yield from self._bytes(answer.estimate)
        yield from self._settings(answer)
        yield from missing_words(self.says, answer)

    def _bytes(self, estimate: dict[str, Any]) -> Iterator[str]:
        at_peak = estimate["at_peak_bytes"]
        for name, by_hand in (
            ("parameters", self.parameters_gib),
            ("optimizer_state", self.states_gib),
        ):
            gib = at_peak[name] / GIB
            if by_hand is None:
                continue
            least, most = (1 - NEAR) * by_hand, (1 + NEAR) * by_hand + MORE_GIB
            if not least <= gib <= most:
                yield f"{name} {gib:.3f} GiB, by hand {by_hand:.3f}"
        reserved = estimate["reserved_bytes"] / GIB
        least, most = self.reserved_gib
        if not least - ROUNDING_GIB <= reserved <= most + ROUNDING_GIB:
            yield f"reserved {reserved:.2f} GiB, not in {least:.2f} to {most:.2f}"
        if bool(estimate["fits"]) is not self.fits:
            yield f"fits is {estimate['fits']}"
        pinned = estimate["host_bytes"] / GIB
        if pinned > self.host_gib:
            yield f"{pinned:.2f} GiB pinned, the host has {self.host_gib:.2f}"

    def _settings(self, answer: Answer) -> Iterator[str]:
        recipe, estimate = answer.recipe, answer.estimate
        for name, value in self.recipe.items():
            if recipe[name] != value:
                yield f"{name} {recipe[name]}, asked for {value}"
        samples = recipe["batch_size"] * recipe["gradient_accumulation_steps"]
        if self.effective not in {None, samples}:
            yield f"effective batch {samples}, asked for {self.effective}"
        per_s = 1000 * samples / estimate["step_ms"] if estimate["step_ms"] else 0.0
        if per_s < self.samples_per_s:
            yield f"{per_s:.3f} samples/s, {self.samples_per_s} fit"
        budget = answer.document.get("budget")
        if budget is not None and self.fits:
            taken = ("context_bytes", "headroom_bytes")
            usable = budget["total_bytes"] - sum(budget[name] for name in taken)
            if estimate["reserved_bytes"] > usable:
                yield f"reserved {estimate['reserved_bytes']} of {usable} usable bytes"

    def in_short(self) -> str:
        """Return itself for a table."""
        verdict = "fits" if self.fits else "does not fit"
        return f"{verdict}, parameters {self.parameters_gib:.2f} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Nothing fits, and the figures and the advice are true.

    Attributes:
        floor_gib: What every setting needs, by hand; no figure may be below it.
        known_gib: Peak of a known recipe; the figure may be above it by 0.2 %.
        suggests: Words, each in the text of a suggestion.
        says: What it must say in words.
    """

    floor_gib: float
    known_gib: float
    suggests: tuple[str, ...] = ()
    says: tuple[str, ...] = ()

    def wrong(self, answer: Answer) -> Iterator[str]:
        """Yield what is wrong with the answer."""
        if answer.code != DOES_NOT_FIT or "needed_bytes" not in answer.error:
            yield f"exit {answer.code}, not refused: {_error(answer)}"
            return
        yield from self._bytes(answer)
        yield from self._advice(answer)
        yield from missing_words(self.says, answer)

    def _bytes(self, answer: Answer) -> Iterator[str]:
        needed = answer.error["needed_bytes"] / GIB
        if needed > self.known_gib * (1 + NOT_SOUGHT) + ROUNDING_GIB:
            yield f"{needed:.2f} GiB needed, {self.known_gib:.2f} is known to do"
        if needed < self.floor_gib - ROUNDING_GIB:
            yield f"{needed:.2f} GiB needed, below {self.floor_gib:.2f} by hand"
        if answer.error["needed_bytes"] <= answer.error["usable_bytes"]:
            yield f"{needed:.2f} GiB needed, which is usable"
        proven = answer.error.get("floor_bytes", 0) / GIB
        if proven > min(needed, self.known_gib) + ROUNDING_GIB:
            yield f"nothing below {proven:.2f} GiB, it says; {needed:.2f} needed"

    def _advice(self, answer: Answer) -> Iterator[str]:
        for each in answer.suggestions:
            card = (each.get("arguments") or {}).get("gpu")
            limit_bytes = answer.error["usable_bytes"]
            if card is not None:  # another card than the one that was asked about
                limit_bytes = find_gpu(card).total_bytes
            if each["peak_bytes"] > limit_bytes:
                yield f"suggested: {each['text']!r}, which does not fit"
            host = each.get("host_bytes", 0) / GIB
            if host > DEFAULT_HOST_GIB:
                yield f"suggested: {each['text']!r}, which pins {host:.2f} GiB"
        texts = " | ".join(each["text"] for each in answer.suggestions).lower()
        for word in self.suggests:
            if word.lower() not in texts:
                yield f"{word!r} is not suggested: {texts or 'nothing is'}"

    def in_short(self) -> str:
        """Return itself for a table."""
        return f"refused, {self.floor_gib:.2f} to {self.known_gib:.2f} GiB needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLine:
    """A mistake, or a question that has no answer: one clear line on stderr.

    Attributes:
        says: What it must say in words.
        code: The exit code.
    """

    says: tuple[str, ...]
    code: int = 2

    def wrong(self, answer: Answer) -> Iterator[str]:
        """Yield what is wrong with the answer."""
        if answer.code != self.code:
            yield f"exit {answer.code}: {_error(answer)}"
        if "Traceback" in answer.stderr:
            yield "a traceback"
        yield from missing_words(self.says, answer)

    def in_short(self) -> str:
        """Return itself for a table."""
        return f"exit {self.code}: {', '.join(self.says)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A table of cards, or of cards and methods: which fit.

    Attributes:
        fits: Verdict by the row's name: card, or card and method.
    """

    fits: Mapping[str, bool]

    def wrong(self, answer: Answer) -> Iterator[str]:
        """Yield what is wrong with the answer."""
        found = {_row_name(row): bool(row["fits"]) for row in _rows(answer)}
        if not found:
            yield f"exit {answer.code}: {_error(answer)}"
        for name, fits in self.fits.items():
            if found.get(name) is not fits:
                yield f"{name}: fits is {found.get(name)}, not {fits}"

    def in_short(self) -> str:
        """Return itself for a table."""
        return ", ".join(
            f"{name} {'fits' if fits else 'does not'}"
            for name, fits in self.fits.items()
        )


def missing_words(words: tuple[str, ...], answer: Answer) -> Iterator[str]:
    """Yield what the answer does not say, in any case of letters."""
    said = " ".join(answer.words.lower().split())
    for word in words:
        if word.lower() not in said:
            yield f"does not say {word!r}"


def answer_in_short(answer: Answer) -> str:
    """Return an answer for a table."""
    estimate = answer.estimate
    if "reserved_bytes" in estimate:
        recipe = answer.recipe
        size = f"{recipe['batch_size']}x{recipe['gradient_accumulation_steps']}"
        verdict = "fits" if estimate["fits"] else "does not fit"
        return f"{verdict}, {size}, {estimate['reserved_bytes'] / GIB:.2f} GiB"
    if "needed_bytes" in answer.error:
        needed = answer.error["needed_bytes"] / GIB
        return f"refused, {needed:.2f} GiB needed"
    rows = [f"{_row_name(row)} {_yes(row['fits'])}" for row in _rows(answer)]
    return ", ".join(rows) or f"exit {answer.code}: {_error(answer)}"


def pinned_gib(answer: Answer) -> float:
    """Return the host's memory that the answer's settings take."""
    return float(answer.estimate.get("host_bytes") or 0) / GIB


def _yes(fits: object) -> str:
    return "fits" if fits else "does not"


def _rows(answer: Answer) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = answer.document.get("cards", [])
    return rows


def _row_name(row: Mapping[str, Any]) -> str:
    card, method = row["gpu"]["name"], row.get("method", "full")
    return f"{card} {method}"


def _error(answer: Answer) -> str:
    text = answer.error.get("message") or answer.stderr.strip()
    return (text.splitlines() or [""])[0][:120]
