"""Load a transformers config from a local file or from the hub."""

import difflib
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import errors as hub_errors
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from budgetfit.errors import InputError
from budgetfit.integrations.model_sources.hub import is_hub_out_of_reach
from budgetfit.integrations.model_sources.model_name import EXAMPLES, one_line


def config_from_fields(
    fields: dict[str, Any], file: Path, *, trust_remote_code: bool
) -> transformers.PreTrainedConfig:
    """Build the config from the fields of a local file.

    Raises:
        InputError: transformers does not know the model, or refuses the fields.
    """
    model_type = fields.get("model_type")
    has_code = "AutoConfig" in (fields.get("auto_map") or {})
    if has_code and trust_remote_code:
        return _auto_config(str(file.parent), trust_remote_code=True)
    if model_type is None:
        raise InputError(
            f"{file} has no model_type, so it does not say which model it describes. "
            'Add one, for example "model_type": "llama".'
        )
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise _unknown_model_type(model_type, str(file), has_code=has_code)
    try:
        return CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:
        raise InputError(
            f"{file} is not a config that transformers {transformers.__version__} "
            f"accepts for {model_type}: {one_line(error)} Correct it, or try the "
            "transformers that it was written with."
        ) from error


def hub_config(
    hub_id: str, *, trust_remote_code: bool
) -> transformers.PreTrainedConfig:
    """Download the config of a hub id; the only use of the network.

    Raises:
        InputError: There is no such model, it is gated, or the hub is unreachable.
    """
    return _auto_config(
        hub_id,
        trust_remote_code=trust_remote_code,
        local_files_only=is_hub_out_of_reach(),
    )


def _auto_config(
    source: str, *, trust_remote_code: bool, local_files_only: bool = False
) -> transformers.PreTrainedConfig:
    try:
        # False, because None would prompt on the terminal.
        return transformers.AutoConfig.from_pretrained(
            source,
            trust_remote_code=trust_remote_code,
            local_files_only=local_files_only,
        )
    except Exception as error:
        raise InputError(_why_not(source, error)) from error


def _why_not(hub_id: str, error: Exception) -> str:
    """Explain why transformers could not load a config, and what to do."""
    causes = tuple(_causes(error))

    def by(*kinds: type[Exception]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if by(hub_errors.GatedRepoError):
        return (
            f"{hub_id} is gated: accept its terms at https://hf.co/{hub_id} and log in "
            "(hf auth login), or give a config.json."
        )
    if by(hub_errors.RepositoryNotFoundError):
        return (
            f"There is no model {hub_id} on the hub, nor a file or folder of that name "
            f"here. {EXAMPLES} A private model needs a login (hf auth login)."
        )
    if by(hub_errors.RemoteEntryNotFoundError):
        return f"{hub_id} has no config.json on the hub. {EXAMPLES}"
    if "trust_remote_code" in str(error):
        return (
            f"{hub_id} brings its own code. Read it at https://hf.co/{hub_id}, then "
            "allow it with trust_remote_code (on the command line: "
            "--trust-remote-code)."
        )
    if isinstance(error, OSError):
        why = one_line(error)
        if by(hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled):
            why = "the hub is out of reach and its cache here does not have it."
        return (
            f"The config of {hub_id} could not be fetched, and there is no file or "
            f"folder of that name here: {why} Without a network, give a folder or a "
            "config.json."
        )
    return f"The config of {hub_id} cannot be used: {one_line(error)}"


def _causes(error: BaseException | None) -> list[BaseException]:
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def _unknown_model_type(model_type: object, file: str, *, has_code: bool) -> InputError:
    if has_code:
        return InputError(
            f"{file} describes a {model_type}, which is code of its own. Read it, then "
            "allow it with trust_remote_code (on the command line: "
            "--trust-remote-code)."
        )
    near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING.keys(), n=3)
    hint = f"Did you mean {', '.join(near)}?" if near else "Check the spelling."
    return InputError(
        f"{file} has model_type {model_type!r}, which transformers "
        f"{transformers.__version__} does not know. {hint} A newer model needs a newer "
        "transformers: pip install --upgrade transformers."
    )
