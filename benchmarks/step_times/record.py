"""Trace the published steps: what each asks of a GPU, by phase and kind of op.

    python -m benchmarks.step_times.record          writes kernels.json.gz

The sums do not depend on the time model, so that its constants are fitted and judged
without a trace.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from benchmarks.step_times.published_models import build
from budgetfit import Recipe, Segment
from budgetfit.core.step_trace import OP_KINDS, RATES
from budgetfit.inputs.adapter import find_adapter
from budgetfit.inputs.settings import find_target_gpu, make_workload, optimizer_name
from budgetfit.timing.kernel_times import OpWork, last_ops
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload

FOLDER: Final = Path(__file__).parent
ROWS: Final = FOLDER / "published_steps.json"
KERNELS: Final = FOLDER / "kernels.json.gz"


def sgd_nesterov(params: Any) -> torch.optim.Optimizer:
    """Timm's and NVIDIA's optimizer for images."""
    return torch.optim.SGD(params, lr=1e-4, momentum=0.9, nesterov=True)


def adamw_foreach(params: Any) -> torch.optim.Optimizer:
    """PyTorch's default AdamW."""
    return torch.optim.AdamW(params, lr=1e-4, foreach=True)


OPTIMIZERS: Final = {"sgd_nesterov": sgd_nesterov, "adamw_foreach": adamw_foreach}


def kernels_of(rows: list[dict[str, Any]]) -> dict[str, list[list[Any]]]:
    """Return, for rows of one program, [phase, kind, rate, kernels, FLOPs, bytes]."""
    first = rows[0]
    workload = _adapters(first) if "targets" in first["spec"] else _model(first)
    optimizer = OPTIMIZERS.get(first["optimizer"], first["optimizer"])
    blocks = workload.blocks if first.get("ckpt") else ()
    session = TraceSession(workload)
    found = {}
    for row in rows:
        recipe = Recipe(
            batch_size=row["batch"],
            precision=row["precision"],
            optimizer=optimizer_name(optimizer),
            segments=tuple(Segment((name,)) for name in blocks),
        )
        trace = session.affine(recipe)
        work = OpWork.of(trace, row["batch"])
        sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0])
        for phase, chosen in last_ops(trace).items():
            for at in chosen:
                total = sums[phase, OP_KINDS[work.kind[at]], RATES[work.rate[at]]]
                total[0] += int(work.kernels[at])
                total[1] += float(work.flops[at])
                total[2] += float(work.moved_bytes[at])
        found[row["id"]] = [[*key, *map(round, values)] for key, values in sums.items()]
    return found


def _model(row: dict[str, Any]) -> Workload:
    model, batch, loss = build(row["spec"])
    workload, _ = make_workload(
        model,
        find_target_gpu(None, row["gpu"]),
        batch=batch,
        loss=loss,
        optimizer=OPTIMIZERS.get(row["optimizer"], row["optimizer"]),
        keeps_dtypes=row["precision"] == "as-is",
    )
    return workload


def _adapters(row: dict[str, Any]) -> Workload:
    spec = row["spec"]
    config = transformers.AutoConfig.for_model(**spec["config"], dtype=torch.float16)
    config._attn_implementation, config.use_cache = spec["attn"], False
    target = find_target_gpu(None, row["gpu"])
    adapter = find_adapter(
        "lora" if spec["quantization"] is None else "qlora",
        target.gpu,
        ["as-is"],
        lora_r=spec["r"],
        lora_alpha=2 * spec["r"],
        lora_dropout=0.0,
        target_modules=spec["targets"],
        quantization=spec["quantization"],
        double_quantization=False,
        prepare_for_kbit=True,
    )
    workload, _ = make_workload(
        config,
        target,
        max_length=spec["T"],
        optimizer=OPTIMIZERS[row["optimizer"]],
        adapter=adapter,
        keeps_dtypes=True,
    )
    return workload


def main() -> None:
    """Record all rows, or those of the groups named."""
    os.environ["BUDGETFIT_CACHE"] = "off"
    rows = [row for row in json.loads(ROWS.read_text()) if not row["excluded"]]
    found = {}
    if sys.argv[1:]:
        rows = [row for row in rows if {row["group"], row["id"]} & set(sys.argv[1:])]
    programs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        fields = ("gpu", "precision", "optimizer", "ckpt", "spec")
        programs[json.dumps([row.get(name) for name in fields])].append(row)
    for number, same in enumerate(programs.values()):
        print(f"{number + 1}/{len(programs)} {same[0]['model']}", flush=True)
        try:
            found |= kernels_of(same)
        except Exception as error:  # noqa: BLE001 - the next ones are recorded anyway
            print(f"  {type(error).__name__}: {error}", file=sys.stderr)
    if sys.argv[1:] and KERNELS.exists():
        found = json.loads(gzip.decompress(KERNELS.read_bytes())) | found
    text = json.dumps(dict(sorted(found.items())), separators=(",", ":"))
    KERNELS.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
