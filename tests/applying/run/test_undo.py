from typing import Any

import pytest
from torch import nn

from budgetfit.applying.undo import Undo


def test_changes_are_put_back_last_first_and_once() -> None:
    done: list[int] = []
    undo = Undo()
    undo.add(done.append, 1)
    undo.add(done.append, 2)
    undo()
    undo()
    assert done == [2, 1]


def test_attributes_that_were_not_there_are_gone_again() -> None:
    module = nn.Linear(1, 1)
    before = dict(module.__dict__)
    undo = Undo()
    undo.set_attribute(module, "forward", print)
    undo.set_attribute(module, "forward", len)
    undo.set_attribute(module, "training", value=False)
    assert module.forward is len
    undo()
    assert module.__dict__ == before


def test_hidden_attributes_come_back_and_missing_ones_do_not_matter() -> None:
    module: Any = nn.Linear(1, 1)
    module.forward = len
    undo = Undo()
    undo.hide_attribute(module, "forward")
    undo.hide_attribute(module, "nothing")
    assert "forward" not in module.__dict__
    undo()
    assert module.__dict__["forward"] is len


def test_an_error_while_changing_undoes_and_a_good_end_does_not() -> None:
    done: list[str] = []
    with Undo() as kept:
        kept.add(done.append, "kept")
    assert done == []
    undo = Undo()
    undo.add(done.append, "undone")
    with pytest.raises(ZeroDivisionError), undo:
        1 / 0  # noqa: B018
    assert done == ["undone"]
