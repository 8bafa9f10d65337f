"""Find questions that a program asks only to raise an error: ``if (x < 0).any(): ...``.

Questions about unknown values are answered with yes. Where the function that asked then
raises, the trace is made again with no for an answer: the program is right, and so are
its values. All are answered with no where more blocks run then (``trace_program``).
"""

import dis
import sys
from pathlib import Path
from types import CodeType
from typing import Final, Literal

import torch

Line = tuple[CodeType, int]

_PACKAGE: Final = str(Path(__file__).parents[2])
_TORCH: Final = Path(torch.__file__).parent
_NOT_ASKING: Final = (_PACKAGE, str(_TORCH / "_"), str(_TORCH / "utils"))


class ValueChecks:
    """The lines that were answered with yes, the last of them, and those with no.

    Attributes:
        asked: Whether anything was answered.
        says_no: Whether questions are answered with no, and numbers with 0: a model may
            leave early on a yes.
        opposites: The opposite of a mask of unknown values is as full ("full"), was so
            in a trace ("were full"), or is empty, as it must be where the two together
            say how many elements there are ("empty").
    """

    def __init__(self) -> None:
        self.asked = self.says_no = False
        self.opposites: Literal["full", "were full", "empty"] = "full"
        self._last: Line | None = None
        self._denied: set[Line] = set()

    def answer(self) -> bool:
        """Answer a question about unknown values, which the calling line asks."""
        self.asked = True
        if self.says_no:
            return False
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(
            _NOT_ASKING
        ):
            frame = frame.f_back
        line = frame.f_code, frame.f_lineno
        if line in self._denied:
            return False
        self._last = line
        return True

    def number(self) -> float:
        """Return a number that is read out of results."""
        self.asked = True
        return 0.0 if self.says_no else 1.0

    def empty_opposites(self) -> bool:
        """Take opposites as empty from here on; return whether that is another try."""
        before = self.opposites
        self.opposites = "empty"
        return before == "were full"

    def deny(self, error: BaseException) -> bool:
        """Answer no from here on if the last to ask raised; return whether it did."""
        last, self._last = self._last, None
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if last is None or trace is None or trace.tb_frame.f_code is not last[0]:
            return False
        if dis.opname[last[0].co_code[trace.tb_lasti]] != "RAISE_VARARGS":
            return False  # no ``raise`` or ``assert``
        self._denied.add(last)
        return True
