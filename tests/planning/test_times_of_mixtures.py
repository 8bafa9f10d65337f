"""Steps of which some phases wait for the host: the chain's times and the judge's."""

from dataclasses import replace

from budgetfit.core.recipe import Recipe, Segment
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.chain.peak import chain_time_ns
from budgetfit.planning.judge import step_time, times_of_ops
from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
from budgetfit.timing.kernel_times import step_time_ns
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests import models
from tests.traced import session

LENGTH = 512
ROUNDING_NS = 100
SIZES = (8, 32, 64)


def chain_of(width: int, gpu: str, precision: str) -> BlockChain:
    """Return the chain of four blocks of a Llama below a large head."""
    model = models.llama(hidden_size=width, num_hidden_layers=4, vocab_size=32_000)
    workload = Workload(
        model=model, batch=models.text(length=LENGTH), gpu=find_gpu(gpu)
    ).with_found_blocks()
    settings = TrainingSettings(
        precision=precision, optimizer="sgd", effective_batch_size=960
    )
    return BlockChain(TraceSession(workload), settings)


def test_no_mixture_of_kept_and_recomputed_blocks_takes_less_than_they_add_up_to() -> (
    None
):
    """Kernels of a large head may hide what small blocks wait: one sum has both."""
    whole = chain_of(256, "h100-80gb", "bf16-mixed")
    workload = whole.traces.workload
    segments = tuple(Segment((name,)) for name in workload.blocks[::2])
    alike = set()
    for chain in (whole, whole.with_loss_chunks(8)):
        for size in SIZES:
            recipe = chain.settings.recipe(size, segments)
            trace = chain.traces.exact(recipe)
            judged = step_time(trace, recipe, workload.gpu)
            judged_ns = judged.forward_ns + judged.backward_ns
            summed_ns = chain_time_ns(chain.profile_at(size), segments)
            waiting = chain.waiting_phases(size)
            assert summed_ns <= judged_ns + ROUNDING_NS
            if times_of_ops(trace, recipe, workload.gpu).waiting == waiting:
                assert summed_ns >= judged_ns - ROUNDING_NS
                alike.add(waiting)
    assert alike >= {0, 2}


def test_no_selective_mixture_takes_less_than_its_bounding_sum() -> None:
    """Beside blocks with long kernels a selective block's waits are hidden."""
    chain = chain_of(512, "rtx-4090", "fp16-mixed")
    overcharged = []
    for size in SIZES:
        profile, bounding = chain.profile_at(size), chain.bounding_profile_at(size)
        block = next(each for each in profile.blocks if len(each.options) > 1)
        saved_ops = next(
            each.saved_ops for each in block.options if each.mode == "selective"
        )
        segments = (Segment((block.name,), "selective", saved_ops),)
        recipe = chain.settings.recipe(size, segments)
        trace = chain.traces.exact(recipe)
        judged = step_time(trace, recipe, chain.traces.workload.gpu)
        judged_ns = judged.forward_ns + judged.backward_ns
        assert chain_time_ns(bounding, segments) <= judged_ns + ROUNDING_NS
        overcharged.append(chain_time_ns(profile, segments) > 1.01 * judged_ns)
        assert (bounding is profile) is not overcharged[-1]
    assert {*overcharged} == {False, True}


def test_no_step_is_shorter_than_the_kernels_of_its_micro_batches() -> None:
    """A host that is busy with one update hides no kernels of many micro-batches."""
    gpu = find_gpu("rtx-4090")
    decided = set()
    for size in (1, 2048, 4096, 8192, 16384):
        recipe = Recipe(batch_size=size, optimizer="adafactor")
        for count in (1, 64):
            recipe = replace(recipe, gradient_accumulation_steps=count)
            trace = session("gpt2").affine(recipe)
            times = times_of_ops(trace, recipe, gpu)
            kernels = step_time_ns(trace, times.kernels_ns)
            judged = step_time(trace, recipe, gpu)
            assert judged.total_ns(count) >= kernels.total_ns(count)
            decided.add((count, times.waiting))
    assert decided >= {(1, 3), (64, 3), (64, 0)}
