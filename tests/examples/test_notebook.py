"""The notebook for Colab and Kaggle runs as a whole, without GPU and network."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "colab_t4.ipynb"


def read() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Source of each cell of code -> what it gave, joined, by kind."""
    notebook = read()
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        where = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=300, resources=where).execute()
    found: dict[str, dict[str, str]] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            given = dict.fromkeys(("stdout", "stderr", "text/plain", "text/html"), "")
            for output in cell.outputs:
                data = output.get("data", {output.get("name"): output.get("text")})
                given |= {
                    kind: given[kind] + data[kind] for kind in given if kind in data
                }
            found[cell.source] = given
    return found


def given_by(outputs: dict[str, dict[str, str]], words: str) -> dict[str, str]:
    (found,) = [given for source, given in outputs.items() if words in source]
    return found


def test_the_plan_is_printed_and_drawn(outputs: dict[str, dict[str, str]]) -> None:
    text = given_by(outputs, "print(plan)")["stdout"]
    assert "RECOMMENDED" in text
    assert "FITS" in text
    assert "t4 14.74 GiB" in text
    assert "recompute" in text
    assert outputs["plan"]["text/html"].count("<svg") >= 3
    assert "h.3" in given_by(outputs, "plan.why")["stdout"]


def test_a_saved_plan_is_the_same(outputs: dict[str, dict[str, str]]) -> None:
    assert given_by(outputs, "plan.save")["text/plain"] == "True"


def test_it_learns_and_passes_verification(outputs: dict[str, dict[str, str]]) -> None:
    text = given_by(outputs, "budgetfit.apply")["stdout"]
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", text)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.1
    assert given_by(outputs, "budgetfit.verify")["stdout"].startswith("PASSED")


def test_nothing_is_installed_where_budgetfit_is(
    outputs: dict[str, dict[str, str]],
) -> None:
    assert set(given_by(outputs, "%pip").values()) == {""}


def test_it_is_stored_without_outputs() -> None:
    cells = [cell for cell in read().cells if cell.cell_type == "code"]
    assert cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
