"""Restore buffers that a block's forward mutates, for its recomputation.

Batch norms update running statistics, spectral norms iterate, queues advance. A
recomputation must start from the buffers before the forward, else it computes something
else; and it must not update them a second time. So it works on copies. Tensors in plain
attributes and frozen parameters are handled like buffers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

# Larger ones are mostly read-only tables (masks, positions, rotary embeddings), and
# frozen parameters weights: they are copied once one was written to.
MAX_ELEMENTS = 2**16
_TABLES = ("_buffers", "__dict__", "_parameters")

_Place: TypeAlias = "tuple[nn.Module, str, str]"


class BufferSnapshot(NamedTuple):
    """A buffer before a forward: the tensor, its version counter, a copy.

    ``tensor`` is None where the forward may fill it. No copy where the forward does not
    read the old values, or is not expected to write. ``is_new`` where there was none.
    """

    module: nn.Module
    table: str
    name: str
    tensor: torch.Tensor | None
    version: int
    copy: torch.Tensor | None
    may_be_replaced: bool = True
    is_new: bool = False

    @property
    def place(self) -> _Place:
        """Where it is."""
        return self.module, self.table, self.name

    @property
    def tensors(self) -> dict[str, Any]:
        """The module's buffers, attributes or parameters."""
        return getattr(self.module, self.table)

    def is_mutated(self) -> bool:
        """Whether the forward wrote to it or replaced it."""
        is_norms = isinstance(self.module, _NormBase) and self.table == "_buffers"
        if is_norms and self.module.training:
            return True  # its kernels do not bump versions
        now = self.tensors.get(self.name)
        if now is not self.tensor:
            return self.may_be_replaced
        # Version counters: torch's notes on autograd, "In-place correctness checks".
        return now is not None and (
            version(now) != self.version or differs(now, self.copy)
        )

    def copied_again(self) -> torch.Tensor | None:
        """Return what a recomputation may write to, as it was before the forward."""
        if self.copy is None:
            return None
        copy = self.copy.clone()
        if self.table == "_parameters":  # which takes no other tensors
            return nn.Parameter(copy, requires_grad=False)
        return copy

    @property
    def lacks_copy(self) -> bool:
        """Whether a recomputation would need one; torch's norms need none."""
        is_norm = self.table == "_buffers" and _is_torchs_norm(self.module)
        return self.copy is None and self.tensor is not None and not is_norm

    def with_copy(self) -> BufferSnapshot:
        """Return it with a copy: of the new values where the old ones are lost."""
        if self.tensor is None or not self.lacks_copy:
            return self
        return self._replace(copy=self.tensor.detach().clone())

    def with_copy_on_host(self, *, kept: bool) -> BufferSnapshot:
        """Return it with its copy in host memory, or (in traces) with none."""
        copy = self.copy
        if copy is None or not kept or copy.is_meta:
            return self._replace(copy=None)
        return self._replace(copy=copy.cpu())


class MutatedBuffers:
    """Detects which buffers of modules a block's forward mutates.

    The first forward copies all small buffers, later ones only those that were ever
    mutated. What is written to without a copy keeps what was written, and is copied
    from then on. ``copies_statistics``: whether running statistics of torch's norms are
    copied, too: where other code than the norm's own reads or writes them.
    """

    def __init__(
        self, modules: Iterable[nn.Module], *, copies_statistics: bool = False
    ) -> None:
        modules = [*modules]
        self._copies_statistics = copies_statistics
        self._small: list[_Place] = []
        self._others: list[_Place] = []
        self._empty: set[_Place] = set()
        parametrized = _parametrized_by_peft(modules)
        for module in modules:
            for table in _TABLES:
                for name, tensor in getattr(module, table).items():
                    place = module, table, name
                    if tensor is None and table == "_buffers":
                        self._empty.add(place)
                        self._small.append(place)
                    elif _is_frozen(tensor) and place not in parametrized:
                        is_small = tensor.numel() <= MAX_ELEMENTS
                        copied = is_small and table != "_parameters"
                        (self._small if copied else self._others).append(place)
        self._places = self._small
        self._set_by_others: set[_Place] = set()
        self._known = [(each, len(each._buffers)) for each in modules]

    def snapshot(self, *, every: bool = False) -> list[BufferSnapshot]:
        """Copy the buffers that the forward may mutate, and note the others' versions.

        ``every``: all small buffers again, running statistics included.
        """
        to_copy = {*self._places, *(self._small if every else ())}
        held = []
        for number, place in enumerate((*self._small, *self._others)):
            module, table, name = place
            tensor = getattr(module, table).get(name)
            if tensor is None and place in self._empty:
                held.append(BufferSnapshot(*place, None, 0, None))
            if not _is_frozen(tensor):
                continue
            copies_all = every or self._copies_statistics
            is_norm = module.training and _is_torchs_norm(module) and not copies_all
            is_table = place in self._empty and tensor.numel() > MAX_ELEMENTS
            copied = place in to_copy and not is_table and not is_norm
            held.append(
                BufferSnapshot(
                    *place,
                    tensor,
                    version(tensor),
                    tensor.detach().clone() if copied else None,
                    may_be_replaced=number < len(self._small) or place in to_copy,
                )
            )
        return held

    def find_mutated(
        self, held: list[BufferSnapshot], *, compared: bool = True
    ) -> list[BufferSnapshot]:
        """Return the mutated buffers, and remember them for later snapshots.

        ``compared``: whether the recomputation is compared with this forward, so that
        it is noticed if it should have begun with values of which there is no copy.
        """
        written = []
        for each in held:
            if each.is_mutated():
                written.append(each.with_copy())
                is_in_place = each.tensors.get(each.name) is each.tensor
                if each.lacks_copy and is_in_place and not compared:
                    _warn_of_late_write(each)
        places = [each.place for each in written]
        if self._places is self._small:
            self._places = []
        self._places += [place for place in places if place not in self._places]
        return [*written, *self._registered()]

    def others(
        self,
        held: list[BufferSnapshot],
        mutated: list[BufferSnapshot],
        *,
        compared: bool,
    ) -> list[BufferSnapshot]:
        """Return the buffers that a forward has left alone, for ``restored_others``."""
        # Copies would take memory until backward: they stay only of those that
        # something else has written to before, and of a compared forward in host
        # memory. Parameters are checked elsewhere.
        places = {each.place for each in mutated}
        return [
            each
            if each.place in self._set_by_others
            else each.with_copy_on_host(kept=compared)
            for each in held
            if each.table != "_parameters"
            and each.tensor is not None
            and each.place not in places
        ]

    @contextmanager
    def restored_others(self, held: list[BufferSnapshot]) -> Iterator[None]:
        """Set buffers that others set since the forward as it found them, or warn."""
        now: list[tuple[BufferSnapshot, Any]] = []
        for each in held:
            current = each.tensors.get(each.name)
            before = each.tensor
            if current is before and before is not None:
                if version(before) == each.version:
                    continue
                self._expect_writes_by_others(each)
                copy = each.copied_again()
                if copy is None:
                    continue
                before = copy.to(before.device)
            elif not each.may_be_replaced:
                continue
            now.append((each, current))
            each.tensors[each.name] = before
        try:
            yield
        finally:
            for each, current in now:
                each.tensors[each.name] = current

    def _expect_writes_by_others(self, each: BufferSnapshot) -> None:
        """Copy it in every forward from now on."""
        if each.place in self._set_by_others:
            return
        if each.copy is None and not isinstance(each.tensor, FakeTensor):
            _warn_of_late_write(each)
        self._set_by_others.add(each.place)
        self._places = [*self._places, each.place]

    def _registered(self) -> Iterator[BufferSnapshot]:
        """Yield the buffers that a forward has registered."""
        for module, count in self._known:
            for name in [*module._buffers][count:]:
                place = module, "_buffers", name
                yield BufferSnapshot(*place, None, 0, None, is_new=True)


def _parametrized_by_peft(modules: Iterable[nn.Module]) -> set[_Place]:
    """Return the parameters, such as fused experts, that peft adapts themselves."""
    # Each forward parametrizes them anew: torch sets them to what they are, which is a
    # new version of the same values.
    layers: Any = sys.modules.get("peft.tuners.lora.layer")
    wrapper = getattr(layers, "ParamWrapper", ())
    return {
        (each.get_base_layer(), "_parameters", each.parameter_name)
        for each in modules
        if isinstance(each, wrapper)
    }


def _is_frozen(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _warn_of_late_write(each: BufferSnapshot) -> None:
    warnings.warn(
        f"{type(each.module).__name__}.{each.name} was written to for the first time, "
        "so that there is no copy of what it was: this once, the recomputation of its "
        "block begins with the new values. Where gradients depend on them, keep that "
        "block.",
        stacklevel=3,
    )


def version(tensor: torch.Tensor) -> int:
    """Return a tensor's version counter; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def differs(now: torch.Tensor, copy: torch.Tensor | None) -> bool:
    """Whether values differ from a copy's: writes to ``.data`` do not bump versions."""
    if copy is None or isinstance(copy, FakeTensor) or copy.is_meta:
        return False
    with suppress(RuntimeError):  # not for all dtypes
        return not torch.equal(now, copy)
    return False


def _is_torchs_norm(module: nn.Module) -> bool:
    """Whether it is torch's batch or instance norm: it trains on batch statistics."""
    return isinstance(module, _NormBase) and type(module).__module__.startswith(
        "torch.nn.modules."
    )


@contextmanager
def restored_buffers(held: list[BufferSnapshot]) -> Iterator[None]:
    """Replace mutated buffers by copies of their old values inside the context."""
    # Torch's norms keep their buffers and do not update them, which takes no memory but
    # a scalar for ``SyncBatchNorm``.
    norms = {
        each.module for each in held if each.copy is None and each.tensor is not None
    }
    copied = [
        each for each in held if each.module not in norms or each.copy is not None
    ]
    now = [each.tensors.get(each.name) for each in copied]
    try:
        for each in copied:
            if each.is_new:
                each.tensors.pop(each.name, None)
            else:
                each.tensors[each.name] = each.copied_again()
        with ExitStack() as stack:
            for module in norms:
                stack.enter_context(_frozen_statistics(module))
            yield
    finally:
        for each, tensor in zip(copied, now, strict=True):
            if each.is_new and tensor is None:  # deleted since
                each.tensors.pop(each.name, None)
            else:
                each.tensors[each.name] = tensor


@contextmanager
def _frozen_statistics(norm: Any) -> Iterator[None]:
    """Freeze running statistics by momentum 0: new = (1 - 0) * old + 0 * batch."""
    momentum, counted = norm.momentum, norm._buffers["num_batches_tracked"]
    must_count = isinstance(norm, SyncBatchNorm) and counted is not None
    scratch_count = counted.clone() if must_count else None
    norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, scratch_count
    try:
        yield
    finally:
        norm.momentum, norm._buffers["num_batches_tracked"] = momentum, counted
