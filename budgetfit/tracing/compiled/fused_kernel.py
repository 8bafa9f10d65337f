"""A Triton kernel of generated code on fake tensors: an op that only moves bytes."""

import re
from typing import Final

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from budgetfit.tracing.cuda.kernel_memory.registry import Call, Steps, kernel_memory

# Kept alive: deleting it would unregister the op.
_LIBRARY = torch.library.Library("budgetfit", "FRAGMENT")
_LIBRARY.define("fused_kernel(Tensor[] inputs, Tensor(a!)[] outputs) -> ()")
torch.library.register_fake("budgetfit::fused_kernel", lambda *_: None, lib=_LIBRARY)

_SIGNATURE: Final = re.compile(r"^def \w+\(([^)]*)\)", re.MULTILINE)


@kernel_memory("budgetfit.fused_kernel.default")
def _fused_kernel(call: Call) -> Steps:
    """Nothing: all that it writes is allocated by the code that launches it."""
    del call
    yield from ()


class FusedKernel:
    """What generated code calls to launch a kernel.

    Args:
        source: Of the kernel. Inductor names its parameters ``in_ptr0``, ``out_ptr0``
            and ``in_out_ptr0``.
    """

    def __init__(self, source: str) -> None:
        found = _SIGNATURE.search(source)
        names = found.group(1).split(",") if found else []
        self._parameters = [name.split(":")[0].strip() for name in names]

    def run(self, *args: object, **_: object) -> None:
        """Record a launch."""
        inputs, outputs = [], []
        for name, value in zip(self._parameters, args, strict=False):
            if isinstance(value, torch.Tensor):
                if name.startswith("in_"):
                    inputs.append(value)
                if not name.startswith("in_ptr"):
                    outputs.append(value)
        # Autograd does not see what a kernel writes.
        kept = _unsafe_preserve_version_counter(tuple(outputs))
        with torch.no_grad(), kept:
            torch.ops.budgetfit.fused_kernel.default(inputs, outputs)
