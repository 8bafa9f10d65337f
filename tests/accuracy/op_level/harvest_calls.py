"""Collect the calls that the traces of the accuracy cases make, to be recorded.

    python -m tests.accuracy.op_level.harvest_calls

Every case is traced with two samples, and each op's calls that differ most in layout
and dtype are written to ``harvested_calls.json``, where the family ``harvested`` of
``op_families`` reads them.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from budgetfit.traces.session import TraceSession
from budgetfit.tracing.cuda.op_semantics import CudaOpSemantics
from tests.accuracy.case import Case
from tests.accuracy.cases import CASES
from tests.accuracy.op_level.op_call import encode
from tests.accuracy.predict import recipe_of, segments_of, subject_of
from tests.accuracy.training import allowed_attention

HARVEST = Path(__file__).parent / "harvested_calls.json"
MOST_CALLS = 8  # of one op
LONGEST_SHAPE = 6
MOST_TENSORS = 4  # of a longer list: optimizers pass hundreds
# What comes out depends on values, which no trace has.
BY_VALUE = ("_local_scalar_dense", "masked_select", "nonzero", "_ctc_loss.Tensor")

Calls = dict[str, dict[str, list[Any]]]


@contextmanager
def collected() -> Iterator[Calls]:
    """Collect the calls of all traces inside: op -> kind of call -> call."""
    calls: Calls = defaultdict(dict)
    run = CudaOpSemantics.run

    def collecting(
        self: CudaOpSemantics,
        inner: Any,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        name = str(func).removeprefix("aten.")
        if func.namespace == "aten" and not name.startswith(BY_VALUE):
            args_, kwargs_ = shorter(args), shorter(kwargs)
            kind = kind_of(args_, kwargs_)
            if kind not in calls[name]:
                calls[name][kind] = on_card([name, encode(args_), encode(kwargs_)])
        return run(self, inner, func, args, kwargs)

    with mock.patch.object(CudaOpSemantics, "run", collecting):
        yield calls


def on_card(call: list[Any]) -> list[Any]:
    """Return the call with its tensors, fakes on the CPU, on the card.

    All but the random state of memory-efficient attention, which the host keeps.
    """
    text = json.dumps(call).replace('@"', '"')
    if "efficient_attention" in call[0]:
        text = text.replace('"int64[]"', '"int64[]@"')
    return list(json.loads(text))


def shorter(value: object) -> Any:
    """Return arguments whose lists of tensors are short."""
    if isinstance(value, dict):
        return {key: shorter(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(shorter(item) for item in value)
    if isinstance(value, list) and len(value) > LONGEST_SHAPE:
        return value[:MOST_TENSORS]
    return value


def kind_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what makes calls differ: dtypes, dimensions, order of strides."""
    return repr(
        [
            (
                leaf.dtype,
                leaf.dim(),
                leaf.is_contiguous(),
                0 in leaf.stride(),
                leaf.storage_offset() > 0,
            )
            if isinstance(leaf, torch.Tensor)
            else type(leaf)
            for leaf in tree_leaves((args, kwargs))
        ]
    )


def programs(cases: Iterable[Case]) -> Iterator[Case]:
    """Yield cases until every one of their pairings was met; batch sizes do not count.

    Cards count only by what they cannot do: a T4 has no flash attention.
    """
    seen: set[tuple[str, ...]] = set()
    for case in cases:
        pairings = {
            (case.family, case.precision, str(case.gpu == "t4")),
            (case.family, case.checkpointing),
            (case.family, case.attention),
            (case.optimizer, case.precision),
            (case.family, str(case.gradient_accumulation_steps > 1)),
        }
        if not pairings <= seen:
            seen |= pairings
            yield replace(case, batch_size=2, last_batch_size=0)


def calls_of(cases: Iterable[Case]) -> Calls:
    """Trace the cases and return their calls."""
    with collected() as calls:
        for case in programs(cases):
            print(case.name, flush=True)
            workload = subject_of(case, cudnn=False)
            recipe = recipe_of(case, workload, segments_of(case, workload))
            with allowed_attention(case):
                TraceSession(workload).exact(recipe)
    return calls


def main() -> None:
    """Write the harvest of all cases."""
    chosen = []
    for _, kinds in sorted(calls_of(CASES.values()).items()):
        rows = sorted(kinds.items())
        step = max(1, -(-len(rows) // MOST_CALLS))
        chosen += [row for _, row in rows[::step]]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in chosen)
    HARVEST.write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    main()
