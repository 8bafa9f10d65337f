"""What each command asks of the api, prints, and ends with."""

import errno
import json
import shlex
from pathlib import Path

import pytest

from budgetfit.core.loop import Loop
from budgetfit.core.plan import Alternative, LazyAlternatives, Plan
from budgetfit.errors import (
    BudgetfitError,
    DoesNotFitError,
    InputError,
    Suggestion,
    TraceError,
)
from tests.cli.conftest import Run
from tests.cli.fake_api import FakeApi
from tests.reporting.sample_plans import (
    GIB,
    sample_estimate,
    sample_model,
    sample_plan,
    sample_verification,
)

DOES_NOT_FIT = DoesNotFitError(
    needed_bytes=30 * GIB,
    usable_bytes=23 * GIB,
    largest=("optimizer_state", 12 * GIB),
    suggestions=(
        Suggestion(
            arguments={"optimizer": "adamw_bnb_8bit"}, recipe=None, peak_bytes=20 * GIB
        ),
    ),
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    return path


def test_plan_prints_the_plan_and_ends_with_0(run: Run) -> None:
    result = run("plan", "gpt2", "--vram", "24GB")
    assert result.exit_code == 0
    printed = str(sample_plan()).replace("pass batch= for", "pass --batch for")
    assert result.stdout == printed + "\n"


MADE_FROM_THE_MODEL = {
    "image_size": None,
    "frames": None,
    "image_sizes": None,
    "text_only": False,
    "batch": None,
    "batch_dims": None,
    "loss": None,
}
ONE_GPU = {"gpus": "1", "engine": "auto"}
ADAPTER_DEFAULTS = {
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "double_quantization": True,
    "prepare_for_kbit": True,
}


def test_plan_hands_every_option_to_the_api(run: Run, api: FakeApi) -> None:
    words = (
        "plan m:make --vram 24GB --gpu rtx-4090 --headroom 500MB --max-length 512 "
        "--host-ram 8GiB --allocator expandable_segments:True "
        "--batch-size 4 --effective-batch-size 64 "
        "--precision fp32,bf16-mixed "
        "--optimizer sgd --checkpointing layers.0,layers.1 --objective memory "
        "--trust-remote-code"
    )

    assert run(*words.split()).exit_code == 0

    [(name, args, kwargs)] = api.calls
    assert (name, args) == ("plan", ("m:make", "24GB"))
    assert kwargs == {
        "gpu": "rtx-4090",
        "headroom": "500MB",
        "host_ram": "8GiB",
        "allocator": "expandable_segments:True",
        "optimizer_in_backward": False,
        "compile": "none",
        **ONE_GPU,
        "link": None,
        "price": None,
        "max_length": 512,
        **MADE_FROM_THE_MODEL,
        "lengths": None,
        "batch_size": 4,
        "effective_batch_size": 64,
        "precision": ["fp32", "bf16-mixed"],
        "optimizer": "sgd",
        "checkpointing": ["layers.0", "layers.1"],
        "objective": "memory",
        **ADAPTER_DEFAULTS,
        "method": None,
        "quantization": None,
        "trust_remote_code": True,
        "progress": None,
    }


def test_plan_left_alone_asks_for_the_defaults_of_the_interface(
    run: Run, api: FakeApi
) -> None:
    run("plan", "gpt2")

    [(_, args, kwargs)] = api.calls
    assert args == ("gpt2", None)
    chosen = {name: value for name, value in kwargs.items() if value is not None}
    assert chosen == {
        "precision": "auto",
        "optimizer": "adamw_torch_fused",
        "checkpointing": "auto",
        "objective": "throughput",
        "optimizer_in_backward": False,
        "compile": "none",
        **ONE_GPU,
        **ADAPTER_DEFAULTS,
        "text_only": False,
        "trust_remote_code": False,
    }


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("sqrt", "sqrt"),
        ("layers.0", ["layers.0"]),
        ("0,1", ["0", "1"]),
        ("stem,", ["stem"]),
    ],
)
def test_a_checkpointing_word_is_a_policy_and_names_are_blocks(
    run: Run, api: FakeApi, word: str, meaning: object
) -> None:
    run("plan", "gpt2", "--checkpointing", word)
    assert api.calls[0][2]["checkpointing"] == meaning


def test_a_saved_plan_loads_and_is_named_in_the_next_command(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    result = run("plan", "gpt2", "--save", path)
    assert Plan.load(path) == sample_plan()
    # A long path continues on the next line.
    assert f"budgetfit verify {path}" in " ".join(result.stdout.split())


@pytest.mark.parametrize("how", [["--save", "plan.json"], ["--json"]])
@pytest.mark.parametrize("asked", [[], ["--details"], ["--report", "plan.html"]])
def test_a_plan_is_written_without_waiting_for_alternatives_that_nobody_asked_for(
    run: Run,
    api: FakeApi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: list[str],
    asked: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = sample_plan()
    rows = plan.alternatives
    assert len(rows) > 1
    evaluated: list[str] = []

    def evaluate() -> tuple[Alternative, ...]:
        evaluated.append("all")
        return rows

    lazy = LazyAlternatives(known=rows[:1], evaluate=evaluate)
    api.answers["plan"] = plan.changed(alternatives=(), lazy_alternatives=lazy)
    result = run("plan", "gpt2", *how, *asked)
    text = result.stdout if how == ["--json"] else Path("plan.json").read_text()
    assert bool(evaluated) == bool(asked)
    assert Plan.from_json(text).alternatives == (rows if asked else rows[:1])


@pytest.mark.parametrize("place", ["no/plan.json", "", "n" * 300, "plan.json/x"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    run: Run, api: FakeApi, saved: Path, place: str
) -> None:
    result = run("plan", "gpt2", "--save", saved.parent / place)
    assert result.exit_code == 2
    assert "Cannot write" in result.stderr
    assert "Name another file" in result.stderr
    assert (result.stdout, api.calls) == ("", [])


def test_an_export_is_not_made_for_a_place_that_cannot_be_written(
    run: Run, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("budgetfit.cli.app.import_or_exit", None)
    result = run("export", saved, "--to", "torch", "--save", saved.parent)
    assert result.exit_code == 2
    assert "Cannot write" in result.stderr


def test_looking_at_where_to_save_leaves_no_file_and_keeps_what_is_there(
    run: Run, api: FakeApi, tmp_path: Path
) -> None:
    api.error = DOES_NOT_FIT
    there, new, link = (tmp_path / name for name in ("there", "new", "link"))
    there.write_text("as it was")
    link.symlink_to(tmp_path / "target")
    for path in (there, new, link):
        assert run("plan", "gpt2", "--save", path).exit_code == 3
    assert sorted(tmp_path.iterdir()) == [link, there]
    assert there.read_text() == "as it was"
    assert not link.exists()


@pytest.mark.parametrize(
    "words", ["plan gpt2 --json", "plan gpt2", "export {} --to torch"]
)
def test_an_answer_that_cannot_be_saved_after_all_is_printed(
    run: Run, saved: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    asked = words.format(saved).split()
    expected = run(*asked).stdout
    monkeypatch.setattr(Path, "replace", full_disk)
    result = run(*asked, "--save", saved.parent / "answer")
    assert result.exit_code == 1
    assert result.stdout == expected
    assert "answer': No space left on device" in result.stderr


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_plan_that_does_not_fit_ends_with_3(run: Run, api: FakeApi) -> None:
    api.answers["plan"] = sample_plan(estimate=sample_estimate(fits=False))
    assert run("plan", "gpt2").exit_code == 3


def test_does_not_fit_is_an_answer_with_numbers_and_suggestions(
    run: Run, api: FakeApi
) -> None:
    api.error = DOES_NOT_FIT
    result = run("plan", "gpt2")
    assert result.exit_code == 3
    assert "found is 30.00 GiB, and 23.00 GiB are usable" in result.stdout
    assert "--optimizer adamw_bnb_8bit: peak 20.00 GiB" in result.stdout
    assert "Traceback" not in result.output


def test_does_not_fit_echoes_what_the_limit_means(run: Run, api: FakeApi) -> None:
    api.error = DOES_NOT_FIT
    stdout = run("plan", "gpt2", "--vram", "24GB").stdout
    assert stdout.startswith("24GB = 22.35 GiB\nCards sold as 24 GB have 21.96 GiB")
    assert "Does not fit" in stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("'24' is not a memory size."), 2),
        (TraceError("no rule for nonzero", module="layers.3", op="nonzero"), 1),
        (BudgetfitError("something"), 1),
        (RuntimeError("a bug"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_no_traceback(
    run: Run, api: FakeApi, error: BaseException, code: int
) -> None:
    api.error = error
    result = run("plan", "gpt2")
    assert result.exit_code == code
    assert str(error) in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_an_unexpected_error_names_its_type_and_the_way_to_see_more(
    run: Run, api: FakeApi
) -> None:
    api.error = RuntimeError("a bug")
    stderr = run("plan", "gpt2").stderr
    assert "Error: RuntimeError: a bug\nAdd --traceback" in stderr


def test_a_traceback_is_shown_on_request_with_the_same_exit_code(
    run: Run, api: FakeApi
) -> None:
    api.error = InputError("wrong")
    result = run("plan", "gpt2", "--traceback")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr


def test_estimate_asks_for_what_the_model_is_now(run: Run, api: FakeApi) -> None:
    result = run("estimate", "gpt2")
    assert result.exit_code == 0
    [(name, args, kwargs)] = api.calls
    assert (name, args) == ("estimate_settings", ("gpt2",))
    chosen = {key: value for key, value in kwargs.items() if value is not None}
    assert chosen == {
        "precision": "as-is",
        "optimizer": "adamw_torch_fused",
        "checkpointing": "as-is",
        **ONE_GPU,
        **ADAPTER_DEFAULTS,
        "text_only": False,
        "trust_remote_code": False,
        "loop": Loop(kind="plain"),
    }


def test_estimate_takes_the_training_loop(run: Run, api: FakeApi) -> None:
    words = "--loop trainer --ema --max-grad-norm 0.5 --evaluation-batch-size 8"
    run("estimate", "gpt2", *words.split())
    [(_, _, kwargs)] = api.calls
    assert kwargs["loop"] == Loop(
        kind="trainer", ema=True, max_grad_norm=0.5, evaluation_batch_size=8
    )
    run("estimate", "gpt2", *["--loop", "sft", "--packing", "--use-liger-kernel"])
    assert api.calls[-1][2]["loop"] == Loop(
        kind="sft", packing=True, use_liger_kernel=True
    )


def test_an_unknown_loop_names_those_there_are(run: Run) -> None:
    result = run("estimate", "gpt2", "--loop", "keras")
    assert result.exit_code == 2
    assert "run, plain, trainer, sft, accelerate, lightning" in result.stderr


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("--batch-dims 1", 1),
        ("--batch-dims x=0 --batch-dims in.table=None", {"x": 0, "in.table": None}),
    ],
)
@pytest.mark.parametrize(
    "command", ["plan m", "estimate m", "compare m --gpus t4", "layers m"]
)
def test_dimensions_of_samples_are_named_one_by_one(
    run: Run, api: FakeApi, command: str, words: str, meaning: object
) -> None:
    run(*command.split(), *words.split())
    [(_, _, kwargs)] = api.calls
    assert kwargs["batch_dims"] == meaning


@pytest.mark.parametrize("word", ["x", "x=", "=0", "x=-1", "x=first", "-1"])
def test_what_is_no_dimension_of_a_name_is_refused(run: Run, word: str) -> None:
    result = run("plan", "m", f"--batch-dims={word}")
    assert result.exit_code != 0
    assert "--batch-dims takes NAME=DIM" in result.stderr


def test_estimate_echoes_the_limit_and_shows_the_recipe(run: Run) -> None:
    result = run("estimate", "gpt2", "--vram", "24GB", "--batch-size", "8")
    assert "24GB = 22.35 GiB" in result.stdout
    assert "recompute blocks 0-15 (16 of 24)" in result.stdout


def test_an_estimate_that_does_not_fit_ends_in_the_plan_of_what_was_typed(
    run: Run, api: FakeApi
) -> None:
    api.answers["estimate_settings"] = (sample_estimate(fits=False), sample_model())
    words = (
        *("estimate", "gpt2", "--gpu", "RTX 4090", "--max-length", "2048"),
        *("--method", "qlora", "--no-prepare-for-kbit", "--lora-r", "64"),
        *("--target-modules", "q_proj,v_proj", "--trust-remote-code"),
        *("--batch-dims", "x=0", "--batch-dims", "table=none"),
    )
    chosen = ("--batch-size", "8", "--checkpointing", "full")

    result = run(*words, *chosen, "--precision", "bf16-mixed")

    command = next(line for line in result.stdout.splitlines() if "plan " in line)
    typed = shlex.split(command)
    assert typed[:3] == ["budgetfit", "plan", "gpt2"]
    assert sorted(typed[3:]) == sorted([*words[2:], "--precision", "bf16-mixed"])
    # It is a command: plan takes it as it stands.
    assert run(*typed[1:]).exit_code == 0
    assert "--precision" not in run(*words, "--precision", "as-is").stdout


@pytest.mark.parametrize(("fits", "code"), [(True, 0), (None, 0), (False, 3)])
def test_estimate_ends_with_3_only_where_it_does_not_fit(
    run: Run, api: FakeApi, fits: bool | None, code: int
) -> None:
    api.answers["estimate_settings"] = (sample_estimate(fits=fits), sample_model())
    assert run("estimate", "gpt2").exit_code == code


def test_layers_prints_the_table(run: Run) -> None:
    result = run("layers", "gpt2", "--max-length", "128")
    assert result.exit_code == 0
    assert "2 x model.layers.*.mlp" in result.stdout


def test_verify_hands_the_loaded_plan_on(run: Run, api: FakeApi, saved: Path) -> None:
    result = run("verify", saved, "--steps", "5", "--device", "cpu", "--model", "m:f")
    assert result.exit_code == 0
    assert "VERIFIED on" in result.stdout
    [(_, args, kwargs)] = api.calls
    assert args == (sample_plan(), "m:f")
    assert (kwargs["steps"], kwargs["device"]) == (5, "cpu")


@pytest.mark.parametrize(("fits", "code"), [(True, 0), (False, 3)])
def test_check_says_what_was_planned_and_what_is_predicted_now(
    run: Run, api: FakeApi, saved: Path, fits: bool, code: int
) -> None:
    api.answers["check"] = sample_estimate(fits=fits)
    result = run("check", saved, "--gpu", "l4")
    assert result.exit_code == code
    [(_, args, kwargs)] = api.calls
    assert args == (sample_plan(), None)
    assert kwargs["gpu"] == "l4"
    text = " ".join(result.stdout.split())
    assert "planned: reserved 22.00 GiB, rtx-4090" in text
    assert "now: reserved 22.00 GiB, l4, budgetfit 0.1, torch 9.0" in text
    assert ("DOES NOT FIT" in text) != fits
    document = json.loads(run("check", saved, "--json").stdout)
    assert document["fits"] == fits


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"out_of_memory": "CUDA out of memory"}, 3),
        ({"gradients_match": False}, 1),
        ({"recomputed_blocks": 0}, 1),
    ],
)
def test_a_failed_verification_has_its_own_exit_code(
    run: Run, api: FakeApi, saved: Path, changes: dict[str, object], code: int
) -> None:
    api.answers["verify"] = sample_verification(**changes)
    result = run("verify", saved)
    assert result.exit_code == code
    assert "FAILED" in result.stdout


def test_an_unknown_export_names_those_there_are(run: Run, saved: Path) -> None:
    result = run("export", saved, "--to", "word")
    assert result.exit_code == 2
    assert "'word' is not an export. Use one of: trainer, sft, " in result.stderr


def test_export_writes_the_script_to_stdout_or_to_a_file(
    run: Run, saved: Path, tmp_path: Path
) -> None:
    printed = run("export", saved, "--to", "torch")
    stored = run("export", saved, "--to", "torch", "--save", tmp_path / "train.py")
    assert printed.exit_code == stored.exit_code == 0
    assert "def main(" in printed.stdout
    assert stored.stdout == ""
    assert (tmp_path / "train.py").read_text() == printed.stdout


@pytest.mark.parametrize(
    ("target", "library", "words"),
    [
        ("trainer", "torch", "per_device_train_batch_size=6,"),
        ("sft", "torch", "max_length=2048,"),
        ("dpo", "torch", "per_device_train_batch_size=3,"),
        ("llamafactory", "torch", "cutoff_len: 2048"),
        ("axolotl", "torch", "micro_batch_size: 6"),
        ("accelerate", "torch", 'mixed_precision: "bf16"'),
        ("lightning", "torch", "accumulate_grad_batches=11,"),
        ("deepspeed", "torch", '"train_micro_batch_size_per_gpu": 6,'),
    ],
)
def test_export_writes_the_settings_of_a_library(
    run: Run, saved: Path, target: str, library: str, words: str
) -> None:
    pytest.importorskip(library)
    result = run("export", saved, "--to", target)
    assert result.exit_code == 0, result.stderr
    assert words in result.stdout
    assert "SmolLM2-1.7B, as planned for" in result.stdout
    if target not in {"accelerate", "deepspeed", "llamafactory", "axolotl"}:
        assert f'budgetfit.Plan.load("{saved}")' in result.stdout
        compile(result.stdout, "settings.py", "exec")
    if target == "deepspeed":
        json.loads(result.stdout)  # what its import prints is elsewhere


def test_gpus_lists_the_cards(run: Run) -> None:
    result = run("gpus")
    assert result.exit_code == 0
    assert "rtx-4090" in result.stdout


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("plan", "gpt2"), "recipe"),
        (("estimate", "gpt2"), "allocated_bytes"),
        (("layers", "gpt2"), "layers"),
        (("verify", "PLAN"), "passed"),
        (("export", "PLAN", "--to", "torch"), "text"),
        (("gpus",), "gpus"),
    ],
)
def test_json_makes_stdout_one_document(
    run: Run, saved: Path, words: tuple[str, ...], key: str
) -> None:
    result = run(*(saved if word == "PLAN" else word for word in words), "--json")
    assert result.exit_code == 0
    assert key in json.loads(result.stdout)


@pytest.mark.parametrize("error", [DOES_NOT_FIT, InputError("no"), RuntimeError("no")])
def test_with_json_an_error_is_a_document_too(
    run: Run, api: FakeApi, error: Exception
) -> None:
    api.error = error
    result = run("plan", "gpt2", "--json")
    assert result.exit_code != 0
    assert json.loads(result.stdout)["error"]["type"] == type(error).__name__
    assert str(error).splitlines()[0] in result.stderr


def test_what_a_model_prints_goes_to_stderr(run: Run) -> None:
    result = run("plan", "gpt2", "--json")
    assert "a factory prints" in result.stderr
    assert "a factory prints" not in result.stdout


def test_the_version_is_printed(run: Run) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("budgetfit ")
