"""No library is imported before it is asked for."""

import json

import pytest

from tests.processes import python

OPTIONAL = (
    *("accelerate", "bitsandbytes", "deepspeed", "keras", "lightning"),
    *("peft", "pytorch_lightning", "timm", "torchao", "trl"),
)
PROGRAM = """
import json, sys
{statement}
print("LOADED", json.dumps(sorted(sys.modules)))
"""


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a fresh process has after a statement."""
    program = PROGRAM.format(statement=statement)
    result = python("-W", "ignore", "-c", program, check=True)
    line = next(row for row in result.stdout.splitlines() if row.startswith("LOADED"))
    return set(json.loads(line.removeprefix("LOADED")))


@pytest.mark.parametrize(
    "statement",
    [
        "import budgetfit",
        "import budgetfit; budgetfit.plan, budgetfit.apply, budgetfit.Plan",
    ],
)
def test_budgetfit_loads_no_library_that_is_optional(statement: str) -> None:
    loaded = loaded_by(statement)
    assert not loaded & {*OPTIONAL, "transformers.trainer"}


def test_importing_budgetfit_loads_neither_torch_nor_transformers() -> None:
    assert not loaded_by("import budgetfit") & {"torch", "transformers"}
    # A plan is read without them too.
    assert not loaded_by("import budgetfit; budgetfit.Plan.load") & {"torch"}


def test_a_file_for_a_library_does_not_import_it() -> None:
    exports = "accelerate", "deepspeed", "lightning", "trl"
    loaded = loaded_by(
        f"from budgetfit.integrations.exports import {', '.join(exports)}"
    )
    assert {f"budgetfit.integrations.exports.{name}" for name in exports} <= loaded
    assert not loaded & {"trl", "lightning", "deepspeed"}
