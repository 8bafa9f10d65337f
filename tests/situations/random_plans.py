"""Refusals and plans of random models, held against random recipes.

    python -m tests.situations.random_plans --number 100 --seed 0

Each model is trained in full, with LoRA or with QLoRA. Three budgets are drawn a little
below the lowest peak that a first refusal names, and three above it. No recipe that
``estimate`` accepts at batch 1 may fit where a plan is refused; 200 are drawn for each
model. A plan that fits without an effective batch size must fit with any accumulation,
and within the host memory that was given.

Recipes whose live bytes alone are clearly more than the budget need no trace: the
formula of the solver says so. One in 20 of them is estimated all the same.

Each result is a line of ``random_plans.jsonl`` beside this file, with the commit that
it is of, and a model that is there is not tried again: hours can be done in parts.
Without the file all are tried.
"""

import argparse
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import pytest
import torch
import transformers
from pydantic import TypeAdapter
from torch import nn

import budgetfit
from budgetfit import (
    DoesNotFitError,
    Estimate,
    InputError,
    Plan,
    Recipe,
    Segment,
    TraceError,
)
from budgetfit.inputs.arguments import Arguments, ParsedArguments
from budgetfit.inputs.target_gpu import find_target_gpu
from budgetfit.memory.chain.peak import chain_host_bytes, chain_peak_bytes
from budgetfit.planning.alternatives import refusal
from budgetfit.planning.judge import judge
from budgetfit.planning.planner import make_plan
from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
from budgetfit.planning.profiling.first_trace import with_checkpointable_blocks
from budgetfit.planning.search.lowest_peak import FORMULA_ERROR
from budgetfit.traces.session import TraceSession
from tests.models import Mebi
from tests.traced import ROOMY

RECIPES: Final = 200
BUDGETS: Final = 3  # below what is needed, and as many above
CHECKED: Final = 0.05  # of the recipes that the formula alone rules out
ACCUMULATIONS: Final = (2, 4, 16)
METHODS: Final = (None, "lora", "qlora")
PARTS: Final = (*(1, 2, 4, 8, 16) * 4, 64, 256)  # of the loss; many take long to trace
MIB: Final = 2**20
ROWS: Final = Path(__file__).with_suffix(".jsonl")


class Subject(NamedTuple):
    """A model, its blocks and how it is asked for."""

    name: str
    model: nn.Module
    arguments: dict[str, Any]
    has_logits: bool


@dataclass(slots=True)
class Refusal:
    """A budget, as a share of the least that is known, and the recipes tried in it.

    ``lowest`` is the lowest of their peaks over the budget.
    """

    share: float
    contradicted: str = ""
    lowest: float = 9.9
    by_formula: int = 0
    estimated: int = 0


@dataclass(slots=True)
class Fitting:
    """A plan that fits: what it pins, and accumulations with which it does not fit."""

    host_bytes: int
    host_ram: int
    too_much: tuple[int, ...]


@dataclass(slots=True)
class Result:
    """What became of one model."""

    seed: int
    name: str
    commit: str = ""
    refusals: list[Refusal] = field(default_factory=list)
    plans: list[Fitting] = field(default_factory=list)


def random_subject(draw: random.Random) -> Subject:
    """Return a small model of a random kind and shape."""
    kind = draw.choice(("llama", "gpt2", "bert", "vit", "plain"))
    layers, width = draw.randint(2, 6), draw.choice((512, 1024, 2048))
    length = draw.choice((512, 2048, 4096))
    vocabulary = draw.choice((512, 32768, 131072))
    gpu = draw.choice(("t4", "rtx-4090", "a100-80gb"))
    precision = draw.choice(
        ("fp32", "auto") if gpu == "t4" else ("fp32", "auto", "bf16")
    )
    asked: dict[str, Any] = {
        "gpu": gpu,
        "precision": precision,
        "optimizer": draw.choice(("adamw_torch_fused", "sgd", "adamw_torch")),
        "host_ram": draw.choice((0, 64 * MIB, 2**36)),
        "headroom": "0",
    }
    common = {"num_hidden_layers": layers, "hidden_size": width}
    if kind == "plain":
        model: nn.Module = Mebi(layers)
        asked["batch"] = torch.zeros(2, 512, 512)
        return Subject(f"plain {layers}", model, asked, has_logits=False)
    if kind == "vit":
        config = transformers.ViTConfig(
            **common,
            image_size=draw.choice((112, 448)),
            intermediate_size=4 * width,
            num_attention_heads=4,
        )
        auto = transformers.AutoModelForImageClassification
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=4,
            n_positions=4096,
            vocab_size=vocabulary,
        )
        auto = transformers.AutoModelForCausalLM
    elif kind == "bert":
        config = transformers.BertConfig(
            **common,
            intermediate_size=4 * width,
            num_attention_heads=4,
            max_position_embeddings=4096,
            vocab_size=vocabulary,
        )
        auto = transformers.AutoModelForMaskedLM
    else:
        config = transformers.LlamaConfig(
            **common,
            intermediate_size=3 * width,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=vocabulary,
            tie_word_embeddings=draw.random() < 0.5,
        )
        auto = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    if kind != "vit":
        asked["max_length"] = length
    method = draw.choice(METHODS)
    if method is not None:
        asked["method"] = method
    return Subject(
        f"{kind} {layers} x {width} {method or 'full'}",
        model,
        asked,
        has_logits=kind in {"llama", "gpt2"},
    )


def random_recipe(
    draw: random.Random, blocks: tuple[str, ...], base: Recipe, *, has_logits: bool
) -> Recipe:
    """Return a recipe of batch 1 that treats blocks at random."""
    segments: list[Segment] = []
    rest = list(blocks)
    longest = draw.choice((1, 1, 2, 4, 8))
    mostly = draw.choice(("recompute", "mixed", "mixed", "host"))
    while rest:
        count = min(len(rest), draw.randint(1, longest))
        names, rest = tuple(rest[:count]), rest[count:]
        kind = draw.choice(("keep", "recompute", "offload", "selective"))
        kind = kind if mostly == "mixed" else "recompute"
        if kind == "recompute" or count > 1:
            segments.append(
                Segment(
                    names,
                    nested=count > 1 and draw.random() < 0.5,
                    input_on_host=mostly == "host" or draw.random() < 0.3,
                )
            )
        elif kind == "offload":
            segments.append(Segment(names, mode="offload"))
        elif kind == "selective":
            op = draw.choice(("aten.mm.default:0", "aten.addmm.default:1"))
            segments.append(Segment(names, mode="selective", saved_ops=(op,)))
    parts = draw.choice(PARTS) if has_logits else 1
    return replace(
        base,
        batch_size=1,
        gradient_accumulation_steps=1,
        segments=tuple(segments),
        loss_chunks=parts,
    )


def arguments_of(subject: Subject, vram: int | None = None) -> ParsedArguments:
    """Return the arguments of ``budgetfit.plan`` as values."""
    return Arguments(model=subject.model, vram=vram, **subject.arguments).parsed()


def plan_within(subject: Subject, usable_bytes: int) -> Plan:
    """Plan for a card that leaves so much usable; a refusal has no suggestions."""
    card = find_target_gpu(None, subject.arguments["gpu"])
    asked = arguments_of(subject, card.budget("0").context_bytes + usable_bytes)
    with mock.patch.object(refusal, "suggestions", return_value=()):
        return make_plan(asked.workload, asked.request, **asked.settings)


def tried(seed: int, recipes: int) -> Result:
    """Plan for one random model, too small and large enough, and try to contradict."""
    draw = random.Random(seed)
    subject = random_subject(draw)
    result = Result(seed, f"{subject.name} {subject.arguments['gpu']}")
    with pytest.raises(DoesNotFitError) as refused:
        plan_within(subject, 2 * MIB)
    needed_bytes = refused.value.needed_bytes
    known = _Known(subject, draw, recipes)
    for _ in range(BUDGETS):
        share = draw.uniform(0.85, 1)
        budget = round(needed_bytes * share)
        try:
            made = plan_within(subject, budget)
        except DoesNotFitError:
            result.refusals.append(known.tried_in(budget, share))
        else:
            result.plans.append(_accumulated(subject, made))
    for _ in range(BUDGETS):
        room = round(needed_bytes * draw.uniform(1.0, 3.0)) + MIB
        try:
            made = plan_within(subject, room)
        except DoesNotFitError:
            continue
        result.plans.append(_accumulated(subject, made))
    return result


def _accumulated(subject: Subject, made: Plan) -> Fitting:
    said = any(
        text in warning
        for text in ("has to stay 1", "may be 1 or 2")
        for warning in made.warnings
    )
    rest = {
        name: value
        for name, value in subject.arguments.items()
        if name not in {"precision", "optimizer"}
    }
    return Fitting(
        host_bytes=made.estimate.host_bytes,
        host_ram=made.budget.host_ram_bytes or 0,
        too_much=tuple(
            steps
            for steps in ACCUMULATIONS
            if not said
            and not budgetfit.estimate(
                subject.model,
                replace(made.recipe, gradient_accumulation_steps=steps),
                vram=made.budget.total_bytes,
                **rest,
            ).fits
        ),
    )


class _Known:
    """Random recipes of a model, by the solver's formula or as ``estimate`` judges."""

    def __init__(self, subject: Subject, draw: random.Random, number: int) -> None:
        asked = arguments_of(subject)
        settings = TrainingSettings(
            precision=asked.settings["precisions"][0],
            optimizer=asked.settings["optimizer"],
            host_ram_bytes=asked.budget.host_ram_bytes,
        )
        self.host_ram_bytes = asked.budget.host_ram_bytes or 0
        self._chains = BlockChain(
            with_checkpointable_blocks(TraceSession(asked.workload), settings), settings
        )
        blocks = self._chains.traces.workload.blocks
        base = settings.recipe(1)
        self._draw = draw
        self._recipes = [
            random_recipe(draw, blocks, base, has_logits=subject.has_logits)
            for _ in range(number)
        ]
        self._estimates: dict[int, Estimate | None] = {}

    def tried_in(self, budget: int, share: float) -> Refusal:
        """Hold a refusal against the recipes; the formula rules most of them out."""
        refusal = Refusal(share)
        for number, recipe in enumerate(self._recipes):
            if number not in self._estimates:
                if self.above(recipe, budget) and self._draw.random() > CHECKED:
                    refusal.by_formula += 1
                    continue
                try:
                    self._estimates[number] = self.estimate(recipe)
                except (InputError, TraceError):  # not a recipe of this model
                    self._estimates[number] = None
            estimate = self._estimates[number]
            if estimate is None:
                continue
            refusal.estimated += 1
            if estimate.host_bytes > self.host_ram_bytes:
                continue
            refusal.lowest = min(refusal.lowest, estimate.reserved_bytes / budget)
            if estimate.reserved_bytes <= budget:
                refusal.contradicted = (
                    f"{estimate.reserved_bytes / MIB:.1f} MiB of "
                    f"{budget / MIB:.1f}: {recipe}"
                )
        return refusal

    def estimate(self, recipe: Recipe) -> Estimate:
        """Return what ``budgetfit.estimate`` does, without making the model again."""
        traces = self._chains.traces
        gpu = traces.workload.gpu
        return judge(traces.exact(recipe), recipe, gpu, ROOMY, context_bytes=0)

    def above(self, recipe: Recipe, peak_bytes: int) -> bool:
        """Whether a recipe has clearly more alive, or takes too much of the host."""
        chains = self._chains
        if recipe.loss_chunks > 1:
            chains = chains.with_loss_chunks(recipe.loss_chunks)
        try:
            chain = chains.profile_at(1)
            live_bytes = chain_peak_bytes(chain, recipe.segments)
            host_bytes = chain_host_bytes(chain, recipe.segments)
        except (InputError, TraceError):
            return False
        most = peak_bytes * (1 + FORMULA_ERROR)
        return host_bytes > self.host_ram_bytes or live_bytes > most


def main() -> None:
    """Try as many models as asked for and print what was contradicted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    as_json = TypeAdapter(Result)
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.exists() else []
    known = {row.seed: row for row in map(as_json.validate_json, lines)}
    results = []
    for seed in range(asked.seed, asked.seed + asked.number):
        if seed not in known:
            known[seed] = tried(seed, RECIPES)
            known[seed].commit = _commit()
            with ROWS.open("ab") as file:
                file.write(as_json.dump_json(known[seed]) + b"\n")
        print_one(known[seed])
        results.append(known[seed])
    print_summary(results)


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        words, cwd=ROWS.parent, check=True, capture_output=True, text=True
    ).stdout.strip()


def print_one(result: Result) -> None:
    """Print what became of one model."""
    print(result.seed, result.name)
    for each in result.refusals:
        print(
            f"    refused at {each.share:.3f} of the least that is known, lowest "
            f"recipe {each.lowest:.4f} of that budget, of {each.estimated} "
            f"(and {each.by_formula} by the formula) {each.contradicted}"
        )
    for plan in result.plans:
        print(
            f"    fits, not accumulating {plan.too_much}, host {plan.host_bytes} "
            f"of {plan.host_ram}",
            flush=True,
        )


def print_summary(results: Sequence[Result]) -> None:
    """Print how many refusals were contradicted, and plans that do not hold."""
    refusals = [each for found in results for each in found.refusals]
    plans = [each for found in results for each in found.plans]
    commits = ", ".join(dict.fromkeys(found.commit for found in results))
    print(f"models: {len(results)}, of {commits}")
    print(f"refusals: {len(refusals)}, each against {RECIPES} random recipes")
    print(f"  of these estimated: {sum(each.estimated for each in refusals)}")
    print(f"  by the formula alone: {sum(each.by_formula for each in refusals)}")
    print(f"  contradicted: {sum(bool(each.contradicted) for each in refusals)}")
    worst = min((each.lowest * each.share for each in refusals), default=1.0)
    print(f"  lowest recipe over the lowest peak that was known: {worst:.4f}")
    print(f"plans that fit: {len(plans)}")
    bad = sum(bool(each.too_much) for each in plans)
    print(f"  that do not fit while accumulating: {bad}")
    over = sum(each.host_bytes > each.host_ram for each in plans)
    print(f"  with more host memory than given: {over}")


if __name__ == "__main__":
    main()
