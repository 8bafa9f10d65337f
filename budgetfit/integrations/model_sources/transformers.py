"""transformers: build a model from its config, on meta.

The network is only used to read the config of a hub id. A config's remote code runs
only with ``trust_remote_code``.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from transformers.models.auto import modeling_auto

from budgetfit.errors import InputError
from budgetfit.integrations.model_sources.checkpoint_config import (
    parts,
    settle_dtype,
    stored_weights,
)
from budgetfit.integrations.model_sources.diffusers import (
    diffusers_builder,
    hub_fields,
    is_diffusers_config,
)
from budgetfit.integrations.model_sources.hub import is_hub_out_of_reach
from budgetfit.integrations.model_sources.model_name import (
    PIPELINE_INDEX,
    config_file,
    is_local_path,
    one_line,
    read_fields,
)
from budgetfit.integrations.model_sources.resolved_model import (
    Materialize,
    ResolvedModel,
    fixed_seed,
)
from budgetfit.integrations.model_sources.timm import timm_builder
from budgetfit.integrations.model_sources.transformers_config import (
    config_from_fields,
    hub_config,
)

# Tried in this order for a config without ``architectures``: the most common training
# task first.
_HEADS = (
    *("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM"),
    *("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    *("IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "VIDEO_CLASSIFICATION"),
    *("CTC", "AUDIO_CLASSIFICATION", "PRETRAINING", "OBJECT_DETECTION"),
    *("UNIVERSAL_SEGMENTATION", "ZERO_SHOT_OBJECT_DETECTION", "DEPTH_ESTIMATION"),
    *("VISUAL_QUESTION_ANSWERING", "SEQUENCE_CLASSIFICATION"),
    *("TOKEN_CLASSIFICATION", "RNNT", "TDT", "TEXT_TO_SPECTROGRAM"),
    *("TEXT_TO_WAVEFORM", "MULTIMODAL_LM", "TIME_SERIES_PREDICTION"),
    *("TIME_SERIES_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION"),
    *("TEXT_RECOGNITION", "TABLE_RECOGNITION", "IMAGE_MATTING", "IMAGE_TO_IMAGE"),
    *("KEYPOINT_MATCHING", "KEYPOINT_DETECTION", "POSE_ESTIMATION"),
)
_BARE = "MODEL_MAPPING_NAMES"


def load_model_on_meta(text: str, *, trust_remote_code: bool = False) -> ResolvedModel:
    """Build the model of a folder, a JSON file or a hub id such as ``"org/name"``.

    It is built on ``meta``: no weights are read, downloaded or allocated.

    Raises:
        InputError: There is no config, or transformers does not know it.
    """
    if not is_local_path(text):
        return _from_hub(text, trust_remote_code=trust_remote_code)
    file = config_file(text)
    name, source = _file_name(file), f"from {file.name}, no weights loaded"
    fields = read_fields(file)
    if {"architecture", "pretrained_cfg"} <= fields.keys():
        return _resolved(timm_builder(fields), name, source, ())
    if is_diffusers_config(fields):
        return _of_diffusers(fields, name, source)
    config = config_from_fields(fields, file, trust_remote_code=trust_remote_code)
    return model_from_config(
        config,
        name=name,
        source=source,
        folder=file.parent,
        trust_remote_code=trust_remote_code,
    )


def _from_hub(hub_id: str, *, trust_remote_code: bool) -> ResolvedModel:
    name = hub_id.rpartition("/")[2]
    source = f"from the config of {hub_id} on the hub, no weights loaded"
    try:
        config = hub_config(hub_id, trust_remote_code=trust_remote_code)
    except InputError:  # a model or a pipeline of diffusers?
        fields, folder = hub_fields(hub_id, local_files_only=is_hub_out_of_reach())
        if not fields:
            raise
        name = f"{name}/{folder}" if folder else name
        return _of_diffusers(fields, name, source)
    return model_from_config(
        config, name=name, source=source, trust_remote_code=trust_remote_code
    )


def model_from_config(
    config: transformers.PreTrainedConfig,
    *,
    name: str = "",
    source: str = "",
    folder: Path | None = None,
    trust_remote_code: bool = False,
) -> ResolvedModel:
    """Build the model of a config on ``meta``; the config is not changed.

    It has the dtypes and quantized layers that ``from_pretrained`` would give it.
    ``folder`` may contain the weights, whose dtype is used for a config without one.

    Raises:
        InputError: The model cannot be built, or its quantization is not supported.
    """
    config = copy.deepcopy(config)
    name = name or (config.name_or_path or "").rpartition("/")[2]
    source = source or f"from a {type(config).__name__}, no weights loaded"
    if config.model_type == "timm_wrapper":
        return _resolved(timm_builder(vars(config)), name, source, ())
    for part in parts(config):
        if getattr(part, "use_cache", False):  # of keys and values, for generation
            part.use_cache = False
    stored = stored_weights(config, name or type(config).__name__)
    dtype_notes = settle_dtype(config, stored, folder)
    notes = [*stored.notes(config)]
    if trust_remote_code and getattr(config, "auto_map", None):
        materialize = _remote_builder(config, notes)
    else:
        materialize = _native_builder(config, notes)
    resolved = _resolved(stored.builder(materialize), name, source, notes)
    return replace(
        resolved,
        dtype_notes=dtype_notes,
        stored_in=stored.undone,
        dequantizer=stored.loader,
    )


def _resolved(
    materialize: Materialize, name: str, source: str, notes: Sequence[str]
) -> ResolvedModel:
    try:
        model = materialize("meta")
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"{name or 'The model'} cannot be built here: {one_line(error)} Install "
            "that, or build the module elsewhere and pass it."
        ) from error
    except Exception as error:
        raise InputError(
            f"{name or 'The model'} cannot be built from its config: {one_line(error)} "
            "Correct the config, or build the module and pass that."
        ) from error
    _refuse_empty_weights(model, name)
    return ResolvedModel(
        model=model,
        name=name or type(model).__name__,
        source=source,
        materialize=materialize,
        notes=tuple(notes),
    )


def _refuse_empty_weights(model: nn.Module, name: str) -> None:
    """Refuse a config with a size of 0, such as a vocabulary without tokens."""
    for path, weight in model.named_parameters():
        # Tokens that a model does not use may be an empty parameter (timm's ViTs).
        if path.endswith("weight") and not is_lazy(weight) and not weight.numel():
            shape = "x".join(map(str, weight.shape))
            raise InputError(
                f"The config of {name or 'the model'} gives {path} the size {shape}, "
                "so nothing is in it. Correct the config: one of its sizes is 0."
            )


def _of_diffusers(fields: dict[str, Any], name: str, source: str) -> ResolvedModel:
    resolved = _resolved(diffusers_builder(fields), name, source, ())
    return replace(resolved, frozen_in_compute_dtype=True)


def _file_name(file: Path) -> str:
    """Name a model by its config file, or the folder of a ``config.json``."""
    # A part of a pipeline has the pipeline's name, too.
    parent = file.resolve().parent
    folder = parent.name
    if (parent.parent / PIPELINE_INDEX).is_file():
        folder = f"{parent.parent.name}/{folder}"
    return folder if file.name == "config.json" and folder else file.stem


def _native_builder(
    config: transformers.PreTrainedConfig, notes: list[str]
) -> Materialize:
    """Return a builder for transformers' own class of this config."""
    model_class = _named_class(config)
    if model_class is None:
        model_class = _usual_class(config)
        named = ", ".join(map(str, config.architectures or ()))
        says = "names no architecture"
        if named:
            says = f"names {named}, which transformers does not have for it"
        notes.append(f"the config {says}: planned as {model_class.__name__}")
    is_part = model_class.config_class is not type(config)
    own = _text_part(config) if is_part else config
    own.dtype = own.dtype or config.dtype
    # Auto classes have from_config, but choose the class by the config's type.
    return _builder(own, model_class._from_config, notes)  # noqa: SLF001


def _named_class(
    config: transformers.PreTrainedConfig,
) -> type[transformers.PreTrainedModel] | None:
    """Return the class of the first matching entry in ``architectures``."""
    for name in config.architectures or ():
        found = _model_class(str(name))
        # A text model may be described by the config of the model that contains it.
        own = (type(config), type(_text_part(config)))
        if found is not None and found.config_class in own:
            return found
    return None


def _text_part(config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    """Return the config of the text model inside; the whole one where there are two."""
    try:
        return config.get_text_config()
    except ValueError:  # MusicGen: a text encoder and a decoder
        return config


def _usual_class(
    config: transformers.PreTrainedConfig,
) -> type[transformers.PreTrainedModel]:
    """Return the most common training class of a config type."""
    tables = [*(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in _HEADS), _BARE]
    for table in tables:
        names = getattr(modeling_auto, table, {}).get(config.model_type, ())
        for name in (names,) if isinstance(names, str) else names:
            found = _model_class(name)
            if found is not None:
                return found
    raise InputError(
        f"No auto class of transformers has a model for the model_type "
        f"{config.model_type!r} of a {type(config).__name__}. Name its class in the "
        'config, "architectures": ["..."], or pass the module itself.'
    )


def _model_class(name: str) -> type[transformers.PreTrainedModel] | None:
    found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and issubclass(
        found, transformers.PreTrainedModel
    )
    return found if is_model else None


def _remote_builder(
    config: transformers.PreTrainedConfig, notes: list[str]
) -> Materialize:
    """Return a builder for the class in the config's remote code (``auto_map``)."""
    names = [name for name in config.auto_map if name.startswith("AutoModel")]
    # Prefer a head to the bare model, as for architectures.
    name = max(names, key=len, default="AutoModel")
    auto_class = getattr(transformers, name)
    build = partial(auto_class.from_config, trust_remote_code=True)
    return _builder(config, build, notes)


def _builder(
    config: transformers.PreTrainedConfig,
    build: Callable[..., transformers.PreTrainedModel],
    notes: list[str],
) -> Materialize:
    """Return a builder that calls ``build`` with a copy of the config and a dtype."""

    def materialize(
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> transformers.PreTrainedModel:
        fields = copy.deepcopy(config)
        with fixed_seed(device), torch.device(device), _NumbersOnCpu():
            model = build(fields, dtype=dtype or fields.dtype)
        note = _train_as_loaded(model)
        if note and note not in notes:
            notes.append(note)
        return model

    return materialize


class _NumbersOnCpu(TorchFunctionMode):
    """Makes tensors of one whole number on the CPU: sizes of layers, kept as buffers.

    On meta they would have no value, and models compute shapes from them.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``torch.tensor(number)`` without the default device."""
        kwargs = kwargs or {}
        if func is torch.tensor and type(args[0] if args else None) is int:
            kwargs = {"device": "cpu", **kwargs}
        return func(*args, **kwargs)


def _train_as_loaded(model: nn.Module) -> str:
    """Unfreeze what ``from_pretrained`` unfreezes, and return a note about it."""
    # It puts a trainable parameter wherever the dtype has gradients, also over a table
    # of positions that ``__init__`` has frozen, in the checkpoint or not (transformers
    # 5.23: core_model_loading.py, ``set_param_for_module``).
    frozen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and parameter.is_floating_point()
    }
    for parameter in frozen.values():
        parameter.requires_grad = True
    if not frozen:
        return ""
    names = list(frozen)
    more = f" and {len(names[3:])} more" if names[3:] else ""
    return (
        f"{', '.join(names[:3])}{more}: frozen by the model's code, trainable once "
        "from_pretrained has loaded it, and planned so; to keep it frozen, plan the "
        "loaded model"
    )
