"""BlockProfile: memory and time of each block of a chain per checkpointing option.

All numbers belong to one batch size; they are the inputs of the solvers.
"""

from dataclasses import dataclass
from typing import Literal

from budgetfit.core.recipe import Segment

Mode = Literal["keep", "recompute", "selective", "offload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOption:
    """Memory and time of one block under one checkpointing option.

    Attributes:
        mode: What happens to the block's activations.
        saved_bytes: Activation bytes kept from the end of its forward to its backward:
            its saved input included; its output and static tensors not.
        forward_bytes: Peak live bytes during its forward above what precedes the block
            (its input, what is being saved and its output included).
        backward_bytes: Peak live bytes in its backward above what precedes the block,
            ``saved_bytes``, the incoming gradient and the weight gradients of later
            blocks; recomputation and its own weight gradients included.
        cached_bytes: Bytes from its forward to the end of the whole forward: autocast's
            cached weight copies that autograd did not save.
        extra_ns: Time added to the plain forward and backward, in nanoseconds
            (integers, so that equal costs compare equal).
        saved_ops, input_on_host: Which option of its mode it is, as in ``Segment``.
        host_bytes: Pinned host memory held between forward and backward.
    """

    mode: Mode
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    cached_bytes: int = 0
    extra_ns: int = 0
    saved_ops: tuple[str, ...] = ()
    input_on_host: bool = False
    host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """One block of the chain.

    Attributes:
        name: Module path; prologue and epilogue have names in angle brackets.
        options: Its checkpointing options; the first is ``keep``, the only one of a
            block that cannot be wrapped (prologue, epilogue).
        gradient_bytes: Weight-gradient bytes that its backward leaves allocated; 0
            where gradients exist during the whole step (gradient accumulation).
        output_bytes: Bytes of its output, and of the incoming gradient.
        forward_ns: One forward, in nanoseconds.
        backward_ns: One backward without recomputation.
        joins_next: Whether its output is the very tensor that the next block takes, so
            that one segment may span both.
    """

    name: str
    options: tuple[BlockOption, ...]
    gradient_bytes: int
    output_bytes: int
    forward_ns: int
    backward_ns: int
    joins_next: bool = False

    @property
    def keep(self) -> BlockOption:
        """The option without checkpointing: autograd saves what it needs."""
        return self.options[0]

    def option(
        self,
        mode: Mode,
        saved_ops: tuple[str, ...] = (),
        *,
        input_on_host: bool = False,
    ) -> BlockOption | None:
        """Return the option with this mode, saved ops and offloading, or None."""
        wanted = mode, saved_ops, input_on_host
        return next(
            (
                option
                for option in self.options
                if (option.mode, option.saved_ops, option.input_on_host) == wanted
            ),
            None,
        )

    def option_in(self, segment: Segment) -> BlockOption | None:
        """Return the block's option within a segment, or None."""
        # Of a segment with its input on the host, only the first block is offloaded.
        return self.option(
            segment.mode,
            segment.saved_ops,
            input_on_host=segment.input_on_host and self.name == segment.blocks[0],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainProfile:
    """A model as a chain of blocks at one batch size, prologue and epilogue included.

    Compared by identity, as a key of caches: comparing values is slow.

    Attributes:
        batch_size: Samples per micro-batch that every number here belongs to.
        static_bytes: Parameters, buffers, shared inputs, optimizer state, gradients
            that outlive the step, workspaces.
        input_bytes: Bytes of the first block's input.
        optimizer_bytes: Peak live bytes of the optimizer step above ``static_bytes``
            and all ``gradient_bytes``.
        optimizer_ns: Time of one optimizer step, in nanoseconds.
        host_limit_bytes: Limit on the pinned host memory of all blocks; None: no limit.
        shortest_ns: What a micro-batch takes at least, for the network.
        waiting_ns: What each waits for the network however long its kernels take.
    """

    batch_size: int
    static_bytes: int
    input_bytes: int
    optimizer_bytes: int
    optimizer_ns: int
    blocks: tuple[BlockProfile, ...]
    host_limit_bytes: int | None = None
    shortest_ns: int = 0
    waiting_ns: int = 0

    def step_ns(self, micro_batch_ns: int, micro_batches: int) -> int:
        """Return the time of an optimizer step, a lower bound where GPUs exchange data.

        ``micro_batch_ns``: of the kernels of one micro-batch.
        """
        each_ns = max(micro_batch_ns + self.waiting_ns, self.shortest_ns)
        return each_ns * micro_batches + self.optimizer_ns

    def block_input_bytes(self, index: int) -> int:
        """Return the bytes of a block's input: its predecessor's output."""
        return self.blocks[index - 1].output_bytes if index else self.input_bytes
