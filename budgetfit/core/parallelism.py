"""Parallelism: the engine that trains one model on several GPUs, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final, Literal, get_args

from budgetfit.core.precision import Precision
from budgetfit.core.validation import check_positive_int, set_python_numbers
from budgetfit.errors import InputError

Engine = Literal["ddp", "fsdp2", "deepspeed"]
PolicyDtype = Literal["bf16", "fp16", "fp32"]
ZeroStage = Literal[1, 2, 3]
MOST_GPUS: Final = 2**14
ZERO_3: Final = 3  # the stage that shards the weights as well
# Of a process group whose ranks exchange tensors in host memory as well.
BACKENDS: Final = "cpu:gloo,cuda:nccl"
_MOST_ELEMENTS: Final = 2**40  # of a bucket
# What not all engines have.
_SETTINGS: Final = {
    "ddp": ("bucket_cap_mb", "gradient_as_bucket_view", "sync_each_batch"),
    "fsdp2": (
        *("reshard_after_forward", "shard", "param_dtype", "reduce_dtype"),
        *("sync_each_batch", "cpu_offload"),
    ),
    "deepspeed": ("zero_stage", "bucket_elements", "overlap_comm", "param_dtype"),
}
_USE: Final = (
    'Use engine="fsdp2", engine="ddp" where the model fits on each GPU, or '
    'engine="deepspeed".'
)
_NOT_PLANNED: Final = {
    **dict.fromkeys(
        ("tp", "tensor", "cp", "context", "sp", "pp", "pipeline", "ep", "expert"),
        "Tensor, context, pipeline and expert parallelism are not planned.",
    ),
    **dict.fromkeys(
        ("zero", "zero1", "zero2", "zero3"),
        'Plan ZeRO with engine="zero1", "zero2" or "zero3"; in Parallelism its engine '
        'is "deepspeed", with zero_stage=1, 2 or 3.',
    ),
    **dict.fromkeys(("fsdp", "fsdp1", "dp"), "FSDP1 and DataParallel are not planned."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How several GPUs train one model: the arguments of PyTorch's own wrappers.

    Attributes:
        engine: ``ddp``: ``DistributedDataParallel``. ``fsdp2``: ``fully_shard`` for
            each block and for the rest. ``deepspeed``: ``deepspeed.initialize``.
        gpus: Ranks, one GPU each: the world size.
        gpus_per_node: GPUs of one machine; None for all of them in one.
        reshard_after_forward: Of ``fully_shard``: whether a block's weights are freed
            after its forward; a number keeps them sharded over so many ranks.
        shard: Of ``fsdp2``: ranks that share one copy of the weights, with a copy in
            each such group (HSDP); None for all ranks.
        param_dtype: Of ``MixedPrecisionPolicy``, in place of autocast: dtype of the
            gathered weights and of the computation. None: as the recipe's precision
            says. Of ``deepspeed``: ``"bf16"`` for its ``bf16.enabled``.
        reduce_dtype: Of ``MixedPrecisionPolicy``: dtype of the reduced gradients; None
            for that of the computation.
        bucket_cap_mb: Of ``DistributedDataParallel``: MiB of a bucket of gradients;
            None for its default, one of 1 and others of 25.
        gradient_as_bucket_view: Of ``DistributedDataParallel``: whether gradients are
            views of the buckets.
        sync_each_batch: Whether gradients are reduced in each micro-batch, instead of
            in the last one of an update (``no_sync``,
            ``set_requires_gradient_sync(False)``).
        cpu_offload: Of ``fully_shard``: ``CPUOffloadPolicy()``, weights, gradients and
            optimizer states in host memory, and the optimizer's step on the CPU.
        zero_stage: Of ``deepspeed``: 1 shards optimizer states, 2 gradients as well, 3
            weights as well.
        bucket_elements: Of ``deepspeed``: ``reduce_bucket_size`` and
            ``allgather_bucket_size``, in elements; None for its default, 5e8.
        overlap_comm: Of ``deepspeed``: whether gradients are reduced on a stream of
            their own; None for its default, which is that of stage 3 alone.
    """

    engine: Engine
    gpus: int
    gpus_per_node: int | None = None
    reshard_after_forward: bool | int = True
    shard: int | None = None
    param_dtype: PolicyDtype | None = None
    reduce_dtype: PolicyDtype | None = None
    bucket_cap_mb: int | None = None
    gradient_as_bucket_view: bool = False
    sync_each_batch: bool = False
    cpu_offload: bool = False
    zero_stage: ZeroStage | None = None
    bucket_elements: int | None = None
    overlap_comm: bool | None = None

    def __post_init__(self) -> None:
        """Check names, counts, and that no setting of another engine is set."""
        set_python_numbers(self, (each.name for each in fields(self)))
        check_engine(self.engine)
        check_positive_int("gpus", self.gpus, most=MOST_GPUS)
        if self.gpus == 1:
            raise InputError(
                "Parallelism is for several GPUs; got gpus=1. Use parallelism=None."
            )
        for name, example in (("bucket_cap_mb", 25), ("bucket_elements", 500_000_000)):
            value = getattr(self, name)
            if value is not None:
                check_positive_int(name, value, example=example, most=_MOST_ELEMENTS)
        for name in ("gpus_per_node", "shard"):
            self._check_divisor(name, getattr(self, name), self.gpus)
        self._check_reshard()
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and value not in get_args(PolicyDtype):
                raise InputError(
                    f"{name} must be one of: {', '.join(get_args(PolicyDtype))}; got "
                    f"{value!r:.80}."
                )
        self._check_engine_settings()

    def _check_reshard(self) -> None:
        """Check the ranks over which weights stay sharded after forward."""
        reshard, ranks = self.reshard_after_forward, self.shard or self.gpus
        if isinstance(reshard, bool):
            return
        self._check_divisor("reshard_after_forward", reshard, ranks)
        if reshard in {1, ranks}:
            raise InputError(
                f"reshard_after_forward={reshard} of {ranks} ranks is "
                f"{reshard == ranks}: write that, or a divisor between 1 and {ranks}."
            )

    def _check_engine_settings(self) -> None:
        """Check that settings of other engines have their defaults."""
        stage = self.zero_stage
        if self.engine == "deepspeed" and stage not in get_args(ZeroStage):
            raise InputError(
                f"engine='deepspeed' must be given with zero_stage=1, 2 or 3; got "
                f"{stage!r:.80}."
            )
        own = {name for names in _SETTINGS.values() for name in names}
        others = sorted(own - set(_SETTINGS[self.engine]))
        for name in others:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                raise InputError(
                    f"{name}={value!r} is no setting of {self.engine}. Leave it out."
                )

    def in_precision(self, precision: Precision) -> Parallelism:
        """Return it with the engine's dtypes in place of a precision's autocast.

        One with ``reduce_dtype`` alone keeps autocast; without any it has no dtypes.
        """
        if self.engine == "ddp" or self.param_dtype:
            return self
        if precision.autocast is None and self.reduce_dtype:
            return replace(self, reduce_dtype=None)
        if precision.autocast is None or self.reduce_dtype:
            return self
        if self.engine == "deepspeed":
            return replace(self, param_dtype=precision.autocast)
        return replace(self, param_dtype=precision.autocast, reduce_dtype="fp32")

    def describe(self) -> str:
        """Return it in words, for reports: ``fsdp2, weights kept after forward``."""
        words: list[str] = [self.engine]
        if self.zero_stage is not None:
            words.append(f"ZeRO-{self.zero_stage}")
        if self.bucket_elements is not None:
            words.append(f"buckets of {self.bucket_elements:,} elements")
        if self.overlap_comm is not None:
            words.append(f"overlap_comm={self.overlap_comm}")
        reshard = self.reshard_after_forward
        if reshard is False:
            words.append("weights kept after forward")
        elif reshard is not True:
            words.append(f"weights over {reshard} ranks after forward")
        if self.shard is not None:
            words.append(f"sharded over {self.shard}, {self.replicate} copies")
        if self.cpu_offload:
            words.append("offloaded to the CPU")
        if self.gradient_as_bucket_view:
            words.append("gradients in buckets")
        return ", ".join(words)

    @property
    def communicators(self) -> int:
        """Groups of ranks that exchange data."""
        if self.engine == "deepspeed":  # its data-parallel group is one of its own
            return 2
        sharded = 1 if isinstance(self.reshard_after_forward, bool) else 3
        return sharded + (self.shard is not None)

    @property
    def gathers(self) -> bool:
        """Whether each block's weights are there only while it runs itself."""
        return self.engine == "fsdp2" or self.zero_stage == ZERO_3

    @property
    def overlaps(self) -> bool:
        """Whether DeepSpeed's collectives run beside its kernels."""
        default = self.zero_stage == ZERO_3
        return default if self.overlap_comm is None else self.overlap_comm

    @staticmethod
    def _check_divisor(name: str, value: int | None, ranks: int) -> None:
        if value is None:
            return
        check_positive_int(name, value, most=MOST_GPUS)
        if ranks % value:
            raise InputError(
                f"{name}={value} does not divide {ranks} ranks. Use a divisor of them."
            )

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return self.gpus // (self.gpus_per_node or self.gpus)

    @property
    def torchrun(self) -> str:
        """The command that starts a script, which follows it, on these GPUs.

        It is run on each machine; ``HOST`` is the name of one of them.
        """
        meet = "--rdzv-backend c10d --rdzv-endpoint HOST:29400"
        several = f"--nnodes {self.nodes} {meet} " if self.nodes > 1 else ""
        return f"torchrun {several}--nproc-per-node {self.gpus // self.nodes}"

    @property
    def replicate(self) -> int:
        """Copies of the weights: ranks of DDP, groups of HSDP, otherwise 1."""
        return (
            self.gpus
            if self.engine == "ddp"
            else self.gpus // (self.shard or self.gpus)
        )


def check_engine(engine: object) -> None:
    """Check that this names an engine that is planned."""
    if isinstance(engine, str) and engine in get_args(Engine):
        return
    known = isinstance(engine, str) and engine.lower().replace("-", "")
    why = _NOT_PLANNED.get(known) if known else None
    raise InputError(f"{why or f'{engine!r:.80} is no engine.'} {_USE}")
