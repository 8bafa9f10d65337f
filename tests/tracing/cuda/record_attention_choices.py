"""Record which attention kernel PyTorch's own CUDA build chooses.

    python tests/tracing/cuda/record_attention_choices.py --add recording.json

Must run where ``torch.cuda`` works: on a real card, or on a null driver (PyTorch's
CUDA build without a GPU, whose host code runs and whose kernels do not). Nothing is
computed, only asked: ``torch._fused_sdp_choice``. Nothing of budgetfit is used;
``test_sdpa_backend.py`` compares. Each run adds one compute capability to the file:

- ``torch``, ``cudnn``, ``origin``, ``date``
- ``choices``: compute capability -> a letter per call of ``attention_calls.calls()``
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.tracing.cuda.attention_calls import Call, calls

LETTERS = {0: "m", 1: "f", 2: "e", 3: "c"}  # at::SDPBackend: math, flash, efficient


def choice(call: Call) -> str:
    """Return the letter of the kernel that a call would run."""
    backend = torch._fused_sdp_choice(
        *call.tensors("cuda"), call.dropout, call.causal, enable_gqa=call.gqa
    )
    return LETTERS[backend]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--add", type=Path, required=True, metavar="FILE")
    path: Path = parser.parse_args().add
    known = json.loads(path.read_text()) if path.exists() else {"choices": {}}
    null = torch.cuda.get_device_name() == "NullCUDA"
    recording = {
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "origin": "null driver" if null else "gpu",
        "date": datetime.now(UTC).date().isoformat(),
    }
    if any(known.get(key, value) != value for key, value in recording.items()):
        raise SystemExit("The file's recordings were made elsewhere: take a new file.")
    major, minor = torch.cuda.get_device_capability()
    letters = "".join(choice(call) for call in calls())
    choices = {**known["choices"], f"{major}.{minor}": letters}
    path.write_text(json.dumps({**recording, "choices": choices}, indent=1) + "\n")


if __name__ == "__main__":
    main()
