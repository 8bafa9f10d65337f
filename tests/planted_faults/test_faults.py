"""Each fault can still be planted: its line is where it says, and the rest parses."""

import ast

import pytest

from tests.planted_faults.faults import FAULTS, Fault
from tests.planted_faults.run import ROOT, planted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.becomes)
def test_a_fault_is_one_line_of_the_package(fault: Fault) -> None:
    ast.parse(planted(fault, ROOT))
    assert all((ROOT / "tests" / name).exists() for name in fault.tests.split())
