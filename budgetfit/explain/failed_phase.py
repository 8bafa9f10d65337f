"""Find the training phase (forward, backward, ...) in which a traceback ended."""

import re
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Phase = Literal[
    "loading", "to_device", "forward", "backward", "optimizer", "evaluation", "unknown"
]

# A frame as Python writes it, as IPython does ("File a.py:12, in f(x)", "a.py in f(x)")
# and as rich does ("a.py:12 in f").
_FRAME: Final = re.compile(
    r'File "(?P<path>[^"\n]+)", line \d+(?:, in (?P<name>[\w<>.]+))?'
    r"|(?P<path2>[^\s\"]{1,200}\.py)(?::\d+)?,? +in\s+(?P<name2>[\w<>.]+)"
)
# (phase, path, function) patterns for frames; paths have slashes.
_RULES: Final[tuple[tuple[Phase, str, str], ...]] = (
    ("backward", "", r"^(backward|run_backward|_engine_run_backward)$"),
    ("backward", r"torch/autograd/", r"^grad$"),
    ("optimizer", r"torch/optim/(?!lr_scheduler)|(bitsandbytes|torchao)/optim", ""),
    ("optimizer", r"optim|deepspeed|accelerate|apex|grad_scaler", r"^(\w+_)?step$"),
    ("optimizer", r"torch/nn/utils/clip_grad|grad_scaler", r"clip|norm|unscale"),
    ("evaluation", r"evaluation_loop|prediction_loop", ""),
    ("evaluation", "", r"^_?(evaluate|(evaluation|prediction|eval)_(loop|step))$"),
    ("evaluation", "", r"^_?(run_)?(predict(_step)?|validat(e|ion)(_step|_epoch)?)$"),
    ("evaluation", "", r"^(eval_epoch|test_step|generate|nested_concat)$"),
    ("to_device", r"torch/nn/modules/module\.py$", r"^(to|cuda|_apply|convert)$"),
    ("to_device", "", r"^(_move_model_to_device|prepare_model)$"),
    ("loading", "", r"from_pretrained$|load_state_dict|load_checkpoint|load_file$"),
    ("loading", "", r"_load_pretrained_model|set_module_tensor_to_device|materialize"),
    ("loading", r"torch/serialization\.py$|safetensors/", ""),
    ("forward", r"torch/nn/modules/module\.py$", r"call"),
    ("forward", "", r"^(forward|training_step|compute_loss)$"),
    ("forward", r"torch/nn/functional\.py$", ""),
)  # fmt: skip
_COMPILED: Final = tuple(
    (phase, re.compile(path), re.compile(name)) for phase, path, name in _RULES
)
_LONGEST: Final = 60_000  # characters of a traceback
_LOSS: Final = re.compile(
    r"loss_utils\.py|cross_entropy|ForCausalLMLoss|nll_loss|/loss"
)
_ATTENTION: Final = re.compile(r"attention|scaled_dot_product", re.IGNORECASE)
_CHECKPOINT: Final = re.compile(r"torch/utils/checkpoint\.py|checkpoint_wrapper")
_FOREACH: Final = re.compile(r"_multi_tensor_\w+|torch\._foreach_|_foreach\b")
_FAMILY: Final = re.compile(r"transformers/models/(\w+)/modeling_")


class Frame(NamedTuple):
    """One line of a traceback: a path with slashes, and a function."""

    path: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedPhase:
    """The phase in which a step failed.

    Attributes:
        place: The innermost frame of user code, for reports; or empty.
        in_loss: Whether the loss was being computed.
        in_attention: Whether an attention layer was running.
        recomputing: Whether a checkpointed block was being recomputed.
        state_is_new: Whether the optimizer was allocating its state.
        foreach: Whether a foreach optimizer was running.
        family: The transformers model family, for example ``llama``.
        on_windows: Whether paths are Windows paths.
    """

    phase: Phase
    place: str = ""
    in_loss: bool = False
    in_attention: bool = False
    recomputing: bool = False
    state_is_new: bool = False
    foreach: bool = False
    family: str = ""
    on_windows: bool = False


def failed_phase(text: str) -> FailedPhase:
    """Analyse the last traceback in the plain text before a message."""
    text = text[-_LONGEST:]
    last = text[max(text.rfind("Traceback (most recent call last)"), 0) :]
    frames = [
        Frame(
            (found["path"] or found["path2"]).replace("\\", "/"),
            (found["name"] or found["name2"] or "").rsplit(".", 1)[-1],
        )
        for found in _FRAME.finditer(last)
    ]
    phases = [(number, phase) for number, f in enumerate(frames) for phase in _of(f)]
    phase, began = _decided(phases) if phases else (_of_code(last), 0)
    inner = frames[began:]
    tail = " ".join(f"{frame.path} {frame.name}" for frame in frames[-4:])
    forward_inside = any(kind == "forward" for number, kind in phases if number > began)
    return FailedPhase(
        phase=phase,
        place=_place(frames),
        in_loss=phase == "forward" and _LOSS.search(tail) is not None,
        in_attention=phase in {"forward", "evaluation"}
        and _ATTENTION.search(tail) is not None,
        recomputing=phase == "backward"
        and forward_inside
        and any(_CHECKPOINT.search(frame.path) for frame in inner),
        state_is_new=phase == "optimizer"
        and any(frame.name in {"_init_group", "init_state"} for frame in inner),
        foreach=phase == "optimizer" and _FOREACH.search(last) is not None,
        family=(_FAMILY.findall(last.replace("\\", "/")) or [""])[-1],
        on_windows=re.search(r"\b[A-Za-z]:\\\w", text) is not None,
    )


def _of_code(text: str) -> Phase:
    """Guess the phase from the last code lines where no frame matches."""
    code = "\n".join(text.rstrip().splitlines()[-4:])
    return "to_device" if re.search(r"\.(to|cuda)\(", code) else "unknown"


def _of(frame: Frame) -> list[Phase]:
    return [
        phase
        for phase, path, name in _COMPILED
        if path.search(frame.path) and name.search(frame.name)
    ]


def _decided(phases: list[tuple[int, Phase]]) -> tuple[Phase, int]:
    """Return the phase, and the index of the frame where it starts."""
    # The innermost frame decides: Lightning computes the loss inside
    # ``optimizer.step``. But a forward inside a backward is a recomputed block, and one
    # inside an evaluation belongs to the evaluation.
    innermost = phases[-1][1]
    owners: dict[Phase, tuple[Phase, ...]] = {
        "forward": ("backward", "evaluation"),
        "to_device": ("loading",),
    }
    for owner in owners.get(innermost, ()):
        for number, phase in phases:
            if phase == owner:
                return owner, number
    return innermost, next(number for number, phase in phases if phase == innermost)


def _place(frames: list[Frame]) -> str:
    """Return the innermost frame of the user's own code."""
    for frame in reversed(frames):
        installed = ("site-packages/", "dist-packages/", "<frozen", "/lib/python")
        if not any(part in frame.path for part in installed):
            return f"{frame.path} in {frame.name}" if frame.name else frame.path
    return ""
