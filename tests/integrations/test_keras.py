"""A Keras 3 model on torch through plan, apply and verify."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.integrations.keras_models import ask

pytestmark = pytest.mark.skipif(
    find_spec("keras") is None, reason="keras is not installed"
)


@pytest.mark.parametrize("name", ["cnn", "seeded"])
def test_training_by_the_plan_is_keras_own_training(name: str) -> None:
    # dropout, batch statistics and seeds included, with every block recomputed
    found = ask("all", name)["trained"]
    assert found["losses"] == found["expected"]
    assert found["differs_in"] == []
    assert found["same_inside"]
    assert found["same_paths"]


@pytest.mark.parametrize("name", ["cnn", "seeded"])
def test_verify_finds_equal_gradients_and_no_more_bytes_than_predicted(
    name: str,
) -> None:
    found = ask("all", name)["verified"]
    assert found["passed"]
    assert found["error"] <= 1e-6
    assert found["untouched"]
    # Keras leaves tensors to the garbage collector: when it runs, fewer are alive.
    for predicted, measured in zip(found["predicted"], found["measured"], strict=True):
        assert measured <= 1.02 * predicted


def test_planning_leaves_the_model_alone_and_finds_blocks_inputs_and_loss() -> None:
    found = ask("all", "seeded")["planned"]
    assert found["untouched"]
    assert [name.rpartition(".")[0] for name in found["blocks"]] == ["layers"] * 3
    assert found["recomputed"] == 3
    assert found["count"] == found["weights"]
    assert found["batch"] == {"inputs": [2, 12], "targets": [2, 12]}
    assert "blocks of Block" in found["text"]
    assert "loss 'sparse_categorical_crossentropy' of the Keras" in found["text"]
    text = " ".join(found["text"].split())
    assert "the Keras model's own optimizer, Adam, is not used" in text


def test_a_loaded_plan_and_a_factory_are_verified_too() -> None:
    assert ask("loaded", "mlp") == {"passed": True, "factory_passed": True}


def test_a_model_without_weights_is_refused_with_what_to_do() -> None:
    assert "is not built yet" in ask("refused", "unbuilt")


def test_importing_budgetfit_imports_no_keras() -> None:
    code = "import sys, budgetfit.api.plan; sys.exit('keras' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603


def test_a_model_on_another_backend_is_refused_with_the_variable_to_set() -> None:
    pytest.importorskip("jax", reason="another backend than torch")
    assert "KERAS_BACKEND=torch" in ask("refused", "built", backend="jax")
