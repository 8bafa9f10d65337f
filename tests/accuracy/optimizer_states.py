"""Print what each optimizer keeps: predicted on fake tensors, and real, on the CPU.

``python -m tests.accuracy.optimizer_states`` needs bitsandbytes and torchao (and
schedulefree for three names); what a missing library leaves out is said.
"""

import argparse

import torch

from budgetfit.applying.optimizers.factory import OPTIMIZER_NAMES
from budgetfit.errors import InputError
from tests.applying.optimizers.optimizer_states import SHAPES, Kept, predicted, real

ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES)


def main() -> None:
    """Print one row for each name and dtype, and the largest error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    print(
        f"{len(SHAPES)} tensors, {ELEMENTS:,} elements: {', '.join(map(str, SHAPES))}"
    )
    print(
        f"{'optimizer':25}{'dtype':10}{'predicted':>12}{'real':>12}{'error':>8}"
        f"{'tensors':>9}{'wrong':>7}{'bytes/element':>15}"
    )
    worst, rows, missing = 0, 0, []
    for dtype in (torch.float32, torch.bfloat16):
        for name in OPTIMIZER_NAMES:
            try:
                ours = predicted(name, dtype)
                theirs = real(name, dtype)
            except (InputError, RuntimeError) as error:
                missing.append(f"{name} {_short(dtype)}: {str(error).splitlines()[0]}")
                continue
            rows += 1
            worst = max(worst, abs(ours.total - theirs.total))
            print(_row(name, dtype, ours, theirs))
    print(f"{rows} rows, largest error {worst} bytes")
    for line in missing:
        print(f"not compared: {line}")


def _row(name: str, dtype: torch.dtype, ours: Kept, theirs: Kept) -> str:
    wrong = "-"  # of paged states the CPU keeps in tensors what a card does not
    if not ours.managed:
        pairs = zip(ours.by_tensor, theirs.by_tensor, strict=True)
        wrong = str(sum(one != two for one, two in pairs))
    paged = f"  of them {ours.managed:,} managed" if ours.managed else ""
    return (
        f"{name:25}{_short(dtype):10}{ours.total:12,}{theirs.total:12,}"
        f"{ours.total - theirs.total:+8}{len(SHAPES):9}{wrong:>7}"
        f"{ours.total / ELEMENTS:15.3f}{paged}"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
