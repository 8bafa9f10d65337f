import gc

import pytest

from budgetfit.traces.gc_freeze import freeze_gc


def test_old_objects_are_left_alone_and_given_back() -> None:
    assert gc.get_freeze_count() == 0
    with freeze_gc():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


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
