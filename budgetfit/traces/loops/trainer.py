"""transformers' ``Trainer`` and TRL's ``SFTTrainer``, run as installed."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

from budgetfit.traces.loops.accelerate import prepared_loader, scale_as_on_cuda
from budgetfit.traces.loops.prepare import Prepared
from budgetfit.traces.loops.trl_kernels import trl_kernels_on_fakes

if TYPE_CHECKING:
    import torch


_STEPS = 1 << 20  # training ends before: ``load`` raises


@contextmanager
def _without_seeding() -> Iterator[None]:
    """Leave the process's generators, which other threads draw from, as they are."""
    trainer = importlib.import_module("transformers.trainer")
    with mock.patch.object(trainer, "set_seed", return_value=None):
        yield


class TrainerLoop:
    """``Trainer.train``, with the optimizer of the recipe."""

    def __init__(self, prepared: Prepared) -> None:
        self.copies = prepared.copies
        self._prepared = prepared
        self._micro_steps = prepared.recipe.gradient_accumulation_steps
        self._folder = tempfile.TemporaryDirectory()
        self._load: Callable[[], Any] = dict  # until ``run``
        with _without_seeding():
            self._trainer = (
                self._sft_trainer(prepared)
                if prepared.loop.kind == "sft"
                else self._plain_trainer(prepared)
            )
        scale_as_on_cuda(self._trainer.accelerator, prepared.precision)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The trainer's, once it has made it."""
        return self._trainer.optimizer

    def run(self, load: Callable[[], Any]) -> None:
        """Train on batches until ``load`` raises."""
        self._load = _loading_others(
            load, self._micro_steps, self._prepared.untraced_batches
        )
        is_sft = self._prepared.loop.kind == "sft"
        kernels = trl_kernels_on_fakes() if is_sft else nullcontext()
        with self._folder, kernels, _without_seeding():
            self._trainer.train()

    def _plain_trainer(self, prepared: Prepared) -> Any:
        import transformers  # noqa: PLC0415 - slow import

        return self._of(transformers.Trainer, prepared)(
            args=transformers.TrainingArguments(**self._arguments(prepared)),
            **self._settings(prepared),
        )

    def _sft_trainer(self, prepared: Prepared) -> Any:
        datasets: Any = importlib.import_module("datasets")
        trl: Any = importlib.import_module("trl")
        arguments = {
            **self._arguments(prepared),
            "gradient_checkpointing": False,  # the recipe's segments are applied
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "packing": prepared.loop.packing,
        }
        arguments.setdefault("bf16", False)
        return self._of(trl.SFTTrainer, prepared)(
            args=trl.SFTConfig(**arguments),
            train_dataset=datasets.Dataset.from_dict(
                {"input_ids": [[0, 0]], "labels": [[0, 0]]}
            ),
            processing_class=_tokenizer(),
            **self._settings(prepared),
        )

    def _of(self, library: type, prepared: Prepared) -> type:
        loop = self

        class Traced(library):  # type: ignore[misc]
            """Gets its batches and its optimizer from the trace."""

            optimizer: Any

            def get_train_dataloader(self) -> Any:
                return prepared_loader(self.accelerator, loop._load)

            def create_optimizer(self, *_: Any) -> Any:
                if self.optimizer is None:
                    self.optimizer = _grouped(
                        prepared, set(self.get_decay_parameter_names(self.model))
                    )
                return self.optimizer

        return Traced

    def _settings(self, prepared: Prepared) -> dict[str, Any]:
        from transformers import TrainerCallback  # noqa: PLC0415 - slow import

        class Average(TrainerCallback):
            """Updates the second copy of the weights."""

            def on_step_end(self, *_: Any, **__: Any) -> None:
                prepared.update_average()

        return {"model": prepared.model, "callbacks": [Average()]}

    def _arguments(self, prepared: Prepared) -> dict[str, Any]:
        autocast, recipe = prepared.precision.autocast, prepared.recipe
        given: dict[str, Any] = {
            "output_dir": self._folder.name,
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_strategy": "no",
            "max_steps": _STEPS,
            "per_device_train_batch_size": recipe.batch_size,
            "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        }
        if autocast is not None:
            given[autocast] = True
        if prepared.loop.max_grad_norm is not None:
            given["max_grad_norm"] = prepared.loop.max_grad_norm
        if prepared.loop.use_liger_kernel:
            given["use_liger_kernel"] = True
        return given


def _loading_others(
    load: Callable[[], Any], micro_steps: int, others: int
) -> Callable[[], Any]:
    """Load so many more batches with an update's first, and hold them with it."""
    # ``Trainer.get_batch_samples`` has the batches of all micro-batches in one list.
    loaded = 0

    def load_update() -> Any:
        nonlocal loaded
        first = loaded % micro_steps == 0
        loaded += 1
        batch = load()
        if not (first and others):
            return batch
        held = _Held(batch)
        held.others = [load() for _ in range(others)]
        return held

    return load_update


class _Held(dict[str, Any]):
    """A batch, and others that live as long."""

    others: list[Any]


def _grouped(prepared: Prepared, decayed: set[str]) -> torch.optim.Optimizer:
    """Return the recipe's optimizer with the Trainer's groups of parameters."""
    # Decayed and other parameters, as ``Trainer.create_optimizer`` makes them.
    named = [
        (name, parameter)
        for name, parameter in prepared.model.named_parameters()
        if parameter.requires_grad
    ]
    first = [parameter for name, parameter in named if name in decayed]
    second = [parameter for name, parameter in named if name not in decayed]
    made = prepared.make_optimizer([*first, *second])
    groups = made.param_groups
    if len(groups) == 1 and first and second:
        (group,) = groups
        made.param_groups = [{**group, "params": first}, {**group, "params": second}]
    return made


def _tokenizer() -> Any:
    """Return a tokenizer of one word: TRL wants one, and nothing is tokenised."""
    import tokenizers  # noqa: PLC0415 - slow import
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - slow import

    level = tokenizers.models.WordLevel({"<end>": 0}, unk_token="<end>")  # noqa: S106
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(level),
        eos_token="<end>",  # noqa: S106
        pad_token="<end>",  # noqa: S106
    )
