"""Plan models near a small limit, then verify the plans on this CUDA device.

    python -m tests.accuracy.verify_plans                 # on a real card
    python -m tests.accuracy.verify_plans --whole-card    # largest batches in all of it
    python -m tests.accuracy.nulldriver.run --gpu t4 -- \\
        python -m tests.accuracy.verify_plans --gpu t4

Unlike the recordings, the measured program is the product's own: the plan is applied
and `budgetfit.verify` measures it. Prints one line per plan, signed errors first, and
says whether a real card or the null driver was measured. Each plan has a process of its
own: what runs first in one decides the addresses of what follows.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable

import torch
import transformers
from torch import nn

import budgetfit
from tests.accuracy.provenance import answer_for_the_device, choose_cudnn, origin
from tests.accuracy.well_formed import NULL_DRIVER


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=2816,
        vocab_size=32000,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


# Name, how to make it, and a limit at which blocks have to be recomputed.
MODELS: tuple[tuple[str, Callable[[], nn.Module], str], ...] = (
    (
        "gpt2-124m",
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)),
        "4500MB",
    ),
    (
        "bert-base",
        lambda: transformers.BertForMaskedLM(transformers.BertConfig()),
        "3500MB",
    ),
    ("llama-210m", _llama, "6500MB"),
    (
        "vit-base",
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig()),
        "3GB",
    ),
)


WHOLE_CARD = "whole card"


def check(name: str, model: nn.Module, limit: str, precision: str, gpu: str) -> str:
    """Plan and verify one model; one line of what was found."""
    whole = limit == WHOLE_CARD
    plan = budgetfit.plan(
        model,
        vram=None if whole else limit,
        gpu=gpu,
        precision=precision,
        objective="batch_size" if whole else "throughput",
        effective_batch_size=None if whole else 32,
        host_ram="64GB",
    )
    found = budgetfit.verify(plan)
    reserved = max(row.measured_reserved_bytes for row in found.phases)
    recipe = plan.recipe
    lengths = [len(segment.blocks) for segment in recipe.segments]
    return (
        f"allocated {found.allocated_error:+.3%}  "
        f"reserved {plan.estimate.reserved_bytes / reserved - 1:+.3%}  "
        f"{'passed' if found.passed else 'FAILED'}  {name} {recipe.precision} "
        f"{recipe.batch_size} x {recipe.gradient_accumulation_steps}, segments of "
        f"{lengths or 'none'}, {reserved / plan.budget.usable_bytes:.1%} of the budget"
    )


def measured_card(description: str | None) -> str:
    """Read the command line, prepare the device and say which card is measured."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--gpu", help="the card's name in the table; this one if absent"
    )
    gpu = prepared_card(parser.parse_args().gpu)
    sys.stdout.write(f"measured on: {origin()} ({gpu}), torch {torch.__version__}\n")
    return gpu


def prepared_card(gpu: str | None) -> str:
    """Prepare the device; return the card's name, by default this one's."""
    transformers.logging.set_verbosity_error()
    if origin() == NULL_DRIVER:
        choose_cudnn(enabled=False)  # it cannot run there
        answer_for_the_device()
    return gpu or torch.cuda.get_device_name()


def main() -> int:
    """Print a line for each model and precision, each from a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", help="name in the table; this card if absent")
    parser.add_argument("--whole-card", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "PRECISION"))
    options = parser.parse_args()
    if options.one:
        wanted, precision = options.one
        gpu = prepared_card(options.gpu)
        for name, make, limit in MODELS:
            if name == wanted:
                asked = WHOLE_CARD if options.whole_card else limit
                sys.stdout.write(check(name, make(), asked, precision, gpu) + "\n")
        return 0
    sys.stdout.write(f"measured on: {origin()}, torch {torch.__version__}\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", "tests.accuracy.verify_plans", *sys.argv[1:]]
    codes = [
        subprocess.run([*command, "--one", name, precision], check=False).returncode
        for name, _, _ in MODELS
        for precision in ("fp32", "auto")
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
