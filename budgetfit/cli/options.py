"""Typer options and arguments shared by the commands.

Names and meanings are those of ``budgetfit.plan``, which parses the values, so that the
command line and Python raise the same errors.
"""

from pathlib import Path
from typing import Annotated

import typer

_ANSWER = "Output"
_MODEL = "Model"
_SETTINGS = "Settings"
_CARD = "Card"

Model = Annotated[
    str,
    typer.Argument(
        help="A hub id, a folder or config.json, or package.module:factory or "
        "file.py:factory that returns a module, or (module, batch, loss). Weights are "
        "never downloaded.",
        metavar="MODEL",
    ),
]
PlanFile = Annotated[
    Path,
    typer.Argument(
        help="A plan that `budgetfit plan --save` wrote.", metavar="PLAN.json"
    ),
]
OtherModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The model, where the plan was made from one in memory.",
        rich_help_panel=_MODEL,
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(help="Tokens in one text sample.", rich_help_panel=_MODEL),
]
ImageSize = Annotated[
    str | None,
    typer.Option(
        help="Pixels of one image, 448, or height and width, 336x448.",
        show_default="as the model was configured",
        rich_help_panel=_MODEL,
    ),
]
TextOnly = Annotated[
    bool,
    typer.Option(
        "--text-only",
        help="Samples without images and sound, for models that read text too.",
        rich_help_panel=_MODEL,
    ),
]
Batch = Annotated[
    str | None,
    typer.Option(
        help="Example batch, or a function that makes one: file.py:make_batch.",
        show_default="made from the model",
        rich_help_panel=_MODEL,
    ),
]
BatchDims = Annotated[
    list[str] | None,
    typer.Option(
        help="Where the batch counts samples: NAME=DIM, NAME=none for what goes with "
        "every sample, or DIM for all tensors. Once for each part.",
        show_default="found from the batch",
        rich_help_panel=_MODEL,
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(
        help="Function loss(outputs, batch): file.py:loss.",
        show_default="the model's own",
        rich_help_panel=_MODEL,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        help="Say how long one pass over so many samples takes.",
        rich_help_panel=_ANSWER,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the model code that a hub repository brings.",
        rich_help_panel=_MODEL,
    ),
]
Vram = Annotated[
    str | None,
    typer.Option(
        help="Memory limit: 24GB is 24 x 10^9 bytes, 24GiB is 24 x 2^30.",
        rich_help_panel=_CARD,
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="Card, as `budgetfit gpus` lists them: rtx-4090, h100-80gb ... "
        "Without --gpu and --vram: this machine's.",
        rich_help_panel=_CARD,
    ),
]
Gpus = Annotated[
    str,
    typer.Option(
        help="Cards to compare, with commas: t4,l4,rtx-4090.",
        rich_help_panel=_CARD,
    ),
]
Lengths = Annotated[
    Path | None,
    typer.Option(
        help="File of sample lengths: one in each line, or length and count.",
        rich_help_panel=_MODEL,
    ),
]
Why = Annotated[
    str | None,
    typer.Option(help="Explain one block instead: layers.3.", rich_help_panel=_ANSWER),
]
Headroom = Annotated[
    str | None,
    typer.Option(
        help="Kept free on top of the prediction, for example 500MB.",
        show_default="1 %, at least 128 MiB",
        rich_help_panel=_CARD,
    ),
]
HostRam = Annotated[
    str | None,
    typer.Option(
        help="Most pinned host memory for offloading, for example 32GiB; 0 for none.",
        show_default="what is free where this machine has the card, else 16GiB",
        rich_help_panel=_CARD,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        help="Samples in one micro-batch.",
        rich_help_panel=_SETTINGS,
    ),
]
EffectiveBatchSize = Annotated[
    int | None,
    typer.Option(
        help="Samples in one optimizer step; never changed.",
        rich_help_panel=_SETTINGS,
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        help="auto, fp32, tf32, fp16-mixed, bf16-mixed, bf16 or as-is; "
        "several with commas are compared.",
        rich_help_panel=_SETTINGS,
    ),
]
OnePrecision = Annotated[
    str,
    typer.Option(
        help="fp32, tf32, fp16-mixed, bf16-mixed, bf16 or as-is.",
        rich_help_panel=_SETTINGS,
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        help="A name of transformers' optim, or of torch.optim in small letters: "
        "adamw_bnb_8bit, sgd, adafactor, muon ...",
        rich_help_panel=_SETTINGS,
    ),
]
Checkpointing = Annotated[
    str,
    typer.Option(
        help="auto, none, full, every-2, sqrt, as-is, or block names with commas.",
        rich_help_panel=_SETTINGS,
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        help="throughput (fastest), batch_size (largest), memory (lowest peak) or "
        "length (longest samples that fit, at batch 1).",
        rich_help_panel=_SETTINGS,
    ),
]
OptimizerInBackward = Annotated[
    bool,
    typer.Option(
        "--optimizer-in-backward",
        help="Update each weight as soon as its gradient is complete: no accumulation, "
        "no clipping.",
        rich_help_panel=_SETTINGS,
    ),
]
_ADAPTERS = "Adapters (peft)"
Method = Annotated[
    str | None,
    typer.Option(
        help="lora or qlora: train adapters on the frozen model; full: its weights.",
        rich_help_panel=_ADAPTERS,
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        help="Methods to compare, with commas: full,lora,qlora.",
        rich_help_panel=_ADAPTERS,
    ),
]
LoraR = Annotated[
    int, typer.Option(help="Rank of the adapters.", rich_help_panel=_ADAPTERS)
]
LoraAlpha = Annotated[
    int, typer.Option(help="Their scale, over the rank.", rich_help_panel=_ADAPTERS)
]
LoraDropout = Annotated[
    float,
    typer.Option(
        help="Share of an adapter's input that is dropped.",
        rich_help_panel=_ADAPTERS,
    ),
]
TargetModules = Annotated[
    str,
    typer.Option(
        help="all-linear, a pattern, or names with commas: q_proj,v_proj.",
        rich_help_panel=_ADAPTERS,
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="How the frozen model is stored: nf4 (4 bits) or int8.",
        show_default="nf4 for qlora, as it is for lora",
        rich_help_panel=_ADAPTERS,
    ),
]
DoubleQuantization = Annotated[
    bool,
    typer.Option(
        " /--no-double-quantization",
        help="Leave the scales of nf4 in fp32.",
        show_default=False,
        rich_help_panel=_ADAPTERS,
    ),
]
PrepareForKbit = Annotated[
    bool,
    typer.Option(
        " /--no-prepare-for-kbit",
        help="Without peft's prepare_model_for_kbit_training: embeddings, norms and "
        "head of a quantised model stay as they are, and not in fp32.",
        show_default=False,
        rich_help_panel=_ADAPTERS,
    ),
]
Steps = Annotated[int, typer.Option(help="Real optimizer steps, at least 3.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu checks numerics without a GPU.", show_default="this machine's GPU"
    ),
]
Target = Annotated[
    str,
    typer.Option(
        "--to",
        help="trainer, sft, dpo, accelerate, lightning, deepspeed, llamafactory, "
        "axolotl: settings for that library. torch: a training script that stands "
        "alone.",
    ),
]
SavePlan = Annotated[
    Path | None,
    typer.Option("--save", help="Write the plan here.", rich_help_panel=_ANSWER),
]
SaveText = Annotated[
    Path | None,
    typer.Option(
        "--save",
        help="Write it here.",
        show_default="standard output",
        rich_help_panel=_ANSWER,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document.", rich_help_panel=_ANSWER),
]
Traceback = Annotated[
    bool,
    typer.Option(
        "--traceback",
        help="Show where an error came from.",
        rich_help_panel=_ANSWER,
    ),
]
