"""Trace the published steps: what each asks of a GPU, by phase and kind of op.

    python -m benchmarks.published_steps.record          writes kernels.json.gz

The sums do not depend on the time model, so that its constants are fitted and judged
without a trace.
"""

import gzip
import json
import os
import sys
from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import transformers
from transformers.integrations import sdpa_attention

from benchmarks.published_steps.models import build
from benchmarks.published_steps.optimizers import OPTIMIZERS
from benchmarks.published_steps.predict import (
    CHECKPOINTS,
    KERNELS,
    RECOMPUTATION,
    ROWS,
    recorded_kernels,
)
from budgetfit import Recipe, Segment
from budgetfit.core.recipe import CompileMode
from budgetfit.core.step_trace import OP_KINDS, RATES
from budgetfit.inputs.arguments import Arguments
from budgetfit.timing.kernel_times import OpWork, last_ops
from budgetfit.traces.session import TraceSession


def kernels_of(rows: list[dict[str, Any]]) -> dict[str, list[list[Any]]]:
    """Return, for rows of one program, what ``recorded_kernels`` does."""
    first = rows[0]
    parsed = _arguments(first).parsed()
    workload = parsed.workload
    blocks = workload.blocks if first.get("ckpt") else ()
    session = TraceSession(workload)
    found = {}
    for row in rows:
        recipe = Recipe(
            batch_size=row["batch"],
            gradient_accumulation_steps=2 if _gradients_stay(row) else 1,
            precision=row["precision"],
            optimizer=parsed.optimizer,
            segments=tuple(Segment((name,)) for name in blocks),
            compile=_compiled(row),
        )
        compiled = recipe.compile != "none"
        trace = session.exact(recipe) if compiled else session.affine(recipe)
        work = OpWork.of(trace, row["batch"])
        sums: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0, 0, 0])
        for phase, chosen in last_ops(trace).items():
            for at in chosen:
                name = RECOMPUTATION if trace.ops.recomputed[at] else phase
                op = (name, OP_KINDS[work.kind[at]], RATES[work.rate[at]])
                # Of elements one by one, the longer of two times: those of a size.
                each = work.moved_bytes[at] / max(work.flops[at], 1)
                size = round(each) if op[-1] == "elements" else 0
                total = sums[*op, int(work.blocks[at]), size]
                total[0] += int(work.kernels[at])
                total[1] += float(work.flops[at])
                total[2] += float(work.moved_bytes[at])
        found[row["id"]] = [
            [*key[:3], *map(round, values), key[3]] for key, values in sums.items()
        ]
        if blocks:
            counted = [CHECKPOINTS, "copy", "none", len(blocks), 0, 0, 0]
            found[row["id"]].append(counted)
    return found


def _gradients_stay(row: dict[str, Any]) -> bool:
    """Return whether backward adds to gradients that are there, in every step.

    They are never cleared around single layers and in NeuSight's program; before torch
    2.0, ``zero_grad`` sets them to zero. Beyond the first micro-batch it is the same.
    """
    return row["group"] in ("mli", "neusight") or row["optimizer"] == "sgd_nesterov"


def _compiled(row: dict[str, Any]) -> CompileMode:
    """Return what was compiled: the whole model, or in torchtune each block."""
    if row["mode"] != "compiled":
        return "none"
    return "blocks" if row["group"] == "torchtune" else "model"


def _arguments(row: dict[str, Any]) -> Arguments:
    spec = row["spec"]
    given = Arguments(
        model="",
        gpu=row["gpu"],
        optimizer=OPTIMIZERS.get(row["optimizer"], row["optimizer"]),
        precision=row["precision"],
        compile=_compiled(row),
    )
    if "targets" not in spec:
        model, batch, loss = build(spec)
        return replace(given, model=model, batch=batch, loss=loss)
    config = transformers.AutoConfig.for_model(**spec["config"], dtype=torch.float16)
    config._attn_implementation, config.use_cache = spec["attn"], False
    tokens = torch.zeros(2, spec["T"], dtype=torch.long)
    return replace(
        given,
        model=config,
        batch={"input_ids": tokens, "labels": tokens},
        method="lora" if spec["quantization"] is None else "qlora",
        lora_r=spec["r"],
        lora_alpha=2 * spec["r"],
        target_modules=spec["targets"],
        quantization=spec["quantization"],
        double_quantization=spec["quantization"] != "nf4",
    )


def _repeated_keys() -> AbstractContextManager[Any]:
    """Have grouped keys repeated before SDPA, as the measured programs did."""
    never = mock.Mock(return_value=False)
    return mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", never)


def main() -> None:
    """Record all rows, or those of the groups named."""
    os.environ["BUDGETFIT_CACHE"] = "off"
    rows = [row for row in json.loads(ROWS.read_text()) if not row["excluded"]]
    found = {}
    if sys.argv[1:]:
        rows = [row for row in rows if {row["group"], row["id"]} & set(sys.argv[1:])]
    programs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        fields = ("gpu", "precision", "optimizer", "ckpt", "mode", "spec")
        programs[json.dumps([row.get(name) for name in fields])].append(row)
    for number, same in enumerate(programs.values()):
        print(f"{number + 1}/{len(programs)} {same[0]['model']}", flush=True)
        try:
            with _repeated_keys():
                found |= kernels_of(same)
        except Exception as error:  # noqa: BLE001 - the next ones are recorded anyway
            print(f"  {type(error).__name__}: {error}", file=sys.stderr)
    if sys.argv[1:] and KERNELS.exists():
        found = recorded_kernels() | found
    text = json.dumps(dict(sorted(found.items())), separators=(",", ":"))
    KERNELS.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
