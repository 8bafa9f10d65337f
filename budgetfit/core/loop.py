"""``Loop``: the training loop around the steps, and what it keeps on the card."""

from dataclasses import dataclass, fields
from typing import Final, Literal, get_args

from budgetfit.core.validation import set_python_numbers
from budgetfit.errors import InputError

LoopKind = Literal["run", "plain", "trainer", "sft", "accelerate", "lightning"]
KINDS: Final[tuple[LoopKind, ...]] = get_args(LoopKind)

_TITLES: Final[dict[LoopKind, str]] = {
    "run": "budgetfit.Run",
    "plain": "a plain loop, which holds outputs until the next ones are there",
    "trainer": "transformers' Trainer",
    "sft": "TRL's SFTTrainer",
    "accelerate": "accelerate, outputs held until the next ones are there",
    "lightning": "Lightning's Trainer",
}
# Settings of a library's arguments.
_SETTINGS_OF: Final[dict[str, tuple[LoopKind, ...]]] = {
    "use_liger_kernel": ("trainer", "sft"),
    "packing": ("sft",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A training loop, as far as it decides how much memory a step takes.

    What a library's loop holds is found by running the installed library's own code.

    Attributes:
        kind: ``plain``: ``outputs = model(**batch)``, ``outputs.loss.backward()``,
            ``optimizer.step()``, ``optimizer.zero_grad()`` in a ``for``, which keeps
            the outputs until the next ones are assigned. ``trainer``: transformers'
            ``Trainer``; ``sft``: TRL's ``SFTTrainer``; ``accelerate``: the loop of its
            documentation; ``lightning``: ``lightning.Trainer.fit``. ``run``:
            ``budgetfit.Run``, which keeps nothing but the loss.
        ema: Whether a second copy of the weights follows the trained ones
            (``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn``).
        max_grad_norm: Clip gradients to this total norm. None: what the library does
            by itself (``trainer`` and ``sft``: 1.0; the others do not clip).
        set_to_none: Argument of ``optimizer.zero_grad()``; with False gradients stay
            on the card as zeros. For ``plain`` and ``accelerate`` alone.
        evaluation_batch_size: Samples in each batch of an evaluation between training
            steps; 0: there is none.
        use_liger_kernel: As in ``TrainingArguments``: the Trainer puts Liger's Triton
            kernels into the model when training begins. For ``trainer`` and ``sft``;
            a model that has them already needs no setting.
        packing: As in ``SFTConfig``: a sample is a row of several texts, and the rows
            of a micro-batch follow each other in one. For ``sft`` alone.

    Raises:
        InputError: A value is invalid, or the kind does not have the setting.
    """

    kind: LoopKind = "plain"
    ema: bool = False
    max_grad_norm: float | None = None
    set_to_none: bool = True
    evaluation_batch_size: int = 0
    use_liger_kernel: bool = False
    packing: bool = False

    def __post_init__(self) -> None:
        set_python_numbers(self, (each.name for each in fields(self)))
        if self.kind not in KINDS:
            raise InputError(
                f"loop={self.kind!r} is not a training loop. Use one of: "
                f"{', '.join(KINDS)}."
            )
        norm = self.max_grad_norm
        if norm is not None and not (isinstance(norm, (int, float)) and norm > 0):
            raise InputError(
                f"max_grad_norm must be a number above zero, got {norm!r}. Leave it "
                "out for what the loop does by itself."
            )
        size = self.evaluation_batch_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise InputError(
                "evaluation_batch_size must be a whole number of samples in a batch, "
                f"or 0 for no evaluation; got {size!r}. Use for example 8."
            )
        if not self.set_to_none and self.kind not in {"plain", "accelerate"}:
            raise InputError(
                f"set_to_none=False is not a setting of loop={self.kind!r}, which "
                "drops the gradients itself. Use it with plain or accelerate."
            )
        for name, kinds in _SETTINGS_OF.items():
            if getattr(self, name) and self.kind not in kinds:
                raise InputError(
                    f"{name}=True is not a setting of loop={self.kind!r}. Use it with "
                    f"{' or '.join(kinds)}."
                )
            if getattr(self, name) and size:
                raise InputError(
                    f"An evaluation between steps is not predicted with {name}=True: "
                    "leave evaluation_batch_size out, or the other."
                )
        if self.kind == "run" and self.ema:
            raise InputError(
                "ema=True is no setting of a Run. Use loop='plain' or a library's."
            )

    def describe(self) -> str:
        """Return the loop in words: what it is, and its settings."""
        settings = {
            "a second copy of the weights (EMA)": self.ema,
            f"gradients clipped to {self.max_grad_norm}": self.max_grad_norm,
            "zero_grad(set_to_none=False)": not self.set_to_none,
            f"evaluation between steps, {self.evaluation_batch_size} samples a batch": (
                self.evaluation_batch_size
            ),
            "use_liger_kernel": self.use_liger_kernel,
            "packing": self.packing,
        }
        return ", ".join([_TITLES[self.kind], *(k for k, on in settings.items() if on)])

    @property
    def loads_update_first(self) -> bool:
        """Whether all micro-batches of an update are on the device before the first."""
        # ``Trainer.get_batch_samples`` fetches them (transformers 5.23, trainer.py).
        return self.kind in {"trainer", "sft"}


RUN: Final = Loop(kind="run")
PLAIN: Final = Loop()


def as_loop(loop: Loop | str) -> Loop:
    """Return the loop of a name, or a ``Loop`` as it is; refuse all else."""
    if isinstance(loop, Loop):
        return loop
    if isinstance(loop, str):
        return Loop(kind=loop)  # type: ignore[arg-type]  # checked there
    raise InputError(
        f"loop must be a Loop or a name ({', '.join(KINDS)}), not a "
        f"{type(loop).__name__}; for example budgetfit.Loop(ema=True)."
    )
