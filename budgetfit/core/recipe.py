"""Recipe: batch size, precision, optimizer and checkpointing of a training run."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from budgetfit.core.parallelism import ZERO_3, Engine, Parallelism
from budgetfit.core.precision import find_precision
from budgetfit.core.validation import (
    MAX_BATCH_SIZE,
    check_positive_int,
    set_python_numbers,
)
from budgetfit.errors import InputError
from budgetfit.utils.function_name import qualified_name

SegmentMode = Literal["recompute", "selective", "offload"]
CompileMode = Literal["none", "blocks", "model"]
_EXAMPLES = {"optimizer": "adamw_torch_fused", "precision": "bf16-mixed"}


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive blocks that are checkpointed or offloaded together.

    Attributes:
        blocks: Module paths in the model, in execution order, for example
            ``("model.layers.0", "model.layers.1")``. Modes other than ``recompute``
            take one block.
        mode: ``recompute`` saves only the first block's input and runs the forward
            again. ``selective`` does so too, but saves the outputs of ``saved_ops``.
            ``offload`` keeps what autograd saves in pinned host memory.
        saved_ops: Of ``selective``: calls of aten ops in the block's forward whose
            outputs are saved, as ``"aten.mm.default:0"`` for the first call of that op.
        nested: Of ``recompute``: when several blocks run forward again, each saves only
            its input and runs a second time (two-level checkpointing).
        input_on_host: Of ``recompute``: the first block's input is offloaded to pinned
            host memory.
    """

    blocks: tuple[str, ...]
    mode: SegmentMode = "recompute"
    saved_ops: tuple[str, ...] = ()
    nested: bool = False
    input_on_host: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        names = self.blocks if isinstance(self.blocks, (list, tuple)) else ()
        if not names or not all(isinstance(name, str) for name in names):
            raise InputError(
                'A segment needs at least one block name, for example ("layers.0",); '
                f"got {self.blocks!r:.80}."
            )
        if self.mode not in get_args(SegmentMode):
            raise InputError(
                f"{self.mode!r} is not a segment mode. "
                f"Use one of: {', '.join(get_args(SegmentMode))}."
            )
        if self.mode != "recompute" and len(self.blocks) > 1:
            raise InputError(
                f"A {self.mode!r} segment is one block, for example "
                f'Segment(("{self.blocks[0]}",), mode="{self.mode}").'
            )
        self._check_details()

    def _check_details(self) -> None:
        """Check that no field of another mode is set."""
        if bool(self.saved_ops) != (self.mode == "selective"):
            raise InputError(
                "saved_ops belong to a 'selective' segment, which needs at least one, "
                'for example saved_ops=("aten.mm.default:0",).'
            )
        for name in self.saved_ops:
            op, _, call = name.rpartition(":")
            if not op or not call.isdecimal():
                raise InputError(
                    f"{name!r} is no call of an op. Name the op and which of its calls "
                    'in the block, from 0: "aten.mm.default:0".'
                )
        if self.nested and len(self.blocks) <= 1:
            raise InputError(
                f"A nested segment has several blocks to recompute, and this one has "
                f"{len(self.blocks)}. Leave nested out."
            )
        if self.input_on_host and self.mode != "recompute":
            raise InputError(
                f"input_on_host belongs to a 'recompute' segment, and this one's mode "
                f"is {self.mode!r}. Leave it out."
            )


def selective_blocks(segments: Iterable[Segment]) -> frozenset[str]:
    """Return the names of the blocks under selective checkpointing."""
    return frozenset(each.blocks[0] for each in segments if each.mode == "selective")


def check_compile(mode: object, *more: str) -> None:
    """Check that this is a value of ``compile``, or one of ``more``."""
    allowed = (*get_args(CompileMode), *more)
    if mode not in allowed:
        raise InputError(
            f"compile must be one of: {', '.join(allowed)}; got {mode!r:.80}."
        )


def check_compile_on_ranks(mode: str, parallelism: Parallelism) -> None:
    """Check that an engine trains what is compiled so."""
    known = ("none",) if parallelism.engine == "deepspeed" else ("none", "blocks")
    if mode not in known:
        raise InputError(
            f"compile={mode!r} is not planned for {parallelism.engine} on several "
            "GPUs. Use compile='blocks' with DDP or FSDP2, or compile='none'."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings of a training run that determine its memory and speed.

    Attributes:
        batch_size: Samples per device and micro-batch.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        precision: Name of a policy of ``core.precision``.
        optimizer: transformers' ``optim`` name, or the qualified name of a callable.
        segments: What is checkpointed or offloaded; ``()`` keeps all activations, one
            block per segment is ordinary checkpointing, longer segments are Chen's
            sqrt(n).
        loss_chunks: Chunks in which output head and loss run; 1: not chunked.
        optimizer_in_backward: Each weight is updated as soon as its gradient is
            complete, and the gradient freed: gradients of all weights never exist
            together. Takes no accumulation, no clipping and no GradScaler.
        longest_batch_first: Before its first update a run does a forward and backward
            of the longest batch and drops their results, so that shorter batches find
            room in its memory; where lengths vary.
        compile: ``blocks``: ``torch.compile`` for the forward of each block, inside its
            checkpoint; blocks under selective checkpointing run eagerly. ``model``:
            for the model's, with the checkpoints of single blocks inside.
        parallelism: How several GPUs train the model; None: one GPU does.
    """

    batch_size: int
    gradient_accumulation_steps: int = 1
    precision: str = "fp32"
    optimizer: str = "adamw_torch_fused"
    segments: tuple[Segment, ...] = field(default=())
    loss_chunks: int = 1
    optimizer_in_backward: bool = False
    longest_batch_first: bool = False
    compile: CompileMode = "none"
    parallelism: Parallelism | None = None

    def __post_init__(self) -> None:
        """Check counts, names, and that no block is in two segments."""
        counts = "batch_size", "loss_chunks", "gradient_accumulation_steps"
        set_python_numbers(self, counts)
        self._check_names()
        check_positive_int("batch_size", self.batch_size)
        check_positive_int("loss_chunks", self.loss_chunks)
        steps = self.gradient_accumulation_steps
        check_positive_int("gradient_accumulation_steps", steps, most=MAX_BATCH_SIZE)
        if self.optimizer_in_backward and self.gradient_accumulation_steps > 1:
            raise InputError(
                "optimizer_in_backward uses each gradient up at once, so there is "
                "nothing to add the next micro-batch's to. Use "
                "gradient_accumulation_steps=1, or optimizer_in_backward=False."
            )
        if self.longest_batch_first and self.optimizer_in_backward:
            raise InputError(
                "longest_batch_first drops the results of a backward, and with "
                "optimizer_in_backward each backward updates the weights. Leave one "
                "out."
            )
        check_compile(self.compile)
        self._check_parallelism()
        self._check_compiled_model()
        segments = self.segments if isinstance(self.segments, (list, tuple)) else None
        if segments is None or not all(isinstance(each, Segment) for each in segments):
            raise InputError(
                "segments must be a tuple of Segments, for example (budgetfit.Segment("
                f'("layers.0",)),); got {self.segments!r:.80}.'
            )
        blocks = self.wrapped_blocks
        twice = {block for block in blocks if blocks.count(block) > 1}
        if twice:
            raise InputError(
                f"Block {min(twice)!r} is in more than one segment. Name each once."
            )

    def _check_parallelism(self) -> None:
        """Check that several GPUs can train by the other settings."""
        parallelism: object = self.parallelism
        if parallelism is None:
            return
        if not isinstance(parallelism, Parallelism):
            raise InputError(
                "parallelism must be a Parallelism, for example budgetfit.Parallelism("
                f'engine="fsdp2", gpus=8); got {parallelism!r:.80}.'
            )
        if self.optimizer_in_backward:
            raise InputError(
                "optimizer_in_backward is not planned for several GPUs yet. Leave it "
                "out, or use parallelism=None."
            )
        if parallelism.cpu_offload and find_precision(self.precision).grad_scaler:
            raise InputError(
                "cpu_offload keeps gradients in host memory, where no GradScaler "
                f"unscales them; got precision={self.precision!r:.80}. Use "
                "precision='bf16-mixed' or 'fp32', or cpu_offload=False."
            )
        check_compile_on_ranks(self.compile, parallelism)
        if parallelism.engine == "deepspeed":
            self._check_deepspeed(parallelism)

    def _check_deepspeed(self, parallelism: Parallelism) -> None:
        """Check that DeepSpeed trains in this precision."""
        wanted = {"fp32": None, "tf32": None, "bf16-mixed": "bf16"}
        given = parallelism.param_dtype
        if self.precision not in wanted:
            raise InputError(
                f"DeepSpeed is planned in {', '.join(wanted)}; got "
                f"precision={self.precision!r:.80}. Use bf16-mixed, its bf16.enabled: "
                "bf16 weights, and fp32 ones in the optimizer; or fp32 on cards "
                'without bf16; or engine="ddp", or engine="fsdp2".'
            )
        if self.loss_chunks > 1:
            raise InputError(
                "loss_chunks is planned for DDP and FSDP2, and not for DeepSpeed. "
                'Leave it out, or use engine="fsdp2".'
            )
        if self.longest_batch_first:
            raise InputError(
                "longest_batch_first drops the results of a backward, and DeepSpeed's "
                'engine keeps them. Leave it out, or use engine="fsdp2".'
            )
        offloads = any(each.mode == "offload" for each in self.segments)
        if parallelism.zero_stage == ZERO_3 and offloads:
            raise InputError(
                "ZeRO-3 with activations offloaded to the host trains with wrong "
                "gradients: a weight is freed while the backward refers to it. Use "
                'mode="recompute", or zero_stage=2.'
            )
        if given != wanted[self.precision]:
            raise InputError(
                f"DeepSpeed in {self.precision}: use param_dtype="
                f"{wanted[self.precision]!r} (its bf16.enabled); got {given!r}."
            )

    def _check_compiled_model(self) -> None:
        """Check that a compiled model has only what its graph can hold."""
        if self.compile != "model":
            return
        if self.loss_chunks > 1 or any(
            each.mode != "recompute" or len(each.blocks) > 1 or each.input_on_host
            for each in self.segments
        ):
            raise InputError(
                "compile='model' takes segments of one recomputed block each and no "
                "loss_chunks: compiled code has no ops to save selectively and "
                "offloads nothing. Use compile='blocks' for the others."
            )

    def _check_names(self) -> None:
        """Check that names are text; for a function, show where it belongs."""
        optimizer: object = self.optimizer
        if callable(optimizer):
            name = qualified_name(optimizer)
            short = name.rpartition(".")[2]
            raise InputError(
                f"A recipe holds the name of its optimizer, and {short} is a function. "
                "Hand that in beside the recipe: budgetfit.estimate(model, Recipe(..., "
                f'optimizer="{name}"), optimizer={short}).'
            )
        for what, value in (("optimizer", optimizer), ("precision", self.precision)):
            if not isinstance(value, str):
                raise InputError(
                    f"{what} must be a name in a recipe, for example "
                    f'Recipe(..., {what}="{_EXAMPLES[what]}"); got {value!r:.80}.'
                )

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self.samples_per_rank * self.ranks

    @property
    def samples_per_rank(self) -> int:
        """Samples per optimizer step on each device."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def ranks(self) -> int:
        """Devices that train."""
        return 1 if self.parallelism is None else self.parallelism.gpus

    @property
    def engine(self) -> Engine | None:
        """What trains on several GPUs; None on one."""
        return None if self.parallelism is None else self.parallelism.engine

    @property
    def reduction(self) -> str:
        """When gradients of several micro-batches are reduced, if not in the last."""
        several, steps = self.parallelism, self.gradient_accumulation_steps
        if several is None or not several.sync_each_batch or steps == 1:
            return ""
        return "gradients reduced in each micro-batch"

    @property
    def zero_stage(self) -> int | None:
        """The stage of DeepSpeed's ZeRO; None without DeepSpeed."""
        return None if self.parallelism is None else self.parallelism.zero_stage

    @property
    def cpu_offload(self) -> bool:
        """Whether ``fully_shard`` keeps weights in host memory, where they train."""
        return self.parallelism is not None and self.parallelism.cpu_offload

    @property
    def offloads_activations(self) -> bool:
        """Whether activations, or inputs of blocks, wait in host memory."""
        return any(
            each.mode == "offload" or each.input_on_host for each in self.segments
        )

    @property
    def wrapped_blocks(self) -> tuple[str, ...]:
        """Names of all blocks in segments, in the segments' order."""
        return tuple(block for segment in self.segments for block in segment.blocks)
