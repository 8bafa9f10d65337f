"""What an optimizer keeps after a step: predicted on fake tensors, and for real."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from budgetfit.applying.optimizers import bitsandbytes, torchao
from budgetfit.applying.optimizers.factory import make_optimizer

Named = str | Callable[..., torch.optim.Optimizer]

# Below, at and above 4096 elements and what 256 divides, 100,000 elements from which on
# states are paged; numbers, biases, matrices, kernels of convolutions, embeddings.
SHAPES = (
    (),
    (1,),
    (16,),
    (4095,),
    (4096,),
    (4097,),
    (64, 64),
    (100, 80),
    (64, 3, 8, 8),
    (2, 1, 4096),
    (300, 333),
    (400, 250),
    (1000, 768),
    (5003, 30),
)

LIBRARIES = {
    **dict.fromkeys(bitsandbytes.SPECS, "bitsandbytes"),
    **dict.fromkeys(torchao.SPECS, "torchao"),
    "schedule_free_adamw": "schedulefree",
    "schedule_free_sgd": "schedulefree",
    "schedule_free_radam": "schedulefree",
}
# Their steps read values off tensors, which a trace follows and a fake alone cannot.
READ_VALUES = ("adafactor_torch", "asgd", "rprop")


class Kept(NamedTuple):
    """Bytes that an optimizer keeps.

    Attributes:
        by_tensor: For each parameter; what several share is the first one's.
        managed: Of all states that are CUDA's managed memory.
    """

    by_tensor: list[int]
    managed: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.by_tensor) + self.managed


def parameters(
    dtype: torch.dtype, shapes: Iterable[tuple[int, ...]] = SHAPES
) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def predicted(
    name: Named, dtype: torch.dtype, shapes: Iterable[tuple[int, ...]] = SHAPES
) -> Kept:
    with FakeTensorMode():
        trained = parameters(dtype, shapes)
        optimizer = make_optimizer(name, trained, device_type="cpu")
        optimizer.step()
        managed = getattr(optimizer, "managed_bytes", 0)
        return Kept(kept_by_tensor(optimizer, trained), managed)


def real(
    name: Named, dtype: torch.dtype, trained: list[torch.nn.Parameter] | None = None
) -> Kept:
    """Step the library's own optimizer on the CPU.

    torchao compiles its step, which changes no state: here it runs uncompiled.
    bitsandbytes does not page on a CPU, and says so.
    """
    trained = parameters(dtype) if trained is None else trained
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
        optimizer = make_optimizer(name, trained, device_type="cpu")
        before = torch._dynamo.eval_frame._stance
        torch.compiler.set_stance("force_eager")
        try:
            optimizer.step()
        finally:
            torch.compiler.set_stance(before.stance)
    return Kept(kept_by_tensor(optimizer, trained))


def kept_by_tensor(
    optimizer: torch.optim.Optimizer, trained: list[torch.nn.Parameter]
) -> list[int]:
    """Return the bytes of each parameter's state; what is shared is the first one's."""
    seen: set[int] = set()
    kept = []
    for parameter in trained:
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in tensors_in(optimizer.state.get(parameter, {}))
        }
        kept.append(sum(size for key, size in storages.items() if key not in seen))
        seen.update(storages)
    return kept


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield plain tensors, those that tensor subclasses are made of too."""
    if isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            for name in names:
                yield from tensors_in(getattr(value, name))
        else:
            yield value
