"""Classify text that names a model: local path, hub id or factory.

Imports neither torch nor transformers, so that missing paths are reported fast.
"""

import json
import re
from pathlib import Path
from typing import Any, Final

from budgetfit.errors import InputError
from budgetfit.utils.function_name import is_factory_text

WEIGHTS: Final = frozenset(
    {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5"}
)
EXAMPLES: Final = (
    "Give a folder, a config.json, a hub id such as HuggingFaceTB/SmolLM2-1.7B, or a "
    "factory such as package.module:build or model.py:build."
)
FACTORY_EXAMPLE: Final = "Write package.module:build or path/to/model.py:build."
PIPELINE_INDEX: Final = "model_index.json"
# What is trained of a diffusers pipeline, by its names of parts; the first one counts.
_DENOISERS: Final = ("transformer", "unet", "prior", "decoder")
_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_model_text(text: str) -> None:
    """Check that a named file exists and is a config; run and fetch nothing.

    Hub ids, modules and the content of a factory's file are checked when loaded.

    Raises:
        InputError: There is no such file, or it is not a config.
    """
    text = text.strip()
    check_name(text)
    if is_factory_text(text):
        place = text.rpartition(":")[0]
        if place.endswith(".py"):
            check_factory_file(Path(place).expanduser())
    elif text and is_local_path(text):
        read_fields(config_file(text))


def check_name(text: str) -> None:
    """Refuse a name that is too long for the file system."""
    try:
        Path(text.rpartition(":")[0] or text).exists()
    except PermissionError:
        return  # reported when it is opened
    except (OSError, ValueError) as error:
        raise InputError(
            f"{text!r:.80} names no model: {error!s:.80}. Give a hub id, a folder or a "
            "factory, for example HuggingFaceTB/SmolLM2-1.7B."
        ) from None


def check_factory_file(file: Path) -> None:
    """Check that a factory's Python file exists."""
    if not file.is_file():
        raise InputError(f"There is no file {file}. {FACTORY_EXAMPLE}")


def is_local_path(text: str) -> bool:
    """Whether a text is a local path: it exists, or can only be a path."""
    return (
        Path(text).expanduser().exists()
        or text.startswith((".", "/", "~"))
        or text.endswith((".json", ".py", *WEIGHTS))
        or _HUB_ID.fullmatch(text) is None
    )


def config_file(text: str) -> Path:
    """Return the config file of a path, without opening it.

    Raises:
        InputError: There is none.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        file = path / "config.json"
        if file.is_file():
            return file
        if (path / PIPELINE_INDEX).is_file():
            part = denoiser_of(read_fields(path / PIPELINE_INDEX))
            if part and (path / part / "config.json").is_file():
                return path / part / "config.json"
            raise InputError(
                f"{text} is a pipeline of diffusers without a config.json of "
                f"{part or 'its UNet or transformer'}: give the folder of the model to "
                "train."
            )
        if (path / "adapter_config.json").is_file():
            raise InputError(
                f"{text} holds an adapter and no model: give the base model that its "
                "adapter_config.json names."
            )
        raise InputError(f"{text} has no config.json. {EXAMPLES}")
    if path.suffix in WEIGHTS:
        raise InputError(
            f"{text} holds weights, which planning does not read: give the config.json "
            "beside it."
        )
    if path.suffix == ".py":
        raise InputError(
            f"{text} needs the name of the function that builds the model, for example "
            f"{text}:build."
        )
    if not path.is_file():
        raise InputError(f"There is no file or folder {text}. {EXAMPLES}")
    return path


def denoiser_of(index: dict[str, Any]) -> str:
    """Return the folder of the model that a pipeline trains; empty for none.

    ``index``: of its ``model_index.json``, ``[library, class]`` of each part.
    """
    parts = {
        name: part
        for name, part in index.items()
        if isinstance(part, list) and part and part[0] == "diffusers"
    }
    return next((name for name in _DENOISERS if name in parts), "")


def read_fields(file: Path) -> dict[str, Any]:
    """Read the fields of a JSON file.

    Raises:
        InputError: The file cannot be read or is not a JSON object.
    """
    try:
        fields = parse_fields(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{file} is not valid JSON: {error.msg} at line {error.lineno}, column "
            f"{error.colno}. Correct it there, or fetch the file again."
        ) from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(
            f"{file} cannot be read: {one_line(error)} {EXAMPLES}"
        ) from error
    if not isinstance(fields, dict):
        raise InputError(
            f"{file} holds a {type(fields).__name__} where a config is an object, for "
            'example {"model_type": "llama", ...}.'
        )
    return fields


def parse_fields(text: str) -> Any:
    """Return a config's JSON as values."""
    # transformers writes infinite numbers as ``{"__float__": "Infinity"}``.

    def value_of(fields: dict[str, Any]) -> object:
        is_tagged = fields.keys() == {"__float__"}
        number = fields["__float__"] if is_tagged else None
        return float(number) if number in ("Infinity", "-Infinity", "NaN") else fields

    return json.loads(text, object_hook=value_of)


def one_line(error: BaseException) -> str:
    """Return an exception's message in one line that ends in a full stop."""
    words = " ".join(str(error).split()) or "it says nothing"
    text = f"{type(error).__name__}: {words}"
    return text if text.endswith((".", "!", "?")) else f"{text}."
