"""Blocks whose forward is another one the second time, if nobody sees to it.

Each is a way to write a block that trains well as it is. Recomputed without care, it
trains with other gradients, or not at all.
"""

# ruff: noqa: NPY002 - the generators are what is tried

import array
import collections
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.models import seed

WIDTH = 8

log: list[float] = []  # a global that forwards append to
calls = {"global": 0, "hook": 0}
total = torch.zeros(())
state: Any = types.ModuleType("tests.hazards.state")


class Block(nn.Module):
    """A residual MLP; children change what happens in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self) -> None:
        """Make what the block needs besides."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.between(self.inner(x))))

    def between(self, x: Tensor) -> Tensor:
        return x


class TorchDropout(Block):
    def between(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.3)


class PythonScale(Block):
    def between(self, x: Tensor) -> Tensor:
        return x * (0.5 + random.random())


class PythonGauss(Block):
    """Draws one of a pair of normal numbers; the other one waits in the generator."""

    def between(self, x: Tensor) -> Tensor:
        return x * (1 + random.gauss(0, 0.3))


class NumpyScale(Block):
    def between(self, x: Tensor) -> Tensor:
        return x * (0.5 + np.random.rand())


class NumpyGauss(Block):
    def between(self, x: Tensor) -> Tensor:
        return x * (1 + 0.3 * np.random.randn())


class OwnPythonGenerator(Block):
    def prepare(self) -> None:
        self.chance = random.Random(3)

    def between(self, x: Tensor) -> Tensor:
        return x * (0.5 + self.chance.random())


class OwnNumpyGenerator(Block):
    def prepare(self) -> None:
        self.chance = np.random.default_rng(3)

    def between(self, x: Tensor) -> Tensor:
        return x * (0.5 + self.chance.random())


class OwnTorchGenerator(Block):
    def prepare(self) -> None:
        self.chance = torch.Generator().manual_seed(3)

    def between(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.chance)


hidden_generator = torch.Generator().manual_seed(3)
_hidden = functools.cache(lambda: hidden_generator)
_hidden()


class HiddenGenerator(Block):
    """Draws from a generator that only a cache of functools has."""

    def between(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=_hidden())


def _every(period: int) -> Callable[[], bool]:
    """Return a counter in a closure: of so many forwards, whether it is the last."""
    runs = itertools.count(1)
    forwards: list[int] = []

    def is_last() -> bool:
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward:
            forwards.append(next(runs))
        return not in_backward and forwards[-1] % period == 0

    return is_last


class EveryThird(Block):
    """Its forward is another one every third time; what runs in backward never is."""

    period = 3

    def prepare(self) -> None:
        is_last = _every(self.period)
        self.inner.register_forward_hook(lambda _m, _a, y: y * (1 + is_last()))


class EveryFifth(EveryThird):
    period = 5


class GlobalGenerator(Block):
    """Draws from a generator that its code names."""

    def between(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=hidden_generator)


class Counter(Block):
    def prepare(self) -> None:
        self.count = 0

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        return x / (1 + 0.1 * self.count)


class SlowCounter(Block):
    """Changes what it does long after the first step."""

    def prepare(self) -> None:
        self.count = 0

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        return x / (1 + self.count // 7)


class CounterBuffer(Block):
    def prepare(self) -> None:
        self.register_buffer("count", torch.zeros(()))

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        return x / (1 + 0.1 * self.count)


class RegisteredBuffer(Block):
    """The first forward registers the buffer, later ones write to it."""

    def between(self, x: Tensor) -> Tensor:
        if "count" not in self._buffers:
            self.register_buffer("count", torch.zeros(()))
        self.count += 1
        return x / (1 + 0.1 * self.count)


class BatchNorm(Block):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


class RunningMean(Block):
    """State in a plain attribute, moved on in place."""

    def prepare(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return (x - self.mean) * (1 + self.mean)


class FirstMean(Block):
    """State in an attribute that is None at first, and then moved on in place."""

    def prepare(self) -> None:
        self.mean: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        else:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return (x - self.mean) * (1 + self.mean)


class RememberedState(Block):
    """State in a plain attribute, put anew: a recurrence over batches."""

    def prepare(self) -> None:
        self.state: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        before = 0.0 if self.state is None else self.state
        y = torch.sin(x + before)
        self.state = y.detach()
        return y


class SpectralNorm(Block):
    def prepare(self) -> None:
        self.inner = spectral_norm(self.inner)


class OldSpectralNorm(Block):
    """The older one: a hook before the forward puts the weight in an attribute."""

    def prepare(self) -> None:
        self.inner = nn.utils.spectral_norm(self.inner)


class Autocast(Block):
    def between(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.outer(x)
        with torch.autocast("cpu", enabled=False):
            return self.outer(y.float()) * y.float()


class CountingHook(Block):
    def prepare(self) -> None:
        self.inner.register_forward_hook(_count_and_scale)


def _count_and_scale(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    calls["hook"] += 1
    return output / (1 + 0.1 * calls["hook"])


class DrawingHook(Block):
    def prepare(self) -> None:
        self.inner.register_forward_hook(_scale_by_chance)


def _scale_by_chance(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return output * (0.5 + random.random())


class ClosureHook(Block):
    """Its hook counts in a list and a number that it closes over."""

    def prepare(self) -> None:
        seen: list[int] = []
        count = 0

        def scale(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
            nonlocal count
            count += 1
            seen.append(count)
            return output / (1 + 0.1 * len(seen) + 0.01 * count)

        self.inner.register_forward_hook(scale)


class MethodHook(Block):
    """Its hook is the method of an object that counts."""

    def prepare(self) -> None:
        self.inner.register_forward_hook(Scaling().scale)


class Scaling:
    """Divides by a number that grows with each call."""

    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(WIDTH)

    def scale(self, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
        self.calls += 1
        self.mean += output.detach().mean(0)
        return output / (1 + 0.1 * self.calls) + 0.1 * self.mean


class ClassHook(Block):
    """Its hook is a method of a class that counts in an attribute."""

    def prepare(self) -> None:
        class Scale:
            calls = 0

            @classmethod
            def scale(cls, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
                cls.calls += 1
                return output / (1 + 0.1 * cls.calls)

        self.inner.register_forward_hook(Scale.scale)


class ModuleHook(Block):
    """Its hook closes over a module outside of the block, and counts in that."""

    def prepare(self) -> None:
        other = Owner()

        def scale(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
            other.count += 1
            return output / (1 + 0.1 * other.count)

        self.inner.register_forward_hook(scale)


class Owner(nn.Module):
    """A module of the user's with a count."""

    count = 0


class Flag(Block):
    """A branch on a flag that each forward turns; its sides save as much."""

    def prepare(self) -> None:
        self.even = True

    def between(self, x: Tensor) -> Tensor:
        self.even = not self.even
        return x * x if self.even else x * self.inner(x)


class GlobalCount(Block):
    def between(self, x: Tensor) -> Tensor:
        calls["global"] += 1
        return x / (1 + calls["global"] % 3)


class GrowingList(Block):
    def between(self, x: Tensor) -> Tensor:
        log.append(float(x.detach().mean()))
        return x * (1 + 0.1 * len(log))


class GlobalTensor(Block):
    def between(self, x: Tensor) -> Tensor:
        total.add_(1)
        return x / (1 + total % 3)


class PythonModule(Block):
    """Counts in an attribute of a Python module."""

    def between(self, x: Tensor) -> Tensor:
        state.count += 1
        return x / (1 + state.count % 3)


def _block_of_a_function() -> Block:
    """Return a block whose class closes over what it changes."""
    runs: list[int] = []
    mean = torch.zeros(WIDTH)

    class OfAFunction(Block):
        def between(self, x: Tensor) -> Tensor:
            runs.append(len(runs))
            mean.add_(x.detach().mean(0))
            return x / (1 + len(runs) % 3) + 0.1 * mean

    return OfAFunction()


class FilledCache(Block):
    """Computes a mask once for each batch; the training loop empties the cache."""

    cache: dict[str, Tensor]

    def prepare(self) -> None:
        self.cache = {}

    def between(self, x: Tensor) -> Tensor:
        if "mask" not in self.cache:
            self.cache["mask"] = torch.sigmoid(self.outer(x))
        return x * self.cache["mask"]


class RandomDepth(Block):
    """Leaves its work out now and then; drawn from torch, so shapes depend on it."""

    def between(self, x: Tensor) -> Tensor:
        keep = torch.rand(x.shape[0]) < 0.5
        y = torch.zeros_like(x)
        y[keep] = torch.tanh(self.outer(x[keep]))
        return y


class RandomReLU(Block):
    def prepare(self) -> None:
        self.relu = nn.RReLU()

    def between(self, x: Tensor) -> Tensor:
        return self.relu(x)


class LastIsRandomReLU(RandomReLU):
    """Nothing is saved after the tensor that is still to be filled."""

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.inner(x))


class Counting(Block):
    """Counts in some object before its last saved tensor, which counts do not change.

    Comparing saved tensors says nothing then: the gradient is right, the count is not.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * (1 + 0.1 * (self.count() % 5))

    def count(self) -> float:
        raise NotImplementedError


def _counting(
    name: str, make: Callable[[], Any], count: Callable[[Any], float]
) -> Callable[[], Block]:
    """Return a block that counts in an attribute."""

    def prepare(block: Any) -> None:
        block.held = make()

    members = {"prepare": prepare, "count": lambda block: count(block.held)}
    return type(name, (Counting,), {**members, "__module__": __name__})


def _in_dict(held: dict[str, int]) -> int:
    held["n"] = held.get("n", 0) + 1
    return held["n"]


def _in_list(held: Any) -> int:
    held.append(len(held))
    return len(held)


def _in_array(held: Any) -> float:
    held[0] += 1
    return float(held[0])


class Namespace:
    """An object with an attribute, and one that is a list."""

    def __init__(self) -> None:
        self.n, self.log = 0, [0]

    def tick(self) -> int:
        self.n += 1
        self.log.append(self.n)
        return self.n + len(self.log)


class Slots:
    """An object that keeps its attribute in a slot."""

    __slots__ = ("n",)

    def tick(self) -> int:
        self.n = getattr(self, "n", 0) + 1
        return self.n


class OwnDict(dict[str, int]):
    """A dict with an attribute besides."""

    extra = 0

    def tick(self) -> int:
        self.extra += 1
        return _in_dict(self) + self.extra


def _in_simple(held: types.SimpleNamespace) -> int:
    held.n += 1
    return held.n


def _in_ordered(held: collections.OrderedDict[str, int]) -> int:
    """Count by the order alone: every other time the first key is ``a``."""
    held.move_to_end(next(iter(held)))
    return next(iter(held.values()))


def _in_a_tensor(held: dict[str, Tensor]) -> float:
    return held["n"].add_(1).item()


def _in_a_small_tensor(held: Any) -> float:
    held.n.data.add_(1)  # which moves no version counter
    return held.n.item()


def _in_tensors(held: list[Tensor]) -> float:
    held.append(held[-1] + 1)
    return held[-1].item()


def _closure() -> Callable[[], int]:
    runs: list[int] = []

    def count() -> int:
        return _in_list(runs)

    return count


def _with_an_attribute() -> Callable[[], int]:
    def count() -> int:
        count.n += 1  # type: ignore[attr-defined]
        return count.n  # type: ignore[attr-defined]

    count.n = 0  # type: ignore[attr-defined]
    return count


def _with_a_default() -> Callable[[], int]:
    def count(runs: list[int] = []) -> int:  # noqa: B006
        return _in_list(runs)

    return count


def _outside() -> tuple[nn.Module]:
    """Return a module that the block does not own: a tuple hides it."""
    module = Owner()
    module.register_buffer("n", torch.zeros(()))
    return (module,)


def _in_module(held: tuple[Any]) -> float:
    held[0].count += 1
    return held[0].count + held[0].n.add_(1).item()


class ClassCount(Counting):
    """Counts in an attribute of its class."""

    calls = 0
    log: list[int] = []  # noqa: RUF012 - shared on purpose

    def count(self) -> float:
        type(self).calls += 1
        return (type(self).calls + _in_list(self.log)) % 5


class SharedCount(Counting):
    """Counts in an object that other references lead to as well."""

    def prepare(self) -> None:
        self.held = collections.Counter[str]()
        self.same = functools.partial(_in_dict, self.held)

    def count(self) -> float:
        return self.same() + self.held["n"]


def _generated() -> Iterator[int]:
    yield from itertools.count()


def _simple_tensor() -> types.SimpleNamespace:
    return types.SimpleNamespace(n=torch.zeros(()))


COUNTING = tuple(
    _counting(*each)
    for each in (
        ("CounterAttribute", collections.Counter, _in_dict),
        ("DefaultDict", lambda: collections.defaultdict(int), _in_dict),
        ("Ordered", lambda: collections.OrderedDict(a=1, b=2), _in_ordered),
        ("Deque", lambda: collections.deque([0], maxlen=5), _in_list),
        ("NestedDict", lambda: {"a": {"b": {}}}, lambda held: _in_dict(held["a"]["b"])),
        ("ListOfLists", lambda: [[0], []], lambda held: _in_list(held[1])),
        ("DictOfLists", dict, lambda held: _in_list(held.setdefault("n", []))),
        ("ListInTuple", lambda: (1, []), lambda held: _in_list(held[1])),
        ("NumpyArray", lambda: np.zeros(2), _in_array),
        ("PythonArray", lambda: array.array("d", [0]), _in_array),
        ("Bytes", lambda: bytearray(2), _in_array),
        ("Simple", lambda: types.SimpleNamespace(n=0), _in_simple),
        ("OwnObject", Namespace, Namespace.tick),
        ("ObjectInList", lambda: [Namespace()], lambda held: held[0].tick()),
        ("BoundMethod", lambda: Namespace().tick, lambda held: held()),
        ("SlotsObject", Slots, Slots.tick),
        ("OwnDictObject", OwnDict, OwnDict.tick),
        ("GeneratorInDict", lambda: {0: random.Random(3)}, lambda h: h[0].random()),
        ("LongList", lambda: [0] * 5000, lambda held: _in_list(held) - 5000),
        ("ListOfTensors", lambda: [torch.zeros(())], _in_tensors),
        ("TensorInDict", lambda: {"n": torch.zeros(())}, _in_a_tensor),
        ("TensorInObject", _simple_tensor, _in_a_small_tensor),
        ("Closure", _closure, lambda held: held()),
        ("FunctionAttribute", _with_an_attribute, lambda held: held()),
        ("DefaultArgument", _with_a_default, lambda held: held()),
        ("OutsideModule", _outside, _in_module),
    )
)
ITERATING = tuple(
    _counting(*each)
    for each in (
        ("IteratorAttribute", itertools.count, next),
        ("IteratorInDict", lambda: {0: itertools.count()}, lambda held: next(held[0])),
        ("IteratorsMethod", lambda: itertools.count().__next__, lambda held: held()),
        ("OwnGeneratorFunction", _generated, next),
    )
)

# The fifteen kinds; each with the ways to write it.
KINDS: dict[str, tuple[Callable[[], Block], ...]] = {
    "torch dropout": (TorchDropout, RandomReLU, LastIsRandomReLU),
    "Python's random": (PythonScale, PythonGauss),
    "numpy's random": (NumpyScale, NumpyGauss),
    "private generator": (
        OwnPythonGenerator,
        OwnNumpyGenerator,
        OwnTorchGenerator,
        GlobalGenerator,
        HiddenGenerator,
    ),
    "some forwards only": (EveryThird, EveryFifth),
    "counter attribute": (Counter, SlowCounter),
    "counter in a buffer": (CounterBuffer, RegisteredBuffer),
    "in-place state": (BatchNorm, RunningMean, FirstMean, RememberedState),
    "spectral norm": (SpectralNorm, OldSpectralNorm),
    "autocast in the block": (Autocast,),
    "hook": (CountingHook, DrawingHook, ClosureHook, MethodHook, ClassHook, ModuleHook),
    "branch on a flag or a number": (Flag, RandomDepth),
    "global list or cache": (
        GlobalCount,
        GrowingList,
        GlobalTensor,
        PythonModule,
        _block_of_a_function,
        FilledCache,
    ),
    "container or object": (*COUNTING, ClassCount, SharedCount),
    "iterator": ITERATING,
}


class Tower(nn.Module):
    """Four blocks and a head."""

    def __init__(self, kind: Callable[[], Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def start(kind: Callable[[], Block]) -> Tower:
    """Return a model, always the same, and all state outside of it as it was."""
    seed(0)
    hidden_generator.manual_seed(3)
    log.clear()
    calls.update({"global": 0, "hook": 0})
    total.zero_()
    state.count = 0
    ClassCount.calls = 0
    ClassCount.log.clear()
    return Tower(kind)


def between_steps(model: Tower) -> None:
    """Do what a training loop does between two batches."""
    for block in model.blocks:
        if isinstance(block, FilledCache):
            block.cache.clear()
