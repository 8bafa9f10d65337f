"""TraceError from an exception of a trace, with module path, op and advice."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Mapping
from typing import Final

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from budgetfit.applying.loss.call_model import described, find_loss
from budgetfit.core.step_trace import SizeLimit, StepTrace
from budgetfit.errors import TraceError
from budgetfit.tracing.compiled.compiled_blocks import CompiledBlocks
from budgetfit.tracing.values.concrete_execution import MAX_WEIGHTS_BYTES, weights_bytes
from budgetfit.tracing.values.known_values import UnknownValueError
from budgetfit.utils.format_bytes import format_bytes

_ONE_DTYPE: Final = "expected tensors of one dtype"
_WHOLE: Final = re.compile(r"torch\.u?int8\b")  # of weights in 4 or 8 bits
# Words of torch's messages -> what to do.
_ADVICE: Final = {
    # Of optimizers that do not take them, and of ops without a fake kernel.
    ("sparse gradients", "SparseTensorImpl"): (
        "An embedding with sparse=True makes sparse gradients. Set sparse=False: its "
        "gradient is then as large as its weight; or use an optimizer that takes them, "
        "such as torch.optim.SparseAdam for it alone, in one micro-batch per update: "
        "their accumulation is not planned."
    ),
    ("support training", "raining is not"): (
        "The class has no loss in this transformers: pass loss=, and a batch without "
        "labels (batch=...)."
    ),
    ("FlexAttention",): (
        "Flex attention is not planned. Plan with another: a transformers model with "
        'set_attn_implementation("eager"), which holds all scores as flex attention '
        'does without torch.compile, or with "sdpa", which comes near to compiled flex '
        "attention; a model of your own with "
        "torch.nn.functional.scaled_dot_product_attention in its place."
    ),
    ("data pointer", "data is not allocated", "Cannot access storage"): (
        "A custom kernel or numpy reads memory that a trace does not have: wrap it in "
        "torch.library.custom_op with a fake implementation (register_fake), or switch "
        "to the model's plain torch path."
    ),
    (
        "Unsupported dtype BFloat16",
        "Unsupported dtype Half",
        "not implemented for 'BFloat16'",
        "not implemented for 'Half'",
    ): 'This op takes no half precision: pass precision="fp32" or "tf32".',
    (_ONE_DTYPE, "the same dtype", "equal to src.dtype"): (
        "Tensors of two dtypes meet under this precision, which CUDA's kernel refuses: "
        'cast one of them in the model (x.to(y.dtype)), or pass precision="fp32", or '
        '"as-is", which leaves every weight its dtype.'
    ),
    ("SyncBatchNorm",): (
        "SyncBatchNorm runs on GPUs alone, and no trace runs it on several. Plan the "
        "model with its batch norms, which take the same memory but for the statistics "
        "of the other ranks, and convert it before apply."
    ),
    ("scalar parameters",): (
        "fully_shard takes no scalar parameters: make it a tensor of one element, "
        'nn.Parameter(torch.tensor([value])), or use engine="ddp".'
    ),
    ("self.dim() cannot be 0 to view",): (
        "DeepSpeed takes no scalar parameters: make it a tensor of one element, "
        'nn.Parameter(torch.tensor([value])), or use engine="ddp".'
    ),
    ("that fully_shard has freed", "that ZeRO-3 has freed"): (
        "Weights are there while their module runs, and freed after its backward "
        "pass. A model or loss that takes gradients of its own, as for a gradient "
        "penalty (create_graph=True), needs them again, and one that goes over "
        'model.parameters() at any time. Use engine="ddp" or engine="zero2".'
    ),
    ("backward an extra time",): (
        "A block under selective checkpointing runs backward once, and here it runs "
        "twice, as where a model or its loss takes gradients of its own "
        "(create_graph=True). Use segments of mode='recompute' for it."
    ),
    ("NestedTensor", "NestedInt", "shape_env must not be None"): (
        "Nested tensors are not traced. Use padded samples with a mask "
        "(torch.nested.to_padded_tensor) in their place."
    ),
    ("DTensor", "overlapping meshes", "by another FSDP group"): (
        "fully_shard makes weights DTensors, and torch cannot do this with them: an "
        "optimizer, or a loss over model.parameters(), may mix them with plain "
        "tensors, and two blocks cannot share a weight. Use another optimizer or loss, "
        'or engine="ddp".'
    ),
}

Described = tuple[tuple[int, ...], str]  # shape and dtype of a tensor

_COMPILED: Final = (
    'torch.compile runs it while it compiles. Use compile="none", or "auto", which '
    "does without where that fails."
)

_OTHER_BATCH: Final = (
    "Pass an example batch that the model's forward accepts (batch=...), and a loss= "
    "if it returns none."
)

_SPARSE: Final = (
    "Sparse tensors in a batch are not planned: batches of 2 and 3 samples are cut "
    "from the given one. Use edge_index [2, edges], a dense tensor of indices; or ask "
    "budgetfit.estimate(model, batch=...), which takes a batch as it is."
)

# Of Python's own containers: "list index out of range", "pop from empty list", "pop
# from an empty deque", "deque index out of range"; or of a tensor's dimensions. The
# rest is said of a tensor's rows.
_NO_ROW: Final = re.compile(
    r"^(list|tuple|string|bytes|bytearray|deque|range object|array|pop"
    r"|Dimension|too many indices)\b"
)


def trace_error(
    model: nn.Module,
    error: Exception,
    *,
    is_sparse: bool = False,
    made: Mapping[str, Described] | None = None,
) -> TraceError:
    """Return a ``TraceError`` with module path and op for any exception of a trace.

    ``is_sparse``: the batch has sparse tensors. ``made``: shapes and dtypes of a batch
    that was made from the config; None for one that was given.
    """
    text = " ".join(str(error).split("\nTip:")[0].split())[:300].rstrip(".")
    module, op = _where(error)
    place = f", in {module!r}" if module else ""
    place += f" at {op}" if op else ""
    name = type(model).__name__
    if isinstance(error, CheckpointError):
        return TraceError(
            f"{name} cannot be recomputed{place}: a block saves other tensors when it "
            f"runs again in backward: {text}. Look for a cache or a flag that its "
            "forward changes, and leave that block out: checkpointing=[...] with the "
            "names of the others.",
            module=module or name,
            op=op,
        )
    said = f"{type(error).__name__}: {text}"
    runs = "be traced compiled" if _is_of_compiling(error) else "run on fake tensors"
    if isinstance(error, UnknownValueError):
        said = f"its own values decide what it does: {text}"
    hint = _SPARSE if is_sparse else _advice(model, error, made, module)
    what, outputs = name, _outputs_of_loss(error)
    if outputs:
        what = f"The loss of {name}"
        if hint == _OTHER_BATCH:
            hint = f"loss(outputs, batch) gets what the model returns, here {outputs}."
    return TraceError(
        f"{what} cannot {runs}{place}: {said}. {hint}", module=module or name, op=op
    )


def size_limit_error(
    model: nn.Module, trace: StepTrace, limit: SizeLimit[int], batch_size: int
) -> TraceError:
    """Return a ``TraceError`` for a size that a CUDA kernel in a trace refuses."""
    if len(trace.batch_sizes) > 1:
        largest = trace.largest_batch(batch_size)
        advice = f"Use batch_size={largest} or less"
    else:  # how the number grows is not known
        largest = batch_size * limit.most // limit.number
        advice = f"Use a smaller batch_size, about {largest}"
    if not largest:
        advice = "Use smaller samples, or another op in the model"
    return TraceError(
        f"{type(model).__name__} cannot train with batch_size {batch_size} on CUDA: "
        f"{limit.op} gets {limit.number:,} {limit.what}, and its kernel "
        f"({limit.source}) takes up to "
        f"{limit.most:,}. {advice}.",
        module=type(model).__name__,
        op=limit.op,
    )


def _advice(
    model: nn.Module,
    error: Exception,
    made: Mapping[str, Described] | None,
    module: str,
) -> str:
    """Return what to pass or change."""
    if ".lora_" in module and _ONE_DTYPE in str(error) and _WHOLE.search(str(error)):
        layer = ".".join(module.partition(".lora_")[0].split(".")[-2:])
        return (
            "The model casts inputs to the dtype of this layer's weight, and quantised "
            "weights are whole numbers. Keep the layer as it is: plan a model loaded "
            f'with BitsAndBytesConfig(..., llm_int8_skip_modules=["{layer}"]), or use '
            'method="lora".'
        )
    if isinstance(error, UnknownValueError):
        size_bytes = weights_bytes(model)
        if size_bytes > MAX_WEIGHTS_BYTES:
            return (
                f"With weights of {format_bytes(MAX_WEIGHTS_BYTES)} or less it is "
                f"computed for real; these have {format_bytes(size_bytes)}. Plan a "
                "smaller configuration, or let sizes follow from shapes instead."
            )
        return (
            "Pass a real batch (batch=...) instead of shapes, or let sizes and loops "
            "follow from shapes and the batch's whole numbers."
        )
    return _advice_on(error, made)


def _advice_on(error: Exception, made: Mapping[str, Described] | None) -> str:
    for words, advice in _ADVICE.items():
        if any(word in str(error) for word in words):
            return advice
    if _is_of_compiling(error):
        return _COMPILED
    if made is not None:
        inputs = ", ".join(f"{name} {list(shape)}" for name, (shape, _) in made.items())
        return (
            f"The batch was made from the config: {inputs}. Either parts of the config "
            "do not fit each other, as in a default one without a checkpoint, or the "
            "model needs other inputs: pass what your data loader gives (batch=...), "
            "and a loss= if it returns none."
        )
    if isinstance(error, IndexError) and not _NO_ROW.search(str(error)):
        return (
            "Check that whole numbers of the batch are below the sizes that they index "
            "(vocabulary, classes, positions). Those that index rows of the batch "
            "(edges of a graph) point into other samples where batches of other sizes "
            "are made from it. Use a mapping with x, edge_index [2, edges] and batch, "
            "without batch_dims for them: graphs are cut with their edges; or padded "
            "samples with one row each in every tensor; or ask "
            "budgetfit.estimate(model, batch=...), which takes a batch as it is."
        )
    return _OTHER_BATCH


def _is_of_compiling(error: Exception) -> bool:
    """Whether it was raised where torch.compile compiles, or runs what it could not."""
    return any(
        frame.f_globals.get("__name__") == CompiledBlocks.__module__
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _outputs_of_loss(error: Exception) -> str:
    """Return what a user's loss got, if the error was raised in it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for finding, called in itertools.pairwise(frames):
        is_finding = finding.f_code is find_loss.__code__
        if is_finding and called.f_globals is not finding.f_globals:
            return described(finding.f_locals["outputs"])
    return ""


def _where(error: Exception) -> tuple[str, str]:
    """Return the innermost module's path and the op, from the traceback's frames."""
    # A copy of the model ran, so paths are those below its outermost module.
    modules: list[nn.Module] = []
    op = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        running, func = frame.f_locals.get("self"), frame.f_locals.get("func")
        if isinstance(running, nn.Module):
            modules.append(running)
        if isinstance(func, torch._ops.OpOverload):  # noqa: SLF001 - it has no other name
            op = str(func)
    if not modules:
        return "", op
    names = {id(module): name for name, module in modules[0].named_modules()}
    return names.get(id(modules[-1]), ""), op
