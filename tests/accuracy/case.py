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
Checkpointing = Literal["keep", "recompute"]


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card that cases name.

    Attributes:
        gpu: budgetfit's canonical name.
        null_driver: What the null driver calls it.
        title: ``torch.cuda.get_device_name`` of the real card.
        has_bf16: Compute capability 8.0 or later.
    """

    gpu: str
    null_driver: str
    title: str
    has_bf16: bool = True


CARDS: Final = {
    card.gpu: card
    for card in (
        Card(gpu="t4", null_driver="t4", title="Tesla T4", has_bf16=False),
        Card(gpu="rtx-4090", null_driver="rtx4090", title="NVIDIA GeForce RTX 4090"),
        Card(gpu="h100-80gb", null_driver="h100", title="NVIDIA H100 80GB HBM3"),
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
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["int64", "float32"] = "int64"
    high: int = 2


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
        note: What a recording without a GPU cannot know of this model.
    """

    name: str
    builder: str
    config: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Input, ...]
    blocks: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training program on one card.

    Attributes:
        name: Unique; also the file name of its recording.
        model: What is trained.
        batch_size: Samples per micro-batch.
        precision: In budgetfit's words.
        optimizer: ``adamw_torch_fused``, ``adamw_torch`` (foreach) or ``sgd``.
        checkpointing: Keep every activation, or recompute every block.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        gpu: Canonical card name, a key of ``CARDS``.
        allocator: Value of ``PYTORCH_CUDA_ALLOC_CONF``; empty for the defaults.
        imitated_memory_gib: Memory of the imitated card where its own is too small
            for the case; 0 for its own. Decides only when memory runs out.
    """

    name: str
    model: Model
    batch_size: int
    precision: Precision
    optimizer: str = "adamw_torch_fused"
    checkpointing: Checkpointing = "keep"
    gradient_accumulation_steps: int = 1
    gpu: str
    allocator: str = ""
    imitated_memory_gib: int = 0

    @property
    def family(self) -> str:
        """Name of the model's family."""
        return self.model.name

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
        return plain
