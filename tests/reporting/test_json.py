"""The JSON documents of the command line."""

import json

from budgetfit.core.plan import Plan
from budgetfit.errors import DoesNotFitError, InputError, Suggestion, TraceError
from budgetfit.gpus.table import all_gpus
from budgetfit.reporting.json import (
    error_json,
    estimate_json,
    export_json,
    gpus_json,
    layers_json,
    plan_json,
    verification_json,
)
from tests.reporting.sample_plans import (
    GIB,
    sample_estimate,
    sample_layers,
    sample_plan,
    sample_recipe,
    sample_verification,
)


def test_a_printed_plan_can_be_loaded_again() -> None:
    plan = sample_plan()
    assert Plan.from_json(plan_json(plan)) == plan


def test_an_estimate_carries_its_bytes_as_whole_numbers() -> None:
    document = json.loads(estimate_json(sample_estimate()))
    assert document["allocated_bytes"] == 20 * GIB
    assert document["samples_per_s"] == 10.0
    assert document["recipe"]["segments"][0]["blocks"] == ["model.layers.0"]


def test_a_verification_says_whether_it_passed() -> None:
    document = json.loads(verification_json(sample_verification()))
    assert document["passed"] is True
    assert document["allocated_error"] == 0.25
    assert len(document["phases"]) == 6


def test_layers_are_not_put_together() -> None:
    document = json.loads(layers_json(sample_layers()))
    assert [layer["name"] for layer in document["layers"]] == [
        "model.layers.0.mlp",
        "model.layers.1.mlp",
        "lm_head",
    ]


def test_an_unknown_rate_is_null() -> None:
    document = json.loads(gpus_json(all_gpus()))
    by_name = {gpu["name"]: gpu for gpu in document["gpus"]}
    assert by_name["t4"]["bf16_tflops"] is None
    assert 0 < by_name["t4"]["shares"]["bandwidth"] <= 1
    assert len(by_name) == len(all_gpus())


def test_does_not_fit_carries_its_numbers_and_suggestions() -> None:
    error = DoesNotFitError(
        needed_bytes=30 * GIB,
        usable_bytes=23 * GIB,
        largest=("optimizer_state", 12 * GIB),
        suggestions=(
            Suggestion(
                arguments={"optimizer": "adamw_bnb_8bit"},
                recipe=sample_recipe(),
                peak_bytes=20 * GIB,
            ),
            Suggestion(arguments={"gpu": "l40s"}, recipe=None, peak_bytes=30 * GIB),
        ),
    )

    document = json.loads(error_json(error))["error"]

    assert document["type"] == "DoesNotFitError"
    assert document["needed_bytes"] == 30 * GIB
    assert document["largest"] == {"name": "optimizer_state", "bytes": 12 * GIB}
    assert document["suggestions"][0]["recipe"]["batch_size"] == 6
    assert document["suggestions"][0]["options"] == "--optimizer adamw_bnb_8bit"
    assert document["suggestions"][1]["recipe"] is None
    assert document["proven"] is False


def test_other_errors_carry_their_type_message_and_fields() -> None:
    trace = TraceError("no shape", module="layers.3", op="aten.nonzero.default")
    assert json.loads(error_json(trace))["error"] == {
        "type": "TraceError",
        "message": "no shape",
        "module": "layers.3",
        "op": "aten.nonzero.default",
    }
    assert json.loads(error_json(InputError("no")))["error"]["message"] == "no"


def test_an_export_is_named_with_its_text() -> None:
    assert json.loads(export_json("torch", "x = 1\n")) == {
        "to": "torch",
        "text": "x = 1\n",
    }


def test_every_estimate_of_a_plan_says_its_rate() -> None:
    plan = sample_plan()
    document = json.loads(plan_json(plan))
    assert document["estimate"]["samples_per_s"] == plan.estimate.samples_per_s
    for row, known in zip(document["alternatives"], plan.alternatives, strict=True):
        assert row["estimate"]["samples_per_s"] == known.estimate.samples_per_s
