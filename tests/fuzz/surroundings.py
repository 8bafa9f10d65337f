"""What a command finds besides its words: standard input, variables, nvidia-smi."""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.explain import messages
from tests.fuzz.words import NONSENSE, Verdict

# What stands for the folder of models and plans, which each run has elsewhere.
HERE: Final = "{here}"
TRACEBACK: Final = """Traceback (most recent call last):
  File "/home/me/train ☃.py", line 40, in <module>
    main()
  File "/home/me/train ☃.py", line 31, in main
    loss.backward()
  File "/usr/lib/python3/site-packages/torch/_tensor.py", line 630, in backward
    torch.autograd.backward(
"""
# Never empty: that means the cache of whoever runs this.
_CACHES: Final = (
    *("off", "NO", "0", "relative/folder", "~nobody/traces", "\n", "☃"),
    *(f"{HERE}/traces", f"{HERE}/config.json", f"{HERE}/config.json/traces"),
    *(f"{HERE}/ünï☃/traces", f"{HERE}/line\nbreak", f"{HERE}/[bold]", f"{HERE}/empty"),
    f"{HERE}/{'x' * 300}",
)
_ALLOCATOR: Final = (
    *("expandable_segments:True", "max_split_size_mb:128", "backend:cudaMallocAsync"),
    *("garbage_collection_threshold:0.8,max_split_size_mb:512", "", ",", ":", "x"),
    *("max_split_size_mb:0", "max_split_size_mb:x", "expandable_segments:maybe", "☃"),
    *("roundup_power2_divisions:[256:1,512:2,>:4]", "roundup_power2_divisions:[", "[]"),
    *("max_split_size_mb", "expandable_segments=True", "9" * 5000, "[bold]:[/red]"),
)
VARIABLES: Final[dict[str, tuple[str | None, ...]]] = {
    "BUDGETFIT_CACHE": _CACHES,
    "PYTORCH_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_ALOC_CONF": ("expandable_segments:True",),
    "CUDA_VISIBLE_DEVICES": ("", "0", "-1", "7", "GPU-x", "0,0", "x"),
    "CUDA_LAUNCH_BLOCKING": ("1", "0", "x"),
    "NVIDIA_TF32_OVERRIDE": ("0", "1", "x"),
    "BNB_CUDA_VERSION": ("128", "", "x"),
    "COLUMNS": ("0", "1", "20", "400", "-5", "x", ""),
    "TERM": ("dumb", "", "x"),
    "NO_COLOR": ("1", ""),
    "FORCE_COLOR": ("1",),
    "HOME": (None, "/nonexistent", f"{HERE}/with space", "", "relative"),
    "SMI_CARDS": (
        "NVIDIA GeForce RTX 4090, 580.95.05, 24564, 10, GPU-1, [N/A], [N/A], 8.9",
        "Tesla T4, 550.54.14, 15360, 15300, GPU-1, Enabled, [N/A], 7.5",
        "Tesla K80, 450.1, 11441, 0, GPU-1, Enabled, [N/A], 3.7",
        "A100, 535.1, 40960, 0, GPU-1, Enabled, Enabled, 8.0\n[bold], x, , , , , ,",
        "Graphics Device, , [N/A], [Unknown Error], , , , 99.99",
        *("☃, ☃, ☃, ☃, ☃", ",,,,,,,", ",,,,", "No devices were found", "", "\x1b[31m"),
        f"RTX 4090, 5{'.9' * 500}, {'9' * 30}, {'9' * 30}, GPU-1, a, b, {'9' * 9}.1",
    ),
    "SMI_PROCESSES": (
        "42, /usr/bin/python3, 5120, GPU-1",
        *(
            "43, C:\\a,b.exe, [N/A], GPU-1",
            "x, y, z",
            ",,,",
            "9" * 50 + ", a, 1, GPU-1",
        ),
        "44, nvidia-cuda-mps-server, 30, GPU-1",
    ),
    "SMI_HEADER": ("CUDA Version: 13.0", "CUDA Version: x.y", "CUDA Version: 99999.9"),
    "SMI_CODE": ("0", "0", "0", "2", "9"),
}
# A driver's tool that answers what the variables above hold.
SMI: Final = """#!/bin/sh
case "$*" in
  *compute-apps*) printf '%s\\n' "$SMI_PROCESSES" ;;
  *query-gpu*) printf '%s\\n' "$SMI_CARDS"; exit "${SMI_CODE:-0}" ;;
  *) printf '| NVIDIA-SMI  %s |\\n' "$SMI_HEADER" ;;
esac
"""


def write_tool(folder: Path) -> None:
    """Write the driver's tool into a folder of its own."""
    (folder / "tools").mkdir()
    tool = folder / "tools" / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)


def draw_variables(
    rng: random.Random, command: tuple[str, ...]
) -> tuple[tuple[str, str | None], ...]:
    """Return variables to set, None for one to remove; they are doctor's input."""
    if command == ("doctor",):
        names = rng.sample(sorted(VARIABLES), rng.randrange(5))
        if rng.random() < 0.5 and sys.platform != "win32":
            names += [name for name in VARIABLES if name.startswith("SMI_")]
            names.append("PATH")
    elif rng.random() < (0.9 if command[0] == "cache" else 0.1):
        names = ["BUDGETFIT_CACHE", *rng.sample(["COLUMNS", "HOME", "FORCE_COLOR"], 1)]
    else:
        return ()
    values = {**VARIABLES, "PATH": (f"{HERE}/tools:/usr/bin:/bin",)}
    return tuple((name, rng.choice(values[name])) for name in dict.fromkeys(names))


def draw_input(rng: random.Random) -> tuple[bytes | None, Verdict]:
    """Return what stands on standard input, None if it is closed."""
    chance = rng.random()
    message = rng.choice(messages.ALL)
    if chance < 0.3:
        encoding = rng.choice(("utf-8", "utf-8-sig", "utf-16"))
        before = rng.choice(("", "step 3\r\n", TRACEBACK, "ünï☃\n", "\x1b[31m"))
        return f"{before}{message}\n".encode(encoding), "right"
    if chance < 0.36:
        return None, "wrong"
    if chance < 0.42:
        return rng.choice((b"", b"\n", rng.randbytes(3000), b"\0" * 99)), "wrong"
    text = rng.choice(("", TRACEBACK)) + message
    for damage in rng.choices(DAMAGE, k=rng.choice((1, 1, 2, 3))):
        text = damage(rng, text)
    data = text.encode("utf-8", errors="surrogateescape")
    if rng.random() < 0.2:
        place = rng.randrange(len(data) + 1)
        data = data[:place] + rng.randbytes(rng.randrange(50)) + data[place:]
    return data, "open"


def _cut_off(rng: random.Random, text: str) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _cut_on(rng: random.Random, text: str) -> str:
    return text[rng.randrange(len(text) + 1) :]


def _without_a_piece(rng: random.Random, text: str) -> str:
    place = rng.randrange(len(text) + 1)
    return text[:place] + text[place + rng.randrange(1, 60) :]


def _other_words(rng: random.Random, text: str) -> str:
    """Put odd numbers, units and nonsense where words are."""
    odd = ("0", "-3", "nan", "9" * 40, "9" * 400, "1e9", "0.00", "GiB", "bytes", "EB")
    words = text.split(" ")
    for _ in range(rng.randrange(1, 6)):
        numbers = [
            at for at, word in enumerate(words) if any("0" <= c <= "9" for c in word)
        ]
        places = numbers if numbers and rng.random() < 0.8 else range(len(words))
        words[rng.choice(list(places))] = rng.choice((*odd, *NONSENSE))
    return " ".join(words)


def _repeated(rng: random.Random, text: str) -> str:
    return rng.choice(("", "\n", " ")).join([text] * rng.choice((2, 50, 1000)))[: 2**20]


def _mixed(rng: random.Random, text: str) -> str:
    other = rng.choice(messages.ALL)
    place = rng.randrange(len(text) + 1)
    return text[:place] + other + text[place:]


def _wrapped(rng: random.Random, text: str) -> str:
    width = rng.choice((1, 20, 79))
    end = rng.choice(("\n", "\r\n", " \u2502\n\u2502 ", "\n[rank0]: ", "\x1b[0m\n"))
    return end.join(text[at : at + width] for at in range(0, len(text), width))[: 2**20]


def _swollen(rng: random.Random, text: str) -> str:
    """Put very much of one character, or of a beginning, somewhere."""
    piece = rng.choice(
        ("9", " ", "\n", "CUDA ", "CUDA out of ", '  File "', "\x1b[", "─")
    )
    place = rng.randrange(len(text) + 1)
    return text[:place] + piece * (200_000 // len(piece)) + text[place:]


DAMAGE: Final[tuple[Callable[[random.Random, str], str], ...]] = (
    *(_cut_off, _cut_on, _without_a_piece, _other_words, _other_words),
    *(_repeated, _mixed, _wrapped, _swollen),
)
