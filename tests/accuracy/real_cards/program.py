"""The program of the runs on a real T4, traced: ``t4_runs.json`` says it in words."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from budgetfit.core.step_trace import StepTrace
from budgetfit.inputs.arguments import Arguments
from budgetfit.traces.depth_extrapolator import DepthChecks, DepthExtrapolator
from budgetfit.traces.quantized_loading import Loading
from budgetfit.traces.tracer import Program, Tracer
from budgetfit.tracing.fake.shortened_model import Shortening
from budgetfit.tracing.recording.raw_trace import RawTrace
from budgetfit.tracing.recording.steady_state import append_steady_step
from budgetfit.tracing.recording.step_tracer import trace_step
from budgetfit.workload.workload import Workload
from tests.accuracy.real_cards.runs import CardRun
from tests.accuracy.training import recompute_every_block

RANK = 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """PyTorch's AdamW with what it takes on CUDA by default."""
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)


def workload_of(run: CardRun) -> Workload:
    """The run's model with adapters, and a batch."""
    config = transformers.AutoConfig.for_model(
        **run.config, max_position_embeddings=8192, dtype=torch.float16
    )
    config._attn_implementation = run.attention
    config.use_cache = False
    tokens = torch.zeros(2, run.length, dtype=torch.long)
    parsed = Arguments(
        model=config,
        gpu="t4",
        batch={"input_ids": tokens, "labels": tokens},
        precision="as-is",
        optimizer=adamw,
        method="lora" if run.quantization is None else "qlora",
        lora_r=RANK,
        lora_alpha=2 * RANK,
        target_modules=TARGETS,
        quantization=run.quantization,
        double_quantization=run.quantization != "nf4",
    ).parsed()
    model: Any = parsed.workload.model
    recompute_every_block(model, ())
    model.enable_input_require_grads()
    return parsed.workload


class HoldsOutputs:
    """A training loop whose function returns after the update, and then drops ``out``.

    What ``zero_grad`` at the start of the next step frees is freed here at the end of
    this one: nothing is allocated between.
    """

    def __init__(self, model: nn.Module, on_phase: Callable[[str], None]) -> None:
        self.model = model.train()
        self.on_phase = on_phase
        self.optimizer = adamw([p for p in model.parameters() if p.requires_grad])

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        """One step."""
        self.on_phase("forward")
        out = self.model(**batch)
        self.on_phase("backward")
        out.loss.backward()
        self.on_phase("optimizer")
        self.optimizer.step()
        del out
        self.optimizer.zero_grad(set_to_none=True)


class LoopTracer(Tracer):
    """Traces that loop instead of ``Run``."""

    def trace(
        self,
        program: Program,
        batch_size: int,
        short: Shortening | None = None,
        *,
        uniform: bool = False,
    ) -> RawTrace:
        """As ``Tracer.trace``."""
        del program, uniform
        raw = self._step(batch_size, short)
        append_steady_step(raw)
        return raw

    def first_forward(self, program: Program, batch_size: int) -> RawTrace:
        """As ``Tracer.first_forward``."""
        del program
        return self._step(batch_size, only_forward=True)

    def _step(
        self,
        batch_size: int,
        short: Shortening | None = None,
        *,
        only_forward: bool = False,
    ) -> RawTrace:
        workload = self.workload
        return trace_step(
            workload.model,
            HoldsOutputs,
            workload.batch,
            batch_size=batch_size,
            blocks=workload.blocks if short is None else short.short_blocks,
            target=workload.target,
            short=short,
            only_forward=only_forward,
        )


def trace_run(run: CardRun) -> StepTrace:
    """Trace the run's program at its batch size."""
    steps, model = trace_steps(run)
    return Loading(model).before(steps)


def trace_steps(run: CardRun) -> tuple[StepTrace, nn.Module]:
    """Trace the run's steps alone; also return the model, whose loading is missing."""
    tracer = LoopTracer(workload_of(run), lambda _: None)
    program = Program("as-is", own_checkpointing=True)
    with _attention_of(run):
        trace = DepthExtrapolator(DepthChecks()).trace(
            program, (run.batch_size,), tracer
        )
    if trace is None:
        raise RuntimeError(f"{run.model} has no equal blocks")
    return trace, tracer.workload.model


@contextmanager
def _attention_of(run: CardRun) -> Iterator[None]:
    """Grouped keys repeated before the memory-efficient kernel, where that is used."""
    if run.attention != "sdpa":
        yield
        return
    attention = partial(_repeated, functional.scaled_dot_product_attention)
    with (
        mock.patch.object(functional, "scaled_dot_product_attention", attention),
        sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
    ):
        yield


def _repeated(
    attention: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    if key.size(-3) != query.size(-3):
        groups = query.size(-3) // key.size(-3)
        key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
        kwargs.pop("enable_gqa", None)
    return attention(query, key, value, *args, **kwargs)
