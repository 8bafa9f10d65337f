"""Models of the zoo are traced, planned, applied and verified.

All of them take an hour (``make zoo``); here runs one of sixty of each family that is
of an architecture of its own and quick, and what is known not to work. What another
task asks of a batch is in tests/example_batches/test_make_batch_transformers.py.
"""

import re
from collections import defaultdict

import pytest

from tests.zoo.check import check
from tests.zoo.entry import zoo
from tests.zoo.known_failures import KNOWN_FAILURES

ONE_OF = 60
# Each takes a quarter of a minute.
SLOW = {
    *("BeitForImageClassification", "DPTForSemanticSegmentation"),
    *("Qwen2AudioForConditionalGeneration", "plain UNet with time and text"),
}
# They take four times as long as all else.
WITH_ALTERNATIVES = {"OlmoForCausalLM", "user's dictionary as output"}


def chosen() -> list[str]:
    families = defaultdict(list)
    for entry in zoo().values():
        families[entry.family].append(entry.name)
    names: dict[str, str] = {}
    for name in (name for family in families.values() for name in family[::ONE_OF]):
        names.setdefault(re.split("For[A-Z]|Model$", name)[0], name)
    quick = [name for name in names.values() if name not in SLOW]
    return list(dict.fromkeys([*quick, *KNOWN_FAILURES]))


@pytest.mark.parametrize("name", chosen())
def test_a_model_is_planned_and_trains_as_without_a_plan(name: str) -> None:
    outcome = check(zoo()[name], alternatives=name in WITH_ALTERNATIVES)
    if name in KNOWN_FAILURES:
        assert outcome.reason, f"{name} works: take it out of KNOWN_FAILURES"
    else:
        assert not outcome.reason, outcome.reason


def test_what_is_named_is_in_the_zoo() -> None:
    assert zoo().keys() >= {*KNOWN_FAILURES, *SLOW}
    assert set(chosen()) >= WITH_ALTERNATIVES


def test_the_zoo_has_150_architectures_of_transformers() -> None:
    stock = {name for name, entry in zoo().items() if "For" in name}
    assert len(stock) >= 150
