"""Modules as users write them: outputs, arguments, structure, autograd, loops."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry
from tests.zoo.networks import user_attributes as at
from tests.zoo.networks import user_autograd as ag
from tests.zoo.networks import user_compute as co
from tests.zoo.networks import user_outputs as out
from tests.zoo.networks import user_structure as st

_X, _Y = torch.linspace(-1, 1, 4 * 8).view(4, 8), torch.zeros(4, 8)
_TOKENS = torch.arange(20).view(2, 10)


def _user(name: str, build: Callable[[], nn.Module], **plan: Any) -> Entry:
    return Entry(f"user's {name}", "users' modules", build, plan, on_meta=False)


_OUTPUTS = [
    _user("dictionary as output", out.DictOutput),
    _user("dataclass with a loss as output", out.DataclassOutput),
    _user("frozen dataclass as output", out.FrozenDataclassOutput),
    _user("named tuple as output", out.NamedTupleOutput),
    _user("indices and None among the outputs", out.TupleWithIntegers),
    _user("plain object with a loss", out.PlainObjectOutput),
    _user(
        "distribution as output",
        out.DistributionOutput,
        batch={"x": _X, "y": _Y},
        loss=out.negative_log_likelihood,
    ),
    _user("list of losses", out.LossList),
    _user("dictionary of losses", out.LossDict),
    _user("scalar loss", out.ScalarLoss, batch=(_X, _Y)),
    _user(
        "several losses",
        out.SeveralLosses,
        batch={"x": _X, "kind": torch.tensor([0, 1, 2, 0]), "value": torch.zeros(4)},
        loss=out.weighed_losses,
    ),
    _user(
        "criterion with weights",
        out.Trunk,
        batch=(_X, torch.tensor([0, 1, 2, 3])),
        loss=out.StatefulLoss(),
    ),
]
_ARGUMENTS = [
    _user(
        "arguments by name alone",
        out.KeywordOnly,
        batch={"x": _X, "scale": 2.0, "mode": "sum"},
    ),
    _user("*args", out.AnyArguments, batch=(_X, _Y, _X)),
    _user("**kwargs", out.AnyKeywords, batch={"left": _X, "right": _Y}),
    _user(
        "batch as the one argument",
        out.BatchDictionary,
        batch=({"x": _X, "y": _Y, "flag": True, "mode": "train", "repeat": 3},),
    ),
    _user(
        "nested batch",
        out.NestedBatch,
        batch=([{"image": _X}, {"image": _Y}], (torch.ones(4), 2)),
    ),
    _user("dataclass as batch", out.DataclassBatch, batch=(out.Sample(_X, _Y),)),
]
_STRUCTURE = [
    _user("nested lists of modules", st.NestedLists),
    _user("block called three times", st.SharedBlock),
    _user("block under two names", st.SharedAmongOthers),
    _user("siamese network", st.Siamese, batch=(_X, _Y)),
    _user("tied autoencoder", st.TiedAutoencoder),
    _user("language model with tied embeddings", st.TiedLanguageModel),
    _user("frozen trunk in evaluation mode", st.FrozenTrunk),
    _user("half of the blocks frozen", st.HalfFrozen),
    _user("ParameterList and ParameterDict", st.Parameters, batch=_X),
    _user("head chosen by name", st.ModuleDictOfTasks, batch={"x": _X, "task": "b"}),
    _user("modules in a plain list", st.HiddenModules),
    _user("weight norm", st.WeightNorm),
    _user("weight norm by a hook", st.old_weight_norm),
    _user("spectral norm", st.spectral_norm),
    _user("spectral norm by a hook", st.old_spectral_norm),
    _user("parametrizations", st.parametrized),
    _user("pruned weights", st.pruned),
    _user("lock among the attributes", at.WithLock),
    _user("torch.Generator among the attributes", at.WithGenerator),
    _user("model that keeps its last output", at.used_once),
    _user("slots and a property as weight", at.Slots, batch=_X),
    _user("buffer made by the first batch", at.LazyBuffer),
    _user("tensors in plain attributes", at.OtherTensors),
    _user("GAN in one module", st.Gan),
    _user("momentum encoder", st.MomentumEncoder),
]
_INSIDE = [
    _user("autograd Functions", ag.CustomFunctions),
    _user("in-place ops", ag.InPlace),
    _user("blocks that write to their input", ag.WritesItsInput),
    _user("own checkpoints", partial(ag.OwnCheckpoint, reentrant=False)),
    _user("own reentrant checkpoints", partial(ag.OwnCheckpoint, reentrant=True)),
    _user("checkpoints inside blocks", ag.CheckpointInside),
    _user("checkpoint_sequential", ag.CheckpointSequential),
    _user("buffers updated in forward", ag.UpdatedBuffers),
    _user("buffer replaced in forward", ag.ReplacedBuffer),
    _user("queue with a pointer", ag.MemoryQueue),
    _user("module hooks", ag.WithHooks),
    _user("tensor hooks", ag.TensorHooks),
    _user("attention by einsum", co.Attention),
    _user("Fourier operator", co.Fourier, optimizer="adamw_torch"),
    _user("complex network", co.ComplexNet, batch=_X, optimizer="adamw_torch"),
    _user("sparse embedding", co.SparseEmbedding, optimizer=torch.optim.SGD),
    _user("blocks skipped at random", co.StochasticDepth),
    _user("control flow on shapes", co.ShapeControl, batch=torch.zeros(2, 101, 8)),
    _user("loop over time", co.Scan, batch=torch.ones(2, 20, 8)),
    _user("cell in a loop", co.CellLoop, batch=torch.ones(2, 9, 8)),
    _user(
        "packed sequences",
        co.PackedLstm,
        batch={"tokens": _TOKENS, "lengths": torch.tensor([10, 6])},
    ),
    _user("functional call with moved weights", co.FunctionalCall),
    _user("gradient penalty", co.GradientPenalty),
    _user("vmap", co.Vmapped, batch=_X),
    _user("Runge-Kutta steps", co.NeuralOde),
    _user("reversible blocks", ag.Reversible),
    _user("part without autocast", co.NestedAutocast),
    _user("sorting, gathering and scattering", co.ParameterInOptimisedPath),
    _user("experts that all run", co.SoftExperts),
    _user("experts on their own samples", co.HardExperts),
    _user(
        "boolean mask from the batch",
        co.BooleanMask,
        batch={"x": _X, "mask": torch.tensor([True, False, True, True])},
    ),
    _user("compiled blocks", co.CompiledPart),
]
ENTRIES = [*_OUTPUTS, *_ARGUMENTS, *_STRUCTURE, *_INSIDE]
