"""Options and arguments of the commands, in groups that the commands share.

Names and meanings are those of ``budgetfit.plan``, which parses the values, so that the
command line and Python raise the same errors.
"""

from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer

from budgetfit.cli.parsing import one_or_list, policy_or_blocks, split_names

REQUIRED: Final = Parameter.empty


class Declared(NamedTuple):
    """An option or argument: its type, typer's description, and how text is split."""

    kind: Any
    info: Any
    default: Any = None
    split: Callable[[str], Any] | None = None

    def words(self, name: str) -> tuple[str, str]:
        """Return the option of the argument ``name``, and its ``--no-`` option."""
        # The first word stands where typer has a default of old.
        given = (self.info.default, *(self.info.param_decls or ()))
        words = [each for each in given if isinstance(each, str)]
        on, _, off = [*words, "--" + name.replace("_", "-")][0].partition("/")
        return on.strip(), off.strip()


Options = dict[str, Declared]


def _option(
    text: str,
    kind: Any = str,  # noqa: ANN401 - a type
    default: object = None,
    *,
    shown: str | bool = True,
    split: Callable[[str], Any] | None = None,
) -> Declared:
    """Declare ``--name``: its help, type, default and what the help shows for that."""
    return Declared(kind, typer.Option(help=text, show_default=shown), default, split)


def _flag(text: str, words: str, *, default: bool = False) -> Declared:
    info = typer.Option(words, help=text, show_default=not default)
    return Declared(bool, info, default)


def _panel(title: str, **options: Declared) -> Options:
    """Return a group of options that the help shows under a title."""
    for option in options.values():
        option.info.rich_help_panel = title
    return options


def only(group: Options, *names: str) -> Options:
    """Return these options of a group."""
    return {name: group[name] for name in names}


MODEL: Options = {
    "model": Declared(
        str,
        typer.Argument(
            help="A hub id, a folder or config.json, or package.module:factory or "
            "file.py:factory that returns a module, or (module, batch, loss). Weights "
            "are never downloaded.",
            metavar="MODEL",
        ),
        REQUIRED,
    )
}
PLAN_FILE: Options = {
    "plan_file": Declared(
        Path,
        typer.Argument(
            help="A plan that `budgetfit plan --save` wrote.", metavar="PLAN.json"
        ),
        REQUIRED,
    )
}
OOM_FILE: Options = {
    "source": Declared(
        str,
        typer.Argument(
            help="File with the message, a traceback or a whole log; - for standard "
            "input.",
            metavar="OOM.txt",
        ),
        REQUIRED,
    )
}
CONTEXT: Options = {"context": Declared(typer.Context, None, REQUIRED)}
CARD = _panel(
    "Card",
    vram=_option("Memory limit: 24GB is 24 x 10^9 bytes, 24GiB is 24 x 2^30."),
    gpu=_option(
        "Card, as `budgetfit gpus` lists them: rtx-4090, h100-80gb ... "
        "Without --gpu and --vram: this machine's."
    ),
)
DOCTORED_CARD = _panel(
    "Card",
    gpu=_option(
        "Judge as if this card were here, as `budgetfit gpus` lists them: rtx-4090.",
        shown="this machine's",
    ),
)
CARDS = _panel(
    "Card",
    gpus=_option(
        "Cards to compare, with commas: t4,l4,rtx-4090; several that train together: "
        "rtx-4090x2, or on four nodes h100-80gbx8x4.",
        default=REQUIRED,
        split=split_names,
    ),
)
RESERVED = _panel(
    "Card",
    headroom=_option(
        "Kept free on top of the prediction, for example 500MB.",
        shown="1 %, at least 128 MiB",
    ),
    host_ram=_option(
        "Most host memory for offloading, for example 32GiB; 0 for none.",
        shown="what is free where this machine has the card, else 16GiB (T4: 8GiB)",
    ),
    allocator=_option(
        "What PYTORCH_ALLOC_CONF will say where training runs: "
        "expandable_segments:True ...",
        shown="what it says here where this machine has the card",
    ),
)
CHECKED_CARD = _panel(
    "Card",
    vram=CARD["vram"],
    gpu=_option(
        "Card, as `budgetfit gpus` lists them: rtx-4090, h100-80gb ... "
        "Without --gpu and --vram: the planned one."
    ),
    headroom=_option(
        "Kept free on top of the prediction, for example 500MB.",
        shown="as planned; on another card 1 %, at least 128 MiB",
    ),
    host_ram=_option(
        "Most host memory for offloading, for example 32GiB; 0 for none.",
        shown="as planned; on another card what the plan was given",
    ),
)
BATCH = _panel(
    "Model",
    max_length=_option("Tokens in one text sample.", int),
    image_size=Declared(
        str,
        typer.Option(
            "--image-size",
            "--resolution",
            help="Pixels of one image, 448, or height and width, 336x448.",
            show_default="as the model was configured",
        ),
    ),
    frames=_option("Frames of one video.", int, shown="as the model was configured"),
    text_only=_flag(
        "Samples without images and sound, for models that read text too.",
        "--text-only",
    ),
    batch=_option(
        "Example batch, or a function that makes one: file.py:make_batch.",
        shown="made from the model",
    ),
    batch_dims=_option(
        "Where the batch counts samples: NAME=DIM, NAME=none for what goes with "
        "every sample, or DIM for all tensors. Once for each part.",
        list[str] | None,
        shown="found from the batch",
    ),
    loss=_option(
        "Function loss(outputs, batch): file.py:loss.", shown="the model's own"
    ),
)
LENGTHS = _panel(
    "Model",
    lengths=_option(
        "File of sample lengths, one in each line, or length and count; or lengths "
        "with commas: 512,1024.",
        Path,
    ),
    image_sizes=_option(
        "Sizes of images that vary: 480,800x1333, or a range, 480-800:32."
    ),
)
REMOTE_CODE = _panel(
    "Model",
    trust_remote_code=_flag(
        "Run the model code that a hub repository brings.", "--trust-remote-code"
    ),
)
OTHER_MODEL = _panel(
    "Model",
    model=_option(
        "The model, where the plan was made from one in memory or from a factory."
    ),
)
SETTINGS = _panel(
    "Settings",
    batch_size=_option("Samples in one micro-batch.", int),
    effective_batch_size=_option("Samples in one optimizer step; never changed.", int),
    precision=_option(
        "auto, fp32, tf32, fp16-mixed, bf16-mixed, bf16 or as-is; "
        "several with commas are compared.",
        default="auto",
        split=one_or_list,
    ),
    optimizer=_option(
        "A name of transformers' optim, or of torch.optim in small letters: "
        "adamw_bnb_8bit, sgd, adafactor, muon ...",
        default="adamw_torch_fused",
    ),
    checkpointing=_option(
        "auto, none, full, every-2, sqrt, as-is, or block names with commas.",
        default="auto",
        split=policy_or_blocks,
    ),
)
SEVERAL_GPUS = _panel(
    "Card",
    gpus=_option(
        "How many such cards train together: 8, or cards per node x nodes: 8x4.",
        default="1",
    ),
    engine=_option(
        "On several cards: ddp, fsdp2, zero1, zero2 or zero3; where there is a choice "
        "(plan, compare) also auto, the better of ddp and fsdp2, and deepspeed, its "
        "best stage of ZeRO.",
        default="auto",
    ),
    link=_option(
        "What connects several cards: nvlink-4, pcie-4, 25GB/s (what collectives "
        "reach), 8x400Gb/s (network adapters of each node); within and between nodes "
        "with a comma.",
        shown="as `budgetfit gpus` lists it",
    ),
)
SETTINGS_AS_THEY_ARE = SETTINGS | _panel(
    "Settings",
    precision=_option(
        "fp32, tf32, fp16-mixed, bf16-mixed, bf16 or as-is.", str, "as-is"
    ),
    checkpointing=SETTINGS["checkpointing"]._replace(default="as-is"),
)
LOOP = _panel(
    "Training loop",
    loop=_option(
        "What trains: plain (outputs live until the next ones), trainer, sft, "
        "accelerate, lightning, or run (budgetfit.Run).",
        default="plain",
    ),
    ema=_flag("With a second copy of the weights that follows them.", "--ema"),
    max_grad_norm=_option(
        "Clip gradients to this norm.", float, shown="as the loop does by itself"
    ),
    evaluation_batch_size=_option(
        "Samples in each batch of an evaluation between steps.",
        int,
        0,
        shown="no evaluation",
    ),
    use_liger_kernel=_flag(
        "With Liger's kernels, as the Trainer's argument (trainer, sft).",
        "--use-liger-kernel",
    ),
    packing=_flag(
        "A sample is a row of several texts, as SFTConfig's argument (sft).",
        "--packing",
    ),
)
HOW_MANY_GPUS = SEVERAL_GPUS | _panel(
    "Card",
    gpus=_option(
        "How many such cards train together: 8, cards per node x nodes: 8x4, or auto: "
        "the fewest that fit.",
        default="1",
    ),
    price=_option(
        "Price per hour of one card, in any currency: --gpus auto takes the cheapest "
        "number.",
        float,
    ),
)
SEARCH = _panel(
    "Settings",
    objective=_option(
        "throughput (fastest), batch_size (largest), memory (lowest peak) or "
        "length (longest samples that fit, at batch 1).",
        default="throughput",
    ),
    optimizer_in_backward=_flag(
        "Update each weight as soon as its gradient is complete: no accumulation, "
        "no clipping.",
        "--optimizer-in-backward",
    ),
    compile=_option(
        "none, blocks (torch.compile for each block; torch 2.13 on Linux), auto (the "
        "better of the two), or model.",
        default="none",
    ),
)
PRICES = _panel(
    "Card",
    prices=Declared(
        list[str] | None,
        typer.Option(
            "--price",
            help="Price per hour of one card, in any currency: t4=0.35,rtx-4090=0.40.",
            metavar="CARD=PRICE",
        ),
    ),
)
METHODS = _panel(
    "Adapters (peft)",
    methods=_option(
        "Methods to compare, with commas: full,lora,qlora.", split=split_names
    ),
)
ADAPTERS = _panel(
    "Adapters (peft)",
    method=_option(
        "lora or qlora: train adapters on the frozen model; full: its weights."
    ),
    lora_r=_option("Rank of the adapters.", int, 16),
    lora_alpha=_option("Adapters are scaled by alpha / r.", int, 32),
    lora_dropout=_option("Dropout probability of an adapter's input.", float, 0.0),
    target_modules=_option(
        "all-linear, a pattern, or names with commas: q_proj,v_proj.",
        default="all-linear",
        split=one_or_list,
    ),
    quantization=_option(
        "How the frozen model is stored: nf4 (4 bits) or int8.",
        shown="nf4 for qlora, as it is for lora",
    ),
    double_quantization=_flag(
        "Leave the scales of nf4 in fp32.", " /--no-double-quantization", default=True
    ),
    prepare_for_kbit=_flag(
        "Without peft's prepare_model_for_kbit_training: embeddings, norms and "
        "head of a quantised model stay as they are, and not in fp32.",
        " /--no-prepare-for-kbit",
        default=True,
    ),
)
REAL_STEPS: Options = {
    "steps": _option("Real optimizer steps, at least 3.", int, 3),
    "device": _option("cpu checks numerics without a GPU.", shown="this machine's GPU"),
}
REPORT = _panel(
    "Output", report=_option("Write the report with figures here: plan.html.", Path)
)
EXPORT: Options = {
    "to": _option(
        "trainer, sft, dpo, accelerate, lightning, deepspeed, llamafactory, axolotl: "
        "settings for that library. torch: a training script that stands alone.",
        default=REQUIRED,
    ),
    **_panel("Output", save=_option("Write it here.", Path, shown="standard output")),
}
SAMPLES = _panel(
    "Output", samples=_option("Say how long one pass over so many samples takes.", int)
)
DETAILS = _panel(
    "Output",
    details=_flag("Show where the memory goes, and more alternatives.", "--details"),
)
PLAN_OUTPUT = _panel(
    "Output",
    why=_option("Explain one block instead: layers.3."),
    save=_option("Write the plan here.", Path),
    snapshot=_option(
        "Write the step with the peak here, for pytorch.org/memory_viz: step.pickle.",
        Path,
    ),
    **REPORT,
)
OUTPUT = _panel(
    "Output",
    as_json=_flag("Print one JSON document.", "--json"),
    traceback=_flag("Show where an error came from.", "--traceback"),
)
