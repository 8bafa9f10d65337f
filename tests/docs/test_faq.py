"""The messages that docs/faq.md is keyed by are those that are really raised."""

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils import checkpoint

import budgetfit
from tests.docs.markdown import ROOT, read

OURS = "## budgetfit's own errors"
PARTS = read("docs/faq.md").partition(OURS)
RECOMPUTED = (
    "A different number of tensors was saved during the original forward "
    "and recomputation"
)
KEY = re.compile(r"^### .*$", re.MULTILINE)


def messages(text: str) -> list[str]:
    """Return what headings quote, cut where they leave something out."""
    quoted = [
        key for line in KEY.findall(text) for key in re.findall("`([^`]+)`", line)
    ]
    return [
        piece.strip() for key in quoted for piece in key.split("...") if piece.strip()
    ]


def texts_of(source: str) -> str:
    """Return all string constants of a source, neighbours joined as Python does."""
    constants = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\n".join(constants)


PACKAGE = "\n".join(
    texts_of(file.read_text(encoding="utf-8"))
    for file in sorted((ROOT / "budgetfit").rglob("*.py"))
)


@pytest.mark.parametrize("message", messages(PARTS[2]))
def test_our_own_messages_are_in_the_package(message: str) -> None:
    words = re.sub(r"^, |\.$", "", message)
    assert words in PACKAGE


def test_the_errors_own_page_names_every_class_of_error() -> None:
    for name in budgetfit.__all__:
        if name.endswith("Error") and name != "InputError":
            assert name in PARTS[2]


@pytest.mark.parametrize(
    ("message", "module"),
    [
        (RECOMPUTED, checkpoint),
        ("the use_reentrant parameter should be passed explicitly", checkpoint),
        ("Attempting to unscale FP16 gradients.", torch.amp.grad_scaler),
    ],
)
def test_messages_of_torch_are_those_of_the_installed_one(
    message: str, module: ModuleType
) -> None:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert message in messages(PARTS[0])
    assert message in texts_of(source)


def test_the_message_on_a_second_backward_pass_is_the_real_one() -> None:
    loss = torch.ones(2, requires_grad=True).exp().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=_key("Trying to backward")):
        loss.backward()


def test_the_message_on_a_loss_without_a_graph_is_the_real_one() -> None:
    with pytest.raises(RuntimeError, match=_key("element 0 of tensors")):
        torch.ones(1).sum().backward()


def _key(start: str) -> str:
    return next(each for each in messages(PARTS[0]) if each.startswith(start))
