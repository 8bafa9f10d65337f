"""Key of an answer: a hash of everything that it depends on, found without torch.

Equal keys mean equal answers. Where that is unknown (code of the user, code of a hub
repository, a config that names another repository) there is none.

What a computation imported is known only afterwards, so its files are kept with the
answer (``stored_answers``). Everything that decides what is imported is in the key.
"""

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, NamedTuple

from budgetfit.traces.cache.code_hash import NotCacheableError
from budgetfit.utils.function_name import is_factory_text

# Variables of the terminal and of the login. Everything else in the environment
# counts: torch and transformers read hundreds of names.
_OF_THE_SESSION: Final = frozenset(
    {
        *("_", "PWD", "OLDPWD", "SHLVL", "TERM", "COLORTERM", "COLUMNS", "LINES"),
        *("NO_COLOR", "FORCE_COLOR", "DISPLAY", "WAYLAND_DISPLAY", "WINDOWID"),
        *("STY", "GPG_TTY", "LS_COLORS", "PS1", "PS2", "PAGER", "EDITOR", "VISUAL"),
        *("INVOCATION_ID", "JOURNAL_STREAM", "DBUS_SESSION_BUS_ADDRESS", "HISTFILE"),
        *("XDG_SESSION_ID", "XDG_SESSION_TYPE", "XDG_VTNR", "XDG_SEAT"),
        *("MAKELEVEL", "MAKEFLAGS", "MFLAGS", "PYTEST_CURRENT_TEST"),
        "VIRTUAL_ENV_PROMPT",
    }
)
_SESSION_PREFIXES: Final = (
    *("SSH_", "TMUX", "TERM_", "VTE_", "ITERM_", "KITTY_", "WEZTERM_", "ALACRITTY_"),
    *("KONSOLE_", "GNOME_", "VSCODE_", "SLURM_", "LC_TERMINAL", "WT_"),
)
# Code of the user runs for these.
_CODE: Final = ("batch", "loss", "trust_remote_code")
_IMPORTED: Final = (".py", ".so", ".pyd", ".zip")
_INSTALLED: Final = (".dist-info", ".egg-info", ".egg-link", ".pth")
# Signs of an accelerator's driver, where torch may find a card.
_DEVICES: Final = (
    ("/dev", "nvidia*"),
    ("/dev", "dxg"),
    ("/dev", "kfd"),
    ("/proc/driver/nvidia/gpus", "*"),
    ("C:/Windows/System32", "nvcuda.dll"),
)


class Process(NamedTuple):
    """What a process found when it started; libraries change some of it."""

    environment: Mapping[str, str]
    search_path: tuple[str, ...]
    started_s: float


_PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


@contextmanager
def answers_are_kept() -> Iterator[None]:
    """Keep and use answers in this context, of a process that did nothing else."""
    # In other processes (tests, notebooks) functions may be patched.
    before = _PROCESS.set(Process(dict(os.environ), tuple(sys.path), time.time()))
    try:
        yield
    finally:
        _PROCESS.reset(before)


def answer_key(command: str, asked: Mapping[str, Any]) -> str | None:
    """Return the key of a command with its parsed arguments; None if there is none."""
    process = _PROCESS.get()
    if process is None or any(asked.get(name) for name in _CODE):
        return None
    try:
        parts = [
            (command, sorted(asked.items())),
            _model(asked["model"]),
            _software(process),
            _machine(),
        ]
    except Exception:  # noqa: BLE001 - what cannot be read is told by the computation
        return None
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _model(text: str) -> list[object]:
    """Return what a model's text stands for."""
    # Of a local folder the config is read, and where it names no dtype the weights'
    # headers (``model_sources/checkpoint_config.py``).
    from budgetfit.integrations.model_sources import hub, model_name

    text = text.strip()
    if is_factory_text(text):
        raise NotCacheableError("a factory")
    is_local = model_name.is_local_path(text)
    file = model_name.config_file(text) if is_local else hub.hub_config_file(text)
    content = file.read_bytes()
    config = json.loads(content)
    if _names_a_backbone(config):
        raise NotCacheableError("a backbone from the hub")
    if "_diffusers_version" in config:
        raise NotCacheableError("a part of a pipeline: others' configs count")
    if not is_local:
        return [file.parent.name, content]
    weights = [
        (path.name, file_version(path))
        for path in sorted(file.parent.glob("*.safetensors*"))
    ]
    return [str(file.resolve()), content, weights]


def _names_a_backbone(fields: object) -> bool:
    """Whether transformers may look up the config of a backbone on the hub."""
    if isinstance(fields, dict):
        named = isinstance(fields.get("backbone"), str)
        return named or any(map(_names_a_backbone, fields.values()))
    return isinstance(fields, list) and any(map(_names_a_backbone, fields))


def _software(process: Process) -> list[object]:
    """Return Python, the environment, what is installed and can be imported."""
    from budgetfit.traces.cache.package_hash import package_hash

    environment = sorted(
        (name, value)
        for name, value in process.environment.items()
        if name not in _OF_THE_SESSION and not name.startswith(_SESSION_PREFIXES)
    )
    folders = [(folder, *_importable(folder)) for folder in process.search_path]
    return [package_hash(), sys.version, sys.flags, environment, folders]


def _importable(folder: str) -> Iterator[tuple[str, object]]:
    """Yield what Python finds in a folder of ``sys.path``, by name."""
    # An installer makes the record of a library anew, so its time counts.
    if not Path(folder).is_dir():
        return
    with os.scandir(folder or ".") as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.endswith(_INSTALLED):
                yield entry.name, file_version(entry)
            elif entry.name.endswith(_IMPORTED) or (
                entry.name.isidentifier() and entry.name != "__pycache__"
            ):
                yield entry.name, None


def _machine() -> list[object]:
    """Return what of this machine and of its user decides."""
    from budgetfit.calibration.file import calibration_path

    kept = calibration_path()  # what verify measured
    devices = [
        str(path) for folder, name in _DEVICES for path in Path(folder).glob(name)
    ]
    return [
        platform.node(),
        platform.platform(),
        sorted(devices),
        kept.read_bytes() if kept.exists() else None,
    ]


def imported_files() -> dict[str, tuple[int, int]]:
    """Return the version of each file that this process imported.

    Raises:
        NotCacheableError: One was edited after the process started.
    """
    process = _PROCESS.get()
    files = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    found = {
        name: file_version(name)
        for name in sorted(file for file in files if file and Path(file).is_absolute())
    }
    newest_ns = max(mtime_ns for mtime_ns, _ in found.values())
    if process is None or newest_ns > process.started_s * 1e9:
        raise NotCacheableError("code that has just changed")
    return found


def file_version(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return time of change and size."""
    found = os.stat(path)  # noqa: PTH116 - thousands of them
    return found.st_mtime_ns, found.st_size
