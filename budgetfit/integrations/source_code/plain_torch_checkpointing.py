"""Checkpointing code of the exported training script."""

from collections.abc import Sequence
from string import Template
from typing import Final

from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError
from budgetfit.integrations.source_code.plain_torch_templates import Part
from budgetfit.integrations.source_code.python_source import to_source


def recompute_parts(recipe: Recipe) -> list[Part]:
    """Return the source that checkpoints the recipe's segments, and its imports.

    Raises:
        InputError: If a segment is offloaded or the loss is chunked: not exported, as
            that takes more than a page of code.
    """
    _refuse_what_is_not_exported(recipe)
    if not recipe.segments:
        return []
    if recipe.compile == "model":
        return [Part(RECOMPUTE_IN_GRAPH, _CHECKPOINT)]
    long = [segment for segment in recipe.segments if len(segment.blocks) > 1]
    selective = [each for each in recipe.segments if each.mode == "selective"]
    code = RECOMPUTE.substitute(
        region=REGION_CALL if long else "",
        selective=SELECTIVE_CALLS if selective else "",
    )
    parts = [REGION] * bool(long) + [SELECTIVE] * bool(selective)
    return [*parts, Part(code, _REPEATED)]


def segment_constants(recipe: Recipe) -> list[str]:
    """Return the constants with the segments' blocks, for the head of the script."""
    if not recipe.segments:
        return []
    ordinary = [each for each in recipe.segments if each.mode == "recompute"]
    lines = ["SEGMENTS = [  # blocks that are recomputed together"]
    lines += [f"    {_tuple(segment.blocks)}," for segment in ordinary]
    lines.append("]")
    if any(len(segment.blocks) > 1 for segment in ordinary):
        nested = [segment.blocks[0] for segment in ordinary if segment.nested]
        lines.append("# The first blocks of segments whose blocks run twice more.")
        lines.append(f"NESTED = {_tuple(nested, indent=0)}")
    groups: dict[tuple[str, ...], list[str]] = {}
    for segment in recipe.segments:
        if segment.mode == "selective":
            groups.setdefault(segment.saved_ops, []).extend(segment.blocks)
    if groups:
        lines.append("SELECTIVE = [  # blocks, and the calls of ops that they save")
        lines += [f"    ({_tuple(b)}, {_tuple(ops)})," for ops, b in groups.items()]
        lines.append("]")
    return lines


def _refuse_what_is_not_exported(recipe: Recipe) -> None:
    refused = [
        f"{' to '.join(dict.fromkeys((each.blocks[0], each.blocks[-1])))} "
        f"({'offload' if each.mode == 'offload' else 'input_on_host'})"
        for each in recipe.segments
        if each.mode == "offload" or each.input_on_host
    ]
    several = recipe.parallelism
    if several is not None and several.gathers:
        refused += [
            f"{each.blocks[0]} to {each.blocks[-1]} (recomputed together, and "
            f"{several.engine} gathers the weights of one block)"
            for each in recipe.segments
            if len(each.blocks) > 1
        ]
    if recipe.loss_chunks > 1:
        refused.append(f"the loss in {recipe.loss_chunks} chunks")
    if recipe.optimizer_in_backward:
        refused.append("an optimizer that steps in the backward pass")
    if refused:
        raise InputError(
            f"A script cannot be exported for: {'; '.join(refused)}. Train with "
            "budgetfit.apply(plan, model) or export --to trainer, or plan anew "
            "without them."
        )


def _tuple(names: Sequence[str], indent: int = 4) -> str:
    """Format a tuple of strings as source, one per line where it is long."""
    words = [to_source(name) for name in names]
    line = f"({', '.join(words)}{',' if len(words) == 1 else ''})"
    if len(line) < 80:  # noqa: PLR2004, with its indentation below 88
        return line
    inner = "".join(f"{' ' * (indent + 4)}{word},\n" for word in words)
    return f"(\n{inner}{' ' * indent})"


_CHECKPOINT: Final = (
    "import functools",
    "from torch.utils.checkpoint import checkpoint",
)
_REPEATED: Final = (
    *_CHECKPOINT,
    "import random",
    "from torch.nn.modules.batchnorm import _NormBase",
)

RECOMPUTE: Final = Template('''\
def recompute(model):
    """Checkpoint the planned blocks, without reentrant autograd, and nothing else."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False
    for segment in SEGMENTS:
        blocks = [model.get_submodule(name) for name in segment]
$region        recompute_block(blocks[0])
$selective

def recompute_block(block, **options):
    again = functools.partial(checkpoint, use_reentrant=False, **options)
    block.forward = functools.partial(by_position, block, again, block.forward)


def by_position(block, again, forward, *args, **kwargs):
    """Checkpoint keeps the generators of devices of tensors without keywords only."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not getattr(block, "_can_checkpoint_with_cache", True):  # a transformers layer
        # It would write to the cache again when it runs again.
        kwargs.update(dict.fromkeys(kwargs.keys() & {"past_key_values", "layer_past"}))
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    tensors = [kwargs.pop(name) for name in names]

    def call(*values):
        named = dict(zip(names, values[len(args) :]))
        return forward(*values[: len(args)], **named, **kwargs)

    return again(RepeatedForward(block, call), *args, *tensors)


class RepeatedForward:
    """A block's forward for one pass: it runs once, and again in backward.

    When it runs again it draws Python's random numbers again, and batch norms leave
    their statistics alone.
    """

    def __init__(self, block, forward):
        self.block, self.forward, self.random_state = block, forward, None

    def __call__(self, *args, **kwargs):
        if self.random_state is not None:
            return self.run_again(*args, **kwargs)
        random_state, before = random.getstate(), self.buffers()
        out = self.forward(*args, **kwargs)
        for name, (buffer, version) in self.buffers().items():
            old, old_version = before.get(name, (None, 0))
            # A table that has grown is the same again when its block runs again.
            replaced = old is not buffer and getattr(old, "shape", None) == buffer.shape
            if replaced or (old is buffer and old_version != version):
                raise RuntimeError(
                    f"{name} of a {type(self.block).__name__} changes in its forward, "
                    "which is to run twice. Take such blocks out of SEGMENTS and "
                    "SELECTIVE, or train by the plan itself, which puts it back."
                )
        self.random_state = random_state
        return out

    def run_again(self, *args, **kwargs):
        random_state = random.getstate()
        norms = [item for item in self.block.modules() if isinstance(item, _NormBase)]
        own = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
        try:
            random.setstate(self.random_state)
            for norm, (_, count) in zip(norms, own):
                norm.momentum = 0.0
                norm.num_batches_tracked = None if count is None else SPARE_COUNT
            return self.forward(*args, **kwargs)
        finally:
            random.setstate(random_state)
            for norm, (momentum, count) in zip(norms, own):
                norm.momentum, norm.num_batches_tracked = momentum, count

    def buffers(self):
        return {
            f"{path}.{name}".strip("."): (buffer, buffer._version)
            for path, module in self.block.named_modules()
            if not isinstance(module, _NormBase)
            for name, buffer in module.named_buffers(recurse=False)
        }


SPARE_COUNT = torch.zeros((), dtype=torch.long)  # of batches, when a block runs again
''')

RECOMPUTE_IN_GRAPH: Final = '''\
def recompute(model):
    """Checkpoint the planned blocks in the compiled graph, and nothing else."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False
    for (name,) in SEGMENTS:
        block = model.get_submodule(name)
        again = functools.partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = again
'''

REGION_CALL: Final = """\
        if len(blocks) > 1:
            Region(blocks, nested=segment[0] in NESTED)
            continue
"""

SELECTIVE_CALLS: Final = """\
    for names, calls in SELECTIVE:
        for name in names:
            contexts = functools.partial(selective_contexts, frozenset(calls))
            recompute_block(model.get_submodule(name), context_fn=contexts)
"""

SELECTIVE: Final = Part(
    '''\
def selective_contexts(calls):
    """The contexts of one forward and of its recomputation, which skips ``calls``."""
    policy = SavedCalls(calls)
    saving, reusing = create_selective_checkpoint_contexts(policy)
    return counted(policy, saving), counted(policy, reusing)


@contextlib.contextmanager
def counted(policy, mode):
    policy.start()
    # Weights that autocast cast before, elsewhere, would be missing from the count.
    torch.clear_autocast_cache()
    with mode:
        yield


class SavedCalls:
    """Says which calls are saved: by the op, and which of its calls in the block."""

    def __init__(self, calls):
        self.calls = calls

    def start(self):
        self.count = collections.Counter()
        self.drew = False  # whether a call that is saved drew random numbers

    def __call__(self, context, op, *args, **kwargs):
        save = f"{op}:{self.count[op]}" in self.calls
        self.count[op] += 1
        if (save or self.drew) and draws_numbers(op, args, kwargs):
            # The generator lags behind what is skipped, so all later draws are saved.
            if op._schema.is_mutable:
                raise RuntimeError(f"{op} draws in place, after a draw that is saved.")
            save = self.drew = True
        if save:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def draws_numbers(op, args, kwargs):
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, args)) | kwargs  # attention: 0.0 where it is not given
    return given.get("dropout_p", 0.0) > 0.0
''',
    (
        "import collections",
        "import contextlib",
        "from torch.utils.checkpoint import CheckpointPolicy",
        "from torch.utils.checkpoint import create_selective_checkpoint_contexts",
    ),
)

REGION: Final = Part(
    '''\
class Region:
    """One checkpoint over neighbouring blocks: only the first one's input is kept.

    The parent module calls the blocks as always. Autograd gets empty holders for what
    they save; the first holder that backward opens runs all of them again, in order.
    Each block's input must be the output of the one before. Nested, each block that
    runs again saves its input only, and runs once more.
    """

    def __init__(self, blocks, nested):
        self.blocks, self.nested = blocks, nested
        self.forwards = [block.forward for block in blocks]
        self.current = None
        for position, block in enumerate(blocks):
            block.forward = functools.partial(self.call, position)

    def call(self, position, *args, **kwargs):
        if not torch.is_grad_enabled():
            return self.forwards[position](*args, **kwargs)
        x, *args = args if args else [kwargs.pop(next(iter(kwargs)))]
        if position == 0:
            self.current = RegionPass(x)
        elif self.current is None or self.current.output() is not x:
            raise RuntimeError("A block's input is not the output of the one before.")
        forward = RepeatedForward(self.blocks[position], self.forwards[position])
        if self.nested:
            forward = functools.partial(checkpoint, forward, use_reentrant=False)
        out = self.current.run(forward, x, args, kwargs)
        if position == len(self.forwards) - 1:
            self.current = None  # autograd's holders keep it from here on
        return out


class RegionPass:
    """One pass through the blocks of a Region, and its recomputation."""

    def __init__(self, x):
        self.x = x
        self.calls = []  # forward, args, kwargs, states of the random generators
        self.holders = []  # weak references, in the order in which tensors were saved
        self.device = x.device.type
        self.autocast = torch.is_autocast_enabled(self.device)
        self.dtype = torch.get_autocast_dtype(self.device)

    def run(self, forward, x, args, kwargs):
        self.calls.append((forward, args, kwargs, random_states(self.device)))
        with saved_tensors_hooks(self.hold, self.open):
            out = forward(x, *args, **kwargs)
        self.output = weakref.ref(first(out))
        return out

    def hold(self, tensor):
        holder = Holder()
        self.holders.append(weakref.ref(holder))
        return holder

    def open(self, holder):
        if holder.tensor is None:
            self.recompute()
        tensor, holder.tensor = holder.tensor, None
        return tensor

    def recompute(self):
        waiting = collections.deque(self.holders)

        def refill(tensor):
            holder = waiting.popleft()()
            if holder is not None:
                holder.tensor = tensor.detach()
            if not waiting:
                raise AllRefilled  # nothing behind this is needed
            return tensor.detach()

        x = self.x.detach().requires_grad_(self.x.requires_grad)
        devices = [self.x.device] if self.device == "cuda" else []
        with (
            contextlib.suppress(AllRefilled),
            torch.random.fork_rng(devices),
            torch.autocast(self.device, dtype=self.dtype, enabled=self.autocast),
            torch.enable_grad(),
            saved_tensors_hooks(refill, lambda tensor: tensor),
        ):
            for forward, args, kwargs, states in self.calls:
                torch.set_rng_state(states[0])
                if self.device == "cuda":
                    torch.cuda.set_rng_state(states[1], self.x.device)
                x = first(forward(x, *args, **kwargs))


class AllRefilled(Exception):
    """Ends a recomputation early."""


class Holder:
    """Stands for a saved tensor until backward asks for it."""

    tensor = None


def random_states(device):
    cuda = torch.cuda.get_rng_state() if device == "cuda" else None
    return torch.get_rng_state(), cuda


def first(out):
    return out[0] if isinstance(out, (tuple, list)) else out
''',
    (
        "import collections",
        "import contextlib",
        "import functools",
        "import weakref",
        "from torch.autograd.graph import saved_tensors_hooks",
    ),
)
