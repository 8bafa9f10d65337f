"""``plan`` and ``estimate``: parse the arguments and call the planner."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from budgetfit.api.apply_and_verify import apply, verify
from budgetfit.api.check_plan import check
from budgetfit.api.compare import compare
from budgetfit.api.estimate import estimate_recipe, estimate_settings, layers
from budgetfit.api.how_many_gpus import check_price, plan_auto
from budgetfit.api.in_loop import plan_in_loop
from budgetfit.api.longest_context import plan_longest
from budgetfit.api.what_would_fit import what_would_fit
from budgetfit.applying.loss.prediction_loss import prediction_loss
from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.core.loop import PLAIN, RUN, Loop, as_loop
from budgetfit.core.plan import Estimate, Plan
from budgetfit.core.recipe import CompileMode, Recipe
from budgetfit.core.samples.image_sizes import ImageSizes, ImageSizeSummary
from budgetfit.core.samples.sample_dims import BatchDims
from budgetfit.core.validation import ImageSize, format_image_size
from budgetfit.errors import InputError
from budgetfit.gpus.table import Gpu
from budgetfit.inputs.adapter import loading_notes
from budgetfit.inputs.arguments import Arguments, ParsedArguments
from budgetfit.inputs.several_gpus import AUTO
from budgetfit.planning.compile_choice import best_compiled
from budgetfit.planning.planner import library_versions, make_plan
from budgetfit.planning.profiling.block_chain import checkpoint_every_block
from budgetfit.planning.session import SessionSettings
from budgetfit.tracing.compiled.cuda_backend import check_supported
from budgetfit.tracing.isolation.torch_state import neutral_torch_state
from budgetfit.utils.function_name import is_factory_text, qualified_name

if TYPE_CHECKING:
    from budgetfit.inputs.arguments import Lengths, Loss, Model, Optimizer, Progress

__all__ = [
    "apply",
    "check",
    "compare",
    "estimate",
    "estimate_settings",
    "layers",
    "library_versions",
    "plan",
    "plan_in_loop",
    "verify",
]


@neutral_torch_state()
def plan(  # noqa: PLR0913 - public API
    model: Model,
    vram: int | str | None = None,
    *,
    gpu: Gpu | str | None = None,
    batch: object = None,
    batch_dims: BatchDims = None,
    max_length: int | None = None,
    image_size: ImageSize = None,
    frames: int | None = None,
    image_sizes: ImageSizes | None = None,
    text_only: bool = False,
    lengths: Lengths | None = None,
    loss: Loss | str | None = None,
    precision: str | Sequence[str] = "auto",
    optimizer: Optimizer = "adamw_torch_fused",
    batch_size: int | None = None,
    effective_batch_size: int | None = None,
    checkpointing: str | Sequence[str] = "auto",
    objective: str = "throughput",
    headroom: int | str | None = None,
    host_ram: int | str | None = None,
    allocator: AllocatorSettings | str | None = None,
    optimizer_in_backward: bool = False,
    compile: str = "none",  # noqa: A002 - as in transformers' torch_compile
    gpus: int | str = 1,
    engine: str = "auto",
    link: str | None = None,
    price: float | None = None,
    method: str | None = None,
    lora_r: int = 16,
    lora_alpha: int = 32,
    lora_dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    quantization: str | None = None,
    double_quantization: bool = True,
    prepare_for_kbit: bool = True,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Find the training settings that fit a VRAM budget and serve the objective best.

    Needs no GPU and no weights; the model is not changed.

    Args:
        model: Any ``torch.nn.Module`` (on CPU, CUDA or meta), a transformers config, or
            text: a hub id, a folder or ``config.json``, ``package.module:factory`` or
            ``file.py:factory``, which may return ``(model, batch, loss)``, too. Text
            never downloads weights.
        vram: Bytes, or text such as ``"24GB"`` (10^9) or ``"24GiB"`` (2^30).
        gpu: A GPU, for example ``"rtx-4090"``; see ``budgetfit gpus``; or that of
            another plan (``plan.gpu``).
        batch: An example batch of any batch size, or ``file.py:function`` that makes
            one; made from the model if left out.
        batch_dims: Where the batch counts samples, in the manner of ``torch.vmap``'s
            ``in_dims``: the dimension of all tensors (``1``), or of parts by name
            (``{"x": 0, "class_weights": None}``), None for what goes with every sample.
            A container's name stands for everything in it, ``"0"`` for the first
            positional input; 0 of a list with one entry for each sample means its
            entries. What is not named is found from the batch's structure.
        max_length: Sequence length of a made text batch.
        image_size: Pixels of the images of a made batch: ``448``, or height and width;
            of a diffusion model, of the images that the VAE turns into latents.
        image_sizes: Sizes of the images, or images by size, where they vary; text such
            as ``"480-800:32"`` is a range: the largest batch fits, and sequences of
            batches of drawn sizes fit, as for ``lengths``.
        frames: Frames of the videos of a made batch.
        text_only: Whether a made batch leaves out images and sound, for models that
            read text alone as well.
        lengths: Lengths of the samples, or samples by length: the longest batch fits,
            and sequences of batches that are padded to their longest sample fit; the
            rate over them is that of the plan.
        loss: ``loss(outputs, batch) -> scalar``, or ``file.py:function``; the model's
            own if left out, or the error of a diffusion model's prediction.
        precision: ``auto`` (16-bit autocast; fp32 if the model cannot run in it;
            ``as-is`` where its weights are float64),
            ``fp32``, ``tf32``, ``fp16-mixed``, ``bf16-mixed``, ``bf16``, ``as-is``, or
            a list of them to compare.
        optimizer: transformers' ``optim`` name or a function of the parameters.
        batch_size: Samples per micro-batch; solved for if left out.
        effective_batch_size: Samples per optimizer step, over all GPUs; never changed.
        checkpointing: ``auto``, ``none``, ``full``, ``every-2`` (or another number),
            ``sqrt``, ``as-is`` or block names.
        objective: ``throughput``, ``batch_size`` or ``memory``; or ``length``: the plan
            for the longest samples that fit, at most ``max_length`` tokens, at batch 1
            unless ``batch_size`` is given.
        headroom: Kept free on top of the predicted process, bytes or text as ``vram``;
            1 %, at least 128 MiB, if left out.
        host_ram: Most host memory that offloading may use; left out: what is
            free where this machine has the GPU, else 16 GiB (8 for a T4).
        allocator: What ``PYTORCH_ALLOC_CONF`` will say where training runs, such as
            ``"expandable_segments:True"``; left out: what it says here where this
            machine has the GPU, else PyTorch's defaults.
        optimizer_in_backward: Each weight is updated as soon as its gradient is
            complete, and the gradient freed; takes no accumulation and no clipping.
        compile: ``blocks``: train with ``torch.compile`` for each block. Needs torch
            2.13 on Linux here, and compute capability 7.0 on the GPU. ``auto`` plans
            with and without it, and takes the better. ``model``: for the model as a
            whole, with everything, every second block or nothing kept; about a minute
            for each of the few batch sizes that are tried.
        gpus: How many such GPUs train together: ``8``, or GPUs per node x nodes:
            ``"8x4"``. What is predicted is one rank's memory. ``"auto"``: the fewest
            that fit; ``print`` says what was tried.
        engine: On several GPUs: ``ddp``, ``fsdp2``, or ``auto`` for the better one.
            ``deepspeed`` for the best stage of its ZeRO, ``zero1``, ``zero2`` or
            ``zero3`` for that one; DeepSpeed has to be installed.
        link: What connects several GPUs: ``nvlink-4``, ``pcie-4``, a bandwidth that
            collectives reach (``25GB/s``), or network adapters of each node
            (``8x400Gb/s``); within and between nodes with a comma. Left out: what is
            usual for the card; see ``budgetfit gpus``.
        price: Money per hour of one GPU: ``gpus="auto"`` takes the cheapest number.
        method: ``lora`` or ``qlora``: plan adapters on the frozen model, as peft makes
            them. The other arguments of adapters are those of peft's ``LoraConfig``.
        lora_r: Rank of the adapters; with ``lora_alpha`` and ``lora_dropout``.
        lora_alpha: Their scale, over the rank.
        lora_dropout: Share of an adapter's input that is dropped.
        target_modules: Which layers get one: ``all-linear``, a pattern, or names.
        quantization: How the frozen base is stored: ``nf4`` (``qlora``'s), ``int8``,
            or None for as it is (``lora``'s).
        double_quantization: Whether nf4's scales are quantised, too.
        prepare_for_kbit: Whether peft's ``prepare_model_for_kbit_training`` turns
            embeddings, norms and the head of a quantized base into fp32.
        trust_remote_code: Let a hub model's own code run.
        progress: Called with a line of text for each longer piece of work.

    Returns:
        The plan; ``print`` it, ``save`` it, ``apply`` it.

    Raises:
        InputError: An argument is invalid; nothing was traced or changed.
        DoesNotFitError: No settings fit; says what is needed and what would help.
        TraceError: The model cannot run on fake tensors.
    """
    given = dict(locals())
    del given["price"]
    asked = Arguments(**given)
    check_price(price, gpus)
    if gpus == AUTO and objective != "length":
        return plan_auto(_plan, asked, price)
    return plan_longest(_plan, asked) if objective == "length" else _plan(asked)


def _plan(given: Arguments) -> Plan:
    asked = given.parsed()

    def made_with(mode: CompileMode) -> Plan:
        settings: SessionSettings = {**asked.settings, "compile": mode}
        return make_plan(
            asked.workload,
            asked.request,
            more_changes=partial(what_would_fit, asked),
            **settings,
        )

    made = best_compiled(asked.compile_modes, made_with, asked.request.objective)
    loading = loading_notes(asked.workload.model, made.estimate)
    return made.changed(
        source=asked.source,
        adapter=asked.source.adapter,
        warnings=(*made.warnings, *loading),
        provenance={
            **made.provenance,
            "asked": _recorded(asked),
            "may_compile": _may_compile(asked, made),
        },
    )


def _may_compile(asked: ParsedArguments, made: Plan) -> bool:
    """Whether ``compile="auto"``, which nobody asked for, may make a faster plan."""
    given = asked.given
    fastest = given.compile == "none" and given.objective == "throughput"
    one_size = made.varying_lengths is None and made.recipe.parallelism is None
    if not (fastest and one_size and made.model.blocks):
        return False
    try:
        check_supported(asked.workload.target)
    except InputError:
        return False
    return True


def _recorded(asked: ParsedArguments) -> dict[str, object]:
    """Return the arguments that a saved plan records for ``verify`` and ``check``."""
    given, lengths = asked.given, asked.lengths
    loss, size = given.loss or asked.source.loss, given.image_size
    is_factorys = (
        given.loss is None
        and loss not in (None, prediction_loss)
        and is_factory_text(str(given.model or ""))
    )
    policy = asked.checkpointing
    if not isinstance(policy, str):
        policy = ",".join(policy)
    length = given.max_length
    samples: dict[str, object] = {}  # as JSON has them: keys are texts
    if isinstance(lengths, ImageSizeSummary):
        size = lengths.planned
        samples["image_sizes"] = {format_image_size(n): k for n, k in lengths.counts}
    elif lengths is not None:
        length = lengths.planned
        samples["lengths"] = {str(n): k for n, k in lengths.counts}
    return {
        "model": given.model if isinstance(given.model, str) else None,
        "vram": given.vram,
        "gpu": given.gpu.name if isinstance(given.gpu, Gpu) else given.gpu,
        "max_length": length,
        "image_size": None if size is None else format_image_size(size),
        "frames": given.frames,
        "text_only": given.text_only,
        **samples,
        "loss": qualified_name(loss) if callable(loss) else loss,
        **({"loss_of_factory": True} if is_factorys else {}),
        **({"batch": given.batch} if isinstance(given.batch, str) else {}),
        **({"trust_remote_code": True} if given.trust_remote_code else {}),
        **({"gpus": given.gpus} if asked.parallelisms else {}),
        **({} if policy == "auto" else {"checkpointing": policy}),
    }


@neutral_torch_state()
def estimate(  # noqa: PLR0913 - public API
    model: Model,
    recipe: Recipe | None = None,
    *,
    loop: Loop | str | None = None,
    gpu: Gpu | str | None = None,
    vram: int | str | None = None,
    batch: object = None,
    batch_dims: BatchDims = None,
    max_length: int | None = None,
    image_size: ImageSize = None,
    frames: int | None = None,
    image_sizes: ImageSizes | None = None,
    text_only: bool = False,
    lengths: Lengths | None = None,
    loss: Loss | str | None = None,
    optimizer: Optimizer | None = None,
    headroom: int | str | None = None,
    host_ram: int | str | None = None,
    allocator: AllocatorSettings | str | None = None,
    link: str | None = None,
    method: str | None = None,
    lora_r: int = 16,
    lora_alpha: int = 32,
    lora_dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    quantization: str | None = None,
    double_quantization: bool = True,
    prepare_for_kbit: bool = True,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Estimate:
    """Predict the memory of one given recipe: will what I have now fit?

    ``recipe=None`` means as it is: the model's dtypes and its own checkpointing,
    ``optimizer`` (``adamw_torch_fused`` if left out), the example batch's own size. No
    decision is taken. The other arguments are those of ``plan``; with a recipe,
    ``optimizer`` is the function that it names, if it names one.

    ``loop`` is the training loop around the steps, a ``Loop`` or its kind: ``plain``
    (left out without a recipe), ``run`` (``budgetfit.Run``; left out with one),
    ``trainer``, ``sft``, ``accelerate`` or ``lightning``.

    Raises:
        InputError: An argument is invalid, or the loop's library is not installed.
        TraceError: The model cannot run on fake tensors.
    """
    given = dict(locals())
    del given["recipe"], given["loop"]
    if loop is None:
        loop = PLAIN if recipe is None else RUN
    loop = as_loop(loop)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputError(
            f"recipe must be a Recipe, not a {type(recipe).__name__}; for example "
            'budgetfit.Recipe(batch_size=8, precision="bf16-mixed").'
        )
    if optimizer is None:
        given["optimizer"] = "adamw_torch_fused" if recipe is None else recipe.optimizer
    several = None if recipe is None else recipe.parallelism
    asked = Arguments(**given).parsed(
        ["as-is" if recipe is None else recipe.precision],
        nodes=0 if several is None else several.nodes,
    )
    if recipe is not None:
        named = asked.workload.with_full_names(recipe)
        return estimate_recipe(asked, named, loop=loop)
    as_it_is = Recipe(
        batch_size=asked.source.batch_size,
        precision="as-is",
        optimizer=asked.optimizer,
        segments=checkpoint_every_block(asked.workload.own_checkpointing()),
    )
    return estimate_recipe(asked, as_it_is, keep_own_checkpointing=True, loop=loop)
