"""What a recorded training step is made of, as plain data: no torch here.

A case says everything that decides the memory of a step: the model, the batch, the
precision, the optimizer, what is recomputed and on which card. ``record.py`` turns it
into a recording; the accuracy test turns the same case into a prediction.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Precision = Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16"]
Checkpointing = Literal["keep", "recompute", "mixed"]
STEPS: Final = 3  # the first creates states, the second meets them, one more
Attention = Literal["", "flash", "efficient", "math"]
Compile = Literal["", "blocks", "model"]


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card that cases name.

    Attributes:
        gpu: budgetfit's canonical name.
        title: ``torch.cuda.get_device_name`` of the real card.
        has_bf16: Compute capability 8.0 or later.
    """

    gpu: str
    title: str
    has_bf16: bool = True


CARDS: Final = {
    card.gpu: card
    for card in (
        Card(gpu="t4", title="Tesla T4", has_bf16=False),
        Card(gpu="a10g", title="NVIDIA A10G"),
        Card(gpu="rtx-3090", title="NVIDIA GeForce RTX 3090"),
        Card(gpu="rtx-4090", title="NVIDIA GeForce RTX 4090"),
        Card(gpu="a100-40gb", title="NVIDIA A100-SXM4-40GB"),
        Card(gpu="h100-80gb", title="NVIDIA H100 80GB HBM3"),
        Card(gpu="h200", title="NVIDIA H200"),
        Card(gpu="b200", title="NVIDIA B200"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Input:
    """One tensor of the batch.

    Attributes:
        name: The keyword under which the model's ``forward`` takes it.
        shape: Its shape without the leading batch dimension.
        dtype: ``"int64"`` or ``"float32"``; float inputs follow a pure bf16 model.
        high: Integers are drawn from ``range(high)``; unused for floats.
        padding: This many positions at the end of every second sample are 0, all
            others 1: an attention mask of a padded batch.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["int64", "float32"] = "int64"
    high: int = 2
    padding: int = 0


@dataclass(frozen=True, kw_only=True)
class Model:
    """How to build the model and its batch.

    Attributes:
        name: Family name, for example ``"gpt2-124m"``.
        builder: A transformers model class, or a function of ``plain_models.py``.
        config: The transformers config class; empty for a plain model.
        settings: Keywords of the config class, or of the plain builder.
        inputs: The batch, in the order in which its tensors are made.
        blocks: Module paths of the lists whose members are recomputed, for models
            that do not bring checkpointing of their own; empty for those that do.
        chain: Module path of the list in which a mixed plan wraps blocks; empty for
            models without such cases.
        note: What a recording without a GPU cannot know of this model.
    """

    name: str
    builder: str
    config: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Input, ...]
    blocks: tuple[str, ...] = ()
    chain: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training program on one card.

    Attributes:
        name: Unique; also the file name of its recording.
        model: What is trained.
        batch_size: Samples per micro-batch.
        precision: In budgetfit's words.
        optimizer: A key of ``training.OPTIMIZERS``.
        checkpointing: Keep every activation, recompute every block, or a mixed plan:
            of ``Model.chain``, the first two blocks are recomputed as one, those up to
            the middle one by one, the others are kept.
        attention: The only kernel family that ``scaled_dot_product_attention`` may
            use; empty for torch's choice.
        last_batch_size: Samples of the third step, which ends an epoch; a step of
            ``batch_size`` follows it. 0 when all steps are equal.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        gpu: Canonical card name, a key of ``CARDS``.
        allocator: Value of ``PYTORCH_CUDA_ALLOC_CONF``; empty for the defaults.
        imitated_memory_gib: Memory of the imitated card where its own is too small
            for the case, or large enough to be no limit; 0 for its own.
        runs_out: The memory is so small that the allocator has to empty its cache.
        compile: ``blocks``: the forward of every block is compiled, inside its
            checkpoint, in a phase of its own before the first step. ``model``: that of
            the model, with the checkpoints inside.
    """

    name: str
    model: Model
    batch_size: int
    precision: Precision
    optimizer: str = "adamw_torch_fused"
    checkpointing: Checkpointing = "keep"
    gradient_accumulation_steps: int = 1
    gpu: str
    attention: Attention = ""
    last_batch_size: int = 0
    allocator: str = ""
    imitated_memory_gib: float = 0
    runs_out: bool = False
    compile: Compile = ""

    @property
    def family(self) -> str:
        """Name of the model's family."""
        return self.model.name

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples per micro-batch in every recorded step."""
        if not self.last_batch_size:
            return (self.batch_size,) * STEPS
        return (self.batch_size, self.batch_size, self.last_batch_size, self.batch_size)

    def as_dict(self) -> dict[str, Any]:
        """The case as JSON values, the form that a recording keeps."""
        plain = dataclasses.asdict(self)
        model = plain["model"]
        model["settings"] = dict(model["settings"])
        model["inputs"] = [
            entry | {"shape": list(entry["shape"])} for entry in model["inputs"]
        ]
        model["blocks"] = list(model["blocks"])
        del model["note"]  # it stands among the recording's notes
        if not self.compile:
            del plain["compile"]  # as in recordings that were made before
        return plain
