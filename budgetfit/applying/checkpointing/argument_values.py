"""Restore numbers in containers that a block was given, for its recomputation.

A list, dict or object among a block's arguments is the same one when the block runs
again, and what called the block may have changed a number in it since. The same goes
for those that its attributes and globals lead to. As with attributes, the recomputation
has to find the values that the forward found. Tensors in them are not kept: that would
keep activations alive.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from budgetfit.utils.mutable_state import MAX_ITEMS, HeldState, leaves, mutable_state


class ArgumentValues:
    """Numbers, text and other plain values in the arguments of one forward.

    Larger containers than ``MAX_ITEMS`` are left out. ``others``: what its attributes
    and globals lead to.
    """

    def __init__(
        self,
        args: tuple[object, ...],
        kwargs: dict[str, Any],
        others: Iterable[HeldState] = (),
    ) -> None:
        given = [("", value) for value in (*args, *kwargs.values())]
        held = [*mutable_state(given, limit=MAX_ITEMS), *others]
        self._held = [
            _plain_part(each) for each in held if each.parts and each.size <= MAX_ITEMS
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the values of the forward inside the context, then the current ones."""
        changed = [each for each in self._held if each.has_changed()]
        targets = [("", each.target) for each in changed]
        now = list(mutable_state(targets)) if targets else []
        try:
            for each in changed:
                each.restore()
            yield
        finally:
            for state in now:
                state.restore()


class _PartlyPlain(NamedTuple):
    """An object that holds tensors or others besides plain values.

    Attributes:
        held: It, with the plain ones of its contents alone: by key, or by position.
        others: Keys of the rest.
    """

    held: HeldState
    others: tuple[frozenset[Any], ...]

    @property
    def target(self) -> object:
        """The object."""
        return self.held.target

    def has_changed(self) -> bool:
        """Whether a plain value is another one now."""
        return any(old is not new for old, new in self._merged())

    def restore(self) -> None:
        """Write back the plain values."""
        for part, (now, then) in zip(self.held.parts, self._merged(), strict=True):
            if then is not now:
                part.write(self.target, then)

    def _merged(self) -> Iterator[tuple[object, object]]:
        """Yield each of its contents now, and with the plain values of the forward."""
        # Both are the same object where these are equal.
        for part, plain, others in zip(
            self.held.parts, self.held.contents, self.others, strict=True
        ):
            now = part.read(self.target)
            if isinstance(now, dict):
                then = {
                    key: value
                    for key, value in now.items()
                    if key in plain or key in others or not _is_plain(value)
                } | plain
                same = len(then) == len(now) and all(
                    now[key] is value for key, value in then.items()
                )
            elif isinstance(now, list):
                then = now.copy()
                for position, value in plain.items():
                    if position < len(then):
                        then[position] = value
                same = all(old is new for old, new in zip(now, then, strict=True))
            else:  # a set that holds others, too
                then, same = now, True
            yield now, now if same else then


def _plain_part(held: HeldState) -> HeldState | _PartlyPlain:
    """Return a state without tensors and what may hold them."""
    if all(map(_is_plain, held.items())):
        return held
    plain: list[dict[Any, Any]] = []
    others: list[frozenset[Any]] = []
    for content in held.contents:
        pairs: dict[Any, Any] = {}
        if isinstance(content, dict):
            pairs = content
        elif isinstance(content, list):
            pairs = dict(enumerate(content))
        plain.append({key: value for key, value in pairs.items() if _is_plain(value)})
        others.append(frozenset(pairs.keys() - plain[-1].keys()))
    return _PartlyPlain(held._replace(contents=tuple(plain)), tuple(others))


def _is_plain(value: object) -> bool:
    """Whether it is a number, text or the like, or holds nothing else."""
    # The garbage collector does not track what can hold no other object.
    return not any(map(gc.is_tracked, leaves(value)))
