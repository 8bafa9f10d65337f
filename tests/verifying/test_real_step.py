from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from budgetfit.applying.run.run import Run
from budgetfit.core.allocator.out_of_memory_message import is_out_of_memory
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError
from budgetfit.measuring import meters, real_step
from budgetfit.measuring.process_memory import ProcessMemory
from budgetfit.measuring.real_step import find_device, run_real_steps
from tests.applying.ranks.live_bytes import LiveBytes
from tests.applying.small_models import CHAIN, batch_for, make

MIB = 2**20


class Script:
    """A run whose phases hold the bytes that a script says, and a meter for them."""

    def __init__(
        self, peaks: dict[str, int], *, fails: BaseException | None = None
    ) -> None:
        self.peaks = peaks
        self.fails = fails
        self.live_bytes = 5
        self.peak_bytes = 0
        self.calls = 0
        self.undone = 0
        self.scale: Callable[[int], int] = lambda call: call
        self.on_phase: Callable[[str], None] = print

    def __call__(self, on_phase: Callable[[str], None]) -> "Script":
        self.on_phase = on_phase
        return self

    def step(self, batch: Any) -> None:
        self.calls += 1
        for phase in batch:
            self.on_phase(phase)
            self.peak_bytes = self.peaks[phase] * self.scale(self.calls)
            if self.fails is not None and self.calls == 4:
                raise self.fails

    def undo(self) -> None:
        self.undone += 1

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    @contextmanager
    def counting(self) -> Iterator["Script"]:
        yield self


def test_each_phases_peak_is_read_when_the_phase_ends() -> None:
    script = Script({"forward": 10, "backward": 30, "optimizer": 20})
    measured = run_real_steps(
        script,
        ("forward", "backward", "optimizer"),
        device="cpu",
        live_bytes=script.counting,
    )
    rows = [(row.step, row.phase, row.allocated_bytes) for row in measured.phases]
    assert rows == [
        (step, phase, peak * (step + 1))
        for step in range(3)
        for phase, peak in script.peaks.items()
    ]
    assert {row.reserved_bytes for row in measured.phases} == {-1}
    assert (measured.steps, len(measured.step_ms)) == (3, 3)
    assert script.undone == 1


def test_a_long_first_step_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    run_real_steps(Script({}), (), device="cpu", say=said.append)
    assert said == []
    monkeypatch.setattr(real_step, "LONG_STEP_S", 0)
    run_real_steps(Script({}), (), device="cpu", say=said.append)
    assert said == ["the first step took 0 s, and others follow"]


def test_of_several_micro_batches_the_largest_peak_counts() -> None:
    script = Script({"forward": 10})
    script.scale = lambda call: [5, 2, 4, 6, 3, 1][call - 1]
    measured = run_real_steps(
        script,
        ("forward",),
        steps=3,
        micro_steps=2,
        device="cpu",
        live_bytes=script.counting,
    )
    assert [row.allocated_bytes for row in measured.phases] == [50, 60, 30]


def test_out_of_memory_is_a_result() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2 GiB. If reserved but not used"
        " memory is large, try this.\nMore"
    )
    script = Script({"forward": 1, "backward": 2}, fails=error)
    measured = run_real_steps(
        script,
        ("forward", "backward"),
        steps=9,
        device="cpu",
        live_bytes=script.counting,
    )
    assert measured.out_of_memory == "CUDA out of memory. Tried to allocate 2 GiB."
    assert measured.steps == 3  # the fourth call failed in its forward
    last = measured.phases[-1]
    assert (last.step, last.phase, last.allocated_bytes) == (3, "forward", 4)
    assert script.undone == 1


def test_other_errors_are_errors_and_the_run_is_undone() -> None:
    script = Script({"forward": 1}, fails=RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_real_steps(script, ("forward",), steps=4, device="cpu")
    assert script.undone == 1


def test_words_for_too_little_memory_are_known() -> None:
    assert is_out_of_memory(RuntimeError("... CUBLAS_STATUS_ALLOC_FAILED when ..."))
    assert is_out_of_memory(RuntimeError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"))


def test_without_a_card_the_cpu_must_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match='or say device="cpu"'):
        find_device(None)
    assert find_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device(None).type == "cuda"


class Allocator:
    """Stands in for torch.cuda's counters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, self._noting(name))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * MIB)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 4 * MIB)
        monkeypatch.setattr(torch.cuda, "reset_peak_host_memory_stats", lambda: None)
        monkeypatch.setattr(torch.cuda, "host_memory_stats", dict)
        self.held = iter([7 * MIB, 9 * MIB, 8 * MIB])
        monkeypatch.setattr(meters, "process_memory", lambda _: self.process())

    def process(self) -> ProcessMemory:
        return ProcessMemory(
            held_bytes=next(self.held),
            reserved_bytes=4 * MIB,
            whole_card=False,
            driver="",
        )

    def _noting(self, name: str) -> Callable[..., None]:
        return lambda *_: self.log.append(name)


def test_on_cuda_the_allocators_peaks_and_the_process_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = Allocator(monkeypatch)
    monkeypatch.setattr(real_step, "device_name", lambda _: "A card")
    script = Script({"forward": 1, "optimizer": 1})
    measured = run_real_steps(script, ("forward", "optimizer"), device="cuda")
    assert measured.device_name == "A card"
    assert {(row.allocated_bytes, row.reserved_bytes) for row in measured.phases} == {
        (3 * MIB, 4 * MIB)
    }
    assert measured.process_bytes == 9 * MIB  # the most of the three steps
    assert measured.last_process is not None
    assert measured.last_process.outside_bytes == 4 * MIB  # of the last step
    (note,) = measured.notes
    assert note == "The process's memory was read from NVML for this process."
    # A fresh cache once; then each phase starts a peak, each step waits for the card.
    once = ["reset_peak_memory_stats"] * 2 + ["synchronize"]
    assert allocator.log == ["empty_cache", *once, *once, *once]


def planned_run(model: nn.Module, recipe: Recipe) -> Callable[..., Run]:
    def make_run(on_phase: Callable[[str], None]) -> Run:
        return Run(model, recipe, on_phase=on_phase)

    return make_run


def test_real_steps_on_the_cpu_show_what_recomputing_saves() -> None:
    name = "gpt2"
    peaks = []
    for segments in ((), (Segment(CHAIN[name][:3]), Segment(CHAIN[name][3:]))):
        model = make(name)
        recipe = Recipe(batch_size=4, segments=segments)
        measured = run_real_steps(
            planned_run(model, recipe),
            batch_for(name),
            device="cpu",
            live_bytes=LiveBytes,
        )
        assert measured.device_name
        phases = {(row.step, row.phase): row.allocated_bytes for row in measured.phases}
        assert len(phases) == 9
        assert phases[1, "backward"] == phases[2, "backward"]  # steady from the second
        # Adam's two states of each parameter exist from the first step's end on.
        states = sum(8 * item.numel() for item in model.parameters())
        assert phases[1, "forward"] - phases[0, "forward"] >= states
        peaks.append(phases[2, "forward"])
    assert peaks[1] < peaks[0]


def test_without_a_counter_live_bytes_are_said_to_be_unknown() -> None:
    measured = run_real_steps(Script({"forward": 1}), ("forward",), device="cpu")
    assert measured.phases == ()
    assert measured.notes == (
        "VRAM was not checked: these steps ran on the CPU.",
        "Live bytes were not counted.",
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_steps_on_a_card_are_measured_in_every_phase() -> None:
    model = make("gpt2")
    recipe = Recipe(batch_size=4, segments=(Segment(CHAIN["gpt2"][:3]),))

    def make_run(on_phase: Callable[[str], None]) -> Run:
        return Run(model, recipe, device="cuda", on_phase=on_phase)

    measured = run_real_steps(make_run, batch_for("gpt2"), device="cuda")
    assert len(measured.phases) == 9
    assert all(0 < row.allocated_bytes <= row.reserved_bytes for row in measured.phases)
    assert measured.process_bytes is not None
    assert measured.process_bytes > max(row.reserved_bytes for row in measured.phases)
