"""Blocks that cannot run again because their input is written to: always kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from budgetfit.applying.loss.call_model import arguments_for
from budgetfit.errors import TraceError
from budgetfit.planning.profiling.block_chain import Setting, every_block
from budgetfit.traces.session import TRACED_BATCH_SIZES, Traces
from budgetfit.tracing.recording.inplace_inputs import overwriting_blocks

if TYPE_CHECKING:
    from torch import nn

_TORCHS_WORDS = "modified by an inplace operation"


def without_overwriting_blocks(traces: Traces, setting: Setting) -> Traces:
    """Return traces of the blocks that can be recomputed, and a note on the others.

    The model is looked at only if recomputing every block fails for this reason; that
    program is one that the search will ask for in any case, and so is any other failure
    of it left to the search.
    """
    subject = traces.subject
    if not subject.blocks:
        return traces
    try:
        size = TRACED_BATCH_SIZES[0]
        traces.of(setting.recipe(size, every_block(subject.blocks)))
    except TraceError as error:
        if _TORCHS_WORDS not in f"{error} {error.__cause__}":
            return traces
    else:
        return traces

    def call(model: nn.Module, batch: Any) -> object:  # noqa: ANN401
        args, kwargs = arguments_for(model, batch, for_loss=subject.loss is not None)
        return model(*args, **kwargs)

    found = overwriting_blocks(subject.model, subject.batch, subject.blocks, call)
    if not found:
        return traces
    note = (
        f"{len(found)} of {len(subject.blocks)} blocks change their input in place and "
        "are always kept"
    )
    kept = tuple(name for name in subject.blocks if name not in found)
    others = replace(subject, blocks=kept, notes=(*subject.notes, note))
    return Traces(others, traces.progress)
