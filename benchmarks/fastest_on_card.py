"""Is the recommended plan the fastest that fits? Its alternatives, timed on a card.

    python -m benchmarks.fastest_on_card --plan FOLDER         # without a GPU
    python -m benchmarks.fastest_on_card --record FOLDER FILE  # on the plans' card
    python -m benchmarks.fastest_on_card --show FILE

Each plan is for an effective batch of 32 under a limit where something must give way.
What it was chosen over, and fits, is applied and trained for about a second, as is the
plan for half and for twice its batch size where these fit. The values of recomputed
tensors are compared in the first update only: in a long training few are.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

import budgetfit
from budgetfit.applying.checkpointing import recomputation_state
from budgetfit.core.plan import Plan
from tests.accuracy.nvml import open_nvml
from tests.accuracy.provenance import describe_card, describe_software

EFFECTIVE: Final = 32
FEWEST, MOST = 2, 8  # updates


class Situation(NamedTuple):
    """A model of ``verify_plans``, a limit, and a precision."""

    model: str
    vram: str
    precision: str

    @property
    def name(self) -> str:
        """As the plan's file is called."""
        return f"{self.model}-{self.vram}-{self.precision}".lower()


SITUATIONS: Final = (
    Situation("gpt2-124m", "5GB", "bf16-mixed"),
    Situation("gpt2-124m", "9GB", "bf16-mixed"),
    Situation("gpt2-124m", "14GB", "bf16-mixed"),
    Situation("gpt2-124m", "8GB", "fp32"),
    Situation("bert-base", "4GB", "bf16-mixed"),
    Situation("bert-base", "8GB", "bf16-mixed"),
    Situation("llama-210m", "6500MB", "bf16-mixed"),
    Situation("llama-210m", "10GB", "bf16-mixed"),
    Situation("vit-base", "4GB", "bf16-mixed"),
    Situation("vit-base", "8GB", "bf16-mixed"),
)


def _models() -> dict[str, Callable[[], nn.Module]]:
    from tests.accuracy.verify_plans import MODELS

    return {name: make for name, make, _ in MODELS}


def example(model: nn.Module, size: int) -> dict[str, torch.Tensor]:
    """Samples of random tokens or pixels, on the CPU."""
    config: Any = model.config
    random = torch.Generator().manual_seed(0)
    if hasattr(config, "image_size"):
        shape = (size, 3, config.image_size, config.image_size)
        pixels = torch.rand(shape, generator=random, device="cpu")
        labels = torch.randint(2, (size,), generator=random, device="cpu")
        return {"pixel_values": pixels, "labels": labels}
    shape = (size, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, shape, generator=random, device="cpu")
    return {"input_ids": ids, "labels": ids}


def made_plan(situation: Situation, gpu: str, **further: Any) -> Plan:
    """The plan of a situation, with its alternatives."""
    model = _models()[situation.model]()
    return budgetfit.plan(
        model,
        batch=example(model, 2),
        vram=situation.vram,
        gpu=gpu,
        precision=situation.precision,
        effective_batch_size=EFFECTIVE,
        host_ram="32GB",
        **further,
    )


def chosen_from(plan: Plan) -> Iterator[tuple[str, Any]]:
    """The plan's estimate and those of other settings that fit, by their label."""
    yield "this plan", plan.estimate
    for row in plan.alternatives:
        recipe = row.estimate.recipe
        same = recipe.optimizer_in_backward == plan.recipe.optimizer_in_backward
        if row.fits and not row.changes_training and same and recipe.compile == "none":
            yield row.label, row.estimate


def save_plans(folder: Path, gpu: str) -> None:
    """Save the plan of each situation, and of half and twice its batch size."""
    folder.mkdir(parents=True, exist_ok=True)
    for situation in SITUATIONS:
        plan = made_plan(situation, gpu)
        plan.save(folder / f"{situation.name}.json")
        for size in (plan.recipe.batch_size // 2, 2 * plan.recipe.batch_size):
            if size < 1 or EFFECTIVE % size:
                continue
            try:
                other = made_plan(situation, gpu, batch_size=size)
            except budgetfit.DoesNotFitError:
                continue
            other.save(folder / f"{situation.name}@{size}.json")
        sys.stdout.write(f"{situation.name}: {plan.recipe}\n")


def time_updates(plan: Plan, model: nn.Module, seconds: float) -> dict[str, Any]:
    """Updates one after the other for about that long."""
    recipe = plan.recipe
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = budgetfit.apply(plan, model)

    def update() -> None:
        for _ in range(recipe.gradient_accumulation_steps):
            run.step(batch)

    with ExitStack() as stack:
        stack.enter_context(run)
        batch = example(model, recipe.batch_size)
        update()
        torch.cuda.synchronize()
        started, took = time.perf_counter(), []
        stack.enter_context(
            patch.object(recomputation_state, "compares_values", lambda _: False)
        )
        while len(took) < FEWEST or time.perf_counter() - started < seconds:
            before = time.perf_counter()
            update()
            torch.cuda.synchronize()
            took.append(time.perf_counter() - before)
            if len(took) == MOST:
                break
        peak = torch.cuda.max_memory_reserved()
    median = statistics.median(took)
    return {
        "update_ms": round(1e3 * median, 3),
        "each_ms": [round(1e3 * one, 2) for one in took],
        "samples_per_s": round(recipe.effective_batch_size / median, 3),
        "reserved_bytes": peak,
    }


def record(folder: Path, file: Path, seconds: float, until: float) -> None:
    """Apply and time every plan of the folder, and what it was chosen over."""
    common = {"card": describe_card(open_nvml()), "software": describe_software()}
    makes = _models()
    for situation in SITUATIONS:
        if not (folder / f"{situation.name}.json").exists():
            continue
        plan = Plan.load(folder / f"{situation.name}.json")
        others = [
            (f"batch size {path.stem.partition('@')[2]}", Plan.load(path))
            for path in sorted(folder.glob(f"{situation.name}@*.json"))
        ]
        rows = [
            (label, replace(plan, recipe=estimate.recipe, estimate=estimate))
            for label, estimate in chosen_from(plan)
        ]
        seen = set()
        for label, tried in rows + others:
            if tried.recipe in seen or time.time() > until:
                continue
            seen.add(tried.recipe)
            with torch.device("cuda"):
                model = makes[situation.model]().train()
            row = {
                "situation": situation.name,
                "label": label,
                "batch_size": tried.recipe.batch_size,
                "accumulation": tried.recipe.gradient_accumulation_steps,
                "predicted_update_ms": round(tried.estimate.step_ms, 3),
                "predicted_samples_per_s": round(tried.estimate.samples_per_s, 3),
                "predicted_reserved_bytes": tried.estimate.reserved_bytes,
            }
            try:
                row |= time_updates(tried, model, seconds)
            except Exception as error:  # noqa: BLE001 - told; the next is tried
                row["error"] = f"{type(error).__name__}: {error}"[:500]
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row | common) + "\n")
            told = {k: v for k, v in row.items() if k != "each_ms"}
            sys.stdout.write(f"{told}\n")
            sys.stdout.flush()
            del model
            gc.collect()


def shown(rows: list[dict[str, Any]]) -> str:
    """Each situation, the one where the plan is furthest from the fastest first."""
    from benchmarks.shared import table

    by_situation: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "error" not in row:
            by_situation[row["situation"]].append(row)
    parts: list[tuple[float, str]] = []
    for name, tried in by_situation.items():
        fastest = max(row["samples_per_s"] for row in tried)
        share = tried[0]["samples_per_s"] / fastest
        lines = [
            (
                row["label"],
                f"{row['batch_size']} x {row['accumulation']}",
                f"{row['predicted_samples_per_s']:.1f}",
                f"{row['samples_per_s']:.1f}",
                f"{row['update_ms'] / row['predicted_update_ms'] - 1:+.0%}",
                f"{row['samples_per_s'] / fastest:.1%}",
            )
            for row in tried
        ]
        titles = ("settings", "batch", "predicted samples/s", "measured", "took", "")
        parts.append(
            (share, f"{name}: {share:.1%} of the fastest\n{table(titles, lines)}")
        )
    failed = [
        f"{row['situation']}, {row['label']}: {row['error']}"
        for row in rows
        if "error" in row
    ]
    return "\n\n".join([text for _, text in sorted(parts)] + failed)


def main() -> int:
    """Plan, record, or show what was recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", type=Path, metavar="FOLDER")
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--record", type=Path, nargs=2, metavar=("FOLDER", "FILE"))
    parser.add_argument("--show", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--until", type=float, default=float("inf"), help="epoch time")
    options = parser.parse_args()
    if options.plan:
        save_plans(options.plan, options.gpu)
    elif options.record:
        record(*options.record, options.seconds, options.until)
    elif options.show:
        lines = options.show.read_text("utf-8").splitlines()
        sys.stdout.write(f"{shown([json.loads(line) for line in lines])}\n")
    else:
        parser.error("one of --plan, --record and --show is needed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
