"""Take one model of the zoo through everything that a user does with it.

Traced (``estimate``), planned (``plan`` with a made batch), applied (loss and gradients
of a real step equal to a plain training step's, blocks really recomputed, undone) and
verified on the CPU, with the state of model and process as before.
"""

import contextlib
import random
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import nn

import budgetfit
from budgetfit.applying.loss.call_model import compute_loss, mean_of_outputs
from budgetfit.batches.batch_tree import batch_size_of, resize_batch
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import NO_LOSS
from budgetfit.core.recipe import Recipe
from budgetfit.measuring.recomputed_blocks import (
    RecomputationWatcher,
    find_blocks_saving_nothing,
)
from budgetfit.tracing.compiled.compiled_blocks import CompiledBlocks
from budgetfit.utils.function_name import qualified_name
from tests.models import seed
from tests.zoo.entry import Entry
from tests.zoo.state import (
    assert_same,
    model_state,
    own_attributes,
    random_state,
    switches,
    unchanged,
)

GPU = "rtx-4090"
BATCH_SIZE = 2
TOLERANCE = 1e-5  # relative; recomputation repeats the same kernels
ROUNDING = 1e-7  # of all gradients together: what is zero but for rounding stays so
STAGES = ("traced", "planned", "applied", "verified")
# Stages of their own: inductor takes seconds for each model, FSDP2 is for large ones.
COMPILED, SHARDED = "compiled", "sharded"
RANKS = 8
_FORWARD_OF = CompiledBlocks.forward_of
Gradients = dict[str, torch.Tensor | None]


@dataclass
class Outcome:
    """What became of one entry.

    Attributes:
        name, family: Of the entry.
        passed: Stages that were passed.
        reasons: Stage -> why it failed. What is behind a failed stage is not tried.
        notes: What the plan warns of.
        seconds: What all of it took.
    """

    name: str
    family: str
    passed: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        """The first failure, with its stage; empty where all is well."""
        return next((f"{name}: {why}" for name, why in self.reasons.items()), "")


def check(
    entry: Entry, stages: tuple[str, ...] = STAGES, *, alternatives: bool = True
) -> Outcome:
    """Take an entry through stages; whatever is raised in one is a reason.

    Without ``alternatives`` a plan's alternatives are not evaluated, which takes half
    of the time.
    """
    outcome = Outcome(entry.name, entry.family)
    started = time.perf_counter()
    walk = _Walk(entry, alternatives=alternatives)
    with warnings.catch_warnings(), mock.patch.object(torch, "seed", _seed_again):
        warnings.simplefilter("ignore")  # the models' own; here we ask what works
        for stage in stages:
            try:
                getattr(walk, stage)()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
                text = " ".join(str(error).split())
                outcome.reasons[stage] = f"{type(error).__name__}: {text}"
                break
            outcome.passed.append(stage)
    outcome.notes = walk.notes
    outcome.seconds = time.perf_counter() - started
    return outcome


class _Walk:
    """One entry on its way; each stage is a method and needs those before it."""

    def __init__(self, entry: Entry, *, alternatives: bool = True) -> None:
        self.entry = entry
        self.alternatives = alternatives
        self.loss = entry.plan.get("loss")
        self.notes: tuple[str, ...] = ()
        self.own: set[str] = set()  # attributes that the model's forward changes

    def traced(self) -> None:
        """The model as it is."""
        asked = dict(self.entry.plan)
        asked.pop("precision", None)  # estimate() takes the model as it is
        with unchanged(self.model):
            budgetfit.estimate(self.model, gpu=GPU, **asked)

    def compiled(self) -> None:
        """Every block under torch.compile; a model without blocks has none to show."""
        forward_of = mock.patch.object(
            CompiledBlocks, "forward_of", autospec=True, side_effect=_FORWARD_OF
        )
        with forward_of as compiled:
            self._estimate(compile="blocks")
        assert compiled.called, "no blocks were found"

    def sharded(self) -> None:
        """As one of eight ranks under FSDP2, each block sharded for itself."""
        self._estimate(parallelism=Parallelism(engine="fsdp2", gpus=RANKS))

    def _estimate(self, **settings: Any) -> None:
        """Predict a recipe with the entry's precision and optimizer."""
        asked = dict(self.entry.plan)
        precision = asked.pop("precision", "fp32")
        optimizer = asked.get("optimizer", Recipe(batch_size=1).optimizer)
        if isinstance(optimizer, str):
            asked.pop("optimizer", None)
        else:
            optimizer = qualified_name(optimizer)
        recipe = Recipe(
            batch_size=BATCH_SIZE, precision=precision, optimizer=optimizer, **settings
        )
        with unchanged(self.model):
            budgetfit.estimate(self.model, recipe, gpu=GPU, **asked)

    def planned(self) -> None:
        """All is decided but the batch size: models this small would take thousands."""
        with unchanged(self.model):
            self.plan = budgetfit.plan(
                self.model, gpu=GPU, batch_size=BATCH_SIZE, **self.entry.plan
            )
            if self.alternatives:
                assert self.plan.details()
        self.notes = self.plan.warnings
        self.loss = self.plan.source.loss
        if NO_LOSS in self.plan.estimate.notes:  # what it was planned with
            self.loss = lambda outputs, _: mean_of_outputs(outputs)

    def applied(self) -> None:
        """Every block recomputed, and every other one."""
        batch = self.plan.source.batch
        dims = self.plan.source.batch_dims
        if batch_size_of(batch, dims=dims) != BATCH_SIZE:
            batch = resize_batch(batch, BATCH_SIZE, dims=dims)
        idle: set[str] = set()
        plain = self._plain_step(batch, idle)
        segments = self._every_block()
        for chosen in (segments, segments[::2]) if segments else ((),):
            loss, gradients = self._planned_step(chosen, batch, idle)
            _assert_close("the loss", loss, plain[0], 0.0)
            assert gradients.keys() == plain[1].keys(), "other parameters"
            rounding = ROUNDING * _norm(plain[1])
            for name, gradient in gradients.items():
                what = f"the gradient of {name}"
                _assert_close(what, gradient, plain[1][name], rounding)

    def verified(self) -> None:
        """Gradients and live bytes by the product's own check; the model as before."""
        model = self._settled_model()
        with unchanged(model, self.own):
            found = budgetfit.verify(
                self._with_segments(self._every_block()),
                model,
                loss=self.loss,
                device="cpu",
            )
        assert found.passed, str(found)

    @cached_property
    def model(self) -> nn.Module:
        """What is planned: on meta where it can be built there."""
        if not self.entry.on_meta:
            return self._real_model()
        seed(0)
        with torch.device("meta"):
            return self.entry.build()

    def _real_model(self) -> nn.Module:
        """Build the model with the same weights each time."""
        seed(0)
        return self.entry.build()

    def _settled_model(self) -> nn.Module:
        """Build it and run it once: some rebuild parts or config when first called."""
        model = self._real_model()
        for _ in range(2):  # the first makes what the second changes
            self.own = own_attributes(
                model, lambda: compute_loss(model, self.plan.source.batch, self.loss)
            )
        return model

    def _every_block(self) -> tuple[budgetfit.Segment, ...]:
        for item in self.plan.judged_alternatives:
            if item.label == "every block recomputed":
                return item.estimate.recipe.segments
        return self.plan.recipe.segments

    def _with_segments(self, segments: tuple[budgetfit.Segment, ...]) -> budgetfit.Plan:
        """Return the plan with other segments, without autocast: that equals a loop."""
        recipe = budgetfit.Recipe(
            batch_size=BATCH_SIZE,
            precision="as-is",
            optimizer=self.plan.recipe.optimizer,
            segments=segments,
        )
        return self.plan.changed(recipe=recipe)

    def _plain_step(
        self, batch: object, idle: set[str]
    ) -> tuple[torch.Tensor, Gradients]:
        """Train as a loop without budgetfit would; note blocks that save nothing."""
        model = self._settled_model()
        names = [name for item in self._every_block() for name in item.blocks]
        seed(0)
        with find_blocks_saving_nothing(model, names, idle):
            loss = compute_loss(model, batch, self.loss)
        loss.backward()
        return loss.detach(), _gradients(model)

    def _planned_step(
        self, segments: tuple[budgetfit.Segment, ...], batch: object, idle: set[str]
    ) -> tuple[torch.Tensor, Gradients]:
        model = self._settled_model()
        before = model_state(model) | switches()
        drawn = random_state()
        gradients: Gradients = {}
        run = budgetfit.apply(self._with_segments(segments), model, loss=self.loss)
        assert_same(drawn, random_state())
        run.optimizer.register_step_pre_hook(
            lambda *_: gradients.update(_gradients(model))
        )
        names = [name for item in segments for name in item.blocks]
        seen = RecomputationWatcher()
        seed(0)
        with _phases_told_to(seen), seen.watching(model, names):
            loss = run.step(batch)
        drawn = random_state()
        run.undo()
        after = model_state(model) | switches() | random_state()
        assert_same(before | drawn, after, self.own)
        missed = {
            name
            for name in set(names) - seen.seen - idle
            if any(
                gradient is not None and key.startswith(f"{name}.")
                for key, gradient in gradients.items()
            )
        }
        assert not missed, f"not recomputed: {', '.join(sorted(missed)[:3])}"
        return loss, gradients


@contextlib.contextmanager
def _phases_told_to(seen: RecomputationWatcher) -> Iterator[None]:
    """Say when the backward pass is on, without asking the product."""
    plain = torch.Tensor.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        seen.on_phase("backward")
        try:
            plain(*args, **kwargs)
        finally:
            seen.on_phase("optimizer")

    with mock.patch.object(torch.Tensor, "backward", backward):
        yield


def _gradients(model: nn.Module) -> Gradients:
    return {
        name: None if item.grad is None else item.grad.detach().clone()
        for name, item in model.named_parameters()
    }


def _norm(gradients: Gradients) -> float:
    """Return the norm of all of them together."""
    return (
        sum(
            item.double().norm().item() ** 2
            for item in gradients.values()
            if item is not None
        )
        ** 0.5
    )


def _assert_close(
    what: str, planned: torch.Tensor | None, plain: torch.Tensor | None, rounding: float
) -> None:
    """Assert equality relative to the plain one's norm, but for rounding."""
    assert (planned is None) == (plain is None), f"{what} is there only once"
    if planned is None or plain is None:
        return
    planned, plain = planned.double().to_dense(), plain.double().to_dense()
    assert plain.isfinite().all(), f"{what} is not finite in plain training"
    error = (planned - plain).norm()
    assert error <= TOLERANCE * plain.norm() + rounding, (
        f"{what} is off by {error / plain.norm():.1e} of its norm"
    )


def _seed_again() -> int:
    """Stand in for ``torch.seed``, so that models that call it can be compared."""
    return torch.manual_seed(random.getrandbits(32)).initial_seed()
