"""Train models of the zoo in a plain loop on this device; print their peak memory.

    python -m tests.zoo.plain_training FOLDER

Started by ``memory.py``, which leaves a batch for each model in FOLDER. Every model
trains in a process of its own; a JSON line is printed for each.

No kernel runs on the null driver, so that nothing that a program reads from the device
is true. What masks and position ids would answer is answered here.
"""

import contextlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import transformers
from torch.utils._pytree import tree_map_only
from transformers import masking_utils

from budgetfit.applying.loss.call_model import call_model, find_loss, mean_of_outputs
from budgetfit.errors import InputError
from budgetfit.example_batches.make_batch import loss_for
from tests.accuracy.provenance import choose_cudnn
from tests.zoo.entry import zoo

STEPS: Final = 6  # reserved memory settles
SECONDS_PER_ENTRY: Final = 120
_PACKED = masking_utils.find_packed_sequence_indices
_ALL, _SUM_ALL = torch.Tensor.all, masking_utils.fast_all
_TRUTH, _RAND = torch.Tensor.__bool__, torch.rand


def _packed(position_ids: torch.Tensor) -> None:
    """Ask as transformers does whether sequences are packed: they are not."""
    _PACKED(position_ids)


def _true(ask: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Ask whether all of a mask is true: it is."""

    def asked(*args: Any, **kwargs: Any) -> torch.Tensor:
        answer = ask(*args, **kwargs)
        answer.all_true = True
        return answer

    return asked


def _truth(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "all_true", False) or _TRUTH(tensor)


def _rand(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Draw as torch does; a single number, which drops a layer, drops none."""
    drawn = _RAND(*args, **kwargs)
    return torch.ones_like(drawn) if args in (([],), ((),)) else drawn


def train(name: str, batch: object) -> dict[str, int]:
    """Train as a user would, in fp32 with AdamW; return the peaks in bytes."""
    entry = zoo()[name]
    torch.manual_seed(0)
    model = entry.build().train().cuda()
    loss = entry.plan.get("loss") or loss_for(model, batch)
    trained = [item for item in model.parameters() if item.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for inputs in repeat(batch, STEPS):
        inputs = tree_map_only(torch.Tensor, torch.Tensor.cuda, inputs)  # noqa: PLW2901 - as users do: the last batch goes first
        outputs = call_model(model, inputs, for_loss=loss is not None)
        try:
            value = find_loss(outputs, inputs, loss)
        except InputError:  # there is none
            value = mean_of_outputs(outputs)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def _in_child(path: Path, to_parent: int) -> None:
    signal.alarm(SECONDS_PER_ENTRY)
    row: dict[str, Any] = {"name": path.stem}
    try:
        batch = torch.load(path, weights_only=False)
        row |= train(path.stem, batch)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    os.write(to_parent, json.dumps(row).encode())
    os._exit(0)


def main() -> None:
    """Fork a process for each model: CUDA starts anew, imports do not."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    choose_cudnn(enabled=False)
    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (masking_utils, "find_packed_sequence_indices", _packed),
            (masking_utils, "fast_all", _true(_SUM_ALL)),
            (torch.Tensor, "all", _true(_ALL)),
            (torch.Tensor, "__bool__", _truth),
            (torch, "rand", _rand),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        for path in sorted(Path(sys.argv[1]).glob("*.pt")):
            from_child, to_parent = os.pipe()
            child = os.fork()
            if child == 0:
                _in_child(path, to_parent)
            os.close(to_parent)
            with os.fdopen(from_child) as answers:
                row = answers.read()
            _, status = os.waitpid(child, 0)
            died = json.dumps({"name": path.stem, "error": f"ended with {status}"})
            print(row or died, flush=True)


if __name__ == "__main__":
    main()
