"""Choose the ways to use several GPUs that can train a model and may fit."""

from torch import nn

from budgetfit.applying.quantized_layers.stored_weights import for_quantized
from budgetfit.applying.sharding import for_batch_norms
from budgetfit.core.budget import Budget
from budgetfit.core.parallelism import Parallelism
from budgetfit.gpus.nccl_memory import nccl_memory


def worth_tracing(
    candidates: tuple[Parallelism, ...], model: nn.Module, budget: Budget
) -> tuple[Parallelism, ...]:
    """Return those that can train the model, with the dtypes that it needs.

    Those are left out whose weights and gradients alone do not fit beside NCCL's
    memory, unless none does. With ``cpu_offload`` both are in host memory.

    DDP holds both in full, and FSDP2 all weights, in half precision at least, where it
    keeps them after the forward, as DeepSpeed does in stages 1 and 2.

    Raises:
        InputError: If the model has quantised weights and all would shard them.
    """
    candidates = for_batch_norms(for_quantized(candidates, model), model)
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    elements = sum(each.numel() for each in model.parameters())
    gradients = sum(
        each.numel() * each.element_size()
        for each in model.parameters()
        if each.requires_grad
    )

    def least(parallelism: Parallelism) -> int:
        if parallelism.engine == "ddp":
            return weights + gradients
        keeps = parallelism.zero_stage in {1, 2} or (
            parallelism.reshard_after_forward is False
        )
        kept = 2 * elements if keeps else 0
        shards = parallelism.gpus // parallelism.replicate
        return kept + (weights + gradients) // shards

    def usable(parallelism: Parallelism) -> int:
        nccl = nccl_memory(parallelism.gpus, parallelism.communicators)
        return budget.usable_bytes - nccl.high_bytes

    on_gpus = [each for each in candidates if not each.cpu_offload]
    fitting = [each for each in on_gpus if least(each) < usable(each)]
    # What is offloaded is tried last, after all others.
    offloaded = [each for each in candidates if each.cpu_offload]
    return (*(fitting or sorted(on_gpus, key=least)[:1]), *offloaded)
