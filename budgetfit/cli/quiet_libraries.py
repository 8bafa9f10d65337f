"""Suppress warnings of libraries about how budgetfit calls them.

Warnings of the user's own files and of budgetfit are shown, and every error.
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_OWN = str(Path(__file__).parents[1])


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress library warnings; ``-W`` and ``PYTHONWARNINGS`` enable them."""
    # transformers has its own verbosity setting and log handler.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    before, shown = logging.root.manager.disable, warnings.showwarning

    def show(  # noqa: PLR0913, PLR0917 - as warnings calls it
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not _is_remark(filename, category):
            shown(message, category, filename, lineno, file, line)

    logging.disable(max(before, logging.WARNING))
    if not sys.warnoptions:
        warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown
        logging.disable(before)


def _is_remark(filename: str, category: type[Warning]) -> bool:
    """Whether a warning is about a library or its calls."""
    from budgetfit.utils.user_code import is_installed

    if filename.startswith(_OWN):
        return category is not UserWarning
    return filename.startswith("<") or is_installed(filename)
