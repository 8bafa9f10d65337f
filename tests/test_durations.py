"""Which tests a quick run takes: the cheapest that fit, and every new one."""

import pytest

from tests import durations

NODES = [
    *(f"tests/a/test_one.py::test_quick[{number}]" for number in range(10)),
    "tests/a/test_one.py::test_slow[x]",
    "tests/a/test_one.py::test_slower",
    "tests/a/test_one.py::test_short",
]
KNOWN = {
    "tests/a/test_one::test_quick": 0.1,
    "tests/a/test_one::test_slow": 2.0,
    "tests/a/test_one::test_slower": 3.0,
    durations.OTHERS: 0.01,
}


@pytest.mark.parametrize(
    ("within_s", "names"),
    [
        (0, {"short"}),  # what is in no file runs always
        (1.1, {"short", "quick"}),  # ten of 0.1 s
        (3.1, {"short", "quick", "slow"}),
        (3.0, {"short", "quick"}),
        (99, {"short", "quick", "slow", "slower"}),
    ],
)
def test_the_cheapest_run_within_the_time(
    monkeypatch: pytest.MonkeyPatch, within_s: float, names: set[str]
) -> None:
    monkeypatch.setattr(durations, "read", lambda: KNOWN)
    found = durations.chosen(NODES, within_s)
    assert found == {f"tests/a/test_one::test_{name}" for name in names}


def test_of_equal_ones_the_first_by_name_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of xdist, whose sets differ in order, must choose the same."""
    names = [f"tests/a/test_one::test_{number:02}" for number in range(20)]
    known = {**dict.fromkeys(names, 1.0), durations.OTHERS: 0.01}
    monkeypatch.setattr(durations, "read", lambda: known)
    assert durations.chosen(names, 7.5) == set(names[:7])


def test_the_file_names_tests_that_there_are() -> None:
    files = {name.partition("::")[0] for name in durations.read()} - {durations.OTHERS}
    root = durations.FILE.parents[1]
    assert files
    assert all((root / f"{file}.py").exists() for file in files)
