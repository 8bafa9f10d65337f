"""Parse how many GPUs there are, and the ways to use them that a plan compares."""

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, get_args

from budgetfit.core.parallelism import (
    MOST_GPUS,
    ZERO_3,
    Parallelism,
    ZeroStage,
    check_engine,
)
from budgetfit.core.validation import MAX_BATCH_SIZE, check_positive_int, is_whole
from budgetfit.errors import InputError
from budgetfit.gpus.interconnect import check_link, is_between_nodes
from budgetfit.gpus.table import Gpu, find_gpu

AUTO: Final = "auto"
_STAGES: Final[dict[str, tuple[ZeroStage, ...]]] = {
    "deepspeed": (1, 2, 3),
    **{f"zero{stage}": (stage,) for stage in get_args(ZeroStage)},
}
Gpus = int | str
_COUNTED: Final = tuple(
    re.compile(r"(.+)x\s*(\d+" + nodes + ")", re.IGNORECASE)
    for nodes in (r"\s*x\s*\d+", "")
)


class CountedGpu(NamedTuple):
    """A GPU and how many of it train together."""

    gpu: Gpu
    per_node: int = 1
    nodes: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.per_node * self.nodes


def parse_gpus(value: object) -> tuple[int, int]:
    """Return the GPUs of each node and the nodes of ``8``, ``"8"`` or ``"8x4"``.

    Raises:
        InputError: If it is none of these.
    """
    if value == AUTO:
        raise InputError(
            "gpus='auto' is a decision that plan takes, at a given length. Use plan, "
            "or say how many: gpus=8 (--gpus 8)."
        )
    parts: list[Any] = [value]
    if isinstance(value, str):
        words = value.lower().split("x")
        parts = [int(word) if is_whole(word) else word for word in words]
    if len(parts) not in {1, 2} or not all(
        isinstance(part, int) and not isinstance(part, bool) and part > 0
        for part in parts
    ):
        raise InputError(
            "gpus must be a number, for example 8, or GPUs per node x nodes, for "
            f'example "8x4"; got {value!r:.80}. Kinds of GPUs are compared with '
            "budgetfit compare MODEL --gpus t4,l4."
        )
    per_node, nodes = (*parts, 1)[:2]
    check_positive_int("gpus", per_node * nodes, most=MOST_GPUS)
    return per_node, nodes


def find_counted_gpu(text: str) -> CountedGpu:
    """Return the GPU of ``"h100-80gb"``, ``"h100-80gbx8"`` or ``"h100-80gbx8x4"``.

    Raises:
        InputError: If the GPU is unknown or the number is none.

    >>> find_counted_gpu("RTX 4090 x2").gpus
    2
    """
    given: object = text
    if not isinstance(given, str):
        raise InputError(
            'Name each card, for example "rtx-4090" or "h100-80gbx8" '
            f"(--gpus rtx-4090,h100-80gbx8); got {given!r:.60}."
        )
    # The name of a card may end like a number of them: gtx1080.
    for name, gpus in _readings(text.strip()):
        try:
            gpu = find_gpu(name)
        except InputError as error:
            problem = error
        else:
            if "0" in str(gpus).lower().split("x"):
                raise InputError(
                    f"{text!r:.60} has no number of cards. Write {name}x8 for eight, "
                    f"or {name}x8x4 for four machines with eight each."
                )
            return CountedGpu(gpu, *parse_gpus(gpus))
    raise problem


def _readings(text: str) -> Iterator[tuple[str, Gpus]]:
    """Yield what may be the card and the number of ``"gtx1080x2"``."""
    yield text, 1
    for pattern in _COUNTED:
        if counted := pattern.fullmatch(text):
            yield counted[1], counted[2]


def parse_link(link: str | None, nodes: int) -> str:
    """Return what connects GPUs, as ``check_link`` spells it; empty for the usual.

    ``nodes``: how many machines there are; 0 for a single GPU.

    Raises:
        InputError: If it is no link, or there is nothing that it connects.
    """
    if link is None:
        return ""
    found = check_link(link)
    if not nodes:
        raise InputError(
            f"link={link!r:.60} is the network between several GPUs, and there is one. "
            "Leave it out, or say how many GPUs: gpus=8 (--gpus 8)."
        )
    if nodes == 1 and is_between_nodes(found):
        raise InputError(
            f"link={link!r:.60} connects machines, and all GPUs are in one. Name the "
            'link within it, or say how many machines: gpus="8x2" (--gpus 8x2).'
        )
    return found


def parallelisms(gpus: Gpus, engine: str) -> tuple[Parallelism, ...]:
    """Return the ways to use several GPUs, to choose from; none for one GPU.

    FSDP2 frees the weights after the forward or keeps them, and reduces gradients in
    each micro-batch or in the last one of an update; over several nodes it also shards
    within each node only (HSDP). Last come its settings with weights and optimizer in
    host memory, for models that fit with no other. DeepSpeed has three stages of ZeRO,
    the first two with or without ``overlap_comm``; its engine is named, or one of them.

    Raises:
        InputError: If the number or the engine is invalid.
    """
    per_node, nodes = parse_gpus(gpus)
    if not isinstance(engine, str):
        check_engine(engine)
    stages = _STAGES.get(engine, ())
    if engine != AUTO and not stages:
        check_engine(engine)
    count = per_node * nodes
    if count == 1:
        return ()
    found = []
    if engine in {AUTO, "ddp"}:
        found.append(
            Parallelism(
                engine="ddp",
                gpus=count,
                gpus_per_node=per_node,
                gradient_as_bucket_view=True,
            )
        )
    if engine in {AUTO, "fsdp2"}:
        groups = (None, per_node) if nodes > 1 < per_node else (None,)
        found += [
            Parallelism(
                engine="fsdp2",
                gpus=count,
                gpus_per_node=per_node,
                reshard_after_forward=reshard,
                shard=shard,
                sync_each_batch=each,
                cpu_offload=offloaded,
            )
            for offloaded in (False, True)
            for each in (True, False)
            for shard in (groups if not offloaded else (None,))
            for reshard in (True, False)
        ]
    found += [
        Parallelism(
            engine="deepspeed",
            gpus=count,
            gpus_per_node=per_node,
            zero_stage=stage,
            overlap_comm=overlap,
        )
        for overlap in (None, True)
        for stage in stages
        if not (overlap and stage == ZERO_3)  # its default
    ]
    return tuple(found)


def refuse_engine_of_one(engine: str) -> None:
    """Refuse an engine that was named for one GPU."""
    if engine != AUTO:
        raise InputError(
            f"engine={engine!r} is for several GPUs, and this is one. Say how many, "
            "for example gpus=2, or leave engine= out."
        )


def samples_per_rank(effective_batch_size: int | None, ranks: int) -> int | None:
    """Return each rank's share of an effective batch, which ranks must divide."""
    if effective_batch_size is None:
        return None
    check_positive_int(
        "effective_batch_size", effective_batch_size, most=MAX_BATCH_SIZE
    )
    share, rest = divmod(effective_batch_size, ranks)
    if rest:
        lower = share * ranks
        near = f"{lower} or {lower + ranks}" if lower else str(ranks)
        raise InputError(
            f"effective_batch_size {effective_batch_size} is no multiple of {ranks} "
            f"ranks, and the effective batch is never changed. Use {near}."
        )
    return share
