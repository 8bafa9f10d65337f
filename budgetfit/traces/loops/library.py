"""The loop that a ``Loop`` names, and whether its library is installed."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Final

from budgetfit.core.loop import Loop
from budgetfit.errors import InputError
from budgetfit.traces.loops.accelerate import AccelerateLoop
from budgetfit.traces.loops.lightning import LightningLoop
from budgetfit.traces.loops.plain import PlainLoop
from budgetfit.traces.loops.prepare import Prepared
from budgetfit.traces.loops.trainer import TrainerLoop
from budgetfit.tracing.recording.raw_trace import LoopRunner

_LOOPS: Final[dict[str, Callable[[Prepared], LoopRunner]]] = {
    "plain": PlainLoop,
    "accelerate": AccelerateLoop,
    "trainer": TrainerLoop,
    "sft": TrainerLoop,
    "lightning": LightningLoop,
}
_NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "plain": (),
    "accelerate": ("accelerate",),
    "trainer": ("transformers", "accelerate"),
    "sft": ("trl", "datasets", "accelerate"),
    "lightning": ("lightning",),
}


def check_installed(loop: Loop) -> None:
    """Refuse a loop whose library, of which is read what it holds, is not installed."""
    missing = [
        name
        for name in _NEEDS.get(loop.kind, ())
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise InputError(
            f"loop={loop.kind!r} runs the installed library to see what it keeps in "
            f"memory: pip install {' '.join(missing)}. Or use loop='plain'."
        )
    if loop.use_liger_kernel:
        _import_liger()


def _import_liger() -> None:
    """Import Liger before a trace asks for which GPU it is.

    Raises:
        InputError: It is not installed, or does not run here.
    """
    try:
        importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise InputError(
            "use_liger_kernel=True runs Liger's own code to see what it keeps in "
            f"memory, and it cannot be imported ({error}): pip install liger-kernel. "
            "Or leave use_liger_kernel out."
        ) from error


def make_loop(prepared: Prepared) -> LoopRunner:
    """Return the runner of a prepared model's loop."""
    return _LOOPS[prepared.loop.kind](prepared)
