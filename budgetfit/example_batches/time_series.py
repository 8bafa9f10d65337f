"""Example inputs for time series models and Decision Transformers."""

from typing import Any

import torch

from budgetfit.errors import InputError
from budgetfit.example_batches.request import Arguments, BatchRequest, forward_arguments
from budgetfit.example_batches.token_ids import first_field

_TRAJECTORY_STEPS = 20  # Decision Transformer's context length for Gym


def time_series_inputs(request: BatchRequest) -> Arguments:
    """Return past values with the features, masks and future that the model takes."""
    # ``context_length`` plus the largest of ``lags_sequence`` is the input length,
    # ``prediction_length`` that of the prediction.
    config: Any = request.model.config
    takes, _ = forward_arguments(request.model)
    lags = first_field(config, "lags_sequence") or [0]
    past = (first_field(config, "context_length", "prediction_length") or 1) + max(lags)
    future = first_field(config, "prediction_length", "horizon_length") or 0
    values = _value_shape(config)
    request.notes.append(f"series of {past} time steps")
    batch: Arguments = {"past_values": _floats(request, past, values)}
    if takes & {"target_values"}:
        return batch | _target_values(request)
    spans = [("past", past)] + [("future", future)] * ("future_values" in takes)
    for name, steps in spans:
        if steps and f"{name}_values" in takes:
            batch[f"{name}_values"] = _floats(request, steps, values)
        if f"{name}_time_features" in takes:
            features = (first_field(config, "num_time_features") or 0,)
            batch[f"{name}_time_features"] = _floats(request, steps, features)
        if f"{name}_observed_mask" in takes and name == "past":
            batch["past_observed_mask"] = torch.ones_like(batch["past_values"])
    for kind in ("real", "categorical"):
        count = first_field(config, f"num_static_{kind}_features")
        if count and f"static_{kind}_features" in takes:
            shape = (request.batch_size, count)
            batch[f"static_{kind}_features"] = (
                request.floats(shape)
                if kind == "real"
                else request.integers(shape, 0, 2)
            )
    return batch


def _value_shape(config: object) -> tuple[int, ...]:
    """Return the shape of one time step: channels, or a scalar."""
    channels = first_field(config, "num_input_channels")
    if channels is not None:
        return (channels,)
    inputs = first_field(config, "input_size") or 1
    return () if inputs == 1 else (inputs,)


def _floats(request: BatchRequest, steps: int, values: tuple[int, ...]) -> torch.Tensor:
    return request.floats((request.batch_size, steps, *values))


def _target_values(request: BatchRequest) -> Arguments:
    """Return ``target_values`` for classification or regression of a series."""
    config: Any = request.model.config
    if "Classification" in type(request.model).__name__:
        count = first_field(config, "num_targets", "num_labels") or 2
        return {"target_values": request.integers((request.batch_size,), 0, count)}
    count = first_field(config, "num_targets") or 1
    return {"target_values": request.floats((request.batch_size, count))}


def trajectory_inputs(request: BatchRequest) -> Arguments:
    """Return trajectories of states, actions and rewards (Decision Transformer)."""
    config: Any = request.model.config
    steps = request.max_length or _TRAJECTORY_STEPS
    request.notes.append(f"trajectories of {steps} steps")
    rows = (request.batch_size, steps)
    widths = {"states": config.state_dim, "actions": config.act_dim}
    batch = {name: request.floats((*rows, width)) for name, width in widths.items()}
    for name in ("rewards", "returns_to_go"):
        batch[name] = request.floats((*rows, 1))
    last = first_field(config, "max_ep_len") or steps
    if steps > last:
        raise InputError(
            f"max_length {steps} is longer than max_ep_len {last}. Use that or less."
        )
    times = torch.arange(steps, device="cpu").expand(rows)
    batch["timesteps"] = times.clone()
    batch["attention_mask"] = request.ones(rows)
    return batch
