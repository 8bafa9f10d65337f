"""Advice after an out-of-memory error, most helpful first."""

from collections.abc import Iterable, Iterator
from typing import Final

from budgetfit.core.allocator.out_of_memory_message import OutOfMemoryMessage
from budgetfit.explain.cause import Diagnosis
from budgetfit.explain.explanation import Advice, Cause
from budgetfit.explain.failed_phase import FailedPhase
from budgetfit.explain.memory_breakdown import MemoryBreakdown
from budgetfit.utils.format_bytes import format_bytes

_NOTABLE_BYTES: Final = 128 * 2**20
_LISTED: Final = 4
_BARE_CONTEXT_BYTES: Final = 2**30
# torch before 2.9 reads this name only; later versions read it first.
_EXPANDABLE: Final = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
# Expandable segments do not exist on Windows.
_ON_WINDOWS: Final = "set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"
_MMAP: Final = 'torch.load(path, map_location="cpu", mmap=True)'

# What helps against a cause before anything else.
_BY_CAUSE: Final[dict[Cause, tuple[Advice, ...]]] = {
    "host memory": (
        Advice(
            "Hold less in host memory: fewer data loader workers, no second copy of "
            "the weights while they are loaded, no optimizer state that is offloaded.",
            ("DataLoader(..., num_workers=2)", _MMAP),
        ),
        Advice("See what takes it.", ("free -g",)),
    ),
    "outside the allocator": (
        Advice(
            "Leave the driver and its libraries some room: PyTorch may have reserved "
            "the whole card. Take a limit for its allocator, or a smaller batch.",
            ("torch.cuda.set_per_process_memory_fraction(0.95)",),
        ),
        Advice("See whether another process has the card.", ("nvidia-smi",)),
    ),
    "one tensor larger than the card": (
        Advice(
            "Look at the line that asked for it: a sequence or an image that is "
            "far too long, attention without a fused kernel (its scores grow with the "
            "square of the length), or a shape that was computed wrongly."
        ),
    ),
    "driver pages to host memory": (
        Advice(
            "Keep the driver from it, so that training fails at once and not "
            "slowly: NVIDIA Control Panel, Manage 3D settings, CUDA - Sysmem Fallback "
            "Policy, Prefer No Sysmem Fallback."
        ),
    ),
    "more free than asked for": (
        Advice(
            "Watch the card while the program starts; on Windows, enlarge the "
            "page file, which the driver needs for every byte of the card.",
            ("nvidia-smi -l 1",),
        ),
    ),
}
_IN_EVALUATION: Final = (
    Advice(
        "Evaluate without gradients and in smaller batches.",
        ("with torch.inference_mode(): ...", "per_device_eval_batch_size=1"),
    ),
    Advice(
        "Do not collect logits on the card: move predictions away every few "
        "steps, or keep no more than the best class of each.",
        (
            "eval_accumulation_steps=1",
            "preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)",
        ),
    ),
)


def find_advice(
    message: OutOfMemoryMessage,
    parts: MemoryBreakdown,
    where: FailedPhase,
    blame: Diagnosis,
) -> tuple[Advice, ...]:
    """Return advice: changes that suffice first, then changes to the model."""
    special = _BY_CAUSE.get(blame.cause, ())
    if message.kind == "host":
        return special
    if message.kind != "allocator":
        return (*special, *_of_phase(message, where))
    around = tuple(_around(message, parts, where, blame))
    first = (advice for advice in around if advice.enough)
    last = (advice for advice in around if not advice.enough)
    return (*special, *first, *_of_phase(message, where), *last)


def _around(
    message: OutOfMemoryMessage,
    parts: MemoryBreakdown,
    where: FailedPhase,
    blame: Diagnosis,
) -> Iterator[Advice]:
    """Yield advice that does not concern the model."""
    missing = blame.missing_bytes or 0
    monitor = "rocm-smi --showpids" if message.on_amd else "nvidia-smi"
    idle = message.idle_bytes or 0
    if idle >= _NOTABLE_BYTES:
        yield Advice(
            "Let segments grow, so that less is reserved and in no tensor "
            f"(at most {format_bytes(idle)}).",
            (_ON_WINDOWS if where.on_windows else _EXPANDABLE,),
            idle,
            enough=blame.cause == "fragmentation",
        )
    named = sum(size_bytes for _, size_bytes in parts.others)
    if named >= _NOTABLE_BYTES:
        pids = [str(pid) for pid, _ in parts.others]
        yield Advice(
            f"{_processes(parts.others)} See what that is and end it, or take "
            "another card.",
            (f"ps -fp {','.join(pids[:_LISTED])}", monitor),
            named,
            enough=0 < missing <= named,
        )
    if parts.unnamed_bytes >= _NOTABLE_BYTES:
        yield Advice(
            f"About {format_bytes(parts.unnamed_bytes)} are held by processes "
            "that the message does not name.",
            (monitor,),
            parts.unnamed_bytes,
            enough=0 < missing <= parts.unnamed_bytes,
        )
    if message.allowed_bytes is not None and message.total_bytes is not None:
        yield Advice(
            f"Raise the process's limit of {format_bytes(message.allowed_bytes)}: "
            "it is set by torch.cuda.set_per_process_memory_fraction, or by "
            "per_process_memory_fraction in PYTORCH_ALLOC_CONF.",
            ("torch.cuda.set_per_process_memory_fraction(1.0)",),
            max(0, message.total_bytes - message.allowed_bytes),
            enough=blame.cause == "limit of the process",
        )


def _processes(others: tuple[tuple[int, int], ...]) -> str:
    """Advise on other processes; several bare CUDA contexts are a launch error."""
    held = ", ".join(f"{pid} ({format_bytes(size)})" for pid, size in others[:_LISTED])
    more = len(others) - _LISTED
    text = f"Process{'es' if len(others) > 1 else ''} {held}"
    text += f" and {more} more" if more > 0 else ""
    text += f" hold{'' if len(others) > 1 else 's'} some of the card."
    if len(others) > 1 and all(size < _BARE_CONTEXT_BYTES for _, size in others):
        text += (
            " So little each is a bare CUDA context: ranks of one program, before "
            "torch.cuda.set_device(local_rank), all open the first card."
        )
    return text


def _of_phase(message: OutOfMemoryMessage, where: FailedPhase) -> Iterable[Advice]:
    """Return changes to model and settings, the least intrusive first."""
    match where.phase:
        case "loading" | "to_device":
            return _loading(message, where)
        case "optimizer":
            return _optimizer(where)
        case "evaluation":
            return _IN_EVALUATION
        case _:
            return _step(message, where)


def _step(message: OutOfMemoryMessage, where: FailedPhase) -> Iterator[Advice]:
    """Yield changes that reduce the memory of forward and backward."""
    asked = message.requested_bytes
    size = "" if asked is None else f" (the {format_bytes(asked)} asked for, too)"
    if where.in_loss:
        yield Advice(
            "The loss was being computed: logits are tokens x vocabulary, often "
            "in fp32 and several times. Compute it in chunks, or on fewer tokens.",
            ("budgetfit.Recipe(..., loss_chunks=8)",),
        )
    if where.in_attention:
        yield Advice(
            "Attention was running: take a fused kernel, which never holds the "
            "scores, tokens x tokens for every head.",
            ('from_pretrained(..., attn_implementation="sdpa")',),
        )
    yield Advice(
        "Halve the batch and double the accumulation: what is learnt stays the "
        f"same, and all that grows with the batch halves{size}.",
        ("per_device_train_batch_size=<half>, gradient_accumulation_steps=<double>",),
    )
    if not where.recomputing:
        yield Advice(
            "Recompute blocks in the backward instead of keeping their "
            "activations; `budgetfit plan` finds which ones have to be.",
            ('model.gradient_checkpointing_enable({"use_reentrant": False})',),
        )


def _optimizer(where: FailedPhase) -> Iterator[Advice]:
    if where.foreach:
        yield Advice(
            "The optimizer updates all parameters at once, which needs "
            "temporaries as large as they are; the fused one needs none.",
            (
                "torch.optim.AdamW(model.parameters(), fused=True)",
                'optim="adamw_torch_fused"',
            ),
        )
    when = "was making it" if where.state_is_new else "makes it in its first step"
    yield Advice(
        "AdamW keeps 8 bytes for each trained parameter, and "
        f"{when}: a smaller batch hardly helps. With 8 bits it keeps 2.",
        ('optim="adamw_bnb_8bit"',),
    )
    yield Advice(
        "Or train fewer parameters: adapters (LoRA) need a hundredth of it.",
        ("budgetfit plan MODEL --method lora",),
    )


def _loading(message: OutOfMemoryMessage, where: FailedPhase) -> Iterator[Advice]:
    held = message.allocated_bytes
    size = "" if not held else f": {format_bytes(held)} were there when it was full"
    yield Advice(
        f"The weights alone are too large{size}. Training all of them in fp32 "
        "with AdamW takes four times the weights, and activations on top."
    )
    if where.phase == "loading":
        yield Advice(
            "Load to host memory first, and one copy only: a checkpoint and the "
            "model it is copied into are two.",
            (_MMAP,),
        )
    yield Advice(
        "Load in 16 bits, or freeze the model in 4 bits and train adapters.",
        (
            "from_pretrained(..., dtype=torch.bfloat16)",
            "budgetfit plan MODEL --method qlora",
        ),
    )
