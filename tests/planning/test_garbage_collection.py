import gc
from collections.abc import Iterator

import pytest

from budgetfit.utils.garbage_collection import (
    NEW_OBJECTS,
    collect_less_often,
    freeze_gc,
)


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


def test_old_objects_are_left_alone_and_given_back() -> None:
    assert gc.get_freeze_count() == 0
    with freeze_gc():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_new_objects_are_collected_less_often() -> None:
    before = gc.get_threshold()
    with freeze_gc():
        assert gc.get_threshold() == (NEW_OBJECTS, *before[1:])
        with freeze_gc():
            pass
        assert gc.get_threshold() == (NEW_OBJECTS, *before[1:])
    assert gc.get_threshold() == before


def test_an_error_gives_them_back_too() -> None:
    with pytest.raises(ValueError, match="no"), freeze_gc():
        raise ValueError("no")
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with freeze_gc():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_what_somebody_chose_is_not_made_more_often_or_turned_on() -> None:
    before = gc.get_threshold()
    try:
        for chosen in ((0, 10, 10), (2 * NEW_OBJECTS, 10, 10)):
            gc.set_threshold(*chosen)
            collect_less_often()
            assert gc.get_threshold() == chosen
    finally:
        gc.set_threshold(*before)
