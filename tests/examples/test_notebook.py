"""The notebook for Colab and Kaggle runs as a whole, without GPU and network."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "colab_t4.ipynb"


def read() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def executed(folder: Path) -> dict[str, dict[str, str]]:
    """Source of each cell of code -> what it gave, joined, by kind."""
    notebook = read()
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


def test_it_plans_draws_saves_learns_and_verifies(tmp_path: Path) -> None:
    outputs = executed(tmp_path)

    def given_by(words: str) -> dict[str, str]:
        (found,) = [given for source, given in outputs.items() if words in source]
        return found

    text = given_by("print(plan)")["stdout"]
    assert "RECOMMENDED" in text
    assert "FITS" in text
    assert "t4 14.74 GiB" in text
    assert "recompute" in text
    assert outputs["plan"]["text/html"].count("<svg") >= 3
    assert "h.3" in given_by("plan.why")["stdout"]
    assert given_by("plan.save")["text/plain"] == "True"

    losses = re.findall(r"loss (\d+\.\d+)", given_by("budgetfit.apply")["stdout"])
    assert len(losses) == 10
    assert float(losses[-1]) < float(losses[0]) - 0.1
    assert given_by("budgetfit.verify")["stdout"].startswith("PASSED")
    # Nothing is installed where budgetfit is.
    assert set(given_by("%pip").values()) == {""}


def test_it_is_stored_without_outputs() -> None:
    cells = [cell for cell in read().cells if cell.cell_type == "code"]
    assert cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
