"""The hub: whether it can be reached, and where the config of a model is kept here.

Imports neither torch nor transformers.
"""

import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies


def is_hub_out_of_reach() -> bool:
    """Whether DNS cannot resolve the hub, which its client would retry for 24 s."""
    from huggingface_hub import constants  # noqa: PLC0415 - only for hub ids

    if getproxies():
        return False  # a proxy resolves names
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return True
    return False


def hub_config_file(hub_id: str) -> Path:
    """Return the config in the hub's cache, as transformers finds it.

    Its folder is named by the commit: the newest one, where the hub can be reached.

    Raises:
        Exception: Of any kind, if there is none.
    """
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - only for hub ids

    return Path(
        hf_hub_download(hub_id, "config.json", local_files_only=is_hub_out_of_reach())
    )
