"""Train two steps in a library's own loop and evaluate there: memory on this device.

    python -m tests.accuracy.evaluation_loops '{"case": "...", "loop": "trainer", ...}'

Started by ``evaluation.py``, with the exported settings as JSON; budgetfit is not
imported. Evaluates with one batch size after the other until memory runs out, each time
several batches and a smaller last one, and prints a JSON line with the peaks.
"""

# ruff: noqa: ARG002 - hooks of libraries that few processes import

import itertools
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from tests.accuracy.evaluation_cases import CASES, LORA_RANK
from tests.accuracy.loop_programs import one_word_tokenizer
from tests.accuracy.provenance import (
    answer_for_the_device,
    choose_cudnn,
    origin,
    weights_as_they_are,
)
from tests.accuracy.training import (
    AUTOCAST,
    OPTIMIZERS,
    Samples,
    build_batch,
    build_model,
    recompute_every_block,
    with_lora,
)
from tests.accuracy.well_formed import NULL_DRIVER

STEPS: Final = 2  # the first creates states, the second meets them
BATCHES: Final = 3  # of evaluation, and half a batch more
Batch = dict[str, torch.Tensor]


class Meter:
    """Peaks of the training and of each evaluation, under a limit of the device."""

    def __init__(self, limits: dict[str, int | None]) -> None:
        self._limits = limits
        self.rows: list[dict[str, Any]] = []
        self._samples = 0
        self._begin("training")

    def evaluation_begins(self, samples: int) -> None:
        """What follows is an evaluation with batches of so many samples."""
        if not self._samples and not self.rows:
            self._end(fits=True)
        self._samples = samples
        self._begin("evaluation")

    def evaluation_ends(self) -> None:
        """It went well; training may go on."""
        self._end(fits=True)
        self._samples = 0

    def ran_out(self) -> None:
        """What was going on did not fit."""
        self._end(fits=False)

    def _begin(self, what: str) -> None:
        limit = self._limits[what]
        total = torch.cuda.get_device_properties(0).total_memory
        share = 1.0 if limit is None else (limit + 0.5) / total
        torch.cuda.set_per_process_memory_fraction(share)
        if limit is not None and torch.cuda.memory_reserved() > limit:
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._retries = torch.cuda.memory_stats()["num_alloc_retries"]

    def _end(self, *, fits: bool) -> None:
        torch.cuda.synchronize()
        retries = torch.cuda.memory_stats()["num_alloc_retries"] - self._retries
        self.rows.append(
            {
                "samples": self._samples,  # 0: the training
                "fits": fits,
                "allocated_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "retries": retries,
            }
        )


class Task:
    """What the command asks for: a case, a loop and its settings."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.evaluated = CASES[asked["case"]]
        self.case = self.evaluated.case
        self.arguments: dict[str, Any] = asked["arguments"]
        self.batch_size: int = asked["batch_size"]
        self.accumulation: int = asked["gradient_accumulation_steps"]
        self.evaluation_batches: list[int] = asked["evaluation_batches"]
        self.rows = build_batch(self.case, 2)

    def training_data(self, epochs: int = 1) -> Samples:
        """As many samples as the steps take."""
        return Samples(self.rows, epochs * STEPS * self.batch_size * self.accumulation)

    def evaluation_data(self, samples: int) -> Samples:
        """Several batches and half a one."""
        return Samples(self.rows, evaluation_samples(samples))

    def model(self) -> nn.Module:
        """The model on the host, with its adapters, in the dtype of its weights."""
        with weights_as_they_are():
            model = build_model(self.case.model, "cpu")
        if self.case.precision == "bf16" or self.evaluated.lora:
            model.to(torch.bfloat16)
        if not self.evaluated.lora:
            return model
        return with_lora(model, r=LORA_RANK, lora_alpha=2 * LORA_RANK)

    def planned_model(self) -> nn.Module:
        """The same as the exports make it: blocks recomputed, generation caches off."""
        model = self.model().train()
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False) is True:
                config.use_cache = False
        if self.case.checkpointing == "recompute":
            recompute_every_block(model, self.case.model.blocks)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """As planned."""
        trained = [each for each in model.parameters() if each.requires_grad]
        return OPTIMIZERS[self.case.optimizer](trained)


def evaluation_samples(samples: int) -> int:
    """How many samples an evaluation with such batches has."""
    return BATCHES * samples + samples // 2


# transformers' Trainer and TRL's. ----------------------------------------------------


class _Metered(transformers.TrainerCallback):
    """Tells the meter of the evaluation that happens after the last training step."""

    def __init__(self, meter: Meter, samples: int) -> None:
        self._meter = meter
        self._samples = samples

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == args.max_steps:
            self._meter.evaluation_begins(self._samples)

    def on_evaluate(
        self, args: object, state: object, control: object, **_: object
    ) -> None:
        if self._samples:
            self._meter.evaluation_ends()
        self._samples = 0


def in_trainer(task: Task, meter: Meter) -> None:
    """``Trainer.train`` evaluates after the last step; then ``Trainer.evaluate``.

    With ``"metrics"`` asked for, a ``compute_metrics`` makes it gather predictions.
    """
    first, *larger = task.evaluation_batches
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(task, folder, _Metered(meter, first))
        if origin() == NULL_DRIVER:  # else it reads from the device how far to pad
            trainer.accelerator.pad_across_processes = lambda tensor, **_: tensor
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        for samples in larger:
            trainer.args.per_device_eval_batch_size = samples
            trainer.eval_dataset = _other_data(task, trainer, samples)
            meter.evaluation_begins(samples)
            trainer.evaluate()
            meter.evaluation_ends()


def _trainer(task: Task, folder: str, callback: Any) -> Any:
    arguments = {
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_steps": STEPS,
        "eval_strategy": "steps",
        "eval_steps": STEPS,
        **task.arguments,
        "output_dir": folder,
    }
    metrics = _no_metrics if task.asked["metrics"] else None
    samples = task.evaluation_batches[0]
    loop = task.asked["loop"]
    if loop == "trainer":
        return transformers.Trainer(
            model=task.model(),
            args=transformers.TrainingArguments(**arguments),
            train_dataset=task.training_data(),
            eval_dataset=task.evaluation_data(samples),
            compute_metrics=metrics,
            callbacks=[callback],
        )
    import trl

    make, settings = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
    }[loop]
    return make(
        model=task.model(),
        args=settings(**arguments),
        train_dataset=_texts(task, len(task.training_data())),
        eval_dataset=_texts(task, evaluation_samples(samples)),
        processing_class=one_word_tokenizer(),
        callbacks=[callback],
    )


def _no_metrics(prediction: Any) -> dict[str, float]:
    return {"samples": float(len(prediction.label_ids))}


def _other_data(task: Task, trainer: Any, samples: int) -> Any:
    """An evaluation set for other batches, prepared as the trainer prepares its own."""
    if task.asked["loop"] == "trainer":
        return task.evaluation_data(samples)
    rows = trainer.eval_dataset
    count = evaluation_samples(samples)
    return rows.select([number % len(rows) for number in range(count)])


def _texts(task: Task, count: int) -> Any:
    """Samples of the planned length, as text: for DPO half of it is the prompt."""
    import datasets

    datasets.disable_progress_bars()
    length = task.case.model.inputs[0].shape[0]
    if task.asked["loop"] == "sft":
        return datasets.Dataset.from_dict({"text": [" ".join(["w"] * length)] * count})
    half = " ".join(["w"] * (length // 2))
    return datasets.Dataset.from_dict(
        {name: [half] * count for name in ("prompt", "chosen", "rejected")}
    )


# Loops that users write. -------------------------------------------------------------


def in_accelerate(task: Task, meter: Meter) -> None:
    """The loop of docs/integrations.md, and evaluation as in transformers' examples."""
    from accelerate import Accelerator

    model = task.planned_model()
    optimizer = task.optimizer(model)
    loader = DataLoader(task.training_data(), batch_size=task.batch_size, shuffle=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=task.accumulation, **task.arguments
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    for samples in task.evaluation_batches:
        data = DataLoader(task.evaluation_data(samples), batch_size=samples)
        evaluation = accelerator.prepare(data)
        meter.evaluation_begins(samples)
        model.eval()
        losses = []
        for batch in evaluation:
            with torch.no_grad():
                outputs = model(**batch)
            loss = outputs.loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(samples)))
        torch.cat(losses).mean()
        meter.evaluation_ends()
        del outputs, batch


def in_own_loop(task: Task, meter: Meter) -> None:
    """Plain PyTorch with autocast, as the exported script trains."""
    model = task.planned_model().to("cuda")
    optimizer = task.optimizer(model)
    dtype = AUTOCAST.get(task.case.precision)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)

    def batches(data: Samples, samples: int) -> Iterator[Batch]:
        for batch in DataLoader(data, batch_size=samples):
            yield {name: tensor.to("cuda") for name, tensor in batch.items()}

    def autocast() -> torch.autocast:
        return torch.autocast("cuda", dtype=dtype, enabled=dtype is not None)

    micro_batches = batches(task.training_data(), task.batch_size)
    for _ in range(STEPS):
        for batch in itertools.islice(micro_batches, task.accumulation):
            with autocast():
                loss = model(**batch).loss / task.accumulation
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for samples in task.evaluation_batches:
        meter.evaluation_begins(samples)
        model.eval()
        total = torch.zeros((), device="cuda")
        with torch.no_grad():
            for batch in batches(task.evaluation_data(samples), samples):
                with autocast():
                    outputs = model(**batch)
                total += outputs.loss
        meter.evaluation_ends()
        del outputs, batch


def in_lightning(task: Task, meter: Meter) -> None:
    """``Trainer.fit``: an epoch of steps, then validation, for each batch size."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.planned_model()

        def training_step(self, batch: Batch, _: int) -> Any:
            return self.net(**batch).loss

        def validation_step(self, batch: Batch, _: int) -> None:
            self.log("loss", self.net(**batch).loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer(self)

        def val_dataloader(self) -> Any:
            samples = task.evaluation_batches[self.current_epoch]
            return DataLoader(task.evaluation_data(samples), batch_size=samples)

        def on_validation_epoch_start(self) -> None:
            if not self.trainer.sanity_checking:
                meter.evaluation_begins(task.evaluation_batches[self.current_epoch])

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                meter.evaluation_ends()

    as_planned = lightning.pytorch.callbacks.LambdaCallback(
        on_sanity_check_end=lambda *_: torch.cuda.empty_cache()
    )  # as plan.lightning_callback() does
    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(
            callbacks=[as_planned],
            max_epochs=len(task.evaluation_batches),
            reload_dataloaders_every_n_epochs=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **task.arguments,
        ).fit(Module(), DataLoader(task.training_data(), batch_size=task.batch_size))


LOOPS: Final[dict[str, Callable[[Task, Meter], None]]] = {
    "trainer": in_trainer,
    "sft": in_trainer,
    "dpo": in_trainer,
    "accelerate": in_accelerate,
    "lightning": in_lightning,
    "torch": in_own_loop,
}


def main() -> int:
    """Measure what the JSON on the command line asks for."""
    warnings.simplefilter("ignore")
    asked = json.loads(sys.argv[1])
    transformers.logging.set_verbosity_error()
    choose_cudnn(enabled=False)
    if origin() == NULL_DRIVER:
        answer_for_the_device()
    meter = Meter(asked["limits"])
    try:
        LOOPS[asked["loop"]](Task(asked), meter)
    except torch.OutOfMemoryError:
        meter.ran_out()
    result = {"origin": origin(), "torch": torch.__version__, "rows": meter.rows}
    sys.stdout.write(f"\n{json.dumps(result)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
