"""BlockProfile: what each block of a chain costs under each option, at one batch size.

The letters in comments are those of memory-model rule C and solver-facts 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from budgetfit.core.recipe import Segment

Mode = Literal["keep", "recompute", "selective", "offload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOption:
    """One way to run one block.

    Attributes:
        mode: What happens to the block's activations.
        saved_bytes: S: bytes that live from the end of its forward to its backward; its
            own saved input included, its output not, static tensors not.
        forward_bytes: f: most bytes alive above the prefix during its forward (its
            input, what is being saved and its output included).
        backward_bytes: b: most bytes alive in its backward above prefix + S + incoming
            gradient + later weight gradients; recomputation and its own weight
            gradients included.
        cached_bytes: c: bytes that live from its forward to the end of the whole
            forward only: autocast's weight copies that nothing saved (cuda-memory M50).
        extra_ns: Time added to the plain forward and backward, in nanoseconds
            (integers, so that equal costs compare equal).
        saved_ops, input_on_host: Which option of its mode it is, as in ``Segment``.
        host_bytes: Pinned host memory that it takes between forward and backward.
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
        options: What can be done with it; the first is ``keep``. A block that must not
            be wrapped (prologue, epilogue) has only that one.
        gradient_bytes: g: weight-gradient bytes it leaves behind; 0 where gradients
            live during the whole step (accumulation, rule C3).
        output_bytes: x_out: bytes of its output, also of the gradient that comes in.
        forward_ns: One forward, in nanoseconds.
        backward_ns: One backward without recomputation.
        joins_next: Whether its output is the next block's input itself, so that a
            segment may hold both (applying P2).
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
        """The option that saves everything autograd asks for."""
        return self.options[0]

    def option(
        self,
        mode: Mode,
        saved_ops: tuple[str, ...] = (),
        *,
        input_on_host: bool = False,
    ) -> BlockOption | None:
        """Return this option, or None."""
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
        """Return the option that the block has in a segment, or None.

        In a segment whose input waits on the host that is the first block alone.
        """
        return self.option(
            segment.mode,
            segment.saved_ops,
            input_on_host=segment.input_on_host and self.name == segment.blocks[0],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProfile:
    """A model as a chain of blocks, prologue and epilogue included, at one batch size.

    Attributes:
        batch_size: Samples per micro-batch that every number here belongs to.
        static_bytes: W: parameters, buffers, shared inputs, optimizer state, gradients
            that outlive the step, workspaces.
        input_bytes: x_in of the first block.
        optimizer_bytes: Most bytes alive in the optimizer step above W + sum of g.
        optimizer_ns: Time of one optimizer step, in nanoseconds.
        blocks: In execution order.
        host_limit_bytes: Most pinned host memory that the blocks' options may take in
            all; None: no limit.
    """

    batch_size: int
    static_bytes: int
    input_bytes: int
    optimizer_bytes: int
    optimizer_ns: int
    blocks: tuple[BlockProfile, ...]
    host_limit_bytes: int | None = None

    def block_input_bytes(self, index: int) -> int:
        """Return x of a block: its predecessor's output."""
        return self.blocks[index - 1].output_bytes if index else self.input_bytes
