"""Lightning: export a plan as ``Trainer`` arguments and a callback for the rest."""

from importlib.util import find_spec
from string import Template
from typing import Any, Final

import torch
from torch import nn

from budgetfit.applying.sharding import wrap
from budgetfit.core.parallelism import BACKENDS, Parallelism
from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.integrations.exports.prepared_model import PreparedModel, prepare
from budgetfit.integrations.exports.ranks import refuse_several_gpus
from budgetfit.integrations.optional_imports import import_attribute
from budgetfit.integrations.source_code.model_loading import load_model_text
from budgetfit.integrations.source_code.plain_torch_ranks import ddp_settings
from budgetfit.integrations.source_code.python_source import (
    import_block,
    keyword_lines,
    plan_summary_lines,
    refuse_optimizer_in_backward,
    to_source,
)

_PRECISIONS: Final = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


def trainer_arguments(plan: Plan) -> dict[str, Any]:
    """Return arguments for Lightning's ``Trainer``: one process for each GPU.

    Without autocast the precision is ``32-true``, which does not change dtypes: pure
    bf16 and tf32 are set by the callback.

    A plan with FSDP2 needs the callback's ``shard`` in ``configure_model``.

    Raises:
        InputError: If the plan's optimizer steps inside the backward pass, DDP reduces
            gradients in each micro-batch, FSDP2 trains in fp16, or DeepSpeed trains.
    """
    refuse_optimizer_in_backward(plan, "Lightning")
    parallelism = plan.recipe.parallelism
    several: dict[str, Any] = {"devices": 1}
    if parallelism is not None:
        reduces_each = parallelism.engine == "ddp" and parallelism.sync_each_batch
        if parallelism.engine == "deepspeed" or reduces_each:
            refuse_several_gpus(plan, "Lightning")
        scaled = find_precision(plan.recipe.precision).grad_scaler
        if parallelism.engine == "fsdp2" and scaled:
            refuse_several_gpus(plan, "Lightning: it scales no loss of fp16 there")
        name, settings = _strategy(parallelism)
        several = {
            "devices": parallelism.gpus // parallelism.nodes,
            "num_nodes": parallelism.nodes,
            "strategy": import_attribute(f"{_home()}.strategies", name)(**settings),
        }
    return {
        **several,
        "precision": _PRECISIONS.get(_autocast(plan) or "", "32-true"),
        "accumulate_grad_batches": plan.recipe.gradient_accumulation_steps,
    }


def _strategy(parallelism: Parallelism) -> tuple[str, dict[str, Any]]:
    """Return the class of Lightning's strategy, and its arguments."""
    if parallelism.engine == "ddp":
        return "DDPStrategy", ddp_settings(parallelism)
    # Offloaded gradients are clipped to a norm that ranks add up in host memory.
    offloaded = {"process_group_backend": BACKENDS} if parallelism.cpu_offload else {}
    return "ModelParallelStrategy", {
        "data_parallel_size": parallelism.gpus,
        "tensor_parallel_size": 1,
        **offloaded,
    }


def _autocast(plan: Plan) -> str | None:
    """Return the dtype of autocast; None too where FSDP2's policy takes its place."""
    parallelism = plan.recipe.parallelism
    if parallelism is not None and parallelism.param_dtype is not None:
        return None
    return find_precision(plan.recipe.precision).autocast


def plan_callback(plan: Plan) -> Any:
    """Return a callback that prepares the planned model when a fit begins.

    The planned model may be the LightningModule or any module in it. It is restored
    when the fit ends, also by an error. A model that FSDP2 shards is prepared by
    ``shard``, and stays sharded.

    Raises:
        InputError: If Lightning is not installed.
    """
    base = import_attribute(_home(), "Callback")
    return type("PlanCallback", (_PlanHooks, base), {})(plan)


def _home() -> str:
    return "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning"


class _PlanHooks:
    """The hooks of Lightning's callback."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._prepared: PreparedModel | None = None
        self._sharded: nn.Module | None = None  # the planned model

    def shard(self, module: nn.Module) -> None:
        """Apply the plan and shard the model: call it in ``configure_model``.

        Lightning calls that once for each of its loops; the first shards. Weights must
        be equal on all ranks.
        """
        parallelism = self._plan.recipe.parallelism
        if parallelism is None or parallelism.engine != "fsdp2":
            return
        if self._sharded is not None:
            return
        self._prepared = prepare(self._plan, module)
        mesh: Any = module
        device = torch.device(mesh.device_mesh.device_type)
        model = self._prepared.model
        wrap(model, self._plan.model.blocks, parallelism, device)
        self._sharded = model

    def on_fit_start(self, _: object, pl_module: nn.Module) -> None:
        """Apply checkpointing, loss and dtypes, after the Trainer's own setup."""
        if self._sharded is None:
            self._undo()
            self._prepared = prepare(self._plan, pl_module)
        elif self._prepared is None:  # ``shard`` prepared the first fit
            self._prepared = PreparedModel(self._plan, self._sharded)

    def on_sanity_check_end(self, *_: object) -> None:
        """Empty the cache before training begins."""
        # Lightning has validated two batches by now. Optimizer states would be
        # allocated in the large blocks that this has left in the cache, which could
        # then never be freed.
        torch.cuda.empty_cache()  # no-op without CUDA

    def on_after_backward(self, *_: object) -> None:
        """Empty the cache after what compiled, before optimizer states fill it."""
        if self._prepared is not None:
            self._prepared.after_backward()

    def on_fit_end(self, *_: object) -> None:
        """Restore the model."""
        self._undo()

    on_exception = on_fit_end

    def _undo(self) -> None:
        if self._prepared is not None:
            self._prepared.undo()
            self._prepared = None


_TEXT: Final = Template('''\
"""$about
"""

$imports
${constants}plan = budgetfit.Plan.load($plan)
callback = plan.lightning_callback()  # recomputes what is planned
BATCH_SIZE = $batch_size  # for your DataLoader


$loading

def make_trainer(**options):
    """Return a Trainer that trains the planned model as planned.

    Your LightningModule has it from load_model(), and its configure_optimizers is
    ``return plan.make_optimizer(self.parameters(), lr=5e-5)``.$sharding
    """
    return lightning.Trainer(
$arguments        callbacks=[callback],
        **options,
    )
''')


def export_text(plan: Plan, plan_file: str) -> str:
    """Return Python source with a function that makes the Trainer."""
    loading = load_model_text(plan)
    return _TEXT.substitute(
        imports=import_block(
            {*loading.modules, "budgetfit", "lightning"}, loading.names
        ),
        constants=loading.constants,
        loading=loading.code,
        about="\n".join(plan_summary_lines(plan, "A Lightning Trainer")),
        plan=to_source(plan_file),
        batch_size=plan.recipe.batch_size,
        sharding=_sharding_lines(plan.recipe),
        arguments=_argument_lines(plan),
    )


def _sharding_lines(recipe: Recipe) -> str:
    """Return what FSDP2 asks of the LightningModule, for a docstring."""
    parallelism = recipe.parallelism
    if parallelism is None or parallelism.engine != "fsdp2":
        return ""
    lines = ["Its configure_model is ``callback.shard(self)``."]
    if recipe.gradient_accumulation_steps > 1 and not parallelism.sync_each_batch:
        lines.append("Lightning reduces gradients in each micro-batch: that takes less")
        lines.append("memory than planned, and more time.")
    return "".join(f"\n    {line}" for line in lines)


def _argument_lines(plan: Plan) -> str:
    """Return the arguments as source; the strategy is an object that is made there."""
    arguments, parallelism = trainer_arguments(plan), plan.recipe.parallelism
    if parallelism is None:
        return keyword_lines(arguments)
    name, settings = _strategy(parallelism)
    given = ", ".join(f"{name}={to_source(value)}" for name, value in settings.items())
    made = f"lightning.pytorch.strategies.{name}({given})"
    lines = keyword_lines({**arguments, "strategy": None})
    return lines.replace("strategy=None", f"strategy={made}")
