"""Small Keras models on torch, and what a test can ask of one in a process of its own.

Which backend Keras has is decided once, when it is imported: these tests run it in a
child, so that the environment variable reaches nothing else.
"""

# ruff: noqa: PLC0415, T201 - Keras is imported by the child alone

import functools
import json
import sys
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

import budgetfit
from tests.models import alone
from tests.processes import python

SEED = 11
HERE = "tests.integrations.keras_models"


@functools.cache
def ask(*words: str, backend: str = "torch") -> Any:
    """Return what ``answer`` says in a process whose Keras runs on ``backend``."""
    done = python("-W", "ignore", "-m", HERE, *words, KERAS_BACKEND=backend)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def build(name: str) -> Any:
    """Return a built and compiled model; its dropout draws as its name says."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(SEED)
    if name == "mlp":
        model = keras.Sequential(
            [
                keras.Input((64,)),
                *(layers.Dense(64, activation="relu") for _ in range(4)),
                layers.Dense(3),
            ]
        )
        model.compile(loss="mse")
        return model
    if name == "cnn":
        model = keras.Sequential(
            [
                keras.Input((16, 16, 3)),
                layers.Conv2D(8, 3, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Conv2D(8, 3, kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dense(10),
            ]
        )
    else:
        model = _transformer(seed=5 if name == "seeded" else None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss)
    return model


def _transformer(seed: int | None) -> Any:
    import keras
    from keras import layers

    class Block(layers.Layer):
        """Attention and an MLP; its call has no ``training``: Keras hands it on."""

        def __init__(self) -> None:
            super().__init__()
            self.norms = [layers.LayerNormalization() for _ in range(2)]
            self.attention = layers.MultiHeadAttention(2, 16, dropout=0.1, seed=seed)
            self.up = layers.Dense(64, activation="gelu")
            self.down = layers.Dense(32)
            self.drop = layers.Dropout(0.5, seed=seed)

        def build(self, shape: Any) -> None:
            for norm in self.norms:
                norm.build(shape)
            self.attention.build(shape, shape)
            self.up.build(shape)
            self.down.build((*shape[:-1], 64))

        def call(self, x: object) -> Any:
            inside = self.norms[0](x)
            x = x + self.attention(inside, inside)
            return x + self.drop(self.down(self.up(self.norms[1](x))))

    tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(50, 32)(tokens)
    for _ in range(3):
        x = Block()(x)
    return keras.Model(tokens, layers.Dense(50)(x))


def batches(name: str, count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ``(inputs, targets)`` as a loader gives them."""
    torch.manual_seed(SEED)
    made = []
    for _ in range(count):
        if name == "mlp":
            made.append((torch.randn(4, 64), torch.randn(4, 3)))
        elif name == "cnn":
            made.append((torch.randn(4, 16, 16, 3), torch.randint(10, (4,))))
        else:
            ids = torch.randint(50, (4, 12), dtype=torch.int32)
            made.append((ids, ids.long()))
    return made


def plan_of(model: Any, checkpointing: Any = "full", **options: Any) -> Any:
    """Plan it in fp32 with SGD, whose steps a plain loop repeats exactly."""
    chosen = {"gpu": "rtx-4090", "precision": "fp32", "batch_size": 4, **options}
    return budgetfit.plan(model, optimizer=sgd, checkpointing=checkpointing, **chosen)


def sgd(parameters: ParamsT) -> torch.optim.Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(parameters, lr=0.05)


def state(model: Any) -> dict[str, list[Any]]:
    """Return every variable's values by its path."""
    return {v.path: v.value.detach().flatten().tolist() for v in model.variables}


def answer(what: str, name: str) -> Any:
    """Return what a test asked for."""
    return {"all": _all, "refused": _refused, "loaded": _loaded}[what](name)


def _all(name: str) -> Any:
    model = build(name)
    before = state(model), _inside(model)
    plan = plan_of(model)
    after = state(model), _inside(model)
    return {
        "planned": _planned(plan, model) | {"untouched": before == after},
        "verified": _verified(plan, model),
        "trained": _trained(plan, model, name),
    }


def _inside(model: Any) -> dict[str, list[str]]:
    return {layer.path: sorted(vars(layer)) for layer in model._flatten_layers()}


def _planned(plan: Any, model: Any) -> dict[str, Any]:
    return {
        "blocks": plan.model.blocks,
        "count": plan.model.parameter_count,
        "weights": sum(variable.value.numel() for variable in model.variables),
        "batch": {name: shape for name, (shape, _) in plan.model.batch.items()},
        "recomputed": len(plan.recipe.wrapped_blocks),
        "text": str(plan),
    }


def _trained(plan: Any, planned: Any, name: str) -> Any:
    """Train with the plan, and as Keras itself would, with the same optimizer."""
    before, paths = _inside(planned), list(state(planned))
    torch.manual_seed(SEED)
    with budgetfit.apply(plan, planned) as run:
        losses = [run.step(batch).item() for batch in batches(name)]

    plain = build(name)
    optimizer = sgd([variable.value for variable in plain.trainable_variables])
    expected = []
    torch.manual_seed(SEED)
    for inputs, targets in batches(name):
        outputs = plain(inputs, training=True)
        loss = plain.compute_loss(x=inputs, y=targets, y_pred=outputs)
        expected.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found, wanted = list(state(planned).values()), list(state(plain).values())
    return {
        "losses": losses,
        "expected": expected,
        "differs_in": [
            p for p, f, w in zip(paths, found, wanted, strict=True) if f != w
        ],
        "same_inside": _inside(planned) == before,
        "same_paths": list(state(planned)) == paths,
    }


def _verified(plan: Any, model: Any) -> Any:
    before = state(model)
    check = budgetfit.verify(plan, device="cpu")
    return {
        "passed": check.passed,
        "error": check.max_gradient_error,
        "predicted": [row.predicted_allocated_bytes for row in check.phases],
        "measured": [row.measured_allocated_bytes for row in check.phases],
        "untouched": state(model) == before,
    }


def _loaded(name: str) -> Any:
    """Verify a factory's plan, and the same one loaded with a model in memory.

    A model without weights is asked for in the same process: to start one takes longer.
    """
    options = {"gpu": "rtx-4090", "precision": "fp32", "batch_size": 4}
    plan = budgetfit.plan(f"{HERE}:{name}", checkpointing="full", **options)
    factory = budgetfit.verify(plan, device="cpu")
    again = budgetfit.Plan.from_json(alone(plan).to_json())
    loaded = budgetfit.verify(again, build(name), device="cpu")
    return {
        "factory_passed": factory.passed,
        "passed": loaded.passed,
        "unbuilt": _refused("unbuilt"),
    }


def mlp() -> Any:
    """Return the MLP, for ``--model tests.integrations.keras_models:mlp``."""
    return build("mlp")


def _refused(name: str) -> Any:
    import keras

    if name == "unbuilt":
        model = keras.Sequential([keras.layers.Dense(3)])
    else:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    try:
        budgetfit.plan(model, gpu="rtx-4090")
    except budgetfit.InputError as error:
        return str(error)
    return "not refused"


if __name__ == "__main__":
    print(json.dumps(answer(*sys.argv[1:])))
