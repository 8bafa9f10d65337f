"""The pieces of an exported training script, as source text.

Each is plain PyTorch and works without budgetfit. ``torch_script`` picks the ones that
a recipe needs; their tests run the scripts.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Template
from typing import Final


@dataclass(frozen=True, slots=True)
class Part:
    """Source text and the import lines that it needs."""

    code: str
    imports: tuple[str, ...] = ()


MODEL_FROM_CONFIG: Final = Template('''\
CONFIG = $config


def build_model():
    """Build the model from its config, with random weights."""
    config = transformers.CONFIG_MAPPING[CONFIG["model_type"]].from_dict(CONFIG)
    return transformers.$class_name(config).to($dtype)
''')

MODEL_FROM_HUB: Final = Template('''\
MODEL = $name


def build_model(*, pretrained=False):
    """Build the model from its config, or with ``pretrained`` load its weights too."""
    config = transformers.AutoConfig.from_pretrained(MODEL)
    kind = getattr(transformers, config.architectures[0])
    if pretrained:
        return kind.from_pretrained(MODEL, dtype="auto")
    return kind(config).to(config.dtype or torch.float32)
''')

MODEL_FROM_FACTORY: Final = Template('''\
def build_model():
    """Build the model as it was planned."""
    made = $made
    return made if isinstance(made, torch.nn.Module) else made()
''')

MODEL_TO_FILL_IN: Final = Template('''\
def build_model():
    """FILL IN: return the model that was planned."""
    raise SystemExit(
        $message
    )
''')

OPTIMIZERS: Final = {
    "adamw_torch": Part("torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)"),
    "adamw_torch_fused": Part(
        "torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=True)"
    ),
    "sgd": Part("torch.optim.SGD(parameters, lr=lr)"),
    "adagrad": Part("torch.optim.Adagrad(parameters, lr=lr)"),
    "rmsprop": Part("torch.optim.RMSprop(parameters, lr=lr)"),
    "adamw_bnb_8bit": Part(
        "AdamW(parameters, lr=lr, weight_decay=0.0, optim_bits=8)",
        ("from bitsandbytes.optim import AdamW",),
    ),
    "paged_adamw_8bit": Part(
        "AdamW(parameters, lr=lr, weight_decay=0.0, optim_bits=8, is_paged=True)",
        ("from bitsandbytes.optim import AdamW",),
    ),
    "adafactor": Part(
        "Adafactor(\n        parameters, lr=lr, scale_parameter=False, "
        "relative_step=False\n    )",
        ("from transformers.optimization import Adafactor",),
    ),
}

RECOMPUTE: Final = Part(
    '''\
def recompute(model):
    """Checkpoint the planned blocks, without reentrant autograd, and nothing else."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False
    for segment in SEGMENTS:
        blocks = [model.get_submodule(name) for name in segment]
        if len(blocks) > 1:
            Region(blocks)
        elif hasattr(blocks[0], "gradient_checkpointing"):  # a transformers layer
            blocks[0].gradient_checkpointing = True
            blocks[0]._gradient_checkpointing_func = functools.partial(
                checkpoint, use_reentrant=False
            )
        else:
            blocks[0].forward = functools.partial(
                checkpoint, blocks[0].forward, use_reentrant=False
            )
''',
    ("import functools", "from torch.utils.checkpoint import checkpoint"),
)

NO_REGION: Final = (
    "        if len(blocks) > 1:\n            Region(blocks)\n        elif",
    "        if",
)

REGION: Final = Part(
    '''\
class Region:
    """One checkpoint over neighbouring blocks: only the first one's input is kept.

    The parent module calls the blocks as always. Autograd gets empty holders for what
    they save; the first holder that backward opens runs all of them again, in order.
    Each block's input must be the output of the one before.
    """

    def __init__(self, blocks):
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
        out = self.current.run(self.forwards[position], x, args, kwargs)
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

BATCHES: Final = Template('''\
def batches(model):
    """REPLACE by your own data: endless random batches of the planned shape.

    Yield CPU tensors; every micro-batch has BATCH_SIZE samples.
    """
$bound    while True:
$tensors
        yield {$names}
''')

VOCABULARY_LINE: Final = """\
    tokens = vocabulary_size(model)
"""

VOCABULARY: Final = '''\
def vocabulary_size(model):
    """How many different whole numbers the model takes."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    sizes = [getattr(config, "vocab_size", None)]
    sizes += [
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
    ][:1]
    return min((size for size in sizes if size), default=2)
'''

OWN_LOSS: Final = '''\
def loss_of(model, batch):
    """The model's own loss."""
    return model(**batch).loss
'''

MADE_LOSS: Final = Template('''\
def loss_of(model, batch):
    """REPLACE by your own loss where the model returns none."""
    outputs = model($arguments)
    own = getattr(outputs, "loss", None)
    if own is not None:
        return own
    outputs = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    return outputs.float().mean()
''')

MAIN: Final = Template("""\
def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--save", help="write model, optimizer and scaler here")
    parser.add_argument("--resume", help="continue from what --save wrote")
$pretrained_option    options = parser.parse_args(words)

    torch.manual_seed(options.seed)
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    model = build_model($pretrained).train()
$weights    model.to(device)
    for module in model.modules():  # generation caches are of no use in training
        if getattr(getattr(module, "config", None), "use_cache", False) is True:
            module.config.use_cache = False
$recompute    optimizer = make_optimizer(
        [item for item in model.parameters() if item.requires_grad], options.lr
    )
$scaler    if options.resume:
        state = torch.load(options.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
$load_scaler        del state

    data = batches(model)
    losses = []
    for step in range(1, options.steps + 1):
        step_loss = 0.0
        for _ in range(GRADIENT_ACCUMULATION_STEPS):
            batch = {key: value.to(device) for key, value in next(data).items()}
$forward            step_loss += loss.detach()
            $backward
            del loss, batch
$update        optimizer.zero_grad(set_to_none=True)
        losses.append(float(step_loss))
        print(f"step {step}  loss {losses[-1]:.6f}", flush=True)
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated() / 2**30
        reserved = torch.cuda.max_memory_reserved() / 2**30
        print(f"peak allocated {allocated:.2f} GiB, reserved {reserved:.2f} GiB")
    if options.save:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
$save_scaler        torch.save(state, options.save)
    return losses


if __name__ == "__main__":
    main()
""")
