"""Train in a loop as its library documents it: peak memory on this device.

    python -m tests.accuracy.loop_programs NAME...

Started by ``loops.py``; budgetfit is not imported. Each case of ``loop_cases.py``
trains in a process of its own; a JSON line is printed for each.
"""

# ruff: noqa: ARG002, PLW2901 - loops as users write them, and hooks of libraries that few processes import

import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch.optim.optimizer import ParamsT
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tests.accuracy.case import Case
from tests.accuracy.loop_cases import CASES, LORA_RANK, STEPS, LoopCase
from tests.accuracy.training import (
    AUTOCAST,
    OPTIMIZERS,
    Samples,
    build_batch,
    build_model,
    recompute_every_block,
    with_lora,
)

EVALUATED_AFTER: Final = 3
EVALUATED_BATCHES: Final = 3
DRAWN_ROWS: Final = 4
TEXTS: Final = 2  # in a packed row
Batch = dict[str, torch.Tensor]


class Task:
    """A case's model, data and optimizer."""

    def __init__(self, wanted: LoopCase) -> None:
        self.wanted, self.case = wanted, wanted.case
        self.settings = dict(wanted.settings)
        self.accumulation = self.case.gradient_accumulation_steps
        self.max_grad_norm = self.settings.get("max_grad_norm")
        self.evaluates = self.settings.get("evaluation_batch_size", 0)

    def training_data(self) -> Samples:
        """As many samples as the steps take."""
        count = STEPS * self.case.batch_size * self.accumulation
        return Samples(build_batch(self.case, DRAWN_ROWS), count)

    def evaluation_data(self) -> Samples:
        """A few batches."""
        count = EVALUATED_BATCHES * self.evaluates
        return Samples(build_batch(self.case, DRAWN_ROWS), count)

    def loader(self) -> DataLoader[Batch]:
        """The training batches."""
        return DataLoader(self.training_data(), batch_size=self.case.batch_size)

    def evaluation_loader(self) -> DataLoader[Batch]:
        """The evaluation batches."""
        return DataLoader(self.evaluation_data(), batch_size=self.evaluates)

    def model(self) -> nn.Module:
        """The model on the host."""
        from transformers import initialization

        if self.wanted.liger:
            use_liger(self.case)
        with initialization.no_init_weights():
            model = build_model(self.case.model, "cpu")
        if self.case.precision == "bf16" or self.wanted.saved_modules:
            model.to(torch.bfloat16)
        if self.wanted.saved_modules:
            saved = list(self.wanted.saved_modules)
            model = with_lora(model, r=LORA_RANK, modules_to_save=saved)
        if self.case.checkpointing == "recompute":
            recompute_every_block(model, self.case.model.blocks)
        return model.train()

    def optimizer(self, parameters: ParamsT) -> torch.optim.Optimizer:
        """The case's, over what is trained."""
        trained = [each for each in parameters if each.requires_grad]
        return OPTIMIZERS[self.case.optimizer](trained)

    def average(self, model: nn.Module) -> AveragedModel | None:
        """A second copy of the weights, where asked for."""
        if not self.settings.get("ema"):
            return None
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))


def use_liger(case: Case) -> None:
    """Replace the model's classes by Liger's, as ``AutoLigerKernelForCausalLM``."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel

    _apply_liger_kernel(getattr(transformers, case.model.config)().model_type)


# Loops that users write. -------------------------------------------------------------


def in_plain_loop(task: Task) -> None:
    """PyTorch's tutorials: the outputs live until the next ones."""
    model = task.model().to("cuda")
    average = task.average(model)
    optimizer = task.optimizer(model.parameters())
    dtype = AUTOCAST.get(task.case.precision)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    accumulation = task.accumulation
    for number, batch in enumerate(task.loader(), start=1):
        batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            outputs = model(**batch)
            loss = outputs.loss
        if accumulation > 1:
            loss = loss / accumulation
        scaler.scale(loss).backward()
        if number % accumulation:
            continue
        if task.max_grad_norm:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        if average is not None:
            average.update_parameters(model)
        optimizer.zero_grad(set_to_none=task.settings.get("set_to_none", True))
        if task.evaluates and number == EVALUATED_AFTER * accumulation:
            plain_evaluation(task, model, dtype)


def plain_evaluation(task: Task, model: nn.Module, dtype: Any) -> None:
    """An evaluation as in PyTorch's tutorials, in a function of its own."""
    model.eval()
    total = torch.zeros((), device="cuda")
    with torch.no_grad():
        for batch in task.evaluation_loader():
            batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
            with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                outputs = model(**batch)
            total += outputs.loss
    model.train()


def in_accelerate(task: Task) -> None:
    """The loop of accelerate's quicktour."""
    from accelerate import Accelerator

    dtype = AUTOCAST.get(task.case.precision)
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "no")
    accelerator = Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=task.accumulation
    )
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, task.loader())
    steps = 0
    for batch in loader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            if task.max_grad_norm and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), task.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=task.settings.get("set_to_none", True))
        steps += accelerator.sync_gradients
        if task.evaluates and steps == EVALUATED_AFTER:
            accelerate_evaluation(task, accelerator, model)


def accelerate_evaluation(task: Task, accelerator: Any, model: Any) -> None:
    """An evaluation as in transformers' examples without its Trainer."""
    loader = accelerator.prepare(task.evaluation_loader())
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        loss = outputs.loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(task.evaluates)))
    torch.cat(losses).mean()
    model.train()


# transformers' Trainer and TRL's. ----------------------------------------------------


class _Average(transformers.TrainerCallback):
    """Lets a second copy of the weights follow."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._average: AveragedModel | None = None

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self._average = self._task.average(model)

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        if self._average is not None:
            self._average.update_parameters(model)


def _arguments(task: Task, folder: str) -> dict[str, Any]:
    dtype = AUTOCAST.get(task.case.precision)
    found: dict[str, Any] = {
        "output_dir": folder,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_steps": STEPS,
        "per_device_train_batch_size": task.case.batch_size,
        "gradient_accumulation_steps": task.accumulation,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "gradient_checkpointing": False,  # done as the case says
        "use_liger_kernel": task.settings.get("use_liger_kernel", False),
    }
    if task.evaluates:
        found["per_device_eval_batch_size"] = task.evaluates
        found["eval_strategy"] = "steps"
        found["eval_steps"] = EVALUATED_AFTER
    return found


def in_trainer(task: Task) -> None:
    """transformers' Trainer at its defaults."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=task.model(),
            args=transformers.TrainingArguments(**_arguments(task, folder)),
            train_dataset=task.training_data(),
            eval_dataset=task.evaluation_data() if task.evaluates else None,
            callbacks=[_Average(task)],
        )
        trainer.accelerator.pad_across_processes = lambda tensor, **_: tensor
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def in_sft_trainer(task: Task) -> None:
    """TRL's SFTTrainer at its defaults; every token counts in the loss."""
    import datasets
    import trl

    datasets.disable_progress_bars()
    length = task.case.model.inputs[0].shape[0]
    packing = task.settings.get("packing", False)
    if packing:
        length //= TEXTS
    words = " ".join(["w"] * (length - 1))  # and the end of the text
    texts = len(task.training_data()) * (TEXTS if packing else 1)
    answer_for_the_masks()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=task.model(),
            args=trl.SFTConfig(
                **_arguments(task, folder),
                packing=packing,
                max_length=task.case.model.inputs[0].shape[0],
            ),
            train_dataset=datasets.Dataset.from_dict({"text": [words] * texts}),
            processing_class=one_word_tokenizer(),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def answer_for_the_masks() -> None:
    """Select all rows by masks on the null driver, which holds no values to count.

    As PyTorch does: ``nonzero``, then an index for each dimension of the mask.
    """
    original = torch.Tensor.__getitem__

    def select(self: torch.Tensor, index: Any) -> Any:
        if not (isinstance(index, torch.Tensor) and index.dtype == torch.bool):
            return original(self, index)
        index.nonzero()
        rows = torch.empty(
            (index.numel(), index.dim()), dtype=torch.int64, device=index.device
        )
        return original(self, rows.unbind(1))

    torch.Tensor.__getitem__ = select  # type: ignore[assignment, method-assign]


def one_word_tokenizer() -> Any:
    """Made here; nothing is downloaded."""
    import tokenizers

    words = {"<end>": 0, "<none>": 1, "w": 2}
    level = tokenizers.models.WordLevel(words, unk_token="<none>")
    built = tokenizers.Tokenizer(level)
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, eos_token="<end>", pad_token="<end>", unk_token="<none>"
    )


# Lightning. --------------------------------------------------------------------------


def in_lightning(task: Task) -> None:
    """``Trainer.fit`` of a module as in Lightning's documentation."""
    import lightning

    dtype = AUTOCAST.get(task.case.precision)
    precision = {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model()

        def training_step(self, batch: Batch, _: int) -> Any:
            return self.net(**batch).loss

        def validation_step(self, batch: Batch, _: int) -> None:
            self.log("loss", self.net(**batch).loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer(self.parameters())

    class Average(lightning.Callback):
        average: AveragedModel | None = None

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.average = task.average(pl_module.net)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if self.average is not None:
                self.average.update_parameters(pl_module.net)

    micro_batches = EVALUATED_AFTER * task.accumulation
    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(
            callbacks=[Average()],
            max_epochs=1,
            accumulate_grad_batches=task.accumulation,
            gradient_clip_val=task.max_grad_norm,
            val_check_interval=micro_batches if task.evaluates else None,
            num_sanity_val_steps=0,
            precision="32-true" if dtype is None else precision[dtype],  # type: ignore[arg-type]
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(
            Module(),
            task.loader(),
            task.evaluation_loader() if task.evaluates else None,
        )


LOOPS: Final[dict[str, Callable[[Task], None]]] = {
    "plain": in_plain_loop,
    "trainer": in_trainer,
    "sft": in_sft_trainer,
    "accelerate": in_accelerate,
    "lightning": in_lightning,
}


def measure(wanted: LoopCase) -> dict[str, Any]:
    """Train a case; return its peaks."""
    from tests.accuracy.provenance import (
        answer_for_the_device,
        choose_cudnn,
        describe_software,
        origin,
    )
    from tests.accuracy.well_formed import NULL_DRIVER

    choose_cudnn(enabled=False)
    if origin() == NULL_DRIVER and not dict(wanted.settings).get("packing"):
        answer_for_the_device()
    LOOPS[wanted.loop](Task(wanted))
    torch.cuda.synchronize()
    return {
        "name": wanted.name,
        "origin": origin(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "software": describe_software() | library_versions(),
    }


def library_versions() -> dict[str, str]:
    """Versions of the libraries whose loops train."""
    from importlib.metadata import version

    names = ("accelerate", "trl", "lightning", "peft", "liger-kernel", "triton")
    return {name: version(name) for name in names}


def _in_child(wanted: LoopCase) -> Iterator[str]:
    """Measure in a process of its own, forked before CUDA is used."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        status = 1
        try:
            with os.fdopen(writer, "w") as file:
                file.write(json.dumps(measure(wanted)))
            status = 0
        except BaseException:  # noqa: BLE001 - the parent goes on
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    if text:
        yield text


def main() -> int:
    """Measure the cases on the command line."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:]:
        for line in _in_child(CASES[name]):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
