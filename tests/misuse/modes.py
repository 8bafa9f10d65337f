"""Training modes, gradient modes and threads around a step."""

import threading
from typing import Any

import torch

from budgetfit import InputError, Run
from tests.applying.small_models import make
from tests.misuse.case import refused, right
from tests.misuse.training import (
    applied,
    apply_unharmed,
    assert_steps_as_plain,
    assert_trains_as_plain,
    batches,
    block_runs,
    next_step_refused,
    plan_of,
    step_unharmed,
    trains_as_plain,
)


def _evaluate(run: Run, batch: Any) -> None:
    run.model.eval()
    with torch.no_grad():
        run.model(**batch)


@trains_as_plain(accumulates=True)
def eval_in_the_middle_of_a_group(run: Run, batch: object) -> None:
    """An evaluation between two micro-batches of an update."""
    _evaluate(run, batch)


@refused("under torch.no_grad.. or torch.inference_mode", InputError)
def under_no_grad() -> None:
    """run.step inside of torch.no_grad()."""
    with torch.no_grad():
        step_unharmed(applied())


@refused("made under torch.inference_mode", InputError)
def apply_under_inference_mode() -> None:
    """A model made inside of torch.inference_mode(), and a plan applied to it."""
    with torch.inference_mode():
        model = make("stack")
    apply_unharmed(plan_of(), model)


@right()
def apply_under_no_grad() -> None:
    """budgetfit.apply called inside of torch.no_grad(), steps outside of it."""
    (batch,) = batches(1)
    with torch.no_grad():
        run = applied()
    assert_trains_as_plain([run.step(batch).item()], run.model, [[batch]])


@refused("Inference tensors cannot be saved for backward", RuntimeError)
def a_batch_from_inference_mode() -> None:
    """Latents that an encoder made inside of torch.inference_mode()."""
    (batch,) = batches(1)
    with torch.inference_mode():
        batch = {**batch, "x": batch["x"] * 1}
    step_unharmed(applied(), batch)


@right()
def from_another_thread() -> None:
    """run.step called in a thread of a thread pool."""
    run, (batch,) = applied(), batches(1)
    losses: list[float] = []
    thread = threading.Thread(target=lambda: losses.append(run.step(batch).item()))
    thread.start()
    thread.join()
    assert_trains_as_plain(losses, run.model, [[batch]])


@refused("already running", InputError)
def from_two_threads() -> None:
    """run.step called in a second thread while the first is in its forward."""
    run, (batch,) = applied(), batches(1)
    inside, found = threading.Event(), []
    go_on = threading.Event()

    def wait(*_: object) -> None:
        if not inside.is_set():
            inside.set()
            go_on.wait(10)

    run.model.head.register_forward_pre_hook(wait)
    first = threading.Thread(target=lambda: found.append(run.step(batch)))
    first.start()
    inside.wait(10)
    try:
        run.step(batch)
    finally:
        go_on.set()
        first.join()


@right()
def under_another_default_dtype() -> None:
    """torch.set_default_dtype(torch.float64) between apply and the steps."""
    run, data = applied(), batches(2)
    torch.set_default_dtype(torch.float64)
    try:
        losses = [run.step(batch).item() for batch in data]
    finally:
        torch.set_default_dtype(torch.float32)
    assert_trains_as_plain(losses, run.model, [[batch] for batch in data])


@right()
def under_a_default_device() -> None:
    """A step inside of torch.device("meta"), left on from building models."""
    run, (batch,) = applied(), batches(1)
    with torch.device("meta"):
        loss = run.step(batch).item()
    assert_trains_as_plain([loss], run.model, [[batch]])


@trains_as_plain("gpt2")
def caches_switched_on(run: Run, _: object) -> None:
    """model.config.use_cache = True after apply, for samples of its output."""
    run.model.config.use_cache = True


@next_step_refused("attention was changed after apply: eager", "llama")
def another_attention(run: Run) -> None:
    """model.set_attn_implementation("eager") after apply, for attention maps."""
    run.model.set_attn_implementation("eager")


def _assert_a_block_runs_twice(run: Run) -> None:
    runs = block_runs(run.model, "model.layers.1")
    assert_steps_as_plain(run, batches(1, "llama"), "llama")
    assert runs.total() == 2, f"the block ran {runs.total()} times"


@right()
def own_checkpointing_switched_on() -> None:
    """model.gradient_checkpointing_enable() after apply: blocks still run twice."""
    run = applied("llama")
    run.model.gradient_checkpointing_enable()
    _assert_a_block_runs_twice(run)
