"""A Keras 3 model on torch through plan, apply and verify."""

from importlib.util import find_spec

import pytest

from tests.integrations.keras_models import ask

pytestmark = pytest.mark.skipif(
    find_spec("keras") is None, reason="keras is not installed"
)


@pytest.mark.parametrize("name", ["cnn", "seeded"])
def test_a_model_is_left_alone_verified_and_trained_as_by_keras_itself(
    name: str,
) -> None:
    found = ask("all", name)
    planned, verified, trained = (found[k] for k in ("planned", "verified", "trained"))
    assert planned["untouched"]
    assert planned["count"] == planned["weights"]
    if name == "seeded":
        names = [name.rpartition(".")[0] for name in planned["blocks"]]
        assert names == ["layers"] * 3
        assert planned["recomputed"] == 3
        assert planned["batch"] == {"inputs": [2, 12], "targets": [2, 12]}
        assert "blocks of Block" in planned["text"]
        text = " ".join(planned["text"].split())
        assert "loss 'sparse_categorical_crossentropy' of the Keras" in text
        assert "the Keras model's own optimizer, Adam, is not used" in text

    assert verified["passed"]
    assert verified["error"] <= 1e-6
    assert verified["untouched"]
    # Keras leaves tensors to the garbage collector: when it runs, fewer are alive.
    for predicted, measured in zip(
        verified["predicted"], verified["measured"], strict=True
    ):
        assert measured <= 1.02 * predicted

    # dropout, batch statistics and seeds included, with every block recomputed
    assert trained["losses"] == trained["expected"]
    assert trained["differs_in"] == []
    assert trained["same_inside"]
    assert trained["same_paths"]


def test_a_loaded_plan_and_a_factory_are_verified_and_no_weights_refused() -> None:
    found = ask("loaded", "mlp")
    assert found["passed"]
    assert found["factory_passed"]
    assert "is not built yet" in found["unbuilt"]


def test_a_model_on_another_backend_is_refused_with_the_variable_to_set() -> None:
    pytest.importorskip("jax", reason="another backend than torch")
    assert "KERAS_BACKEND=torch" in ask("refused", "built", backend="jax")
