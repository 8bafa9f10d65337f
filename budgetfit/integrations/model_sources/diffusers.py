"""diffusers: build the model of a config, on meta.

A pipeline's folder has a ``model_index.json``, which names the model that is trained
in it: the UNet, the transformer or the prior. The network is only used to read the
configs of a hub id.
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import hf_hub_download
from torch import nn

from budgetfit.errors import InputError
from budgetfit.integrations.model_sources.model_name import (
    PIPELINE_INDEX,
    denoiser_of,
    read_fields,
)
from budgetfit.integrations.model_sources.resolved_model import Materialize, fixed_seed
from budgetfit.integrations.optional_imports import import_library

_OUT_OF_REACH = hub_errors.LocalEntryNotFoundError  # nor in the hub's cache
CLASS_NAME = "_class_name"  # the class of a model in its config.json


def is_diffusers_config(fields: dict[str, Any]) -> bool:
    """Whether these are the fields of a diffusers ``config.json``."""
    return isinstance(fields.get(CLASS_NAME), str)


def hub_fields(hub_id: str, *, local_files_only: bool) -> tuple[dict[str, Any], str]:
    """Return the config of a hub id's model, and its subfolder; empty for none.

    A pipeline has its model in a subfolder. ``local_files_only``: read the hub's cache.
    """

    def fields_of(name: str) -> dict[str, Any]:
        try:
            file = hf_hub_download(hub_id, name, local_files_only=local_files_only)
        except (hub_errors.HfHubHTTPError, OSError) as error:
            if local_files_only or not isinstance(error, _OUT_OF_REACH):
                return {}
            raise  # after 24 s of retries, which the next file would take too
        return read_fields(Path(file))

    try:
        index = fields_of(PIPELINE_INDEX)
        folder = denoiser_of(index) if index else ""
        fields = fields_of(f"{folder}/config.json" if folder else "config.json")
    except _OUT_OF_REACH:
        return {}, ""
    return (fields, folder) if is_diffusers_config(fields) else ({}, "")


def diffusers_builder(fields: dict[str, Any]) -> Materialize:
    """Return a function that builds the model of a diffusers config.

    Its weights are fp32, as ``from_pretrained`` without ``torch_dtype`` loads them.

    Raises:
        InputError: diffusers is not installed, or has no such model.
    """
    name = str(fields[CLASS_NAME])
    library = import_library(
        "diffusers",
        f"{name} is a model of diffusers, which is not installed: pip install "
        "diffusers.",
    )
    kind: Any = getattr(library, name, None)
    if not hasattr(kind, "from_config"):
        raise InputError(
            f"diffusers {library.__version__} has no model {name}. A newer model needs "
            "a newer diffusers: pip install --upgrade diffusers."
        )

    def materialize(
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> nn.Module:
        with fixed_seed(device), torch.device(device):
            # A copy, as from_config takes entries out.
            model: nn.Module = kind.from_config(json.loads(json.dumps(fields)))
        # nn.Module.to: diffusers' own logs that some parts are better left in fp32.
        return (model if dtype is None else nn.Module.to(model, dtype)).train()

    return materialize
