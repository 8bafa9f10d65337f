"""Check GPUs: bf16 support, free memory, MIG, ECC, TF32."""

from collections.abc import Iterator
from typing import Final

from budgetfit.doctor.facts import Finding, GpuFacts, Machine, note, ok, problem
from budgetfit.utils.format_bytes import format_bytes

_NATIVE_BF16: Final = (8, 0)
_NOTABLE_BYTES: Final = 200 * 2**20
# ECC in GDDR memory takes a sixteenth of it; HBM has extra bits.
_SHARED_ECC: Final = 0.95
_LISTED: Final = 3


def check_gpus(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the GPUs."""
    if not machine.gpus:
        yield ok(
            "card",
            "No NVIDIA card here: name the one to plan for.",
            "budgetfit plan MODEL --gpu rtx-4090",
        )
    yield from _visible(machine)
    for gpu in machine.gpus:
        yield from _precision(machine, gpu)
        if not machine.assumed:
            yield _memory(machine, gpu)
            yield from _modes(gpu)
    yield from _tf32(machine)
    if machine.mps:
        yield note(
            "MPS",
            "CUDA's Multi-Process Service runs: processes share the card, and "
            "each may be limited by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT.",
            "echo quit | nvidia-cuda-mps-control",
        )
    if (machine.wsl or machine.system == "Windows") and machine.gpus:
        yield note(
            "sysmem",
            "Windows moves what does not fit to host memory instead of "
            "failing, and training becomes up to 100 times slower: choose Prefer No "
            "Sysmem Fallback.",
            "NVIDIA Control Panel > Manage 3D settings > Sysmem Fallback Policy",
        )
    if machine.wsl and machine.gpus:
        yield note(
            "host memory",
            "WSL2 pins little host memory, often 1 to 2 GB of all that is there: plan "
            "offloading with less.",
            "budgetfit plan MODEL --host-ram 1GiB",
        )


def _visible(machine: Machine) -> Iterator[Finding]:
    text = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if text is None or machine.assumed or not machine.gpus:
        return
    count = len(machine.gpus)
    first = text.split(",")[0].strip()
    number = int(first) if first.isdecimal() else None
    named = first.startswith("GPU-")
    if text.strip() in {"", "-1"}:
        what = f"CUDA_VISIBLE_DEVICES={text!r} hides every card of this machine."
    elif number is not None and number >= count:
        what = (
            f"CUDA_VISIBLE_DEVICES={text} begins with a card that is not there: this "
            f"machine has {count}, counted from 0."
        )
    elif named and not any(gpu.uuid.startswith(first) for gpu in machine.gpus):
        what = (
            f"CUDA_VISIBLE_DEVICES={text} begins with a card that is not there: "
            "nvidia-smi -L lists those of this machine."
        )
    else:
        yield ok("card", f"CUDA_VISIBLE_DEVICES={text}.")
        return
    yield problem("card", what, "unset CUDA_VISIBLE_DEVICES")


def _precision(machine: Machine, gpu: GpuFacts) -> Iterator[Finding]:
    if gpu.capability is None:
        return
    major, minor = gpu.capability
    which = f"{gpu.name} (capability {major}.{minor})"
    if gpu.capability >= _NATIVE_BF16:
        yield ok("bf16", f"{which} computes bf16 itself.")
        return
    said = "torch.cuda.is_bf16_supported() says True all the same; "
    yield note(
        "bf16",
        f"{which} has no bf16, only a slow emulation; "
        f"{said if machine.torch.says_bf16 else ''}budgetfit plans fp16-mixed for it.",
        "TrainingArguments(fp16=True, bf16=False)",
    )


def _memory(machine: Machine, gpu: GpuFacts) -> Finding:
    """Report used memory of a GPU, and the processes that use it."""
    if not gpu.total_bytes:  # nvidia-smi says [N/A] where the memory is shared
        return note(
            "card",
            f"{gpu.name}: the driver does not tell how much memory it has, as with "
            "chips that share the computer's: name a limit.",
            "budgetfit plan MODEL --vram 64GiB",
        )
    free = format_bytes(gpu.free_bytes)
    total = format_bytes(gpu.total_bytes)
    if gpu.used_bytes < _NOTABLE_BYTES:
        return ok("card", f"{gpu.name}: {free} of {total} are free.")
    mine = [p for p in machine.processes if not p.gpu_uuid or p.gpu_uuid == gpu.uuid]
    mine.sort(key=lambda process: -(process.used_bytes or 0))
    names = ", ".join(
        f"{p.pid} {p.name.replace(chr(92), '/').rsplit('/', 1)[-1]}"
        + (f" ({format_bytes(p.used_bytes)})" if p.used_bytes is not None else "")
        for p in mine[:_LISTED]
    )
    more = f" and {len(mine) - _LISTED} more" if len(mine) > _LISTED else ""
    who = f" by {names}{more}" if names else ", by processes that are not listed"
    size_gib = gpu.free_bytes / 2**30
    enough = size_gib >= 1  # too little to plan with
    return note(
        "card",
        f"{gpu.name}: {format_bytes(gpu.used_bytes)} of {total} are taken"
        f"{who}: end them{', or plan for what is free' if enough else ''}.",
        f"kill {mine[0].pid}" if mine else "nvidia-smi",
        *([f"budgetfit plan MODEL --vram {size_gib - 0.05:.1f}GiB"] if enough else []),
    )


def _modes(gpu: GpuFacts) -> Iterator[Finding]:
    if gpu.mig:
        yield note(
            "MIG",
            f"{gpu.name} is divided (MIG): torch sees one slice, and a plan "
            "must be for the slice's memory.",
            "nvidia-smi -L",
            "budgetfit plan MODEL --vram SIZE",
        )
    if not gpu.ecc:
        return
    sold = gpu.sold_as_gb
    if sold is None or gpu.total_bytes > _SHARED_ECC * sold * 2**30:
        yield ok("ECC", "Error correction is on and takes none.")
        return
    yield note(
        "ECC",
        f"Error correction is on; {gpu.name}, sold as {sold} GB, has "
        f"{format_bytes(gpu.total_bytes)} with it. Off gives about 6 % more, without "
        "protection from bit errors, after a restart.",
        "sudo nvidia-smi -e 0",
    )


def _tf32(machine: Machine) -> Iterator[Finding]:
    if machine.environment.get("NVIDIA_TF32_OVERRIDE") == "0":
        yield note(
            "TF32",
            "NVIDIA_TF32_OVERRIDE=0 turns TF32 off everywhere: the precision "
            "tf32 of a plan will be as slow as fp32.",
            "unset NVIDIA_TF32_OVERRIDE",
        )
    elif machine.environment.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1":
        yield note(
            "TF32",
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 makes fp32 matrix products "
            "TF32: the precision fp32 of a plan will be faster and less exact.",
            "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        )
    else:
        state = "run in TF32" if machine.torch.tf32 else "do not use TF32"
        yield ok(
            "TF32",
            f"fp32 matrix products {state} until a plan with precision tf32 "
            "is applied.",
        )
