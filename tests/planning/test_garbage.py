import gc

import pytest

from budgetfit.traces.gc_freeze import old_objects_left_alone


def test_old_objects_are_left_alone_and_given_back() -> None:
    assert gc.get_freeze_count() == 0
    with old_objects_left_alone():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_an_error_gives_them_back_too() -> None:
    with pytest.raises(ValueError, match="no"), old_objects_left_alone():
        raise ValueError("no")
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with old_objects_left_alone():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
