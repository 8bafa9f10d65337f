"""Run one case in this process, in plain PyTorch, and write what it took.

Nothing of budgetfit is imported: the loop below is what a user would write by hand, in
the order of applying rule P4. A process measures one case, because a recording starts
with an empty allocator. ``record.py`` starts this file; it is not meant to be typed.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.accuracy.case import CARDS, Case
from tests.accuracy.cases import case_named, recording_path
from tests.accuracy.event_list import EventList
from tests.accuracy.nvml import Nvml

FORMAT: Final = 1
NULL_DEVICE_NAME: Final = "NullCUDA"  # what the null driver calls its device
NULL_DRIVER: Final = "null driver"
GPU: Final = "gpu"
STEPS: Final = 3
AUTOCAST: Final = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
OPTIMIZERS: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "adamw_torch_fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "adamw_torch": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=1e-3, foreach=True),
}


def origin() -> str:
    """What stands behind the CUDA device; found out from it, never passed in."""
    if torch.cuda.get_device_properties(0).name == NULL_DEVICE_NAME:
        return NULL_DRIVER
    if os.environ.get("NULLCUDA_CC"):
        msg = "the null driver's settings are there, but the device is another one"
        raise RuntimeError(msg)
    return GPU


class Recorder:
    """The memory numbers of named phases, and on request every allocator event."""

    def __init__(self, *, with_events: bool) -> None:
        torch.cuda.init()
        self.setup: list[dict[str, Any]] = []
        self.steps: list[list[dict[str, Any]]] = []
        self.events = EventList() if with_events else None
        self.nvml: Nvml | None = None
        if origin() == GPU:
            self.nvml = Nvml(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        torch.cuda.synchronize()  # creates the context: nothing of ours is on it yet
        self.process_bytes_at_start = self._process_bytes()

    def _process_bytes(self) -> int | None:
        return None if self.nvml is None else self.nvml.process_bytes()

    def start_step(self) -> None:
        """The phases that follow belong to a new step."""
        self.steps.append([])

    @contextmanager
    def phase(self, name: str, micro_step: int = 0) -> Iterator[None]:
        """Measure the block under ``with``."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        where = {"phase": name, "micro_step": micro_step}
        (self.steps[-1] if self.steps else self.setup).append(
            {
                **where,
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
                "end_allocated_bytes": torch.cuda.memory_allocated(),
                "end_reserved_bytes": torch.cuda.memory_reserved(),
                "process_bytes": self._process_bytes(),
            }
        )
        if self.events is not None:
            self.events.collect({"step": len(self.steps) - 1, **where})


def answer_for_the_device() -> str:
    """Answer one question of transformers that the null driver cannot; say so.

    Without an attention mask, transformers reads from the position ids, on the device,
    whether several sequences are packed into one row. They are not, and a GPU answers
    None; the null driver's zeros would be read as "packed" and cost a large mask.
    """
    from transformers import masking_utils  # noqa: PLC0415

    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # noqa: ARG005
    return (
        "transformers' question whether sequences are packed was answered with no, "
        "as a GPU does: the null driver holds no position ids to read"
    )


def build_model(case: Case) -> nn.Module:
    """The case's model on the card, in training mode, recomputing what it asks for."""
    wanted = case.model
    if wanted.config:
        transformers = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        config = getattr(transformers, wanted.config)(**wanted.settings)
        build = partial(getattr(transformers, wanted.builder), config)
    else:
        plain_models = importlib.import_module("tests.accuracy.plain_models")
        build = partial(getattr(plain_models, wanted.builder), **wanted.settings)
    with torch.device("cuda"):
        model: nn.Module = build()
    if case.precision == "bf16":
        model.to(torch.bfloat16)
    model.train()
    if case.checkpointing == "recompute":
        recompute_every_block(model, wanted.blocks)
    return model


def recompute_every_block(model: nn.Module, blocks: tuple[str, ...]) -> None:
    """Non-reentrant checkpointing of every block: the model's own, or around it."""
    if not blocks:
        with warnings.catch_warnings():  # transformers 5.23 renamed the method
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(  # type: ignore[operator]
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        return
    for path in blocks:
        for block in model.get_submodule(path).children():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def build_batch(case: Case) -> dict[str, torch.Tensor]:
    """The batch, made on the card, each input a tensor of its own."""
    batch = {}
    for wanted in case.model.inputs:
        shape = (case.batch_size, *wanted.shape)
        if wanted.dtype == "int64":
            batch[wanted.name] = torch.randint(wanted.high, shape, device="cuda")
        else:
            dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
            batch[wanted.name] = torch.randn(shape, device="cuda", dtype=dtype)
    return batch


class Training:
    """A case's training program, as a user would write it by hand."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = build_model(case)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[case.optimizer](parameters)
        self.scaler = torch.amp.GradScaler(
            "cuda", enabled=case.precision == "fp16-mixed"
        )
        self.batch = build_batch(case)

    def step(self, recorder: Recorder) -> None:
        """One optimizer step, phase by phase, in the order of applying rule P4."""
        dtype = AUTOCAST.get(self.case.precision)
        accumulation = self.case.gradient_accumulation_steps
        for micro_step in range(accumulation):
            with recorder.phase("forward", micro_step):
                with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                    out = self.model(**self.batch)
                    loss = out.loss
                loss = loss / accumulation
            with recorder.phase("backward", micro_step):
                self.scaler.scale(loss).backward()
                del out, loss
        with recorder.phase("optimizer", accumulation - 1):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)


def describe_card(recorder: Recorder) -> dict[str, Any]:
    """The card as torch sees it, and which one it imitates, if any."""
    properties = torch.cuda.get_device_properties(0)
    imitated = os.environ.get("NULLCUDA_GPU")
    names = {card.null_driver: card.gpu for card in CARDS.values()}
    return {
        "name": properties.name,
        "imitates": names[imitated] if imitated else None,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "threads_per_sm": properties.max_threads_per_multi_processor,
        "total_bytes": properties.total_memory,
        "driver": None if recorder.nvml is None else recorder.nvml.driver_version,
    }


def describe_software() -> dict[str, Any]:
    """Versions, and the switches that decide which kernels run."""
    transformers = sys.modules.get("transformers")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn_enabled": torch.backends.cudnn.enabled,
        "cudnn_version": torch.backends.cudnn.version(),
        "transformers": None if transformers is None else transformers.__version__,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "sdpa": [
            name
            for name, enabled in (
                ("flash", torch.backends.cuda.flash_sdp_enabled()),
                ("efficient", torch.backends.cuda.mem_efficient_sdp_enabled()),
                ("math", torch.backends.cuda.math_sdp_enabled()),
                ("cudnn", torch.backends.cuda.cudnn_sdp_enabled()),
            )
            if enabled
        ],
    }


def refuse_a_wrong_card(case: Case) -> None:
    """Raise unless this process has the case's card, real or imitated."""
    card = CARDS[case.gpu]
    name = torch.cuda.get_device_properties(0).name
    if origin() == NULL_DRIVER:
        fits, name = os.environ.get("NULLCUDA_GPU") == card.null_driver, "null driver"
    else:
        fits = card.title_part in name
    if not fits:
        msg = f"{case.name} is for {case.gpu}, but this process runs on {name}"
        raise RuntimeError(msg)


def choose_cudnn(*, enabled: bool) -> None:
    """Switch cuDNN on or off everywhere, attention included."""
    if enabled and origin() == NULL_DRIVER:
        msg = "cuDNN does not run on the null driver: its workspaces are a GPU's"
        raise RuntimeError(msg)
    torch.backends.cudnn.enabled = enabled
    torch.backends.cuda.enable_cudnn_sdp(enabled)


def measure(case: Case, *, with_events: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recording of a case, and its event list (empty unless asked for)."""
    refuse_a_wrong_card(case)
    notes = []
    if origin() == NULL_DRIVER:
        notes.append("made without a GPU, by the null driver: not a GPU measurement")
        if case.model.config:
            notes.append(answer_for_the_device())
        if case.model.note:
            notes.append(case.model.note)
    recorder = Recorder(with_events=with_events)
    with recorder.phase("setup"):
        training = Training(case)
    for _ in range(STEPS):
        recorder.start_step()
        training.step(recorder)
    weights = list(training.model.parameters())
    config = getattr(training.model, "config", None)
    recording = {
        "format": FORMAT,
        "name": case.name,
        "origin": origin(),
        "date": datetime.now(UTC).date().isoformat(),
        "card": describe_card(recorder),
        "software": describe_software(),
        "case": case.as_dict(),
        "parameter_count": sum(weight.numel() for weight in weights),
        "parameter_bytes": sum(weight.nbytes for weight in weights),
        "attention": getattr(config, "_attn_implementation", None),
        "alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "process_bytes_at_start": recorder.process_bytes_at_start,
        "setup": recorder.setup,
        "steps": recorder.steps,
        "notes": notes,
    }
    return recording, recorder.events.as_dict() if recorder.events else {}


def main() -> int:
    """Measure the case named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--cudnn", choices=("on", "off"), default="off")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--events", type=Path)
    options = parser.parse_args()
    choose_cudnn(enabled=options.cudnn == "on")
    case = case_named(options.name)
    recording, events = measure(case, with_events=options.events is not None)
    path = recording_path(recording, options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")
    if options.events is not None:
        options.events.mkdir(parents=True, exist_ok=True)
        target = options.events / path.name
        text = json.dumps({**recording, "events": events}, separators=(",", ":"))
        target.write_text(text + "\n", encoding="utf-8")
    peak = max(p["peak_allocated_bytes"] for step in recording["steps"] for p in step)
    reserved = max(p["peak_reserved_bytes"] for s in recording["steps"] for p in s)
    sys.stdout.write(
        f"{case.name}: {recording['origin']}, peak allocated {peak:,}, "
        f"reserved {reserved:,} bytes\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
