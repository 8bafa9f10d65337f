"""Refusals and plans of random models, held against random recipes.

    python -m tests.situations.random_plans --number 300 --seed 0

A refusal says what the lowest peak is that was found. No recipe that ``estimate``
accepts at batch 1 may be below it. A plan that fits without an effective batch size
must fit with any accumulation, and within the host memory that was given.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
import transformers
from torch import nn

import budgetfit
from budgetfit import DoesNotFitError, InputError, Recipe, Segment, TraceError
from tests.models import Mebi

RECIPES: Final = 200
ACCUMULATIONS: Final = (2, 4, 16)
MIB: Final = 2**20


class Subject(NamedTuple):
    """A model, its blocks and how it is asked for."""

    name: str
    model: nn.Module
    blocks: tuple[str, ...]
    arguments: dict[str, Any]
    has_logits: bool


@dataclass(slots=True)
class Result:
    """What became of one model.

    ``lowest`` is the lowest peak of the random recipes over the refusal's.
    """

    name: str
    refused: bool = False
    contradicted: str = ""
    lowest: float = 1.0
    fits: bool = False
    not_accumulating: tuple[int, ...] = ()
    host_bytes: int = 0
    host_ram: int = 0


def random_subject(draw: random.Random) -> Subject:
    """Return a small model of a random kind and shape."""
    kind = draw.choice(("llama", "gpt2", "bert", "vit", "plain"))
    layers, width = draw.randint(2, 7), draw.choice((64, 128, 256))
    length = draw.choice((32, 128, 512))
    vocabulary = draw.choice((512, 8192, 32768))
    gpu = draw.choice(("t4", "rtx-4090", "a100-40gb"))
    precision = draw.choice(
        ("fp32", "auto") if gpu == "t4" else ("fp32", "auto", "bf16")
    )
    asked: dict[str, Any] = {
        "gpu": gpu,
        "precision": precision,
        "optimizer": draw.choice(("adamw_torch_fused", "sgd", "adamw_torch")),
        "host_ram": draw.choice((0, 4 * MIB, 2**30)),
        "headroom": 0,
    }
    common = {"num_hidden_layers": layers, "hidden_size": width}
    if kind == "plain":
        model: nn.Module = Mebi(layers)
        names = tuple(f"blocks.{number}" for number in range(layers))
        asked["batch"] = torch.zeros(2, 512, 512)
        return Subject(kind, model, names, asked, has_logits=False)
    if kind == "vit":
        config = transformers.ViTConfig(
            **common, image_size=112, intermediate_size=4 * width, num_attention_heads=4
        )
        prefix, auto = "vit.layers", transformers.AutoModelForImageClassification
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=width, n_head=4, vocab_size=vocabulary
        )
        prefix, auto = "transformer.h", transformers.AutoModelForCausalLM
    elif kind == "bert":
        config = transformers.BertConfig(
            **common,
            intermediate_size=4 * width,
            num_attention_heads=4,
            vocab_size=vocabulary,
        )
        prefix, auto = "bert.encoder.layer", transformers.AutoModelForMaskedLM
    else:
        config = transformers.LlamaConfig(
            **common,
            intermediate_size=3 * width,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=vocabulary,
            tie_word_embeddings=draw.random() < 0.5,
        )
        prefix, auto = "model.layers", transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    if kind != "vit":
        asked["max_length"] = length
    modules = dict(model.named_modules())
    found = [name for name in modules if name.endswith(("layers.0", "h.0", "layer.0"))]
    stem = found[0].removesuffix("0") if found else f"{prefix}."
    names = tuple(f"{stem}{number}" for number in range(layers))
    return Subject(
        f"{kind} {layers} x {width}", model, names, asked, kind in {"llama", "gpt2"}
    )


def random_recipe(draw: random.Random, subject: Subject, base: Recipe) -> Recipe:
    """Return a recipe of batch 1 that treats blocks at random."""
    segments: list[Segment] = []
    rest = list(subject.blocks)
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
    parts = 2 ** draw.randint(0, 8) if subject.has_logits else 1
    return replace(
        base,
        batch_size=1,
        gradient_accumulation_steps=1,
        segments=tuple(segments),
        loss_chunks=parts,
    )


def refusal_of(subject: Subject) -> DoesNotFitError | None:
    """Return the refusal of a plan within next to nothing."""
    try:
        made = budgetfit.plan(subject.model, "800MiB", **subject.arguments)
    except DoesNotFitError as error:
        return error
    context = made.budget.context_bytes
    try:
        budgetfit.plan(subject.model, context + 2 * MIB, **subject.arguments)
    except DoesNotFitError as error:
        return error
    return None


def tried(seed: int, recipes: int) -> Result:
    """Plan for one random model, too small and large enough, and try to contradict."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    subject = random_subject(draw)
    result = Result(f"{seed} {subject.name} {subject.arguments['gpu']}")
    error = refusal_of(subject)
    if error is not None:
        result.refused = True
        _contradict(draw, subject, error, result, recipes)
    made = _plan_that_fits(draw, subject, error)
    if made is not None:
        result.fits = True
        result.host_bytes = made.estimate.host_bytes
        result.host_ram = made.budget.host_ram_bytes or 0
        given = {name: subject.arguments[name] for name in ("gpu", "headroom")}
        rest = {
            name: subject.arguments[name]
            for name in ("batch", "max_length", "host_ram")
            if name in subject.arguments
        }
        said = any("has to stay 1" in warning for warning in made.warnings)
        result.not_accumulating = tuple(
            steps
            for steps in ACCUMULATIONS
            if not said
            and not budgetfit.estimate(
                subject.model,
                replace(made.recipe, gradient_accumulation_steps=steps),
                vram=made.budget.total_bytes,
                **given,
                **rest,
            ).fits
        )
    return result


def _plan_that_fits(
    draw: random.Random, subject: Subject, error: DoesNotFitError | None
) -> Any:  # noqa: ANN401 - a plan, or None
    room = 40 * MIB if error is None else error.needed_bytes
    probe = budgetfit.plan(subject.model, **subject.arguments)
    limit = probe.budget.context_bytes + round(room * draw.uniform(1.0, 3.0)) + MIB
    try:
        return budgetfit.plan(subject.model, limit, **subject.arguments)
    except DoesNotFitError:
        return None


def _contradict(
    draw: random.Random,
    subject: Subject,
    error: DoesNotFitError,
    result: Result,
    recipes: int,
) -> None:
    precision = subject.arguments["precision"]
    if precision == "auto":
        precision = "fp16-mixed" if subject.arguments["gpu"] == "t4" else "bf16-mixed"
    base = Recipe(
        batch_size=1, precision=precision, optimizer=subject.arguments["optimizer"]
    )
    given = {
        name: subject.arguments[name]
        for name in ("gpu", "batch", "max_length", "host_ram", "headroom")
        if name in subject.arguments
    }
    for _ in range(recipes):
        recipe = random_recipe(draw, subject, base)
        try:
            estimate = budgetfit.estimate(subject.model, recipe, **given)
        except (InputError, TraceError):
            continue  # not a recipe of this model
        if not estimate.fits:
            continue  # more host memory than there is
        ratio = estimate.reserved_bytes / error.needed_bytes
        if ratio < result.lowest:
            result.lowest = ratio
            result.contradicted = (
                f"{estimate.reserved_bytes / MIB:.1f} MiB of "
                f"{error.needed_bytes / MIB:.1f}: {recipe}"
            )


def main() -> None:
    """Try as many models as asked for and print what was contradicted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipes", type=int, default=RECIPES)
    asked = parser.parse_args()
    results = []
    for seed in range(asked.seed, asked.seed + asked.number):
        found = tried(seed, asked.recipes)
        results.append(found)
        print(
            f"{found.name}: refused {found.refused}, lowest {found.lowest:.4f}, "
            f"fits {found.fits}, not accumulating {found.not_accumulating}, host "
            f"{found.host_bytes} of {found.host_ram}",
            flush=True,
        )
        if found.contradicted:
            print(f"    {found.contradicted}", flush=True)
    refused = [each for each in results if each.refused]
    fitting = [each for each in results if each.fits]
    print(f"refusals: {len(refused)}, each against {asked.recipes} random recipes")
    print(f"  contradicted: {sum(bool(each.contradicted) for each in refused)}")
    worst = min((each.lowest for each in refused), default=1.0)
    print(f"  lowest recipe over the refusal's peak: {worst:.4f}")
    print(f"plans that fit: {len(fitting)}")
    bad = sum(bool(each.not_accumulating) for each in fitting)
    print(f"  that do not fit while accumulating: {bad}")
    over = sum(each.host_bytes > each.host_ram for each in fitting)
    print(f"  with more host memory than given: {over}")


if __name__ == "__main__":
    main()
