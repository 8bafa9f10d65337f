"""Put what loading a quantised base does on the card before a trace's first step.

A base that bitsandbytes quantises is loaded onto the card (transformers:
``update_device_map`` of the quantizer), weight by weight in 16 bits, and what this
leaves in the caching allocator counts as reserved. Models that are not quantised are
loaded on the host and moved, which is the order that a trace has (decision 0042).

Sources:
    transformers 5.23, ``modeling_utils.py``: ``caching_allocator_warmup`` (one block
    of the size of the model, freed at once); ``core_model_loading.py``:
    ``convert_and_load_state_dict_in_model`` (weights by name; with quantisation
    without threads, from 5.4 on); ``integrations/bitsandbytes.py``:
    ``Bnb4bitQuantize`` and ``Bnb8bitQuantize``.
    bitsandbytes 0.50, ``functional.py``: ``quantize_4bit``, ``get_4bit_type``,
    ``quantize_blockwise``; ``nn/modules.py``: ``Int8Params._quantize``.
    peft 0.21, ``utils/other.py``: ``prepare_model_for_kbit_training`` (to fp32 one
    after the other, then the cache is emptied, since 0.20);
    ``tuners/lora/layer.py``: ``update_layer``; ``tuners/tuners_utils.py``:
    ``cast_adapter_dtype`` (adapters in the compute dtype, then fp32).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from packaging.version import Version
from torch import nn

from budgetfit.applying.precision import tensors_in_apply_order
from budgetfit.applying.quantized_layers.int8_linear import Int8Linear
from budgetfit.applying.quantized_layers.nf4_linear import (
    CODE_VALUES,
    NESTED_CODE_VALUES,
    Nf4Linear,
)
from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.core.step_trace import CATEGORIES, EMPTY_CACHE, StepTrace
from budgetfit.memory.make_allocator import make_allocator, rounded_bytes

_FP32_BYTES: Final = 4
_HALF_BYTES: Final = 2
_PEFT_THAT_EMPTIES: Final = Version("0.20")
# Earlier ones copy weights in threads, ahead of their turn (decision 0042).
TRANSFORMERS_IN_ORDER: Final = Version("5.4")


class Loading:
    """The loading of a model, found once, to be put before each of its traces.

    There is none without quantised layers.
    """

    def __init__(
        self, model: nn.Module, *, ahead: int = 0, empties: bool | None = None
    ) -> None:
        """Find what loading does.

        Args:
            model: The traced one, at full depth.
            ahead: Entries of the checkpoint that are on the card before their turn. Up
                to transformers 5.3 threads copy them, as far as the host gets: no run
                is like another.
            empties: Whether the cache is emptied after casts to fp32; None is what the
                installed peft does.
        """
        self._sizes: list[int] = []
        self._log = _LoadingLog()
        if not has_quantized_layers(model):
            return
        for tensor in tensors_in_apply_order(model):
            known = self._log.storages
            if tensor.layout is torch.strided and _storage(tensor) not in known:
                known[_storage(tensor)] = len(known)
                self._sizes.append(tensor.untyped_storage().nbytes())
        self._log.first = len(self._sizes)
        _load_base(model, self._log, ahead)
        _cast_for_training(model, self._log, empties=empties)
        _make_adapters(model, self._log)
        for tensor in tensors_in_apply_order(model):
            self._log.keep(tensor)

    def fits(
        self, limit_bytes: int, settings: AllocatorSettings, card_bytes: int
    ) -> bool:
        """Whether it needs no more memory than a limit, without anything else."""
        allocator = make_allocator(limit_bytes, settings, card_bytes)
        sizes = np.array([*self._sizes, *self._log.sizes], np.int64)
        allocator.run(self._log.events, rounded_bytes(sizes, settings).tolist())
        return allocator.failed_event is None

    def before(self, trace: StepTrace) -> StepTrace:
        """Return a trace of the model with the loading; as it is if there is none."""
        # Its events begin with the model's parameters and buffers.
        first = trace.events[: len(self._sizes)] - 1
        if (
            not self._sizes
            or len(first) < len(self._sizes)
            or (first < 0).any()
            or trace.fixed_bytes[first].tolist() != self._sizes
        ):
            return trace
        return _joined(trace, self._log, first)


def has_quantized_layers(model: nn.Module) -> bool:
    """Whether a model to trace has layers that bitsandbytes quantises."""
    return any(map(_is_quantized, model.modules()))


@dataclass
class _LoadingLog:
    """Events of loading.

    Attributes:
        storages: Of the tensors that stay, by the identity of their storage, numbered
            in the order in which a model is moved.
        first: The first of the temporaries, which are numbered behind these.
        events: As in ``StepTrace``, with these numbers.
        sizes: Of the temporaries.
        halves: Temporaries in 16 bits, by the identity of what they become.
        kept: Storages that are allocated.
        table: The code table that double quantisation makes once and keeps.
    """

    storages: dict[int, int] = field(default_factory=dict)
    first: int = 0
    events: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    halves: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    table: int = 0

    def keep(self, tensor: torch.Tensor) -> None:
        """Allocate a tensor that stays; a tied one once."""
        storage = self.storages.get(_storage(tensor))
        if storage is not None and storage not in self.kept:
            self.kept.add(storage)
            self.events.append(storage + 1)

    def temporary(self, size_bytes: int) -> int:
        """Allocate a temporary and return it."""
        self.sizes.append(size_bytes)
        self.events.append(self.first + len(self.sizes))
        return self.events[-1]

    def free(self, *temporaries: int) -> None:
        """Free temporaries, in this order."""
        self.events += [-each for each in temporaries]

    def half(self, tensor: torch.Tensor) -> None:
        """Allocate a tensor in 16 bits, which a cast to fp32 replaces later."""
        if _storage(tensor) not in self.halves:
            size = tensor.numel() * _HALF_BYTES
            self.halves[_storage(tensor)] = self.temporary(size)

    def cast(self, tensor: torch.Tensor) -> None:
        """Replace a tensor in 16 bits by the one that stays."""
        half = self.halves.pop(_storage(tensor), None)
        if half is not None:
            self.keep(tensor)
            self.free(half)


class _Loaded(NamedTuple):
    """One entry of the checkpoint: its name, its module, and None for its weight."""

    name: str
    module: Any
    tensor: torch.Tensor | None


def _load_base(model: nn.Module, log: _LoadingLog, ahead: int) -> None:
    """Log ``from_pretrained``: the warm-up, then each weight in the order of names."""
    base = list(_checkpoint_entries(model))
    in_half = _loads_in_half(model)
    _warm_up(base, log, in_half=in_half)
    copied: list[int] = []
    for turn, (_, module, tensor) in enumerate(base):
        due = base[len(copied) : turn + ahead + 1]
        copied += [_copy(entry, log, in_half=in_half) for entry in due]
        if isinstance(module, Nf4Linear) and tensor is None:
            _quantize_nf4(module, log, copied[turn])
        elif tensor is None:
            _quantize_int8(module, log, copied[turn])


def _warm_up(base: list[_Loaded], log: _LoadingLog, *, in_half: bool) -> None:
    """Log a block of the size of the stored model, which is freed at once."""
    total, seen = 0.0, set()
    for _, module, tensor in base:
        owner = module.weight if tensor is None else tensor
        if _storage(owner) in seen:
            continue
        seen.add(_storage(owner))
        if tensor is None:
            stored = 0.5 if isinstance(module, Nf4Linear) else 1
            total += module.in_features * module.out_features * stored
        else:
            halved = in_half and tensor.dtype == torch.float32
            total += tensor.nbytes / 2 if halved else tensor.nbytes
    log.free(log.temporary(int(total // 2) * 2))


def _copy(entry: _Loaded, log: _LoadingLog, *, in_half: bool) -> int:
    """Log an entry that comes from the host; return what is quantised of it, or 0."""
    _, module, tensor = entry
    if tensor is None:
        nf4 = isinstance(module, Nf4Linear)
        itemsize = module.packing.weight.itemsize if nf4 else _HALF_BYTES
        return log.temporary(module.in_features * module.out_features * itemsize)
    if in_half and tensor.dtype == torch.float32:
        log.half(tensor)
    else:
        log.keep(tensor)
    return 0


def _quantize_nf4(layer: Nf4Linear, log: _LoadingLog, weight: int) -> None:
    """Log one ``Params4bit`` made of a weight on the card, which is freed."""
    count = layer.in_features * layer.out_features
    scales_bytes = -(-count // layer.packing.block) * _FP32_BYTES
    if layer.packing.nested:
        scales = log.temporary(scales_bytes)
    else:
        log.keep(layer.absmax)
    log.keep(layer.weight)
    log.keep(layer.code)
    magnitudes = log.temporary(CODE_VALUES * _FP32_BYTES)
    log.free(magnitudes, log.temporary(_FP32_BYTES))
    if layer.packing.nested:
        log.keep(layer.offset)
        centred = log.temporary(scales_bytes)
        if not log.table:
            log.table = log.temporary(NESTED_CODE_VALUES * _FP32_BYTES)
        log.keep(layer.nested_absmax)
        log.keep(layer.absmax)
        log.keep(layer.nested_code)
        log.free(centred, scales)
    log.free(weight)


def _quantize_int8(layer: Int8Linear, log: _LoadingLog, weight: int) -> None:
    """Log one ``Int8Params``: its 16 bits go back to the host, and come again."""
    again = log.temporary(layer.in_features * layer.out_features * _HALF_BYTES)
    log.keep(layer.SCB)
    log.keep(layer.weight)
    log.free(again, weight)


def _cast_for_training(
    model: nn.Module, log: _LoadingLog, *, empties: bool | None
) -> None:
    """Log ``prepare_model_for_kbit_training``, where it was called."""
    if not log.halves:
        return
    for parameter in model.parameters():
        log.cast(parameter)
    for tensor in tensors_in_apply_order(model):
        log.cast(tensor)
    if empties is None:
        empties = Version(metadata.version("peft")) >= _PEFT_THAT_EMPTIES
    if empties:
        log.events.append(EMPTY_CACHE)


def _make_adapters(model: nn.Module, log: _LoadingLog) -> None:
    """Log ``get_peft_model``: adapters in the layer's compute dtype, then in fp32."""
    in_half = _adapters_in_half(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    for parameter in trained:
        if in_half and parameter.dtype == torch.float32:
            log.half(parameter)
        else:
            log.keep(parameter)
    for parameter in trained:
        log.cast(parameter)


def _checkpoint_entries(model: nn.Module) -> Iterator[_Loaded]:
    """Yield the entries of the base's checkpoint in the order of loading."""
    found: list[_Loaded] = []
    for path, module in model.named_modules():
        name = path.removeprefix("base_model.model.").replace(".base_layer", "")
        prefix = f"{name}." if name else ""
        if _is_quantized(module):
            found.append(_Loaded(f"{prefix}weight", module, None))
            if module.bias is not None:
                found.append(_Loaded(f"{prefix}bias", module, module.bias))
            continue
        hidden = module._non_persistent_buffers_set  # noqa: SLF001 - of nn.Module
        tensors = (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        )
        found += [
            _Loaded(f"{prefix}{key}", module, tensor)
            for key, tensor in tensors
            if key not in hidden and not tensor.requires_grad
        ]
    yield from sorted(found, key=lambda entry: _natural_key(entry.name))


def _natural_key(name: str) -> list[tuple[int, int, str]]:
    """Order numbers by value and before words, as ``dot_natural_key``."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in name.split(".")
    ]


def _loads_in_half(model: nn.Module) -> bool:
    """Whether fp32 tensors of the base were in 16 bits when they were loaded."""
    layers = [module for module in model.modules() if _is_quantized(module)]
    return not any(
        isinstance(layer, Nf4Linear) and layer.packing.weight == torch.float32
        for layer in layers
    )


def _adapters_in_half(model: nn.Module) -> bool:
    """Whether adapters are made in 16 bits: those beside nf4 layers that compute so."""
    halves = {torch.float16, torch.bfloat16}
    return any(
        isinstance(module, Nf4Linear) and module.packing.compute in halves
        for module in model.modules()
    )


def _is_quantized(module: nn.Module) -> bool:
    return isinstance(module, (Nf4Linear, Int8Linear))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001 - what StorageLog goes by


def _joined(trace: StepTrace, log: _LoadingLog, storages: NDArray[Any]) -> StepTrace:
    """Return the trace with its first events replaced by those of loading."""
    # ``storages``: the trace's storages of the model, in their order.
    new = len(log.sizes)
    numbers = np.concatenate([storages, trace.fixed_bytes.size + np.arange(new)])
    own = np.array(log.events, np.int64)
    events = np.sign(own) * (numbers[abs(own) - 1] + 1)  # ``EMPTY_CACHE`` is zero
    temporaries = np.full(new, CATEGORIES.index("temporaries"))

    def longer(column: NDArray[Any], more: ArrayLike) -> NDArray[Any]:
        return np.concatenate([column, np.asarray(more, column.dtype)])

    setup = trace.events[len(storages) : trace.phases[0].end]
    longer_trace = replace(
        trace,
        fixed_bytes=longer(trace.fixed_bytes, log.sizes),
        bytes_per_sample=longer(trace.bytes_per_sample, np.zeros(new)),
        category=longer(trace.category, temporaries),
        layer=longer(trace.layer, np.full(new, -1)),
        scratch_index=longer(trace.scratch_index, np.full(new, -1)),
    )
    return longer_trace.with_setup_events((*events.tolist(), *setup.tolist()))
