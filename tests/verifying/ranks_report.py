"""``python -m tests.verifying.ranks_report``: real ranks with gloo against predictions.

Plans for 2 and 4 GPUs are verified by as many processes: live bytes of each phase
against the trace, and reduced gradients against the mean of what each rank computes
alone. A few minutes of two cores.
"""

# ruff: noqa: T201 - printing is its output

import itertools
import os
import statistics
from typing import Any

import torch

import budgetfit
from budgetfit import Parallelism
from budgetfit.core.verification import Verification
from tests.gloo_ranks import on_ranks
from tests.integrations.tiny_training import plan_for, tiny_model

SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "ddp, views": {"engine": "ddp", "gradient_as_bucket_view": True},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2, kept": {"engine": "fsdp2", "reshard_after_forward": False},
    "fsdp2, each batch": {"engine": "fsdp2", "sync_each_batch": True},
    "fsdp2, on the CPU": {"engine": "fsdp2", "cpu_offload": True},
    "hsdp": {"engine": "fsdp2", "shard": 2},
}


def verify(kind: str, ranks: int, name: str) -> Verification:
    """Verify a setting, with some blocks recomputed."""
    model = tiny_model(kind)
    plan = plan_for(model, parallelism=Parallelism(gpus=ranks, **SETTINGS[name]))
    ids = torch.arange(24).view(3, 8) + int(os.environ["RANK"])
    batch = {"input_ids": ids, "labels": ids.clone()}
    return budgetfit.verify(plan, model, batch=batch, device="cpu")


def main() -> None:
    """Print a row for each case, and the worst."""
    errors = []
    cases = itertools.product(("llama", "gpt2"), (2, 4), SETTINGS)
    for kind, ranks, name in cases:
        if SETTINGS[name].get("shard") == ranks:
            continue
        check = on_ranks(verify, ranks, kind, ranks, name)[0]
        late = [
            row.predicted_allocated_bytes / row.measured_allocated_bytes - 1
            for row in check.phases
        ]
        errors += late
        print(
            f"{kind:6} {ranks} ranks  {name:18} phases {len(late)}, differ "
            f"{sum(map(bool, late))}, worst {max(late, key=abs):+.2%}; "
            f"gradients {check.max_gradient_error:.1e}",
            flush=True,
        )
    print(
        f"{len(errors)} phases, {sum(not each for each in errors)} of them 0 bytes off,"
        f" median {statistics.median(errors):+.2%}, worst {max(errors, key=abs):+.2%}"
    )


if __name__ == "__main__":
    main()
