"""Whole answers on disk: the same bytes without the api, or computed again."""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from budgetfit.cli import stored_answers
from budgetfit.cli.answer_key import answers_are_kept, file_version
from budgetfit.cli.stored_answers import ask
from budgetfit.core.plan import LazyAlternatives, Plan
from budgetfit.core.recipe import Recipe
from budgetfit.errors import DoesNotFitError, InputError, Suggestion
from budgetfit.gpus.table import find_gpu
from budgetfit.inputs import target_gpu
from budgetfit.traces.cache import package_hash as own_sources
from budgetfit.traces.cache.folder import CACHE_VARIABLE
from tests.cli.conftest import Run
from tests.cli.fake_api import FakeApi
from tests.cli.real_cli import CONFIG
from tests.processes import python
from tests.reporting.sample_plans import sample_estimate, sample_model, sample_plan

COMMANDS = {
    "plan": ("--gpu", "t4"),
    "estimate": ("--gpu", "t4"),
    "compare": ("--gpus", "t4,l4"),
    "layers": (),
}
REFUSAL = DoesNotFitError(
    needed_bytes=3 << 30,
    usable_bytes=2 << 30,
    largest=("parameters", 1 << 30),
    suggestions=(
        Suggestion(
            arguments={"method": "lora", "prepare_for_kbit": False},
            recipe=Recipe(batch_size=2, precision="bf16"),
            peak_bytes=1 << 30,
            samples_per_s=1.5,
        ),
        Suggestion(arguments={"gpu": "l4"}, recipe=None, peak_bytes=5),
    ),
    floor_bytes=1 << 20,
    notes=("a note — not ASCII",),
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A config, and a process that keeps answers."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(own_sources, "package_hash", lambda: "as they are")
    monkeypatch.setattr(stored_answers, "imported_files", dict)
    with answers_are_kept():
        yield tmp_path


def kept(model: Path) -> list[Path]:
    return sorted((model / "cache").glob("*.json.gz"))


@pytest.mark.parametrize("more", [(), ("--json",), ("--json", "--samples", "9")])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_second_answer_is_the_first_without_the_api(
    run: Run, api: FakeApi, model: Path, command: str, more: tuple[str, ...]
) -> None:
    if command == "layers":
        more = more[:1]
    words = (command, model, *COMMANDS[command], *more)
    first, second = run(*words), run(*words)
    assert len(api.calls) == 1
    assert (second.stdout, second.exit_code) == (first.stdout, first.exit_code)
    assert first.stdout
    assert len(kept(model)) == 1


def test_how_it_is_printed_is_not_asked_again(
    run: Run, api: FakeApi, model: Path
) -> None:
    file = model / "plan.json"
    for words in ((), ("--json",), ("--samples", 5), ("--save", file)):
        assert run("plan", model, "--gpu", "t4", *words).exit_code == 0
    assert len(api.calls) == 1
    assert Plan.load(file) == sample_plan()


def test_another_question_is_computed(run: Run, api: FakeApi, model: Path) -> None:
    for words in ((), ("--batch-size", 2), ("--vram", "8GB"), ("--method", "lora")):
        run("plan", model, "--gpu", "t4", *words)
    run("estimate", model, "--gpu", "t4")
    assert len(api.calls) == 5


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_refusal_is_an_answer(
    run: Run, api: FakeApi, model: Path, more: tuple[str, ...]
) -> None:
    api.error = REFUSAL
    words = ("plan", model, "--vram", "2GB", *more)
    first, second = run(*words), run(*words)
    assert len(api.calls) == 1
    assert first.exit_code == second.exit_code == 3
    assert (second.stdout, second.stderr) == (
        first.stdout,
        first.stderr.replace("a factory prints\n", ""),
    )


def test_errors_are_not_kept(run: Run, api: FakeApi, model: Path) -> None:
    api.error = InputError("the network is down.")
    assert [run("plan", model, "--gpu", "t4").exit_code for _ in "ab"] == [2, 2]
    assert len(api.calls) == 2
    assert kept(model) == []


def asked(model: Path) -> dict[str, Any]:
    return {"model": str(model), "gpu": "t4"}


def test_alternatives_are_evaluated_once_and_when_needed(model: Path) -> None:
    whole = sample_plan()
    rows, evaluated = whole.alternatives, []

    def compute() -> Plan:
        def evaluate() -> tuple[Any, ...]:
            evaluated.append(1)
            return rows

        lazy = LazyAlternatives(known=rows[:1], evaluate=evaluate)
        return replace(whole, alternatives=(), lazy_alternatives=lazy)

    first = ask("plan", asked(model), compute)
    second = ask("plan", asked(model), lambda: pytest.fail("it is stored"))
    assert first.judged_alternatives == second.judged_alternatives == rows[:1]
    assert evaluated == []
    third = ask("plan", asked(model), compute)
    assert third.alternatives == rows  # computed, and stored with them
    assert evaluated == [1]
    last = ask("plan", asked(model), lambda: pytest.fail("it is stored"))
    assert last.alternatives == last.judged_alternatives == rows
    assert last.to_json() == third.to_json() == whole.to_json()


def test_alternatives_of_a_fresh_plan_are_stored_when_evaluated(model: Path) -> None:
    whole = sample_plan()
    lazy = LazyAlternatives(known=(), evaluate=lambda: whole.alternatives)
    fresh = replace(whole, alternatives=(), lazy_alternatives=lazy)
    first = ask("plan", asked(model), lambda: fresh)
    assert first.alternatives == whole.alternatives
    again = ask("plan", asked(model), lambda: pytest.fail("it is stored"))
    assert again.alternatives == whole.alternatives


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def _other_format(path: Path) -> None:
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(content.replace(b"answer 1", b"answer 2", 1)))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "a byte changed": _flip,
    "empty": lambda path: path.write_bytes(b""),
    "no archive": lambda path: path.write_bytes(b"hello" * 99),
    "somebody's": lambda path: path.write_bytes(gzip.compress(b'{"x": 1}\n[]')),
    "another format": _other_format,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_foreign_file_is_computed_again_and_gives_way(
    run: Run, api: FakeApi, model: Path, damage: Callable[[Path], object]
) -> None:
    words = ("plan", model, "--gpu", "t4")
    first = run(*words)
    damage(kept(model)[0])
    assert run(*words).stdout == first.stdout
    assert run(*words).stdout == first.stdout
    assert len(api.calls) == 2


def test_an_answer_under_anothers_name_is_computed(
    run: Run, api: FakeApi, model: Path
) -> None:
    run("plan", model, "--gpu", "t4")
    (one,) = kept(model)
    run("plan", model, "--gpu", "l4")
    (other,) = set(kept(model)) - {one}
    one.replace(other)
    run("plan", model, "--gpu", "l4")
    assert len(api.calls) == 3


def test_what_was_imported_must_be_the_same(
    run: Run, api: FakeApi, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = model / "library.py"
    library.write_text("x = 1")
    versions = {str(library): file_version(library)}
    monkeypatch.setattr(stored_answers, "imported_files", lambda: versions)
    for _ in "ab":
        run("plan", model, "--gpu", "t4")
    assert len(api.calls) == 1
    library.write_text("x = 22")
    run("plan", model, "--gpu", "t4")
    library.unlink()
    run("plan", model, "--gpu", "t4")
    assert len(api.calls) == 3


def test_a_model_that_changes_meanwhile_is_not_kept(model: Path) -> None:
    def compute() -> Plan:
        (model / "config.json").write_text(json.dumps({**CONFIG, "n_layer": 9}))
        return sample_plan()

    ask("plan", asked(model), compute)
    assert kept(model) == []


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("plan", replace(sample_plan(), warnings=(f"another in {CACHE_VARIABLE}",))),
        ("plan", replace(sample_plan(), provenance={"seconds": {1: "no text"}})),
        ("estimate", (replace(sample_estimate(), step_ms=8), sample_model())),
    ],
    ids=["the cache's warning", "cannot be read again", "would be printed as 8.0"],
)
def test_an_answer_that_another_run_would_not_give_is_not_kept(
    model: Path, command: str, found: object
) -> None:
    assert ask(command, asked(model), lambda: found) == found
    assert kept(model) == []


def test_the_card_of_this_machine_is_asked_each_time(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(target_gpu, "current_gpu", lambda: find_gpu("t4"))
    for words in (("--gpu", "t4"), (), ("--vram", "4GB")):
        run("plan", model, *words)
    run("compare", model, "--gpus", "l4,t4")
    assert kept(model) == []
    run("plan", model, "--gpu", "l4")
    run("compare", model, "--gpus", "l4,rtx-4090")
    assert len(kept(model)) == 2


def test_without_a_cache_everything_is_computed(
    run: Run, api: FakeApi, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "file").write_text("")
    for place in ("off", str(model / "file" / "below")):
        monkeypatch.setenv(CACHE_VARIABLE, place)
        results = [run("plan", model, "--gpu", "t4") for _ in "ab"]
        assert results[0].stdout == results[1].stdout
        assert results[0].exit_code == results[1].exit_code == 0
    assert len(api.calls) == 4


def test_reading_an_answer_imports_no_torch(model: Path) -> None:
    """Nor does keeping one; the process is not told that functions are patched."""
    code = (
        "import sys\n"
        "from budgetfit.cli.answer_key import answers_are_kept\n"
        "from budgetfit.cli.stored_answers import ask\n"
        "from budgetfit.reporting.render import print_plan\n"
        "from tests.reporting.sample_plans import sample_plan\n"
        "asked = {'model': sys.argv[1], 'gpu': 't4'}\n"
        "with answers_are_kept():\n"
        "    ask('plan', asked, sample_plan)\n"
        "    print_plan(ask('plan', asked, lambda: sys.exit('it is stored')))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    found = python("-c", code, str(model), check=True)
    assert found.stdout.endswith("[]\n"), found.stdout
