"""A model that was planned for is as it was, and so is the process (law D8)."""

import gc
import operator
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers.utils.import_utils
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import budgetfit
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe
from budgetfit.errors import TraceError
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.profiling.block_chain import checkpoint_every_block
from budgetfit.traces.session import TraceSession
from budgetfit.tracing.cuda.dispatch.autocast import ops_with_kernel
from budgetfit.tracing.cuda.dispatch.thread_kernels import unregister_unused
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.recording.step_tracer import trace_step
from budgetfit.workload.workload import Workload
from tests.models import EXAMPLES, Chain, without_loss

ADA = CudaTarget(compute_capability=(8, 9), torch_version=(2, 13))
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a user could notice, identities included."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "tensors": [
            (name, id(t), t.data_ptr() if not t.is_meta else 0, t._version)
            for name, t in tensors
        ],
        "kinds": [(type(t), t.device, t.dtype, t.shape, t.grad) for _, t in tensors],
        "requires_grad": [t.requires_grad for _, t in tensors],
        "training": [module.training for module in model.modules()],
        "modules": [(name, id(m), type(m)) for name, m in model.named_modules()],
        "hooks": [
            dict(getattr(module, hook)) for module in model.modules() for hook in HOOKS
        ],
        "attributes": [
            sorted(key for key in vars(module)) for module in model.modules()
        ],
        "forwards": [
            getattr(module.forward, "__func__", 0) for module in model.modules()
        ],
        "keys": list(model.state_dict()),
        "use_cache": getattr(getattr(model, "config", None), "use_cache", None),
    }


def _nesting() -> int:
    """How deep autocast regions are nested."""
    inside = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return inside - 1


def process_state() -> dict[str, Any]:
    """Everything about torch and the process that tracing could have left behind."""
    ops = ops_with_kernel("AutocastCUDA") | ops_with_kernel("AutocastCPU") | {"dropout"}
    unregister_unused()  # what an earlier test's threads kept
    if threading.active_count() > 1:
        ops = frozenset()  # kernels stay registered, and do nothing in other threads
    return {
        "random": torch.get_rng_state().tolist(),
        "python's random": random.getstate(),
        "numpy's random": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            _nesting(),
        ),
        "clear_autocast_cache": torch.clear_autocast_cache,
        "function modes": _get_current_function_mode_stack(),
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "kernels": [torch._C._dispatch_dump(f"aten::{op}") for op in sorted(ops)],
        "transformers": transformers.utils.import_utils.is_fake_tensor,
        "collection": gc.isenabled(),
        "threads": threading.active_count(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "sdp": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
    }


def subject_of(name: str, model: nn.Module) -> Workload:
    found = Workload(model=model, batch=EXAMPLES[name].batch, gpu=find_gpu("rtx-4090"))
    return found.with_found_blocks()


@pytest.mark.parametrize(
    ("name", "precision"),
    [("gpt2", "fp16-mixed"), ("t5", "bf16"), ("convolutions", "bf16-mixed")],
)
def test_planning_leaves_model_and_process_as_they_were(
    name: str, precision: str
) -> None:
    model = EXAMPLES[name].model()
    values = {key: value.clone() for key, value in model.state_dict().items()}
    before = model_state(model), process_state()
    workload = subject_of(name, model)
    recipe = Recipe(
        batch_size=4,
        precision=precision,
        segments=checkpoint_every_block(workload.blocks),
    )
    TraceSession(workload).affine(recipe)
    assert (model_state(model), process_state()) == before
    assert all(torch.equal(values[k], v) for k, v in model.state_dict().items())


def test_a_model_on_meta_stays_on_meta() -> None:
    with torch.device("meta"):
        model = EXAMPLES["gpt2"].make()
    before = model_state(model)
    TraceSession(subject_of("gpt2", model)).affine(Recipe(batch_size=4))
    assert model_state(model) == before
    assert all(p.is_meta for p in model.parameters())


def test_a_mixture_of_modes_and_frozen_weights_stays_that_mixture() -> None:
    model = EXAMPLES["gpt2"].model()
    model.transformer.h[1].eval()
    model.transformer.h[0].requires_grad_(requires_grad=False)
    handle = model.transformer.h[2].register_forward_hook(lambda *_: None)
    before = model_state(model)
    TraceSession(subject_of("gpt2", model)).affine(Recipe(batch_size=4))
    assert model_state(model) == before
    handle.remove()


def test_a_batch_is_not_written_to() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 4)

        def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            scale.zero_()
            return self.embedding(ids.add_(1)) * scale

    batch = {"ids": torch.zeros(2, 4, dtype=torch.long), "scale": torch.ones(2, 4, 4)}
    workload = Workload(model=Writes(), batch=batch, gpu=find_gpu("t4"))
    TraceSession(workload).affine(Recipe(batch_size=4))
    assert not batch["ids"].any()
    assert batch["scale"].all()


def test_random_numbers_that_a_model_draws_are_given_back() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = random.random() + np.random.rand()  # noqa: NPY002
            return self.linear(x) * scale + torch.rand(4)

    model = Draws()
    before = process_state()
    workload = Workload(model=model, batch=torch.zeros(2, 4), gpu=find_gpu("t4"))
    TraceSession(workload).affine(Recipe(batch_size=4))
    assert process_state() == before


class Fails(nn.Module):
    """Raises in its forward, in the middle of a block."""

    def __init__(self, error: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        self.error(x)
        return self.layers[1](x)


def _raise(_: torch.Tensor) -> None:
    raise KeyError("missing")


def _ask(x: torch.Tensor) -> torch.Tensor:
    return torch.bincount(x.long().flatten() - 99)  # no CPU answers it either


@pytest.mark.parametrize(
    ("error", "message"),
    [(_raise, "KeyError: 'missing'"), (_ask, "its own values decide")],
)
def test_an_error_in_the_model_leaves_nothing_behind_either(
    error: Callable[[torch.Tensor], Any], message: str
) -> None:
    model = Fails(error)
    before = model_state(model), process_state()
    workload = Workload(model=model, batch=torch.zeros(2, 4), gpu=find_gpu("rtx-4090"))
    recipe = Recipe(batch_size=4, precision="bf16-mixed")
    with pytest.raises(TraceError, match=message):
        TraceSession(workload.with_found_blocks()).affine(recipe)
    assert (model_state(model), process_state()) == before


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_an_error_later_in_the_step_leaves_nothing_behind_either(phase: str) -> None:
    example = EXAMPLES["convolutions"]
    model = example.model()
    before = model_state(model), process_state()

    def program(copied: nn.Module, on_phase: Callable[[str], None]) -> Run:
        def stop(name: str) -> None:
            on_phase(name)
            if name == phase:
                raise KeyboardInterrupt

        recipe = Recipe(batch_size=2, precision="bf16-mixed")
        return Run(copied, recipe, on_phase=stop, on_missing_loss=without_loss)

    with pytest.raises(KeyboardInterrupt):
        trace_step(
            model, program, example.batch, batch_size=2, blocks=("0", "1"), target=ADA
        )
    assert (model_state(model), process_state()) == before


def test_two_threads_may_plan_at_the_same_time() -> None:
    found: list[list[int]] = []
    example = EXAMPLES["convolutions"]
    models = [example.model() for _ in range(3)]

    def plan() -> None:
        raw = trace_step(
            models.pop(),
            lambda copied, on_phase: Run(
                copied,
                Recipe(batch_size=2, precision="bf16-mixed"),
                on_phase=on_phase,
                on_missing_loss=without_loss,
            ),
            example.batch,
            batch_size=2,
            blocks=("0", "1"),
            target=ADA,
        )
        found.append(raw.log.events)

    before = process_state()
    threads = [threading.Thread(target=plan) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert found[0] == found[1] == found[2]
    assert process_state() == before


KEPT: list[torch.Tensor] = []


class Keeping(nn.Module):
    """Keeps a tensor with a graph in a list of the module, which the model clears."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        KEPT.append(y.pow(2).mean())
        return y


class SumOfKept(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KEPT.clear()
        super().forward(x)
        return torch.stack(KEPT).sum()


@pytest.mark.filterwarnings("error")  # torch's, of .grad of a tensor with a graph
def test_a_global_list_of_tensors_with_a_graph_is_put_back() -> None:
    model = SumOfKept(*(Keeping() for _ in range(3)))
    batch = torch.ones(2, 4)
    model(batch)
    before = list(KEPT)
    budgetfit.plan(model, gpu="rtx-4090", batch=batch, batch_size=2)
    assert len(KEPT) == 3
    assert all(map(operator.is_, KEPT, before))
