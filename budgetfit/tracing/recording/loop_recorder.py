"""Record a training loop that fetches its own batches: a library's, or a plain one.

Nothing tells when a phase of such a loop begins, so that is read off what happens: a
batch that is loaded, or the model's forward, begins a forward; an op of a backward pass
that accumulates gradients begins the backward; the first op after the last backward of
an update begins the optimizer's phase. What a step leaves alive and the next one frees
(outputs that are kept, gradients that are zeroed late) cannot be derived from one step:
all are run.
"""

import functools
from typing import Any
from unittest import mock

import torch

from budgetfit.tracing.recording.raw_trace import LoopRunner
from budgetfit.tracing.recording.step_recorder import EnoughError, StepRecorder
from budgetfit.tracing.recording.tensor_owners import log_optimizer_state, log_weights


class LoopRecorder:
    """Runs a loop until so many optimizer steps are recorded.

    ``micro_steps``: micro-batches in each.
    """

    def __init__(self, recorder: StepRecorder, steps: int, micro_steps: int) -> None:
        self._recorder = recorder
        self._steps, self._micro_steps = steps, micro_steps
        self._runner: LoopRunner | None = None
        self._in_backward = False

    def train(self, runner: LoopRunner, batch: Any) -> None:
        """Run the loop on batches of new tensors."""
        recorder = self._recorder
        self._runner = runner
        log_weights(recorder.fake, recorder.log, recorder.tracker)
        for copy in runner.copies:
            log_weights(copy, recorder.log)
        recorder.log.on_op = self._on_op
        begins = recorder.fake.register_forward_pre_hook(self._on_forward)
        engine = vars(torch.autograd)["_engine_run_backward"]
        run_backward = functools.partial(self._run_backward, engine)
        try:
            with mock.patch.object(
                torch.autograd, "_engine_run_backward", run_backward
            ):
                runner.run(lambda: self._load(batch))
        except EnoughError:
            pass
        finally:
            begins.remove()

    def _run_backward(self, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a backward pass of the loop; one in a forward leaves gradients."""
        # ``torch.autograd.grad``, as of a gradient penalty, accumulates none.
        before = self._in_backward
        self._in_backward = before or bool(kwargs.get("accumulate_grad"))
        try:
            return engine(*args, **kwargs)
        finally:
            self._in_backward = before

    def _load(self, batch: Any) -> Any:
        """Return a new batch on the device; end the loop after the last step."""
        recorder = self._recorder
        if recorder.phase.name != "forward":
            self._start_forward()
        return recorder.new_batch(batch)

    def _on_forward(self, *_: Any) -> None:
        if self._recorder.phase.name == "backward" and not self._in_backward:
            self._start_forward()

    def _start_forward(self) -> None:
        recorder = self._recorder
        before = recorder.phase.name
        if before == "backward":
            recorder.micro_step += 1
        elif before != "setup":
            assert self._runner is not None  # noqa: S101 - set by train
            log_optimizer_state(
                recorder.fake, self._runner.optimizer, recorder.log, recorder.tracker
            )
            if recorder.step + 1 == self._steps:
                recorder.end_phase()
                recorder.log.stop()
                raise EnoughError
            recorder.step, recorder.micro_step = recorder.step + 1, 0
        recorder.start_phase("forward")

    def _on_op(self) -> None:
        recorder = self._recorder
        phase, inside = recorder.phase.name, self._in_backward
        if phase == "forward" and inside:
            recorder.note_blocks()
            recorder.start_phase("backward")
        elif (
            phase == "backward"
            and not inside
            and recorder.micro_step + 1 == self._micro_steps
        ):
            recorder.start_phase("optimizer")
        recorder.tracker.on_backward_op()
