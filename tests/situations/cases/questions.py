"""Cards, options and questions that people type, on a model that is quick to answer."""

from tests.situations.case import Case
from tests.situations.expectation import Fits, OneLine

SMALL = "--batch-size 1 --max-length 128 --precision fp32"
GPT2 = Fits(0.464, 0.927, (1.39, 5.0))
GPT2_WHY = "124.4 M parameters: 0.46, AdamW 0.93."
OWNED = ("rtx-4070-ti", "rtx-5060-ti-16gb", "RTX 4090 Laptop", "gtx 1080 ti")
HONEST = {"--fsdp": "--engine fsdp2", "--torch-compile": "--compile blocks"}

CASES = (
    *(
        Case(f"card-{card}", f"estimate gpt2 --gpu '{card}' {SMALL}", GPT2, GPT2_WHY, 6)
        for card in OWNED
    ),
    Case(
        "card-rtx-5060-ti",
        f"estimate gpt2 --gpu rtx-5060-ti {SMALL}",
        OneLine(says=("rtx-5060-ti-8gb", "rtx-5060-ti-16gb")),
        "Sold with 8 and with 16 GB: which one is asked.",
        1,
    ),
    Case(
        "card-mi300x",
        f"estimate gpt2 --gpu mi300x {SMALL}",
        OneLine(says=("AMD",)),
        "Not a CUDA card: refused with the reason.",
        1,
    ),
    *(
        Case(
            f"option {option}",
            f"plan gpt2 --gpu t4 {option}",
            OneLine(says=(said,)),
            "Other tools' name of it: one line with ours, and no 'No such option'.",
            1,
        )
        for option, said in HONEST.items()
    ),
    Case(
        "gpt2-hours",
        "plan gpt2 --gpu t4 --max-length 512 --effective-batch-size 32 "
        "--samples 100000",
        Fits(0.464, 0.927, (1.85, 14.44), effective=32),
        f"{GPT2_WHY} The hours are samples over samples/s.",
        15,
    ),
    Case(
        "gpt2-length",
        "plan gpt2 --gpu t4 --objective length --effective-batch-size 16",
        Fits(0.464, 0.927, (1.85, 14.44), effective=16, says=("1024",)),
        f"{GPT2_WHY} The longest that the model has positions for, 1024, fits: it is "
        "planned at batch 8 for that.",
        20,
    ),
    Case(
        "smollm2-length",
        "plan SmolLM2-1.7B --gpu rtx-4090 --precision bf16 --objective length "
        "--effective-batch-size 16",
        Fits(3.188, 6.375, (12.75, 22.90), effective=16),
        "1.7114 B x 2 bytes: 3.19, gradients 3.19, AdamW 6.38.",
        60,
    ),
)
