"""dtype and quantization with which ``from_pretrained`` loads a checkpoint to train.

Source: transformers 5.23. ``trainer_utils.validate_quantization_for_training`` trains
adapters on the methods whose ``is_trainable`` is true, and quantized weights
themselves with none. Where the class of a ``quantization_config`` takes ``dequantize``
(``utils/quantization_config.py``), weights are loaded in the model's dtype, and the
model is a plain one. A checkpoint of one method is not quantized by another while it
is loaded (``quantizers/auto.py``, ``merge_quantization_configs``). The dtype is the
config's, or else the first one of the weights (``modeling_utils._get_dtype``).
"""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn

from budgetfit.errors import InputError
from budgetfit.integrations.model_sources.resolved_model import Materialize
from budgetfit.integrations.optional_imports import quiet_import
from budgetfit.integrations.quantization.quantize_linear import quantize_as_stored

BITSANDBYTES = "bitsandbytes"
# safetensors dtypes in which a model can be loaded; not those of 8 bits and fewer
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
        method: The quantization method; empty for none.
        layers: bitsandbytes' config of the linear layers, if that is the method.
        loader: The config class that dequantizes them while loading.
    """

    method: str = ""
    layers: transformers.BitsAndBytesConfig | None = None
    loader: str = ""

    @property
    def undone(self) -> str:
        """The method, where loading dequantizes."""
        return self.method if self.loader else ""

    def notes(self, config: transformers.PreTrainedConfig) -> Iterator[str]:
        """Describe the planned dtype where it is not the stored one."""
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

    def builder(self, materialize: Materialize) -> Materialize:
        """Wrap a builder so that the model gets the stored quantized layers."""
        layers = self.layers
        if layers is None:
            return materialize

        def quantized(
            device: torch.device | str = "cpu", dtype: torch.dtype | None = None
        ) -> nn.Module:
            model = materialize(device, dtype)
            quantize_as_stored(model, layers)
            return model

        return quantized


def stored_weights(config: transformers.PreTrainedConfig, name: str) -> StoredWeights:
    """Read from a config how the weights are stored.

    Its ``quantization_config`` is removed where loading dequantizes.

    Raises:
        InputError: If the quantization is not supported.
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
        raise InputError(
            f"The weights of {name} are quantised by "
            f"{method or 'a method without a name'}: what its layers take in training "
            "is not known here. Give the unquantised model that it was made from (its "
            'model card names it), with method="qlora" (--method qlora) for 4 bits.'
        )
    for part in said:
        vars(part).pop("quantization_config", None)
    return StoredWeights(method=method, loader=kind.__name__)


def settle_dtype(
    config: transformers.PreTrainedConfig, stored: StoredWeights, folder: Path | None
) -> tuple[str, ...]:
    """Set the dtype of a config without one to that in which its weights are loaded.

    ``folder``: where the weights may be.

    Returns:
        Notes on what was assumed.
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
            "but from_pretrained loads the weights as they are stored: if not in fp32, "
            'write the dtype into config.json ("dtype": "bfloat16")'
        )
    config.dtype = found
    return (f"the config names no dtype: planned in {_name(found)}, {why}",)


def parts(config: transformers.PreTrainedConfig) -> Iterator[Any]:
    """Yield a config and its sub-configs."""
    yield config
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, transformers.PreTrainedConfig):
            yield from parts(part)


def _weights_dtype(folder: Path) -> torch.dtype | None:
    """Return the first dtype in the header of the first safetensors file, if any."""
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
    """Return the method's name as in transformers' ``AutoQuantizationConfig``."""
    for bits in (4, 8):
        if fields.get(f"load_in_{bits}bit"):
            return f"{BITSANDBYTES}_{bits}bit"
    method = fields.get("quant_method")
    return str(getattr(method, "value", method) or "")


def _bitsandbytes(fields: dict[str, Any], name: str) -> Any:
    try:
        return _library().AutoQuantizationConfig.from_dict(fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"The quantization_config of {name} cannot be read: {error!s:.200}. "
            "Correct it, or give the unquantised model that it was made from."
        ) from None


def _library() -> Any:
    with quiet_import():  # imports torchao
        from transformers.quantizers import auto  # noqa: PLC0415
    return auto
