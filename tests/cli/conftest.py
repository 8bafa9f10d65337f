"""The command line with a fake api behind it."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
from click.testing import Result
from typer.testing import CliRunner

from budgetfit.cli.app import app
from tests.cli.fake_api import FakeApi
from tests.cli.real_cli import quiet_transformers, write_models

Run = Callable[..., Result]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "budgetfit.api.plan", cast("ModuleType", fake))
    return fake


@pytest.fixture
def run(api: FakeApi) -> Run:  # noqa: ARG001 - it must be in place
    """Run the command line with these words."""

    def invoke(*words: object) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words])

    return invoke


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of models that people name, right and wrong ones."""
    with quiet_transformers():
        yield write_models(tmp_path_factory.mktemp("models"))
