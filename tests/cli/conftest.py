"""The command line with a fake api behind it."""

import sys
from collections.abc import Callable

import pytest
from click.testing import Result
from typer.testing import CliRunner

from budgetfit.cli.app import app
from tests.cli.fake_api import FakeApi

Run = Callable[..., Result]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "budgetfit.api.plan", fake)  # type: ignore[arg-type]
    return fake


@pytest.fixture
def run(api: FakeApi) -> Run:  # noqa: ARG001 - it must be in place
    """Run the command line with these words."""

    def invoke(*words: object) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words])

    return invoke
