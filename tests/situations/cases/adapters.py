"""LoRA and QLoRA. nf4: half a byte per weight of the blocks' linear layers.

Beside it 1/64 + 4/16384 bytes of scales per weight (buffers), what is not in linear
layers in fp32 (peft's k-bit preparation), adapters of r x (in + out) in fp32, their
gradients, and AdamW's two states.
"""

from tests.situations.case import Case
from tests.situations.expectation import Fits, OneLine, Refused, Rows

LONG = "--max-length 2048 --effective-batch-size 16"
CASES = (
    Case(
        "qwen-8b-qlora-4090",
        f"plan Qwen3-8B --gpu rtx-4090 --method qlora --lora-r 64 {LONG}",
        Fits(8.522, 1.301, (10.58, 22.90), effective=16),
        "6.946 B in nf4 3.23, 1.245 B of embeddings and head in fp32 4.64, adapters "
        "174.6 M in fp32 0.65: 8.52; states 1.30, gradients 0.65, scales 0.10. Every "
        "block recomputed, nothing on the host, loss in 8 parts: 13.90.",
        60,
    ),
    Case(
        "qwen-8b-lora-4090",
        f"plan Qwen3-8B --gpu rtx-4090 --method lora --lora-r 64 {LONG}",
        Fits(15.906, 1.301, (17.86, 22.90), effective=16),
        "8.191 B in bf16 15.26 and adapters in fp32 0.65: 15.91. Every block "
        "recomputed, nothing on the host, loss in 8 parts: 19.67.",
        60,
    ),
    Case(
        "qwen-14b-qlora-4090",
        f"plan Qwen3-14B --gpu rtx-4090 --method qlora --lora-r 64 {LONG}",
        Fits(12.907, 1.914, (15.97, 22.90), effective=16),
        "13.212 B in nf4 6.15, 1.556 B in fp32 5.80, adapters 256.9 M 0.96: 12.91. "
        "Every block recomputed, nothing on the host, loss in 8 parts: 20.97; no more "
        "than the host's 16 GiB may be pinned, where it was 103.85.",
        60,
    ),
    Case(
        "qwen-32b-qlora-4090",
        f"plan Qwen3-32B --gpu rtx-4090 --method qlora {LONG}",
        Refused(floor_gib=22.79, known_gib=25.59, suggests=("prepare_for_kbit",)),
        "31.206 B in nf4 14.53, 1.557 B in fp32 5.80, adapters 134.2 M 0.50, scales "
        "0.46, gradients 0.50, states 1.00: 22.79, and a block's activations do not go "
        "into the 0.11 left. Loss in 64 parts, inputs on the host: 25.59, of which "
        "0.95 are cached since the weights were loaded. Without the preparation "
        "the 5.80 are 2.90: qwen-32b-qlora-unprepared fits.",
        80,
    ),
    Case(
        "qwen-32b-qlora-unprepared",
        f"plan Qwen3-32B --gpu rtx-4090 --method qlora --no-prepare-for-kbit {LONG}",
        Fits(17.930, 1.0, (19.89, 22.90), effective=16),
        "nf4 14.53, bf16 2.90, adapters 0.50: 17.93. Known: 21.92.",
        60,
    ),
    Case(
        "qwen-32b-qlora-short",
        "plan Qwen3-32B --gpu rtx-4090 --method qlora --no-prepare-for-kbit "
        "--max-length 512 --effective-batch-size 16",
        Fits(17.930, 1.0, (19.89, 22.90), samples_per_s=0.65, effective=16),
        "As qwen-32b-qlora-unprepared, at 512 tokens. Every block recomputed, batch 1: "
        "0.594 samples/s, 1 GiB unused. At batch 4, with inputs on the host and the "
        "loss in 8 parts: 0.657 in 22.12 GiB.",
        60,
    ),
    Case(
        "llama-70b-qlora-4090",
        f"plan Llama-3.3-70B --gpu rtx-4090 --method qlora {LONG}",
        Refused(floor_gib=43.80, known_gib=48.56),
        "68.451 B in nf4 31.88, 2.103 B in fp32 7.83, adapters 0.77: 40.48; scales "
        "1.01, gradients 0.77, states 1.54: 43.80. Loss in 64 parts, inputs on "
        "the host: 48.56.",
        70,
    ),
    Case(
        "llama-70b-qlora-a100",
        f"plan Llama-3.3-70B --gpu a100-80gb --method qlora {LONG}",
        Fits(40.480, 1.543, (43.80, 77.90), effective=16),
        "40.48 GiB of parameters, as on the rtx-4090, and 34 GiB for activations.",
        120,
    ),
    Case(
        "qwen-4b-lora-32k",
        "plan Qwen3-4B --gpu a100-80gb --method lora --max-length 32768 "
        "--effective-batch-size 16",
        Fits(7.615, 0.246, (8.11, 77.90), effective=16),
        "4.022 B in bf16 7.49, adapters 33.0 M in fp32 0.12. Logits of one sample in "
        "fp32: 32768 x 151936 x 4 bytes = 18.5 GiB, several times at once: loss in "
        "parts; a block's input is 0.16 GiB in bf16.",
        60,
    ),
    Case(
        "llama-8b-qlora-131k",
        "plan Llama-3.1-8B --gpu a100-80gb --method qlora --max-length 131072 "
        "--effective-batch-size 16",
        Fits(7.321, 0.312, (7.89, 77.90), effective=16),
        "6.979 B in nf4 3.25, 1.051 B in fp32 3.91, adapters 0.16: 7.32. A block's "
        "input is 131072 x 4096 x 4 bytes = 2 GiB: all 32 are 64 GiB, too much for the "
        "host's 16; in 6 nested segments of 5 or 6, 12 GiB are on the host and at most "
        "5 x 2 inside one: 75.78 with the loss in 64 parts.",
        60,
    ),
    Case(
        "llama-8b-qlora-131k-host",
        "plan Llama-3.1-8B --gpu a100-80gb --method qlora --max-length 131072 "
        "--effective-batch-size 16 --host-ram 128GB",
        Fits(7.321, 0.312, (7.89, 77.90), host_gib=119.21, effective=16),
        "As llama-8b-qlora-131k; with 64 GiB of inputs on the host 68.78.",
        60,
    ),
    Case(
        "gemma-4b-qlora-t4",
        "plan gemma-3-4b-it --gpu t4 --method qlora --max-length 1024 "
        "--effective-batch-size 16",
        Fits(
            4.364,
            0.287,
            (4.85, 14.44),
            host_gib=8.0,
            recipe={"precision": "fp16-mixed"},
            effective=16,
        ),
        "3.620 B in nf4 1.69, 0.680 B in fp32 2.53, adapters 38.5 M 0.14: 4.36.",
        240,
    ),
    Case(
        "mistral-7b-lora-4090",
        "plan Mistral-7B-v0.3 --gpu 4090 --method lora --max-length 4096 "
        "--effective-batch-size 16",
        Fits(13.657, 0.312, (14.13, 22.90), effective=16),
        "7.248 B in bf16 13.50, adapters 41.9 M in fp32 0.16.",
        50,
    ),
    Case(
        "mistral-7b-lora-bf16",
        "plan Mistral-7B-v0.3 --gpu 4090 --method lora --max-length 4096 "
        "--effective-batch-size 16 --precision bf16",
        Fits(13.579, 0.156, (13.80, 22.90), effective=16),
        "7.248 B and adapters in bf16: 13.50 + 0.08.",
        50,
    ),
    Case(
        "phi-4-mini-lora-t4",
        "plan Phi-4-mini --gpu T4 --method lora --max-length 1024 "
        "--effective-batch-size 16",
        Fits(
            7.231,
            0.172,
            (7.49, 14.44),
            recipe={"precision": "fp16-mixed"},
            effective=16,
        ),
        "3.836 B in 16 bits 7.15, adapters 23.1 M in fp32 0.09.",
        60,
    ),
    Case(
        "gpt-oss-lora-4090",
        f"plan gpt-oss-20b --gpu rtx-4090 --method lora {LONG}",
        Refused(floor_gib=38.96, known_gib=42.41, says=("mxfp4",)),
        "20.915 B parameters; the checkpoint's mxfp4 experts are trained dequantised, "
        "in bf16: 38.96 GiB, which no 24 GB card holds; never fp32 without a word. "
        "Known: 42.41, loss in 8 parts, inputs on the host.",
        90,
    ),
    Case(
        "gpt-oss-qlora-4090",
        f"plan gpt-oss-20b --gpu rtx-4090 --method qlora {LONG}",
        OneLine(says=("mxfp4", "lora")),
        "transformers does not quantise an mxfp4 checkpoint a second time: refused "
        "with that reason.",
        4,
    ),
    Case(
        "qwen-30b-moe-qlora-4090",
        f"plan Qwen3-30B-A3B --gpu rtx-4090 --method qlora {LONG}",
        Refused(floor_gib=125.64, known_gib=133.30, says=("expert",)),
        "29.6 of 30.5 B are the experts' fused weights, embeddings and head, which "
        "bitsandbytes does not quantise (bitsandbytes 1849): 55.18 GiB in bf16, 110.37 "
        "in fp32, as peft's preparation makes them; and it says so. 0.9 B in nf4 0.42, "
        "adapters (on the experts too) 996 M, with gradients and states 14.85: 125.64. "
        "Known: every block recomputed, loss in 64 parts: 133.30, of which a layer's "
        "experts with their adapters added take 1.50 once more.",
        60,
    ),
    Case(
        "qwen-8b-24gb",
        "plan Qwen3-8B --vram 24gb --max-length 2048",
        Refused(
            floor_gib=91.54,
            known_gib=143.54,
            suggests=('method="lora"', 'method="qlora"'),
        ),
        "8.191 B x 12 bytes = 91.54, with gradients 122.05. Known: 143.54, loss in "
        "64 parts, inputs on the host. qwen-8b-lora-4090 and "
        "qwen-8b-qlora-4090 fit on a card of 24 GB.",
        80,
    ),
    Case(
        "qwen-8b-qlora-as-given",
        "estimate Qwen3-8B --gpu rtx-4090 --method qlora --batch-size 4 "
        "--checkpointing full --max-length 2048 --precision bf16-mixed "
        "--optimizer paged_adamw_8bit",
        Fits(parameters_gib=8.035, reserved_gib=(24.4, 40.0), fits=False),
        "nf4 3.23, fp32 4.64, adapters 0.16: 8.03. Logits 4 x 2048 x 151936: 2.32 GiB "
        "in bf16, 4.64 in fp32, and as much for the softmax and its gradient: 24.3.",
        10,
    ),
    Case(
        "qwen-vl-7b-qlora",
        "estimate Qwen2.5-VL-7B --gpu rtx-4090 --method qlora --batch-size 1 "
        "--checkpointing full --precision bf16-mixed",
        Fits(7.615, 0.386, (8.2, 22.90), says=("224",)),
        "7.200 B in nf4 3.35, 1.092 B in fp32 4.07, adapters 51.8 M 0.19; and it says "
        "which size of images it took.",
        12,
    ),
    Case(
        "llama-8b-methods",
        "compare Llama-3.1-8B --gpus rtx-4090,a100-80gb --methods full,lora,qlora "
        "--max-length 2048 --effective-batch-size 16",
        Rows(
            fits={
                "rtx-4090 full": False,
                "rtx-4090 lora": True,
                "rtx-4090 qlora": True,
                "a100-80gb full": False,
                "a100-80gb lora": True,
                "a100-80gb qlora": True,
            }
        ),
        "8.030 B: 119.66 GiB with gradients and AdamW, 89.7 without gradients; LoRA "
        "14.96 in bf16 + 0.16 and 4 x 2048 x 128256 x 2 GiB of logits in parts; QLoRA "
        "7.32.",
        120,
    ),
)
