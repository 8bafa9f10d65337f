"""Verify in a subprocess: a clean CUDA context, allocator and host process.

Earlier work of an interpreter leaves memory behind: the allocator's cache, loaded
kernels, cuBLAS workspaces. The child runs the command line, with the plan's file and
the name of the model as arguments.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from budgetfit.core.allocator.settings import VARIABLE, VARIABLES, AllocatorSettings
from budgetfit.core.plan import Plan
from budgetfit.core.verification import Verification
from budgetfit.errors import BudgetfitError, InputError

# Properties that the command line prints besides a verification's fields.
_PROPERTIES = ("passed", "allocated_error")


def verify_in_subprocess(  # noqa: PLR0913 - what the command line takes
    plan: Plan,
    model: str | None,
    *,
    steps: int,
    device: str | None,
    trust_remote_code: bool,
    progress: Callable[[str], None] | None,
) -> Verification:
    """Run ``budgetfit verify`` on the plan in a subprocess and return its result.

    ``model``: name of the model or its factory; None for the one in the plan.

    Raises:
        InputError: As raised in the child.
        BudgetfitError: The child crashed, or failed with another error.
    """
    if progress is not None:
        progress(f"running {steps} real steps in a fresh process")
    with tempfile.TemporaryDirectory(prefix="budgetfit-") as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        options = ["--steps", str(steps), "--json"]
        options += ["--model", model] if model is not None else []
        options += ["--device", device] if device is not None else []
        options += ["--trust-remote-code"] if trust_remote_code else []
        settings = plan.budget.allocator
        return _answer(_run([str(path), *options], settings))


def _run(
    arguments: Sequence[str], settings: AllocatorSettings
) -> subprocess.CompletedProcess[str]:
    """Run it with the plan's allocator settings, in place of this process's."""
    environment = {
        name: text for name, text in os.environ.items() if name not in VARIABLES
    }
    if settings.text:
        environment[VARIABLE] = settings.text
    return subprocess.run(  # noqa: S603 - this package, in this interpreter
        [sys.executable, "-m", "budgetfit", "verify", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def _answer(done: subprocess.CompletedProcess[str]) -> Verification:
    try:
        found: Any = json.loads(done.stdout)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        last = done.stderr.strip().splitlines()[-3:] or ["it said nothing"]
        raise BudgetfitError(
            f"The fresh process ended with code {done.returncode} and no answer: "
            f"{' '.join(last)} Verify in this process instead, without fresh_process."
        )
    if "error" in found:
        kind = InputError if found["error"]["type"] == "InputError" else BudgetfitError
        raise kind(found["error"]["message"])
    fields = {name: item for name, item in found.items() if name not in _PROPERTIES}
    try:
        return TypeAdapter(Verification).validate_python(
            {**fields, "fresh_process": True}
        )
    except ValidationError as error:
        raise BudgetfitError(
            f"The fresh process answered as another version does: {error} Install one "
            "version of budgetfit for this Python."
        ) from None
