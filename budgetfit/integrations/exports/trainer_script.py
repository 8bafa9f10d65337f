"""Training scripts for transformers' ``Trainer`` and TRL's trainers, as source text."""

from collections.abc import Callable
from dataclasses import dataclass
from string import Template
from typing import Any, Final

from budgetfit.applying.run.num_items_in_batch import trainer_sums_losses
from budgetfit.core.plan import Plan
from budgetfit.errors import BudgetfitError
from budgetfit.integrations.exports.every_n_layers import trainer_checkpointing
from budgetfit.integrations.exports.ranks import (
    copied_gradients,
    dtype_lines,
    refuse_cut_loss,
)
from budgetfit.integrations.exports.trainer_arguments import (
    exported,
    known_fields,
    planned_arguments,
)
from budgetfit.integrations.source_code.model_loading import Loading, load_model_text
from budgetfit.integrations.source_code.plain_torch import planned_model
from budgetfit.integrations.source_code.plain_torch_loop import data_parts
from budgetfit.integrations.source_code.plain_torch_ranks import launch_line
from budgetfit.integrations.source_code.python_source import (
    escape_line,
    import_block,
    keyword_lines,
    plan_summary_lines,
    planned_loss,
    to_source,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptParts:
    """The parts of a trainer's script.

    Attributes:
        library: Package that its classes are imported from.
        extra: Fields of the arguments in addition to ``TrainingArguments``.
        settings: Values of a plan for these and others.
        columns: Of a text data set; empty where samples are tensors.
        cuts_loss: Whether the trainer itself chunks the loss.
    """

    what: str
    library: str
    trainer: str
    arguments: str
    extra: frozenset[str] = frozenset()
    settings: Callable[[Plan], dict[str, Any]] | None = None
    columns: str = ""
    cuts_loss: bool = False
    remarks: tuple[str, ...] = ()


_TEXT: Final = Template('''\
"""$about
"""

$imports$constants

$loading

def make_trainer(model, train_dataset, $tokenizer**options):
    """Return $article $trainer of the planned model, which trains as planned."""
    args = $arguments_class(
        output_dir="out",
$arguments    )
$before    return $trainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
$more        **options,
    )


$main''')

_MEANS: Final = Template("""\
    # Its losses are means; without this the Trainer adds up those of an update.
    $own.accepts_loss_kwargs = False
""")

_RANDOM: Final = Template("""\
BATCH_SIZE = 1  # of the random batches below


$batches

if __name__ == "__main__":
    model = load_model()
    # REPLACE by your own data set: random samples of the planned shape.
    samples = [
        {name: tensor[0] for name, tensor in batch.items()}
        for batch in itertools.islice(batches(model), $count)
    ]
    make_trainer(model, samples).train()
""")

_TEXTS: Final = Template("""\
if __name__ == "__main__":
    # REPLACE by your own data set, with $columns.
    texts = load_dataset("json", data_files="train.jsonl", split="train")
    $made = $auto.from_pretrained($name)
    make_trainer(load_model(), texts, $made).train()
""")
_STEPS: Final = 3  # max_steps of the script


def program_text(plan: Plan, plan_file: str, program: ScriptParts) -> str:
    """Return the script as Python source.

    It needs budgetfit only where the trainer's own arguments cannot express the plan.

    Raises:
        InputError: If the trainer has no such optimizer, or cannot cut the loss.
    """
    if not program.cuts_loss:
        refuse_cut_loss(plan, f"the {program.trainer}")
    overrides, optimizer = exported(plan)
    plain = None
    if not optimizer and plan.recipe.parallelism is None:
        plain = trainer_checkpointing(plan, cuts_loss=program.cuts_loss)
    shown = plan if plain is None else plain.plan
    arguments = planned_arguments(
        shown,
        known_fields() | program.extra,
        {**(program.settings(shown) if program.settings else {}), **overrides},
        0 if plain is None else plain.every,
    )
    loading = load_model_text(shown)
    constants, callback = loading.constants, ""
    if plain is None:
        constants += f"plan = budgetfit.Plan.load({to_source(plan_file)})\n"
        callback = (
            "        # What no argument says: blocks, losses in parts, dtypes.\n"
            "        callbacks=[plan.trainer_callback()],\n"
        )
    before = ""
    if program.trainer == "Trainer" and _sums_losses(shown):
        own = "model" if shown.adapter is None else "model.get_base_model()"
        before = _MEANS.substitute(own=own)
    tokens = "        processing_class=processing_class,\n" if program.columns else ""
    remarks = [
        *program.remarks,
        *_launch(plan),
        *_own_loss(plan, program),
        *([plain.remark] if plain and plain.remark else []),
    ]
    return _TEXT.substitute(
        about="\n".join(
            [*plan_summary_lines(shown, program.what), *map(escape_line, remarks)]
        ),
        imports=_imports(shown, program, loading, needs_plan=plain is None),
        constants=f"\n{constants}" if constants else "",
        loading=loading.code,
        tokenizer="processing_class, " if program.columns else "",
        before=before,
        article="an" if program.trainer.startswith("S") else "a",
        trainer=program.trainer,
        arguments_class=program.arguments,
        arguments=keyword_lines(arguments),
        more=f"{tokens}{callback}{optimizer}",
        main=_main(shown, program, loading),
    )


def _sums_losses(plan: Plan) -> bool:
    """Whether the Trainer would add up losses that are means."""
    # False where the model cannot be built to be asked.
    recipe = plan.recipe
    several = recipe.effective_batch_size > recipe.batch_size
    if not several or "labels" not in plan.model.batch:
        return False
    try:
        model: Any = planned_model(plan)
    except (BudgetfitError, OSError):
        return False
    return model is not None and trainer_sums_losses(model)


def _own_loss(plan: Plan, program: ScriptParts) -> list[str]:
    """Say how a trainer gets a loss that the model does not return."""
    if not planned_loss(plan):
        return []
    return [
        f"REPLACE {program.trainer} by a class whose compute_loss(model, inputs, ...)",
        "returns that loss: the model has none of its own.",
    ]


def _launch(plan: Plan) -> list[str]:
    parallelism = plan.recipe.parallelism
    if parallelism is None:
        return []
    return [launch_line(parallelism), *dtype_lines(plan), *copied_gradients(plan)]


def _processing(plan: Plan) -> tuple[str, str]:
    """Return the class that prepares samples, and a name for it."""
    if "pixel_values" in plan.model.batch:
        return "AutoProcessor", "processor"
    return "AutoTokenizer", "tokenizer"


def _imports(
    plan: Plan, program: ScriptParts, loading: Loading, *, needs_plan: bool
) -> str:
    names = [
        (program.library, program.trainer),
        (program.library, program.arguments),
        *loading.names,
    ]
    modules = set(loading.modules)
    if program.columns:
        auto, _ = _processing(plan)
        names += [("datasets", "load_dataset"), ("transformers", auto)]
    else:
        modules |= {"itertools", "torch"}
    if needs_plan:
        modules.add("budgetfit")
    return import_block(modules, names)


def _main(plan: Plan, program: ScriptParts, loading: Loading) -> str:
    if program.columns:
        name = "MODEL" if loading.from_hub else '"REPLACE by its folder"'
        auto, variable = _processing(plan)
        columns = program.columns
        if auto == "AutoProcessor":
            columns = '"images" and "messages"'
        return _TEXTS.substitute(columns=columns, name=name, auto=auto, made=variable)
    made = data_parts(plan.model)
    batches = "\n\n".join(part.code for part in made)
    count = _STEPS * plan.recipe.effective_batch_size
    return _RANDOM.substitute(batches=batches, count=count)
