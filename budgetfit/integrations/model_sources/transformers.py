"""transformers: from a config, without weights, to the model that it describes.

The network is used for one thing: reading the config of a hub id. Code that a config
brings along runs only where the user said so.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import transformers
from transformers.models.auto import modeling_auto

from budgetfit.errors import InputError
from budgetfit.integrations.model_sources.checkpoint_config import (
    parts,
    settle_dtype,
    stored_weights,
)
from budgetfit.integrations.model_sources.model_name import (
    config_file,
    is_local_path,
    one_line,
    read_fields,
)
from budgetfit.integrations.model_sources.resolved_model import (
    Materialise,
    ResolvedModel,
)
from budgetfit.integrations.model_sources.timm import is_timm_config, timm_builder
from budgetfit.integrations.model_sources.transformers_config import (
    config_from_fields,
    hub_config,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# Tried in this order for a config that names no architecture: what a model of several
# heads is mostly trained as comes first.
_HEADS = (
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
_SEED = 0  # random weights, the same in every run


def load_model_on_meta(text: str, *, trust_remote_code: bool = False) -> ResolvedModel:
    """Return the model that a folder, a ``config.json`` or a hub id describes.

    It is built on ``meta``: no weights are read, downloaded or allocated.

    Args:
        text: Path of a folder or JSON file, or a hub id such as ``"org/name"``.
        trust_remote_code: Let code that the config names run, as in transformers.

    Raises:
        InputError: Nothing is there, or it is no config that transformers knows.
    """
    if not is_local_path(text):
        return model_from_config(
            hub_config(text, trust_remote_code=trust_remote_code),
            name=text.rpartition("/")[2],
            source=f"from the config of {text} on the hub, no weights loaded",
            trust_remote_code=trust_remote_code,
        )
    file = config_file(text)
    name, source = _file_name(file), f"from {file.name}, no weights loaded"
    fields = read_fields(file)
    if is_timm_config(fields):
        return _resolved(timm_builder(fields), name, source, ())
    config = config_from_fields(fields, file, trust_remote_code=trust_remote_code)
    return model_from_config(
        config,
        name=name,
        source=source,
        folder=file.parent,
        trust_remote_code=trust_remote_code,
    )


def model_from_config(
    config: transformers.PreTrainedConfig,
    *,
    name: str = "",
    source: str = "",
    folder: Path | None = None,
    trust_remote_code: bool = False,
) -> ResolvedModel:
    """Return the model of a config, built on ``meta``; the config is not changed.

    It has the dtypes and the quantised layers that ``from_pretrained`` would give it.
    ``folder`` is where the config lies, perhaps beside its weights: a config without a
    dtype has theirs.

    Raises:
        InputError: The config describes no model that can be built here, or weights
            that are stored in a way that cannot be planned.
    """
    config = copy.deepcopy(config)
    name = name or (config.name_or_path or "").rpartition("/")[2]
    source = source or f"from a {type(config).__name__}, no weights loaded"
    if config.model_type == "timm_wrapper":
        return _resolved(timm_builder(vars(config)), name, source, ())
    _switch_off_cache(config)
    stored = stored_weights(config, name or type(config).__name__)
    dtype_notes = settle_dtype(config, stored, folder)
    notes = [*stored.notes(config)]
    if trust_remote_code and getattr(config, "auto_map", None):
        materialise = _remote_builder(config)
    else:
        materialise = _native_builder(config, notes)
    resolved = _resolved(stored.builder(materialise), name, source, notes)
    return replace(resolved, dtype_notes=dtype_notes, stored_in=stored.undone)


def _resolved(
    materialise: Materialise, name: str, source: str, notes: Sequence[str]
) -> ResolvedModel:
    try:
        model = materialise("meta")
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{name or 'The model'} cannot be built from its config: {one_line(error)} "
            "Correct the config, or build the module and pass that."
        ) from error
    return ResolvedModel(
        model=model,
        name=name or type(model).__name__,
        source=source,
        materialise=materialise,
        notes=tuple(notes),
    )


def _file_name(file: Path) -> str:
    """Return what a model is called by its file: of config.json, by the folder."""
    folder = file.resolve().parent.name
    return folder if file.name == "config.json" and folder else file.stem


def _switch_off_cache(config: transformers.PreTrainedConfig) -> None:
    """Switch off in a config what only generation needs."""
    for part in parts(config):
        if getattr(part, "use_cache", False):
            part.use_cache = False


def _native_builder(
    config: transformers.PreTrainedConfig, notes: list[str]
) -> Materialise:
    """Return a builder for the library's own class of this config."""
    found = _named_class(config)
    if found is None:
        found = _usual_class(config)
        named = ", ".join(config.architectures or ())
        says = "names no architecture"
        if named:
            says = f"names {named}, which transformers does not have for it"
        notes.append(f"the config {says}: planned as {found.__name__}")
    model_class = found
    is_part = model_class.config_class is not type(config)
    own = config.get_text_config() if is_part else config
    own.dtype = own.dtype or config.dtype

    def materialise(
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> transformers.PreTrainedModel:
        fields = copy.deepcopy(own)
        with _fixed_seed(device), torch.device(device):
            # Auto classes end here too, but choose the class from the config's type.
            return model_class._from_config(fields, dtype=dtype or fields.dtype)  # noqa: SLF001

    return materialise


def _named_class(
    config: transformers.PreTrainedConfig,
) -> type[transformers.PreTrainedModel] | None:
    """Return the first of the config's architectures that fits it."""
    for name in config.architectures or ():
        found = _model_class(name)
        # A text model may be described by the config of the model that contains it.
        own = (type(config), type(config.get_text_config()))
        if found is not None and found.config_class in own:
            return found
    return None


def _usual_class(
    config: transformers.PreTrainedConfig,
) -> type[transformers.PreTrainedModel]:
    """Return the class that a config of this type is mostly trained as."""
    for table in _HEADS:
        names = getattr(modeling_auto, table, {}).get(config.model_type, ())
        for name in (names,) if isinstance(names, str) else names:
            found = _model_class(name)
            if found is not None:
                return found
    raise InputError(
        f"transformers has no model for the model_type {config.model_type!r} of a "
        f"{type(config).__name__}. Pass the module itself."
    )


def _model_class(name: str) -> type[transformers.PreTrainedModel] | None:
    found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and issubclass(
        found, transformers.PreTrainedModel
    )
    return found if is_model else None


def _remote_builder(config: transformers.PreTrainedConfig) -> Materialise:
    """Return a builder for the class that the config's own code defines."""
    names = [name for name in config.auto_map if name.startswith("AutoModel")]
    # A head before the bare model, as for architectures.
    name = max(names, key=len, default="AutoModel")
    auto_class = getattr(transformers, name)

    def materialise(
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> transformers.PreTrainedModel:
        fields = copy.deepcopy(config)
        with _fixed_seed(device), torch.device(device):
            model: transformers.PreTrainedModel = auto_class.from_config(
                fields, dtype=dtype or fields.dtype, trust_remote_code=True
            )
        return model

    return materialise


@contextmanager
def _fixed_seed(device: torch.device | str) -> Iterator[None]:
    """Seed the random weights; afterwards the global state is as it was."""
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(_SEED)
        yield
