"""What ``from_pretrained`` makes of a checkpoint to train: its dtype, its quantisation.

Source: transformers 5.23. ``trainer_utils.validate_quantization_for_training`` trains
adapters on the methods whose ``is_trainable`` is true, and quantised weights
themselves with none. Where the class of a ``quantization_config`` takes ``dequantize``
(``utils/quantization_config.py``), weights are loaded in the model's dtype, and the
model is a plain one. A checkpoint of one method is not quantised by another while it
is loaded (``quantizers/auto.py``, ``merge_quantization_configs``). The dtype is the
config's, or else the first one of the weights (``modeling_utils._get_dtype``).
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError, safe_open

from budgetfit.errors import InputError
from budgetfit.integrations.optional_imports import quiet_import
from budgetfit.integrations.quantization.bitsandbytes_layers import quantise_as_stored

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from budgetfit.integrations.model_sources.resolved_model import Materialise

BITSANDBYTES = "bitsandbytes"
# What a model can be loaded in, as files of weights call it; 8 bits and fewer are not.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """How the weights of a checkpoint are stored, where its config says so.

    Attributes:
        method: The name of the quantisation; empty for none.
        layers: What bitsandbytes made of the linear layers, if it was bitsandbytes.
        loader: The config class with which they are loaded as a plain model.
    """

    method: str = ""
    layers: transformers.BitsAndBytesConfig | None = None
    loader: str = ""

    @property
    def undone(self) -> str:
        """The method, where loading undoes it."""
        return self.method if self.loader else ""

    def notes(self, config: transformers.PreTrainedConfig) -> Iterator[str]:
        """Say what was planned, where that is not what is stored."""
        if self.loader:
            yield (
                f"the weights are stored in {self.method}: planned dequantised to "
                f"{_name(config.dtype)}, as from_pretrained(..., quantization_config="
                f"{self.loader}(dequantize=True)) loads them"
            )
        elif self.method and self.layers is None:
            yield (
                f"transformers does not know the quantisation {self.method!r} of the "
                "config, and loads the weights as they are: planned so"
            )

    def builder(self, materialise: Materialise) -> Materialise:
        """Return what builds the model with the layers that are stored."""
        layers = self.layers
        if layers is None:
            return materialise

        def quantised(
            device: torch.device | str = "cpu", dtype: torch.dtype | None = None
        ) -> nn.Module:
            model = materialise(device, dtype)
            quantise_as_stored(model, layers)
            return model

        return quantised


def stored_weights(config: transformers.PreTrainedConfig, name: str) -> StoredWeights:
    """Return how a config says that the weights are stored.

    Args:
        config: Loses what it says where loading does.
        name: What to call the model in an error.

    Raises:
        InputError: If they are stored in a way that cannot be planned.
    """
    asked: Any = None
    said = (config.get_text_config(decoder=True), config)
    for part in said:
        asked = getattr(part, "quantization_config", None) or asked
    if asked is None:
        return StoredWeights()
    fields = asked if isinstance(asked, dict) else asked.to_dict()
    method = _method(fields)
    if method.startswith(BITSANDBYTES):
        return StoredWeights(method=method, layers=_bitsandbytes(fields, name))
    kind = _library().AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if method and kind is None:
        return StoredWeights(method=method)
    if kind is None or "dequantize" not in inspect.signature(kind).parameters:
        raise _cannot_plan(name, method or "a method without a name")
    for part in said:
        vars(part).pop("quantization_config", None)
    return StoredWeights(method=method, loader=kind.__name__)


def _cannot_plan(name: str, method: str) -> InputError:
    return InputError(
        f"The weights of {name} are quantised by {method}: what its layers take in "
        "training is not known here. Give the unquantised model that it was made from "
        '(its model card names it), with method="qlora" (--method qlora) for 4 bits.'
    )


def settle_dtype(
    config: transformers.PreTrainedConfig, stored: StoredWeights, folder: Path | None
) -> tuple[str, ...]:
    """Give a config that names no dtype the one that its weights are loaded in.

    Args:
        config: Is changed.
        stored: How its weights are stored.
        folder: Where the weights may lie.

    Returns:
        What was assumed.
    """
    if config.dtype is None:
        named = (part.dtype for part in parts(config) if part.dtype is not None)
        config.dtype = next(named, None)
    if config.dtype is not None:
        return ()
    found = None if folder is None else _weights_dtype(folder)
    why = "as the weights beside it"
    if found is None and stored.method:
        found, why = torch.bfloat16, "what is not quantised is mostly stored in it"
    if found is None:
        found = torch.float32
        why = (
            "from_pretrained takes that of the weights: name another in config.json "
            '("dtype": "bfloat16")'
        )
    config.dtype = found
    return (f"the config names no dtype: planned in {_name(found)}, {why}",)


def parts(config: transformers.PreTrainedConfig) -> Iterator[Any]:
    """Yield a config and those inside it."""
    yield config
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, transformers.PreTrainedConfig):
            yield from parts(part)


def _weights_dtype(folder: Path) -> torch.dtype | None:
    """Return the first dtype in the header of the first file of weights, if any."""
    file = folder / "model.safetensors"
    try:
        index = json.loads((folder / f"{file.name}.index.json").read_text("utf-8"))
        file = folder / min(index["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        pass  # most models have a single file
    try:
        with safe_open(file, framework="pt") as weights:
            kinds = [weights.get_slice(key).get_dtype() for key in weights.keys()]  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError):
        return None
    return next((_DTYPES[kind] for kind in kinds if kind in _DTYPES), None)


def _name(dtype: torch.dtype | str | None) -> str:
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    name = str(dtype).removeprefix("torch.")
    return short.get(name, name)


def _method(fields: dict[str, Any]) -> str:
    """Return the name as transformers takes it (``AutoQuantizationConfig``)."""
    for bits in (4, 8):
        if fields.get(f"load_in_{bits}bit"):
            return f"{BITSANDBYTES}_{bits}bit"
    method = fields.get("quant_method")
    return str(getattr(method, "value", method) or "")


def _bitsandbytes(fields: dict[str, Any], name: str) -> Any:  # noqa: ANN401 - its config
    try:
        return _library().AutoQuantizationConfig.from_dict(fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"The quantization_config of {name} cannot be read: {error!s:.200}. "
            "Correct it, or give the unquantised model that it was made from."
        ) from None


def _library() -> Any:  # noqa: ANN401 - the module
    with quiet_import():  # it imports torchao
        from transformers.quantizers import auto  # noqa: PLC0415
    return auto
