"""torch.optim optimizers that transformers has no name for."""

from __future__ import annotations

from typing import Any, Final

import torch

from budgetfit.errors import InputError

# Lower-case names of torch.optim. transformers' "adafactor" is its own class.
KINDS: Final[dict[str, type[torch.optim.Optimizer]]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor_torch": torch.optim.Adafactor,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "muon": torch.optim.Muon,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
}
_MATRIX: Final = 2  # dimensions

# Prefixes of names -> why they are refused.
REFUSED: Final = {
    "lbfgs": "each of its steps runs forward and backward several times through a "
    "closure, which a loop of batches has not",
    "sparse_adam": "it takes sparse gradients only, which nothing but "
    "nn.Embedding(sparse=True) makes; optimizer='adam' takes all others",
    "sparseadam": "it takes sparse gradients only, which nothing but "
    "nn.Embedding(sparse=True) makes; optimizer='adam' takes all others",
}


def make(name: str, parameters: list[Any], lr: float) -> torch.optim.Optimizer:
    """Build a torch optimizer with default settings, and no weight decay.

    Args:
        name: One of ``KINDS``.
        parameters: The trainable ones.
        lr: Learning rate.

    Raises:
        InputError: If it is Muon and a parameter is no matrix.
    """
    if name == "muon":
        _check_matrices(parameters)
        return torch.optim.Muon(parameters, lr=lr, weight_decay=0.0)
    kind: Any = KINDS[name]
    made: torch.optim.Optimizer = kind(parameters, lr=lr)
    return made


def _check_matrices(parameters: list[Any]) -> None:
    others = [tuple(each.shape) for each in parameters if each.ndim != _MATRIX]
    if others:
        raise InputError(
            f"Muon updates matrices only, and {len(others)} of the {len(parameters)} "
            f"trained tensors are none, the first of shape {others[0]}. Train adapters "
            "(method='lora', --method lora), which are matrices, or hand in a callable "
            "that gives the others to AdamW: docs/optimizers.md shows one."
        )
