"""Print what updates of many sizes reserve on the null driver, beside the replay of it.

    python -m tests.accuracy.nulldriver.run --gpu rtx-4090 -- \\
        python -m tests.accuracy.replayed_sequences gpt2 --batch 4 --accumulation 4
    ... python -m tests.accuracy.replayed_sequences resnet --image-sizes 128-256:32
    ... python -m tests.accuracy.replayed_sequences gpt2 --engine fsdp2 --longest-first

With an engine it is one rank of four, under torch's fake process group; DDP's reducer
reads numbers of its own by way of the device: ``NULLCUDA_ECHO=1``. The updates are the
same, in the same order; memory has no limit. One model in each process, since a second
one would find what the first has left in the cache.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch import distributed, nn
from torch.nn.parallel import distributed as ddp_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from budgetfit.applying.run.run import Run
from budgetfit.applying.sharding import for_batch_norms
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.core.samples.image_sizes import ImageSizeSummary
from budgetfit.core.step_trace import StepTrace
from budgetfit.inputs.arguments import Arguments
from budgetfit.memory.replay_sequence import StepSequence
from budgetfit.traces.length_traces import LengthTraces
from budgetfit.traces.session import TraceSession
from tests.accuracy.nulldriver.addresses import null_driver_addresses
from tests.accuracy.provenance import answer_for_the_device, choose_cudnn
from tests.accuracy.sharded.record import reduce
from tests.accuracy.varying_lengths import DISTRIBUTIONS, MODELS, batch_of

COMPARED: Final = (10, 50, 200)  # updates
PRECISION: Final = "bf16-mixed"
RANKS: Final = 4
_ENGINES: Final = {
    "ddp": Parallelism(engine="ddp", gpus=RANKS),
    "fsdp2": Parallelism(engine="fsdp2", gpus=RANKS),
}
_IMAGES: Final[dict[str, Callable[[], nn.Module]]] = {
    "resnet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[1, 1, 2, 1]
        )
    ),
    "convnext": lambda: transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(
            hidden_sizes=[48, 96, 192, 384], depths=[1, 1, 2, 1]
        )
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=256, num_hidden_layers=3, num_attention_heads=4
        )
    ),
    "segformer": lambda: transformers.SegformerForImageClassification(
        transformers.SegformerConfig(depths=[1, 1, 1, 1])
    ),
}


def _batch(name: str, size: Any, samples: int) -> dict[str, Any]:
    """Return a batch as the workload's, of token ids or images."""
    if name in MODELS:
        lengths = np.full(samples, size)
        lengths[1:] = np.maximum(size - size // 8, 1)  # as made batches are padded
        return batch_of(MODELS[name], lengths, None, size)
    pixels = torch.rand(samples, 3, *size)
    further = {"interpolate_pos_encoding": True} if name == "vit" else {}
    labels = torch.zeros(samples, dtype=torch.long)
    return {"pixel_values": pixels, "labels": labels, **further}


def compared(options: argparse.Namespace) -> Iterator[tuple[int, int, int]]:
    """Yield updates, the bytes that were reserved by then, and those replayed."""
    name, steps = options.model, options.accumulation
    module = MODELS[name].make() if name in MODELS else _IMAGES[name]()
    parallelism = _ENGINES.get(options.engine)
    if parallelism is not None:  # as plans have it
        (parallelism,) = for_batch_norms((parallelism,), module)
        parallelism = parallelism.in_precision(find_precision(PRECISION))
    recipe = Recipe(
        batch_size=options.batch,
        precision=PRECISION,
        gradient_accumulation_steps=steps,
        parallelism=parallelism,
    )
    sizes: dict[str, Any] = {"image_sizes": options.image_sizes}
    if name in MODELS:
        samples = DISTRIBUTIONS[options.lengths](np.random.default_rng(0))
        sizes = {"lengths": samples.tolist()}
    asked = Arguments(model=module, gpu="rtx-4090", **sizes).parsed()
    workload, lengths = asked.workload, asked.lengths
    assert lengths is not None

    def trace_at(size: Any) -> StepTrace:
        return TraceSession(workload.at_length(size)).exact(recipe)

    # Of images: batches of one size each, which vary most.
    seed = int(isinstance(lengths, ImageSizeSummary))
    updates = lengths.draw(recipe.batch_size, steps, max(COMPARED), seed)
    drawn = {size for row in updates for size in row}
    traces = LengthTraces(trace_at, recipe.batch_size, lengths, drawn)
    sequence = StepSequence(traces.program_at, workload.gpu, micro_steps=steps)
    run = _run(module, recipe, workload.blocks)
    longest = lengths.planned if options.longest_first else None
    if longest is not None:
        batch = _batch(name, longest, recipe.batch_size)
        run._run_and_drop([batch] * min(steps, 2))
    for number, row in enumerate(updates, 1):
        for size in row:
            run.step(_batch(name, size, recipe.batch_size))
        if number in COMPARED:
            reserved = torch.cuda.max_memory_reserved()
            with null_driver_addresses():
                told = sequence.peaks(updates[:number], longest_first=longest)
            yield number, reserved, told.reserved_bytes


def _run(module: nn.Module, recipe: Recipe, blocks: tuple[str, ...]) -> Run:
    """Return a run on the card; of several it is rank 0, and no other exists."""
    engine = recipe.parallelism.engine if recipe.parallelism else None
    if engine is not None:
        distributed.init_process_group(
            "fake", store=FakeStore(), rank=0, world_size=RANKS
        )
    if engine != "fsdp2":  # which moves it block by block
        module.to("cuda")
    if engine == "ddp":  # what other ranks sent has no values here
        ddp_module._verify_param_shape_across_processes = lambda *_: None
    run = Run(module, recipe, determinism_check="default", blocks=blocks)
    if engine == "ddp":
        called: Any = run._called
        called.register_comm_hook(None, lambda _, bucket: reduce(bucket))
    return run


def main() -> None:
    """Print a line for each number of updates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=[*MODELS, *_IMAGES])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--lengths", default="uniform", choices=DISTRIBUTIONS)
    parser.add_argument("--image-sizes", default="128-256:32")
    parser.add_argument("--engine", choices=_ENGINES)
    parser.add_argument("--longest-first", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    choose_cudnn(enabled=False)
    answer_for_the_device()
    what = options.lengths if options.model in MODELS else options.image_sizes
    what += f", {options.engine}" if options.engine else ""
    what += ", longest first" if options.longest_first else ""
    for number, reserved, told in compared(options):
        sys.stdout.write(
            f"{told / reserved - 1:+6.2%} of {reserved >> 20:,} MiB after {number} "
            f"updates  {options.model}, {what}, {options.batch} x "
            f"{options.accumulation}\n"
        )


if __name__ == "__main__":
    main()
