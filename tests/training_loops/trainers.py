"""transformers' Trainer, and TRL's for texts and for preferences.

Each takes its settings, a plan or None for the library alone, and a folder to write in.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from budgetfit.core.plan import Plan
from tests.models import seed
from tests.training_loops.families import collate
from tests.training_loops.own_loops import Trained, final_state
from tests.training_loops.settings import BATCH_SIZE, LEARNING_RATE, Settings


def with_trainer(settings: Settings, plan: Plan | None, folder: Path) -> Trained:
    """transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    def arguments(plan: Plan | None, **own: Any) -> Any:
        if plan is not None:
            own = plan.to_training_arguments(**own)
        return TrainingArguments(output_dir=str(folder), **own)

    data = {"data_collator": collate, "train_dataset": _samples(settings)}
    data["eval_dataset"] = settings.family.samples(4, seed=9)
    return _trained(Trainer, arguments, data, settings, plan, folder)


def with_sft(settings: Settings, plan: Plan | None, folder: Path) -> Trained:
    """TRL's SFTTrainer on texts of many lengths."""
    import trl

    from tests.integrations.tiny_training import word_tokenizer

    def arguments(plan: Plan | None, **own: Any) -> Any:
        own["max_length"] = 12  # cuts the longest
        if plan is not None:
            own = plan.to_sft_config(**own)
        else:
            own |= {"gradient_checkpointing": False}
            own.setdefault("bf16", False)
        return trl.SFTConfig(output_dir=str(folder), **own)

    texts = [_words(sample["input_ids"]) for sample in _samples(settings)]
    data = {
        "train_dataset": _table({"text": texts}),
        "eval_dataset": _table({"text": texts[:4]}),
        "processing_class": word_tokenizer(),
    }
    return _trained(trl.SFTTrainer, arguments, data, settings, plan, folder)


def with_dpo(settings: Settings, plan: Plan | None, folder: Path) -> Trained:
    """TRL's DPOTrainer, its settings those of ``export --to dpo``."""
    import trl

    from tests.integrations.tiny_training import word_tokenizer

    def arguments(plan: Plan | None, **own: Any) -> Any:
        own["per_device_train_batch_size"] = BATCH_SIZE // 2  # a sample is a pair
        own["precompute_ref_log_probs"] = True
        own["disable_dropout"] = False
        own["max_length"] = 20  # cuts the longest
        if plan is None:
            own |= {"gradient_checkpointing": False}
            own.setdefault("bf16", False)
            return trl.DPOConfig(output_dir=str(folder), **own)
        extra = {name: own.pop(name) for name in _ONLY_DPO}
        given = plan.to_training_arguments(**own) | extra
        return trl.DPOConfig(output_dir=str(folder), **given)

    texts = [_words(sample["input_ids"]) for sample in _samples(settings)]
    half = len(texts) // 2
    rows = {
        "prompt": texts[:half],
        "chosen": [f" {text}" for text in texts[half:]],
        "rejected": [f" {text}" for text in texts[1 : half + 1]],
    }
    data = {
        "train_dataset": _table(rows),
        "eval_dataset": _table({name: each[:4] for name, each in rows.items()}),
        "processing_class": word_tokenizer(),
    }
    return _trained(trl.DPOTrainer, arguments, data, settings, plan, folder)


_ONLY_DPO = ("precompute_ref_log_probs", "disable_dropout", "max_length")


def _trained(
    base: Any,
    arguments: Any,
    data: dict[str, Any],
    settings: Settings,
    plan: Plan | None,
    folder: Path,
) -> Trained:
    """Train with a Trainer; if settings say so, go on from its checkpoint with another.

    Args:
        base: The Trainer's class.
        arguments: Makes its arguments of a plan or None, and keywords.
        data: More of what the Trainer takes.
        settings: What is trained, and how.
        plan: None for the Trainer alone.
        folder: For checkpoints.
    """
    from transformers import PrinterCallback, TrainerCallback

    losses: list[float] = []

    class Recording(base):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    class Stops(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_training_stop = state.global_step == settings.halfway

    counts: Counter[str] = Counter()
    own = _own_arguments(settings, planned=plan is not None)
    checkpoint: str | None = None
    for number in range(1 + settings.has("resume")):
        model = settings.model(counts, number)
        callbacks = [] if plan is None else [plan.trainer_callback()]
        trainer = Recording(
            model=model, args=arguments(plan, **own), callbacks=callbacks, **data
        )
        trainer.remove_callback(PrinterCallback)
        if number == 0 and settings.has("resume"):
            trainer.add_callback(Stops)
        seed(5)
        trainer.train(resume_from_checkpoint=checkpoint)
        checkpoint = str(folder / f"checkpoint-{settings.halfway}")
    history = trainer.state.log_history  # of the first Trainer too
    losses += [row["eval_loss"] for row in history if "eval_loss" in row]
    return Trained(losses, final_state(model), sum(counts.values()))


def _own_arguments(settings: Settings, *, planned: bool) -> dict[str, Any]:
    """Return the user's own arguments; without a plan, also what a plan would say."""
    made: dict[str, Any] = {
        "max_steps": settings.updates,
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": settings.max_norm or 0.0,
        "lr_scheduler_type": "cosine" if settings.has("schedule") else "constant",
        "warmup_steps": 5 if settings.has("schedule") else 0,
        "eval_strategy": "steps" if settings.has("evaluate") else "no",
        "eval_steps": settings.evaluates_every,
        "save_strategy": "steps" if settings.has("resume") else "no",
        "save_steps": settings.halfway,
        "use_cpu": True,
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    if not planned:
        made |= {
            "per_device_train_batch_size": BATCH_SIZE,
            "gradient_accumulation_steps": settings.accumulation,
            "bf16": settings.has("bf16"),
            "optim": "adamw_torch",
        }
    return made


def _samples(settings: Settings) -> list[Any]:
    return settings.family.samples(settings.micro_batches * BATCH_SIZE)


def _words(ids: Tensor) -> str:
    return " ".join(f"w{number - 2}" for number in ids.tolist())


def _table(columns: dict[str, list[str]]) -> Any:
    import datasets

    return datasets.Dataset.from_dict(columns)
