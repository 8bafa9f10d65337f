"""Let optimizers and clipping choose ``foreach`` and ``capturable`` as on CUDA.

torch asks for the device and the type of parameters, here of fakes on the CPU. With the
loop over single tensors an optimizer has other temporaries.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

_ASKED: Final = (
    "_get_foreach_kernels_supported_devices",
    "_get_capturable_supported_devices",
)


@contextlib.contextmanager
def optimizers_on_cuda() -> Iterator[None]:
    """Count the CPU among CUDA's devices, in this thread, and fakes among tensors."""
    thread = threading.get_ident()

    def with_fakes(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def devices(*args: object, **kwargs: object) -> list[str]:
            found = original(*args, **kwargs)
            return [*found, "cpu"] if threading.get_ident() == thread else found

        return devices

    modules = [
        module for key, module in sys.modules.items() if key.startswith("torch.optim.")
    ]
    types: list[Any] = [
        sys.modules["torch.optim.optimizer"],
        torch.utils._foreach_utils,
    ]
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name in _ASKED:
                if hasattr(module, name):
                    asked = with_fakes(getattr(module, name))
                    stack.enter_context(mock.patch.object(module, name, asked))
        for module in types:  # not replaced: an import may add to them meanwhile
            module._foreach_supported_types.append(FakeTensor)
            stack.callback(module._foreach_supported_types.remove, FakeTensor)
        yield
