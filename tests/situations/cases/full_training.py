"""All weights trained: fp32 weights and gradients 4 bytes each, AdamW 8 bytes."""

from tests.situations.case import Case
from tests.situations.expectation import Fits, OneLine, Refused, Rows

CASES = (
    Case(
        "llama-1b-4090",
        "plan Llama-3.2-1B --gpu rtx-4090 --max-length 2048 --effective-batch-size 32",
        Fits(
            4.604,
            9.207,
            (18.41, 22.90),
            recipe={"precision": "bf16-mixed"},
            effective=32,
        ),
        "1.2358 B parameters: 4.60 GiB, gradients 4.60, AdamW 9.21, together 18.41. "
        "The loss in 8 parts and the blocks' inputs (16 x 2048 x 2048 x 4 bytes: 0.25 "
        "GiB) on the host: 22.70 of 22.90 GiB.",
    ),
    Case(
        "llama-1b-cards",
        "compare Llama-3.2-1B --gpus t4,rtx-4090,a100-40gb,h100-80gb "
        "--max-length 2048 --effective-batch-size 32",
        Rows(
            fits={
                "t4 full": False,
                "rtx-4090 full": True,
                "a100-40gb full": True,
                "h100-80gb full": True,
            }
        ),
        "18.41 GiB of weights, gradients and states: not in the 14.44 GiB that a T4 "
        "leaves; llama-1b-4090 fits on the rtx-4090, the others are larger.",
        40,
    ),
    Case(
        "llama-3b-4090",
        "plan Llama-3.2-3B --gpu rtx-4090 --max-length 2048 --effective-batch-size 32",
        Refused(
            floor_gib=35.90,
            known_gib=56.42,
            suggests=("adamw_bnb_8bit", 'method="lora"', 'method="qlora"'),
        ),
        "3.2127 B parameters: weights 11.97, AdamW 23.94; 35.90 even where gradients "
        "are used up in the backward pass, 47.87 otherwise. Loss in 64 parts, every "
        "block recomputed, inputs on the host: 56.42. llama-3b-8bit fits; LoRA: "
        "5.98 in bf16 and 0.09 of adapters.",
        60,
    ),
    Case(
        "llama-3b-8bit",
        "plan Llama-3.2-3B --gpu rtx-4090 --max-length 2048 --effective-batch-size 32 "
        "--precision bf16 --optimizer adamw_bnb_8bit",
        Fits(5.984, 6.078, (18.05, 22.90), effective=32),
        "3.2127 B x 2 bytes: weights 5.98, gradients 5.98; two states of 1 byte and "
        "4 for each 256: 5.98 x (1 + 1/64) = 6.08. Known: 21.26, loss in 8 parts.",
    ),
    Case(
        "llama-1b-as-loaded",
        "estimate Llama-3.2-1B --gpu rtx-4090 --max-length 2048 --batch-size 4 "
        "--checkpointing full --loop run",
        Fits(2.302, 4.604, (9.21, 22.90), recipe={"batch_size": 4}, says=("bf16",)),
        "The config says bfloat16: weights 2.30, gradients 2.30, AdamW 4.60; and it "
        "says that it was taken so, since plan answers for fp32 weights. A plain loop "
        "holds the logits (25.01 in all) and does not fit; a Run drops them.",
        5,
    ),
    Case(
        "gemma-1b-t4",
        "plan gemma-3-1b-it --gpu t4 --max-length 512",
        Refused(
            floor_gib=14.90,
            known_gib=18.78,
            suggests=("adamw_bnb_8bit", 'method="lora"'),
        ),
        "0.9999 B x 16 bytes = 14.90 GiB; the T4 leaves 14.44. Known: 18.78, "
        "loss in 64 parts, inputs on the host. With 8-bit AdamW 13.07 "
        "is known; LoRA: 1.86 GiB in 16 bits.",
        60,
    ),
    Case(
        "qwen-0.6b-lengths",
        "plan Qwen3-0.6B --gpu t4 --lengths tests/situations/lengths.txt "
        "--effective-batch-size 16",
        Fits(
            2.220,
            4.441,
            (8.88, 14.44),
            recipe={"precision": "fp16-mixed"},
            effective=16,
            says=("padded to their longest",),
        ),
        "0.596 B parameters: 2.22 and 4.44. 9 of 10 samples have 200 tokens, one has "
        "2048: padding to it is 1 - (9 x 200 + 2048) / (10 x 2048) = 81 %.",
        40,
    ),
    Case(
        "flan-t5-xl-4090",
        "plan flan-t5-xl --gpu rtx-4090 --max-length 512 --effective-batch-size 16",
        Refused(
            floor_gib=31.11,
            known_gib=49.02,
            suggests=('precision="bf16"', 'method="lora"'),
        ),
        "2.784 B parameters (transformers ties the head): 12 bytes 31.11, 16 bytes "
        "41.48. Known: 49.02, every block recomputed, inputs on the host. In bf16 8 "
        "bytes, 20.74, of 22.90, so that 8-bit AdamW is not needed.",
        90,
    ),
    Case(
        "mamba2-a100",
        "plan mamba2-1.3b --gpu a100-80gb --max-length 1024 --effective-batch-size 8",
        Fits(5.006, 10.011, (20.02, 77.90), effective=8),
        "1.3438 B parameters: 5.01, gradients 5.01, AdamW 10.01.",
        130,
    ),
    Case(
        "smollm2-accumulates",
        "python accumulates examples/configs/SmolLM2-1.7B",
        Fits(3.188, 6.375, (12.75, 21.63), recipe={"gradient_accumulation_steps": 16}),
        "The README's first plan, for 24GB = 22.35 GiB in bf16, without an effective "
        "batch size; estimated with 16 micro-batches: 1.7114 B x 2 bytes = 3.19, "
        "gradients 3.19, AdamW 6.38. It planned 3 x 1, which needs 23.54 once it "
        "accumulates.",
    ),
    Case(
        "gpt2-muon",
        "plan gpt2 --gpu t4 --max-length 256 --optimizer muon",
        OneLine(says=("matrices",)),
        "torch.optim.Muon takes matrices alone, and gpt2 has norms and biases: refused "
        "with that reason.",
        10,
    ),
)
