"""What people and machines type: right values, near-misses and nonsense.

A value knows whether the command must take it: a line of right values only ends with 0
or 3, one with a wrong value in it with 2, and of the others either may be true.
"""

import random
from collections.abc import Sequence
from typing import Final, Literal

Verdict = Literal["right", "wrong", "open"]

RIGHT: Final[dict[str, tuple[str, ...]]] = {
    "vram": ("24GB", "16GiB", "8 GB", "12gib", "600MB"),
    "gpu": ("t4", "rtx-4090", "RTX 4090", "l4", "a100-80gb", "h100-80gb"),
    "gpus": ("t4,l4", "rtx-4090", "t4, l4 ,", "1"),  # of compare; of plan, estimate
    "engine": ("auto", "ddp", "fsdp2"),
    "headroom": ("0", "500MB", "1GiB"),
    "host_ram": ("0", "500MB", "64GiB"),
    "allocator": ("", "expandable_segments:True", "roundup_power2_divisions:[>:4]"),
    "max_length": ("8", "16"),
    "lengths": ("lengths.txt", "8,16"),
    "loop": ("plain", "run"),
    "max_grad_norm": ("1", "0.5"),
    "evaluation_batch_size": ("0", "4"),
    "batch_size": ("1", "2", "4", "100000"),
    "effective_batch_size": ("4", "8", "64"),
    "batch_dims": ("0", "input_ids=0"),
    "precision": ("auto", "fp32", "fp16-mixed", "fp32,fp16-mixed"),
    "optimizer": ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor"),
    "checkpointing": ("none", "full", "sqrt"),
    "objective": ("throughput", "batch_size", "memory"),
    "compile": ("none",),
    "methods": ("full", "full, full"),
    "samples": ("1", "50000"),
    "lora_r": ("4", "16"),
    "lora_alpha": ("8",),
    "lora_dropout": ("0", "0.1"),
    "target_modules": ("all-linear",),
    "steps": ("3",),
    "device": ("cpu",),
    "to": ("torch", "accelerate", "deepspeed", "lightning", "trainer"),
    "plan_file": ("full.json", "sqrt.json", "odd/plän ☃ of\nmine.json"),
    "model": (
        *("config.json", ".", "with space/config.json", "ünï☃/config.json", "[bold]"),
        *("line\nbreak/config.json", "./-dash/config.json", "a:b/config.json"),
    ),
    "save": ("made.json", "odd/ü [x].json"),
    "report": ("made.html", "odd/ü [x].html"),
    "snapshot": ("made.pickle", "odd/ü [x].pickle"),
    # "-" is drawn with what stands on standard input.
    "source": (
        "oom.txt",
        "-",
        "-",
        "-",
        "odd/öom ☃\n[x].log",
        "utf16.txt",
        "boxed.txt",
    ),
}
# What the same words mean differently for one command.
RIGHT_FOR: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("estimate", "precision"): ("as-is", "fp32", "fp16-mixed"),
    ("estimate", "checkpointing"): ("none", "full", "as-is"),
}
WRONG: Final[dict[str, tuple[str, ...]]] = {
    "vram": ("24", "24Gb", "-1GB", "nanGB", "infGB", "1e400GB", "0x10GB", "GB", ""),
    "gpu": ("rtx-4091", "", "\n", "☃", "t4,l4", "nan"),
    "gpus": ("", ",", "t4,rtx-4091", "☃", "0", "8x", "-2"),
    "engine": ("tp", "zero4", "FSDP", "", "☃"),
    "link": ("nvlink-9", "0GB/s", "8x", "nvlink-4,nvlink-4", "", "☃"),
    "price": ("0", "-1", "nan", "inf", "x", "t4=0.35", ""),
    "headroom": ("lots", "-1GB", "9999GB", "nan", ""),
    "host_ram": ("lots", "-1GB", "nan", ""),
    "allocator": ("expandable_segments", "max_split_size_mb:0", "a:b", "[:", ","),
    "max_length": ("0", "-1", "x", "", "nan", "1.5", "17"),
    "lengths": ("bad_lengths.txt", "missing.txt", "empty", "bytes.bin", "empty.txt"),
    "image_sizes": ("", "x", "0", "64-32", "32-64:0", "missing.txt", "bytes.bin"),
    "loop": ("", "hf", "Plain", "plain,run", "☃"),
    "max_grad_norm": ("0", "-1", "nan", "inf", "x", ""),
    "evaluation_batch_size": ("-1", "x", "", "1.5"),
    "batch_size": ("0", "-3", "two", "", "nan", "1.5", "1e3", "0x2"),
    "effective_batch_size": ("0", "-8", "many", "", "inf"),
    "batch_dims": ("-1", "pixels=0", "input_ids=", "=0", "input_ids=7", "☃"),
    "precision": ("bf17", "fp32,", "", "FP32 ", "auto,auto,x", "☃"),
    "optimizer": ("adamx", "", "lomo", "☃", "adamw_torch "),
    "checkpointing": ("some", "transformer.h.9", "", "transformer.h.0,x", "full,none"),
    "objective": ("luck", "", "memory ", "☃"),
    "compile": ("reduce-overhead", "", "Blocks", "☃"),
    "image_size": ("0", "-1", "x", "", "448x", "64", "1x2x3"),
    "batch": ("factories.py", "factories.py:gone", "missing.py:x", "", "[1, 2]"),
    "loss": ("mse", "missing.py:x", "factories.py:gone", "", "os:sep"),
    "samples": ("0", "-1", "x", "", "1e5"),
    "prices": ("t4", "t4=0", "t4=-1", "t4=nan", "=1", "t5=1", ""),
    "methods": ("", ",", "full,dora", "LoRA"),
    "lora_r": ("0", "-1", "x", ""),
    "lora_alpha": ("0", "x"),
    "lora_dropout": ("1", "-0.1", "nan", "inf", "x"),
    "target_modules": ("", ",", "nowhere_proj", "(", "*"),
    "method": ("dora", "", "LoRA"),
    "quantization": ("nf5", "", "int4"),
    "steps": ("2", "0", "-1", "x", "", "1.5"),
    "device": ("tpu", "", "cpu:x", "cuda", "meta", "cpu "),
    "to": ("x", "", "Torch", "torch,trainer"),
    "plan_file": ("missing.json", "", "config.json", "bytes.bin", "empty", ".", "\n"),
    "model": (
        *("missing.json", "broken.json", "list.json", "unknown.json", "untyped.json"),
        *("empty", "model.safetensors", "factories.py", "factories.py:raises", ""),
        *("factories.py:returns_three", "factories.py:needs_an_argument", "bytes.bin"),
        *(
            "factories.py:gone",
            "missing.py:build",
            "nowhere_at_all:build",
            "config.json:x",
        ),
        *(
            "factories.py:frozen",
            "remote",
            "remote/config.json",
            "full.json",
            ":",
            "a:",
        ),
        *(
            "os:getcwd",
            "builtins:dict",
            "a/b:c",
            "\n",
            " ",
            "...",
            "x" * 5000,
            "~nobody/x",
        ),
    ),
    "frames": ("0", "-1", "x", "", "1.5", "5"),
    "report": ("no/such/folder/plan.html", ".", "", "config.json/plan.html"),
    "snapshot": ("no/such/folder/x.pickle", ".", "", "config.json/x.pickle"),
    "save": ("no/such/folder/plan.json", ".", "", "config.json/plan.json", "x" * 300),
    "why": ("transformer.h.9", "", "x", "h"),
    "source": (
        *(
            "missing.txt",
            "empty",
            "empty.txt",
            "bytes.bin",
            "config.json",
            ".",
            "",
            "\n",
        ),
        *("no/such/folder/oom.txt", "config.json/oom.txt", "~nobody/x", "x" * 5000),
        "/dev/null",
    ),
}
OPEN: Final[dict[str, tuple[str, ...]]] = {
    "vram": (
        "100MB",
        "1GB",
        "400 MiB",
        "9e9TB",
        "99999999999999999999GB",
        "\uff11\uff16GB",
    ),
    "gpu": ("b200", "tesla t4", "nvidia"),
    "link": ("nvlink-4", "25GB/s", "8x400Gb/s"),  # with several GPUs
    "price": ("0.35",),  # with gpus="auto"
    "precision": ("bf16-mixed", "bf16", "tf32", "as-is", "fp32,bf16-mixed,as-is"),
    "optimizer": ("adamw_bnb_8bit", "paged_adamw_8bit", "galore_adamw", "stable_adamw"),
    "checkpointing": (
        "transformer.h.0",
        "as-is",
        "auto",
        "transformer.h.1,transformer.h.0,",
    ),
    "model": (
        *(
            "factories.py:small",
            "factories.py:Odd",
            "wrong.py:Wrong",
            "with space/factories.py:small",
        ),
        *(
            "a:b/factories.py:small",
            "gpt2",
            "no-one/nothing",
            "../x",
            "http://localhost/x",
        ),
        *("[bold]/factories.py:small", "line\nbreak/factories.py:small", "ünï☃"),
    ),
    "method": ("lora", "qlora", "full"),
    "methods": ("full,lora", "qlora"),
    "image_size": ("448", "32x64"),
    "frames": ("1", "9"),
    "image_sizes": ("32-64:32", "448"),
    "loop": ("accelerate", "lightning", "trainer"),
    "batch": ("factories.py:batch",),
    "loss": ("factories.py:own_loss", "builtins:print"),
    "objective": ("length",),
    "samples": (str(10**18),),
    "prices": ("t4=0.35", "rtx-4090=0.35,t4=0.2"),
    "quantization": ("nf4", "int8"),
    "target_modules": ("c_attn", "c_attn,c_proj", ".*attn"),
    "batch_size": ("7", "1000000", "99999999999", str(10**18), str(10**30)),
    "effective_batch_size": ("7", "1000000007", str(10**18), str(2**64)),
    "max_length": (str(10**9), str(2**63)),
    "lora_r": (str(10**9), str(2**63)),
    "lora_alpha": (str(10**30),),
    "headroom": ("1B", "5GB"),
    "steps": ("4",),
    "plan_file": ("factory.json", "module.json", "qlora.json"),
    "to": ("sft",),
    "why": ("h.0", "transformer.h.1"),
    "source": ("cut.txt", "binary.txt", "large.txt", "many.txt"),
}
NONSENSE: Final = (
    *("", " ", "-", "--", "-1", "0", "1e999", "nan", "inf", "-inf", "None", "null"),
    *("true", "☃", "ünï", "\u202e", "a\nb", "a\tb", "\x1b[31m", "[/red]", "[bold]x"),
    *(
        "%s%n",
        "{0}",
        "$HOME",
        "*",
        "'",
        '"',
        "\\",
        "/",
        "//",
        "..",
        "~",
        "~root",
        "\udcff",
    ),
    *("9" * 5000, "x" * 10_000, str(2**63), str(-(2**63)), "0.1", "1,2", ",", "a=b"),
    *("--json", "--gpu", "--gpu=t4", "-h", "--version", "--no-such-option", "--vram"),
)


def near_miss(rng: random.Random, value: str) -> str:
    """Return a text one slip of the finger away."""
    place = rng.randrange(len(value) + 1)
    slips = (
        lambda: value[:place] + value[place + 1 :],
        lambda: value[:place] + rng.choice("xé0-., \n☃") + value[place:],
        lambda: value[:place] + value[place : place + 1] * 2 + value[place + 1 :],
        value.upper,
        lambda: f" {value}",
        value.swapcase,
        lambda: value[::-1],
    )
    return rng.choice(slips)()


def draw(rng: random.Random, command: str, name: str) -> tuple[str, Verdict]:
    """Return a value for an argument or option, and whether it must be taken."""
    right = RIGHT_FOR.get((command, name), RIGHT.get(name, ()))
    kinds: dict[Verdict, Sequence[str]]
    kinds = {"right": right, "wrong": WRONG.get(name, ()), "open": OPEN.get(name, ())}
    chance = rng.random()
    if chance < 0.62 and right:
        return rng.choice(right), "right"
    if chance < 0.85:
        known = [(text, kind) for kind, texts in kinds.items() for text in texts]
        if known:
            return rng.choice(known)
    if chance < 0.93 and right:
        return near_miss(rng, rng.choice(right)), "open"
    return rng.choice(NONSENSE), "open"
