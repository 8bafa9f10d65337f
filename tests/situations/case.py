"""Case: a question of a user, and what a right answer says."""

import shlex
from dataclasses import dataclass

from tests.situations.answer import Answer, ask, model_path
from tests.situations.expectation import Expectation


@dataclass(frozen=True, slots=True)
class Case:
    """One question.

    Attributes:
        name: Short and unique.
        question: The words after ``budgetfit``, a config's folder as the model; or
            ``python NAME`` for a function of ``in_python``.
        expects: What a right answer says.
        why: The arithmetic by hand, and where known figures are from.
        seconds: Of processor time, about, without a cache of traces.
    """

    name: str
    question: str
    expects: Expectation
    why: str
    seconds: int = 20

    def words(self) -> list[str]:
        """Return what ``python`` is run with."""
        command, *rest = shlex.split(self.question)
        if command == "python":
            return ["-m", "tests.situations.in_python", *rest]
        model, *options = rest
        return ["-m", "budgetfit", command, model_path(model), *options, "--json"]

    def answer(self) -> Answer:
        """Ask."""
        return ask(self.words())
