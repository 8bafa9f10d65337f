"""What makes DeepSpeed's ZeRO run on fake tensors, and its memory known.

DeepSpeed asks an accelerator for streams, devices and free memory. The trace has one of
its own: CUDA's answers, with the streams and the device of the CPU.

A tensor that another stream uses too (``record_stream``) returns to the allocator's
pool when that stream is done, which is a matter of time; here at once, as on a device
whose streams are never behind.

Sources: ``deepspeed/accelerator``, ``deepspeed/runtime/zero`` of DeepSpeed 0.19.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.errors import InputError
from budgetfit.utils.lazy_import import lazy_import

if TYPE_CHECKING:
    from budgetfit.tracing.recording.distributed.rank_log import RankLog

_PLENTY_BYTES = 1 << 60  # DeepSpeed flattens in host memory where the device has none
_OPTIMIZERS = {
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
}
# Modules whose variables are process groups and backends, made once in a process.
_GLOBALS = ("deepspeed.comm.comm", "deepspeed.utils.groups")


@contextlib.contextmanager
def deepspeed_on_fakes(log: RankLog) -> Iterator[None]:
    """Let DeepSpeed train fake modules, and log what no op shows.

    The weights are in host memory until it moves them: the log, paused by the caller,
    begins there.

    Raises:
        InputError: If the installed version has other parts.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))  # it says on what it runs
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)  # of torch, of its calls
            try:
                with _disable_current_modes():
                    patches = _patches(log)
                for patch in patches:
                    stack.enter_context(patch)
            except (AttributeError, ImportError) as error:
                raise InputError(
                    f"This version of DeepSpeed cannot be traced ({error}); 0.19.8 "
                    'can. Install that, or use engine="fsdp2".'
                ) from error
            yield
    finally:
        logging.disable(before)


def _patches(log: RankLog) -> list[Any]:
    accelerators = lazy_import("deepspeed.accelerator.real_accelerator")
    engine = lazy_import("deepspeed.runtime.engine").DeepSpeedEngine
    stages = {lazy_import(name): kind for name, kind in _OPTIMIZERS.items()}
    stage3 = lazy_import("deepspeed.runtime.zero.stage3")
    gathered = _by_way_of_the_host(log, stage3.defragment)
    patches = [
        mock.patch.object(accelerators, "ds_accelerator", _accelerator(log)),
        mock.patch.object(engine, "_broadcast_model", _moved(log, engine)),
        mock.patch.object(stage3, "defragment", gathered),
        mock.patch.object(torch.Tensor, "record_stream", _on_other_stream),
        mock.patch.object(torch.cpu.Stream, "synchronize", _done, create=True),
        # ZeRO-3 replaces it for good.
        mock.patch.object(functional, "linear", functional.linear),
        mock.patch.object(FakeTensor, "data_ptr", _place_in_storage, create=True),
        mock.patch.dict(os.environ, LOCAL_RANK="0"),
        *(mock.patch.dict(vars(lazy_import(name))) for name in _GLOBALS),
    ]
    for module, kind in stages.items():
        for owner, name in (
            (getattr(module, kind), "has_overflow"),
            (module, "is_invalid_grad_norm"),
        ):
            checked = _finite(getattr(owner, name))
            patches.append(mock.patch.object(owner, name, checked))
    return patches


def _on_other_stream(_: torch.Tensor, __: object) -> None:
    """Do what ``record_stream`` does to a tensor without memory."""


def _by_way_of_the_host(log: RankLog, gather: Callable[..., Any]) -> Callable[..., Any]:
    """Log what ZeRO-3 gathers in host memory only once it is on the device again."""

    def call(tensors: list[torch.Tensor]) -> torch.Tensor:
        with log.pause():
            flat: torch.Tensor = gather(tensors)
        log.log_storage(flat, "parameters")
        return flat

    return call


def _finite(check: Callable[..., bool]) -> Callable[..., bool]:
    """Return a check for infinite gradients that reads zeros: fakes have no values."""
    # A step that finds some would be skipped.

    @functools.wraps(check)
    def call(*args: Any, **kwargs: Any) -> bool:
        with (
            mock.patch.object(FakeTensor, "item", _zero, create=True),
            mock.patch.object(FakeTensor, "__bool__", _zero, create=True),
        ):
            return check(*args, **kwargs)

    return call


def _zero(_: torch.Tensor) -> bool:
    return False


def _done(_: torch.cpu.Stream) -> None:
    """Wait for a stream in name, that is never behind."""


def _place_in_storage(tensor: torch.Tensor) -> int:
    """Return where a tensor begins: DeepSpeed checks that partitions are aligned."""
    return int(tensor.storage_offset() * tensor.element_size())


def _moved(log: RankLog, engine: Any) -> Callable[[Any], None]:
    """Log the weights as they come from the host; DeepSpeed broadcasts them then."""
    broadcast = engine._broadcast_model

    def call(self: Any) -> None:
        log.paused = False
        log_module(self.module)
        log.end_moves()
        broadcast(self)

    def log_module(module: torch.nn.Module) -> None:  # the order of Module._apply
        for child in module.children():
            log_module(child)
        for parameter in module._parameters.values():
            if parameter is not None:
                log.move(parameter, "parameters")
        for buffer in module._buffers.values():
            if buffer is not None:
                log.move(buffer, "buffers")

    return call


def _accelerator(log: RankLog) -> Any:
    """Return an accelerator with CUDA's answers and the CPU's streams and device."""
    cuda = lazy_import("deepspeed.accelerator.cuda_accelerator")
    base: Any = cuda.CUDA_Accelerator
    default = torch.cpu.current_stream()

    def answer(value: Any = None) -> Callable[..., Any]:
        return lambda *_, **__: value

    answers: dict[str, Any] = {
        "_init_pynvml": answer(),
        "is_available": answer(value=True),
        "device_name": answer("cpu"),
        "current_device_name": answer("cpu"),
        "device": answer(torch.device("cpu")),
        "current_device": answer(0),
        "device_count": answer(1),
        "set_device": answer(),
        "synchronize": answer(),
        "on_accelerator": answer(value=True),
        "pin_memory": lambda _, tensor, *__: tensor,
        "range_push": answer(),
        "range_pop": answer(),
        "lazy_call": answer(),
        "create_op_builder": answer(),
        "empty_cache": lambda _: log.empty_cache(),
        "available_memory": answer(_PLENTY_BYTES),
        "total_memory": answer(_PLENTY_BYTES),
        "memory_stats": answer({}),
        "Stream": torch.cpu.Stream,
        "Event": lambda _, **__: torch.cpu.Event(),
        "stream": lambda _, stream: torch.cpu.stream(stream),
        "current_stream": lambda *_: torch.cpu.current_stream(),
        "default_stream": answer(default),
    }
    answers |= dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved"), answer(0)
    )
    answers |= dict.fromkeys(
        ("max_memory_reserved", "memory_cached", "max_memory_cached"), answer(0)
    )
    answers |= dict.fromkeys(
        ("reset_max_memory_allocated", "reset_max_memory_cached"), answer()
    )
    answers["reset_peak_memory_stats"] = answer()
    return type("AcceleratorOnFakes", (base,), answers)()
