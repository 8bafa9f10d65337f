"""How far predicted tokens per second are from published ones on 8 to 512 GPUs.

Rows of llm-foundry: Composer with FSDP1, on nodes of eight. The model is rebuilt in
plain PyTorch, with as many parameters as the row says, and trained by FSDP2 as the row
asks. What connected the nodes is not stated: what budgetfit assumes. From the rows of
MPT-760m and MPT-7b are the H100's rate of 16-bit products and what waiting for the
slowest node costs; all other rows are held out.
*scaling* is against the row of the same model, card and sharding with the fewest GPUs:
what is wrong with the kernels' times cancels where micro-batches are equal.

python -m benchmarks.published_steps.scaling                     # all, some minutes
python -m benchmarks.published_steps.scaling MPT-13b MPT-70b     # some
"""

import json
import statistics
import sys
from typing import Any, Final

from benchmarks.published_steps.models import build
from benchmarks.published_steps.predict import FOLDER
from benchmarks.shared import one_thread, table
from budgetfit import Estimate, Parallelism, Recipe, Segment, estimate

VOCABULARY: Final = 50_368
SHAPES: Final = {  # width, heads, blocks: llm-foundry, scripts/train/yamls/pretrain
    "MPT-125m": (768, 12, 12),
    "MPT-350m": (1024, 16, 24),
    "MPT-760m": (1536, 12, 24),
    "MPT-1b": (2048, 16, 24),
    "MPT-3b": (2560, 20, 32),
    "MPT-7b": (4096, 32, 32),
    "MPT-13b": (5120, 40, 40),
    "MPT-30b": (7168, 56, 48),
    "MPT-70b": (8192, 64, 80),
}
# Their rows gave ``together`` (``gpus/kernel_shares.toml``) and ``PER_DOUBLED_NODES``.
FITTED: Final = {"MPT-760m", "MPT-7b"}
WITHIN: Final = 0.1
# Composer's mixed precision: the dtype of reductions.
REDUCED_IN: Final = {"amp_bf16 DEFAULT": "fp32", "bf16 PURE": "bf16"}
RESHARDS: Final = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
Row = dict[str, Any]


def main(names: list[str]) -> int:
    """Predict every row, or those of these models, and print the worst first."""
    one_thread()
    rows = json.loads((FOLDER / "scaling.json").read_text())["rows"]
    asked = [row for row in rows if not names or row["model"] in names]
    for number, row in enumerate(asked, 1):
        found = predicted(row)
        tokens = row["batch"] * row["accumulation"] * row["seq"]
        row["predicted"] = tokens / found.step_ms * 1e3
        row["waits"] = found.network_ms / found.step_ms
        assert found.step_range_ms is not None
        least_ms, most_ms = found.step_range_ms
        measured_ms = tokens / row["tokens_per_s_per_gpu"] * 1e3
        row["in_range"] = least_ms <= measured_ms <= most_ms
        row["error"] = row["predicted"] / row["tokens_per_s_per_gpu"] - 1
        print(f"{number} of {len(asked)}", file=sys.stderr)
    for row in asked:
        row["scaling"] = scaling_error(row, asked)
    print(summary(asked))
    return 0


def predicted(row: Row) -> Estimate:
    """Return the estimate of a row's program on one of its GPUs."""
    width, heads, blocks = SHAPES[row["model"]]
    shape = {"d": width, "h": heads, "L": blocks, "V": VOCABULARY, "T": row["seq"]}
    model, batch, loss = build({"kind": "gpt", **shape})
    count = sum(each.numel() for each in model.parameters())
    assert count == row["parameters"], (row["model"], count)
    names = [f"blocks.{number}" for number in range(blocks)]
    recipe = Recipe(
        batch_size=row["batch"],
        gradient_accumulation_steps=row["accumulation"],
        precision="bf16-mixed",
        optimizer="adamw_torch_fused",
        segments=tuple(Segment((name,)) for name in names if row["checkpointed"]),
        parallelism=Parallelism(
            engine="fsdp2",
            gpus=row["gpus"],
            gpus_per_node=8,
            reshard_after_forward=RESHARDS[row["sharding"]],
            param_dtype="bf16",
            reduce_dtype=REDUCED_IN[row["precision"]],  # type: ignore[arg-type]
        ),
    )
    return estimate(model, recipe, gpu=row["gpu"], batch=batch, loss=loss)


def scaling_error(row: Row, rows: list[Row]) -> float | None:
    """Return the error of tokens per second over those of the fewest GPUs."""
    alike = ("model", "gpu", "sharding", "checkpointed")
    group = [each for each in rows if all(each[name] == row[name] for name in alike)]
    first = min(group, key=lambda each: int(each["gpus"]))
    if first is row:
        return None
    return float((1 + row["error"]) / (1 + first["error"]) - 1)


def summary(rows: list[Row]) -> str:
    """Return medians and worst cases, and every row."""
    held_out = [row for row in rows if row["model"] not in FITTED]
    gpus = sorted({row["gpu"] for row in rows})
    lines = [
        f"* {name} on {gpu}: {figures(found)}"
        for name in ("error", "scaling")
        for gpu in gpus
        if (found := _known(held_out, gpu, name))
    ]
    for gpu in gpus:
        inside = [row["in_range"] for row in held_out if row["gpu"] == gpu]
        lines.append(f"* in the printed range on {gpu}: {sum(inside)} of {len(inside)}")
    worst = sorted(rows, key=lambda row: -abs(row["error"]))
    cells = [
        (
            row["model"],
            row["gpu"],
            str(row["gpus"]),
            f"{row['batch']} x {row['accumulation']}",
            row["sharding"].lower(),
            f"{row['tokens_per_s_per_gpu']:,}",
            f"{row['predicted']:,.0f}",
            f"{row['error']:+.1%}",
            "" if row["scaling"] is None else f"{row['scaling']:+.1%}",
            f"{row['waits']:.1%}",
        )
        for row in worst
    ]
    heads = (
        *("model", "GPU", "GPUs", "batch", "sharding"),
        *("measured", "predicted", "error", "scaling", "network"),
    )
    return "\n".join([*lines, "", table(heads, cells, left=0)])


def _known(rows: list[Row], gpu: str, name: str) -> list[float]:
    found = (row[name] for row in rows if row["gpu"] == gpu)
    return [each for each in found if each is not None]


def figures(found: list[float]) -> str:
    """Return the median and the range of errors, and how many are close."""
    inside = sum(abs(each) <= WITHIN for each in found)
    return (
        f"{len(found)} rows, median {statistics.median(found):+.1%}, from "
        f"{min(found):+.1%} to {max(found):+.1%}; {inside} within {WITHIN:.0%}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
