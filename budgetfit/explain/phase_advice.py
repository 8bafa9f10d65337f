"""Advice on model and training settings, by the phase that failed."""

from collections.abc import Callable, Iterator
from typing import Final

from budgetfit.core.out_of_memory_message import OutOfMemoryMessage
from budgetfit.explain.explanation import Advice
from budgetfit.explain.failed_phase import FailedPhase, Phase
from budgetfit.utils.format_bytes import format_bytes

_CHECKPOINTING: Final = 'model.gradient_checkpointing_enable({"use_reentrant": False})'


def phase_advice(message: OutOfMemoryMessage, where: FailedPhase) -> tuple[Advice, ...]:
    """Return changes that reduce memory, the least intrusive first."""
    rules: dict[
        Phase, Callable[[OutOfMemoryMessage, FailedPhase], Iterator[Advice]]
    ] = {
        "loading": _loading,
        "to_device": _loading,
        "optimizer": _optimizer,
        "evaluation": _evaluation,
    }
    return tuple(rules.get(where.phase, _step)(message, where))


def _step(message: OutOfMemoryMessage, where: FailedPhase) -> Iterator[Advice]:
    """Yield changes that reduce the memory of forward and backward."""
    asked = message.requested_bytes
    size = "" if asked is None else f" (the {format_bytes(asked)} asked for, too)"
    if where.in_loss:
        yield Advice(
            text="The loss was being computed: logits are tokens x vocabulary, often "
            "in fp32 and several times. Compute it in chunks, or on fewer tokens.",
            commands=("budgetfit.Recipe(..., loss_chunks=8)",),
        )
    if where.in_attention:
        yield Advice(
            text="Attention was running: take a fused kernel, which never holds the "
            "scores, tokens x tokens for every head.",
            commands=('from_pretrained(..., attn_implementation="sdpa")',),
        )
    yield Advice(
        text="Halve the batch and double the accumulation: what is learnt stays the "
        f"same, and all that grows with the batch halves{size}.",
        commands=(
            "per_device_train_batch_size=<half>, gradient_accumulation_steps=<double>",
        ),
    )
    if not where.recomputing:
        yield Advice(
            text="Recompute blocks in the backward instead of keeping their "
            "activations; `budgetfit plan` finds which ones have to be.",
            commands=(_CHECKPOINTING,),
        )


def _optimizer(message: OutOfMemoryMessage, where: FailedPhase) -> Iterator[Advice]:
    del message
    if where.foreach:
        yield Advice(
            text="The optimizer updates all parameters at once, which needs "
            "temporaries as large as they are; the fused one needs none.",
            commands=(
                "torch.optim.AdamW(model.parameters(), fused=True)",
                'optim="adamw_torch_fused"',
            ),
        )
    when = "was making it" if where.state_is_new else "makes it in its first step"
    yield Advice(
        text="AdamW keeps 8 bytes for each trained parameter, and "
        f"{when}: a smaller batch hardly helps. With 8 bits it keeps 2.",
        commands=('optim="adamw_bnb_8bit"',),
    )
    yield Advice(
        text="Or train fewer parameters: adapters (LoRA) need a hundredth of it.",
        commands=("budgetfit plan MODEL --method lora",),
    )


def _evaluation(message: OutOfMemoryMessage, where: FailedPhase) -> Iterator[Advice]:
    del message, where
    yield Advice(
        text="Evaluate without gradients and in smaller batches.",
        commands=("with torch.inference_mode(): ...", "per_device_eval_batch_size=1"),
    )
    yield Advice(
        text="Do not collect logits on the card: move predictions away every few "
        "steps, or keep no more than the best class of each.",
        commands=(
            "eval_accumulation_steps=1",
            "preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)",
        ),
    )


def _loading(message: OutOfMemoryMessage, where: FailedPhase) -> Iterator[Advice]:
    held = message.allocated_bytes
    size = "" if not held else f": {format_bytes(held)} were there when it was full"
    yield Advice(
        text=f"The weights alone are too large{size}. Training all of them in fp32 "
        "with AdamW takes four times the weights, and activations on top.",
    )
    if where.phase == "loading":
        yield Advice(
            text="Load to host memory first, and one copy only: a checkpoint and the "
            "model it is copied into are two.",
            commands=('torch.load(path, map_location="cpu", mmap=True)',),
        )
    yield Advice(
        text="Load in 16 bits, or freeze the model in 4 bits and train adapters.",
        commands=(
            "from_pretrained(..., dtype=torch.bfloat16)",
            "budgetfit plan MODEL --method qlora",
        ),
    )
